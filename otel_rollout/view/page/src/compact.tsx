// Messages in few lines, for columns that stand side by side.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { Prose, count } from "./text";
import type { Node } from "./types";

/** Characters that are shown at first. */
const LONGEST = 700;
const LONGEST_REASONING = 300;
const LONGEST_CALL = 200;
/** So many times as much is not cut: less would be hidden than is written instead. */
const MORE = 1.2;
/** Characters of what is the same, before what differs. */
const BEFORE = 80;

interface Props {
  node: Node;
  /** Text up to here is the same as in the other columns, and reasoning. */
  same?: number;
  sameReasoning?: number;
}

export function Compact({ node, same = 0, sameReasoning = 0 }: Props): JSX.Element {
  return (
    <>
      <h2>
        <Prose text={node.role} />
      </h2>
      {node.reasoning !== null && (
        <div class="reasoning compact-reasoning">
          <span class="muted">reasoning</span>
          <Part text={node.reasoning} most={LONGEST_REASONING} same={sameReasoning} />
        </div>
      )}
      <Part text={node.text} most={LONGEST} same={same} size={node.whole ? node.text.length : node.size} />
      {node.toolCalls.map((call) => (
        <div class="compact-call">
          <b>
            <Prose text={call.name} />
          </b>
          <Part text={call.arguments} most={LONGEST_CALL} />
        </div>
      ))}
    </>
  );
}

interface PartProps {
  text: string;
  /** Characters that are shown at first. */
  most: number;
  same?: number;
  /** Characters in all, where the text is cut. */
  size?: number;
}

/** A text, long ones cut at first; what is beyond `same` is marked, if anything is the same. */
function Part({ text, most, same = 0, size = text.length }: PartProps): JSX.Element {
  const [open, setOpen] = useState(false);
  // Where they differ is what is looked for: a long text that is the same is cut before it.
  const isWhole = open || text.length <= most * MORE;
  const start = isWhole || same <= most || same >= text.length ? 0 : same - BEFORE;
  const shown = isWhole ? text : text.slice(start, start + most);
  const from = Math.min(Math.max(0, same - start), shown.length);
  const rest = <Prose text={shown.slice(from)} />;
  if (text === "") return <></>;
  return (
    <p class="compact-text" dir="auto">
      {start > 0 && "… "}
      <Prose text={shown.slice(0, from)} />
      {from > 0 && from < shown.length ? <mark>{rest}</mark> : rest}
      {shown.length < text.length ? (
        <>
          {"… "}
          <button type="button" class="link" onClick={() => setOpen(true)}>
            more ({count(size)} characters)
          </button>
        </>
      ) : (
        size > text.length && <span class="muted"> … {count(size)} characters</span>
      )}
    </p>
  );
}

/** How many characters two texts begin with in common, up to the word that differs. */
function sharedStart(a: string, b: string): number {
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at++;
  if (at === a.length && at === b.length) return at;
  const word = Math.max(a.lastIndexOf(" ", at - 1), a.lastIndexOf("\n", at - 1)) + 1;
  return Math.min(at, word);
}

/** The same of any number of texts. */
export function sharedByAll(texts: string[]): number {
  const [first, ...others] = texts;
  return first === undefined ? 0 : Math.min(...[first, ...others].map((other) => sharedStart(first, other)));
}
