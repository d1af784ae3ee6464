// Two trajectories from where they part.

import type { JSX } from "preact";

import { formatAddress } from "./address";
import { Compact, sharedByAll } from "./compact";
import { useLoaded } from "./hooks";
import { Status } from "./overview";
import { source } from "./source";
import { Name, TokenText, count, many, seconds, short, shortId, signed } from "./text";
import type { Diff, Overview } from "./types";

export function DiffView({ ids }: { ids: [string, string] }): JSX.Element {
  const key = ids.join("\n");
  const { value, error } = useLoaded(() => source.diff(...ids), key);
  if (error !== null && !value)
    return (
      <p class="hint error" role="alert">
        {error}
      </p>
    );
  return value ? <Both diff={value} /> : <p class="hint">Reading…</p>;
}

function Both({ diff }: { diff: Diff }): JSX.Element {
  const { a, b, messages, tokens } = diff;
  const longest = Math.max(messages.a.length, messages.b.length);
  const firsts = [messages.a[0], messages.b[0]];
  const same = {
    same: sharedByAll(firsts.map((node) => node?.text ?? "")),
    sameReasoning: sharedByAll(firsts.map((node) => node?.reasoning ?? "")),
  };
  return (
    <div class="diff-view">
      <h1 class="unseen">Difference</h1>
      <div class="columns" role="table" aria-label="Two trajectories" style={{ "--columns": 2 }}>
        <div class="columns-row heads" role="row">
          <Head one={a} />
          <Head one={b} />
        </div>
        <div class="common" role="row">
          <p role="cell">
            {longest === 0
              ? "All messages are the same"
              : `The first ${many(messages.common, "message")} are the same`}
            {tokens ? (
              <>
                {" "}
                · the first token that differs is {count(tokens.position)}:{" "}
                <Token
                  side={a}
                  row={tokens.row_a}
                  position={tokens.position}
                  id={tokens.a_id}
                  text={tokens.a_text}
                />{" "}
                and{" "}
                <Token
                  side={b}
                  row={tokens.row_b}
                  position={tokens.position}
                  id={tokens.b_id}
                  text={tokens.b_text}
                />
              </>
            ) : (
              " · no token that differs is known"
            )}
          </p>
        </div>
        {Array.from({ length: longest }, (_, place) => (
          <div class={`columns-row ${place === 0 ? "differs" : ""}`} role="row">
            {[messages.a[place], messages.b[place]].map((node) => (
              <div class={`column-cell role-${node?.role ?? "none"}`} role="cell">
                {node ? (
                  <Compact node={node} {...(place === 0 ? same : {})} />
                ) : (
                  <span class="muted">ended</span>
                )}
              </div>
            ))}
          </div>
        ))}
      </div>
    </div>
  );
}

interface TokenProps {
  side: Overview;
  row: number;
  position: number;
  id: number | null;
  text: string | null;
}

function Token({ side, row, position, id, text }: TokenProps): JSX.Element {
  const shown = text !== null ? <TokenText text={text} /> : id === null ? "the end" : String(id);
  return (
    <a href={formatAddress({ trajectory: side.id, view: "tokens", row, token: position })}>
      <span class="token">{shown}</span>
    </a>
  );
}

function Head({ one }: { one: Overview }): JSX.Element {
  return (
    <div class="column-head" role="columnheader">
      <a href={formatAddress({ trajectory: one.id })}>
        <b>
          <Name text={one.name} />
        </b>{" "}
        <Name text={one.id} />
      </a>
      <div class="big-reward">
        {short(one.reward)}{" "}
        <span class="advantage">{one.advantage === null ? "" : signed(one.advantage)}</span>
      </div>
      <p>
        <Status value={one.status} /> · {many(one.turns, "turn")} · {short(one.sampled_tokens)} sampled ·{" "}
        {seconds(one.seconds)}
        {one.group_id !== null && (
          <>
            {" "}
            · group{" "}
            <a href={formatAddress({ group: one.group_id })}>
              <Name text={shortId(one.group_id)} title={one.group_id} />
            </a>
          </>
        )}
      </p>
    </div>
  );
}
