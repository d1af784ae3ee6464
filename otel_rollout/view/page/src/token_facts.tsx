// All that is known of one token.

import type { JSX } from "preact";

import { SIGNALS } from "./signals";
import { Name, TokenText, count, short } from "./text";
import { Fact, type Shown } from "./trajectory";
import type { Alternative, RowView, TokenWindow } from "./types";

const ORIGINS: Record<string, string> = {
  h: "its log-probability",
  e: "the same id elsewhere",
  t: "the tokenizer",
};

interface Props extends Shown {
  row: RowView;
  window: TokenWindow | undefined;
  position: number;
}

export function TokenFacts({ detail, row, window, position, move }: Props): JSX.Element {
  const place = window ? position - window.start : 0;
  if (!window || place < 0 || place >= window.ids.length) {
    return (
      <aside class="token-facts" aria-label="Token">
        Reading…
      </aside>
    );
  }
  const text = window.texts[place] ?? null;
  const logprob = window.logprobs[place] ?? null;
  const sampled = Boolean(window.sampled[place]);
  const number = window.completions[place] ?? null;
  const call = number === null ? undefined : detail.completions[number];
  const alternatives = window.alternatives[String(place)] ?? [];
  const reading = (name: string) =>
    SIGNALS.find((one) => one.name === name)?.of(window, place, { detail, row }).text ?? "";
  return (
    <aside class="token-facts" aria-label="Token" aria-live="polite">
      <p class="token-big">
        {text === null ? (
          <span class="muted">text not known</span>
        ) : text === "" ? (
          "∅"
        ) : (
          <TokenText text={text} />
        )}
      </p>
      <dl>
        <Fact name="id" value={String(window.ids[place])} />
        <Fact name="position" value={`${count(position)} of ${count(window.length)}`} />
        <Fact
          name="log-probability"
          value={sampled ? (logprob === null ? "not known" : short(logprob)) : "not sampled"}
        />
        {logprob !== null && <Fact name="probability" value={percent(logprob)} />}
        <Fact name="mask" value={reading("mask")} />
        <Fact name="entropy" value={reading("entropy")} />
        {row.advantage !== null && <Fact name="advantage" value={reading("advantage")} />}
        {call && <Fact name="version" value={<Name text={reading("version")} />} />}
        {text !== null && (
          <Fact name="text from" value={ORIGINS[window.textsFrom[place] ?? ""] ?? "not known"} />
        )}
      </dl>
      {sampled && <Alternatives list={alternatives} id={window.ids[place] ?? null} />}
      {call && (
        <div class="token-call">
          <h2>Completion</h2>
          <p>
            <Name text={call.id} />
            {call.choice > 0 && <span class="muted"> choice {call.choice}</span>}
          </p>
          {call.model !== null && (
            <p class="muted">
              <Name text={call.model} />
            </p>
          )}
          {!call.trains && call.dropped !== null && (
            <p class="verdict">
              ○ <Name text={call.dropped} />
            </p>
          )}
          {call.node !== null && (
            <button
              type="button"
              class="link"
              onClick={() =>
                move({ view: "messages", node: call.node ?? 0, history: row.history ?? undefined })
              }
            >
              its message →
            </button>
          )}
        </div>
      )}
    </aside>
  );
}

function percent(logprob: number): string {
  const value = Math.exp(logprob) * 100;
  return value > 0 && value < 0.01 ? `${value.toExponential(1)} %` : `${short(value)} %`;
}

function Alternatives({ list, id }: { list: Alternative[]; id: number | null }): JSX.Element {
  if (list.length === 0)
    return <p class="muted">Alternatives are not known: no top log-probabilities came.</p>;
  return (
    <div class="alternatives">
      <h2>Alternatives</h2>
      {[...list]
        .sort((a, b) => b.logprob - a.logprob)
        .map((one) => (
          <div class={`alternative ${one.id !== null && one.id === id ? "chosen" : ""}`}>
            <span class="alternative-text">
              <TokenText text={one.text} />
            </span>
            <span class="alternative-share">{percent(one.logprob)}</span>
            <svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">
              <rect width={Math.min(100, Math.exp(one.logprob) * 100)} height="1" />
            </svg>
          </div>
        ))}
    </div>
  );
}
