// Messages in few lines, for columns that stand side by side.

import type { JSX } from "preact";

import { Prose, count } from "./text";
import type { Node } from "./types";

const LONGEST = 700;

interface Props {
  node: Node;
  /** Text up to here is the same as in the other column. */
  same?: number;
}

export function Compact({ node, same = 0 }: Props): JSX.Element {
  const text = node.text.slice(0, LONGEST);
  const from = Math.min(same, text.length);
  return (
    <>
      <h2>
        <Prose text={node.role} />
      </h2>
      {node.reasoning !== null && (
        <details class="reasoning">
          <summary>reasoning · {count(node.reasoning.length)} characters</summary>
          <p class="compact-text" dir="auto">
            <Prose text={node.reasoning} />
          </p>
        </details>
      )}
      <p class="compact-text" dir="auto">
        <Prose text={text.slice(0, from)} />
        {from > 0 && from < text.length ? (
          <mark>
            <Prose text={text.slice(from)} />
          </mark>
        ) : (
          <Prose text={text.slice(from)} />
        )}
        {node.size > LONGEST && <span class="muted"> … {count(node.size)} characters</span>}
      </p>
      {node.toolCalls.map((call) => (
        <p class="compact-call">
          <b>
            <Prose text={call.name} />
          </b>{" "}
          <Prose text={call.arguments.slice(0, 200)} />
        </p>
      ))}
    </>
  );
}

/** How many characters two texts begin with in common, up to the word that differs. */
export function sharedStart(a: string, b: string): number {
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at++;
  if (at === a.length && at === b.length) return at;
  const word = Math.max(a.lastIndexOf(" ", at - 1), a.lastIndexOf("\n", at - 1)) + 1;
  return Math.min(at, word);
}
