// "Why does this not train": each finding with its cause and what to do.

import type { JSX } from "preact";

import { Name, Prose, count, many } from "./text";
import type { Shown } from "./trajectory";
import type { Finding } from "./types";

const KINDS: Record<string, string> = {
  incomplete: "Parts of it are missing",
  inexact: "Not exactly what the model saw and said",
  damaged: "Parts of it are damaged",
  drift: "The prompt was rendered otherwise than before",
  unscored: "It has no reward",
  side_call: "Calls beside the agent",
  duplicate: "It is there more than once",
  failed: "Calls or the rollout failed",
  dropped: "Replies that no row trains",
  truncated: "Replies that were cut at a limit",
  mixed_policy: "Several versions of the policy sampled it",
  uncertain: "What cannot be told for sure",
};

export function FindingsView({ detail, move }: Shown): JSX.Element {
  const { overview, findings } = detail;
  const sampled =
    overview.sampled_tokens === null ? "" : ` of ${count(overview.sampled_tokens)} sampled ones`;
  const asMessages = detail.histories.some((one) => one.trains.length > 0);
  const kinds = [...new Set(findings.map((one) => one.kind))];
  return (
    <div class="findings page-column">
      <p class="lead">
        {overview.trained_tokens > 0
          ? `${many(overview.trained_tokens, "token")}${sampled} in ${many(overview.rows, "row")} can be trained on.`
          : asMessages
            ? "No token of this trajectory can be trained on; its messages can."
            : "Nothing of this trajectory trains."}{" "}
        {findings.length === 0 && "There is nothing to know before training on it."}
      </p>
      {kinds.map((kind) => (
        <section class="finding-kind" key={kind}>
          <h2>
            <span class={`kind ${kind}`}>{kind}</span> {KINDS[kind] ?? ""}
          </h2>
          <Same findings={findings.filter((one) => one.kind === kind)} detail={detail} move={move} />
        </section>
      ))}
    </div>
  );
}

const SHOWN = 200;

/** Findings of one kind; those with the same words are one, with a link for each completion. */
function Same({
  findings,
  detail,
  move,
}: Pick<Shown, "detail" | "move"> & { findings: Finding[] }): JSX.Element {
  const texts = new Map<string, Finding[]>();
  for (const one of findings) {
    const list = texts.get(one.text);
    if (list) list.push(one);
    else texts.set(one.text, [one]);
  }
  return (
    <>
      {[...texts].slice(0, SHOWN).map(([text, same]) => (
        <article class="finding">
          <p class="cause">
            <Prose text={text} />
            {same.length > 1 && <span class="tag">{count(same.length)} times</span>}
          </p>
          {same[0]?.advice && (
            <p class="advice">
              <Prose text={same[0].advice} />
            </p>
          )}
          <p class="where">
            {same
              .slice(0, SHOWN)
              .map((one) => one.completion_id !== null && <To finding={one} detail={detail} move={move} />)}
          </p>
        </article>
      ))}
      {texts.size > SHOWN && <p class="muted">and {count(texts.size - SHOWN)} more</p>}
    </>
  );
}

function To({ finding, detail, move }: Pick<Shown, "detail" | "move"> & { finding: Finding }): JSX.Element {
  const { completion_id, choice_index } = finding;
  const place = detail.completions.findIndex(
    (call) => call.id === completion_id && call.choice === choice_index,
  );
  const call = detail.completions[place];
  const node = call?.node ?? call?.promptNode ?? null;
  const text = (
    <>
      <Name text={completion_id ?? ""} />
      {choice_index > 0 && ` choice ${choice_index}`}
    </>
  );
  if (node === null)
    return (
      <button type="button" class="link" onClick={() => move({ view: "raw" })}>
        call {text}
      </button>
    );
  const history = detail.histories.find((one) => one.completions.includes(place));
  return (
    <button
      type="button"
      class="link"
      onClick={() => move({ view: "messages", node, history: history?.number })}
    >
      {text}
    </button>
  );
}
