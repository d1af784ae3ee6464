// Long texts, folded; what the server cut is fetched when asked for.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { messageOf } from "./hooks";
import { Plain } from "./markdown";
import { source } from "./source";
import { count } from "./text";
import type { Node } from "./types";

/** Longer texts begin folded. */
const FOLD = 3000;
const FOLDED = 1500;
/** Of a whole text so much is drawn at once, and again at each click. */
const PIECE = 500_000;

interface Props {
  node: Node;
  id: string;
  draw(text: string): ComponentChildren;
  /** A text of more lines begins folded, too. */
  lines?: number;
}

export function Folded({ node, id, draw, lines = Infinity }: Props): JSX.Element {
  const rows = node.text.split("\n");
  const isLong = rows.length > lines;
  const [open, setOpen] = useState(node.whole && node.text.length <= FOLD && !isLong);
  if (open && node.whole) return <>{draw(node.text)}</>;
  if (open) return <Whole node={node} id={id} draw={draw} />;
  return (
    <div class="folded">
      {draw(
        (isLong ? rows.slice(0, lines / 2).join("\n") : node.text).slice(
          0,
          node.text.length > FOLD ? FOLDED : FOLD,
        ),
      )}
      <button type="button" class="link more" onClick={() => setOpen(true)}>
        show all {isLong && node.whole && `${count(rows.length)} lines, `}
        {count(node.size)} characters
      </button>
    </div>
  );
}

function Whole({ node, id, draw }: Props): JSX.Element {
  const [text, setText] = useState<string | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [pieces, setPieces] = useState(1);
  useEffect(() => {
    source.message(id, node.id).then(
      ({ message, whole }) => setText(whole ? textOf(message) : node.text),
      (reason: unknown) => setError(messageOf(reason)),
    );
  }, [id, node.id]);
  if (text === null) {
    return (
      <div class="folded">
        {draw(node.text)}
        {error === null ? (
          <button type="button" class="link more" disabled>
            reading {count(node.size)} characters…
          </button>
        ) : (
          <p class="error" role="alert">
            {error}
          </p>
        )}
      </div>
    );
  }
  const parts = Array.from({ length: Math.min(pieces, Math.ceil(text.length / PIECE)) });
  return (
    <div class="whole">
      {parts.map((_, place) => (
        <Plain text={text.slice(place * PIECE, (place + 1) * PIECE)} />
      ))}
      {pieces * PIECE < text.length && (
        <button type="button" class="link more" onClick={() => setPieces(pieces + 1)}>
          show more: {count(pieces * PIECE)} of {count(text.length)} characters are shown
        </button>
      )}
    </div>
  );
}

/** The texts of a message of whatever API, else the message as JSON. */
export function textOf(message: unknown): string {
  if (typeof message !== "object" || message === null) return String(message);
  const { content, output, text } = message as Record<string, unknown>;
  const inner = content ?? output ?? text;
  if (typeof inner === "string") return inner;
  if (Array.isArray(inner)) {
    const texts = inner
      .map((part) => (part as { text?: unknown } | null)?.text)
      .filter((one) => typeof one === "string");
    if (texts.length) return texts.join("\n");
  }
  return JSON.stringify(message, null, 2);
}
