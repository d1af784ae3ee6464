// Text from the data, shown as text: what cannot be seen, or would change its surroundings, is escaped.

import type { ComponentChildren, JSX } from "preact";

const CONTROLS = "\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f";
const BIDI = "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069";
const UNSEEN =
  "\\u00ad\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200d\\u2028\\u2029\\u2060-\\u2065\\u206a-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff9-\\ufffb";
/** Tags: letters that nobody sees, and models read. */
const TAGS = "\\u{e0000}-\\u{e0fff}";
const LONE = "\\ud800-\\udfff";

/** In messages: emoji and several scripts need joiners and variants there. */
const IN_MESSAGES = new RegExp(`[${CONTROLS}${BIDI}\\u2028\\u2029\\ufeff${TAGS}${LONE}]`, "gu");
/** In names, ids and tokens. */
const IN_NAMES = new RegExp(`[${CONTROLS}\\n\\t${BIDI}${UNSEEN}${TAGS}${LONE}]`, "gu");
/** So many marks are drawn one by one; a text with more has plain escapes. */
const MARKS = 2000;

export function escapeOf(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  if (character === "\n") return "\\n";
  if (character === "\t") return "\\t";
  if (character === "\r") return "\\r";
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  if (code < 0x10000) return `\\u${code.toString(16).padStart(4, "0")}`;
  return `\\u{${code.toString(16)}}`;
}

/** A text as one line of plain characters, for titles and labels. */
export function plain(text: string): string {
  return text.replace(IN_NAMES, escapeOf);
}

function marked(text: string, unseen: RegExp): ComponentChildren {
  const cuts = [...text.matchAll(unseen)];
  if (cuts.length === 0) return text;
  if (cuts.length > MARKS) return text.replace(unseen, escapeOf);
  const parts: ComponentChildren[] = [];
  let from = 0;
  for (const cut of cuts) {
    if (cut.index > from) parts.push(text.slice(from, cut.index));
    parts.push(<span class="escape">{escapeOf(cut[0])}</span>);
    from = cut.index + cut[0].length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

/** The text of a message, of whatever direction. */
export function Prose({ text }: { text: string }): JSX.Element {
  return <bdi>{marked(text, IN_MESSAGES)}</bdi>;
}

/** A name or an id: nothing in it is invisible. */
export function Name({ text, title }: { text: string; title?: string }): JSX.Element {
  return (
    <bdi class="name" title={title ?? plain(text)}>
      {marked(text, IN_NAMES)}
    </bdi>
  );
}

/** The text of a token: its whitespace, too, can be seen. What it stands in isolates its direction. */
export function TokenText({ text }: { text: string }): JSX.Element {
  const parts: ComponentChildren[] = [];
  for (const piece of text.match(/ |\n|\t|[^ \n\t]+/g) ?? []) {
    if (piece === " ") parts.push(<span class="space">␣</span>);
    else if (piece === "\n") parts.push(<span class="space">⏎</span>);
    else if (piece === "\t") parts.push(<span class="space">⇥</span>);
    else parts.push(marked(piece, IN_NAMES));
  }
  return <>{parts}</>;
}

const counts = new Intl.NumberFormat("en");

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? "not known" : counts.format(value);
}

/** "1 call", "2 calls". */
export function many(value: number, noun: string): string {
  const plural = noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}s`;
  return `${counts.format(value)} ${value === 1 ? noun : plural}`;
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A number of tokens in few digits. */
export function tokens(value: number | null): string {
  return value !== null && value >= 1e5 ? compact.format(value) : short(value);
}

/** A sum of tokens, and of how many trajectories it is where some are not known. */
export function tokenSum(sum: number | null, known: number, all: number): string {
  return known < all && sum !== null ? `${count(sum)} (of ${count(known)} of ${count(all)})` : count(sum);
}

/** A number in few digits; nothing known is a dash. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (Number.isInteger(size) && size < 1e6) return sign + counts.format(size);
  if (size >= 1e6 || size < 1e-3) return sign + size.toExponential(1).replace("e+", "e").replace("e-", "e−");
  return sign + String(Number(size.toPrecision(3)));
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value)} s`;
  const whole = Math.round(value);
  const parts = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const kept = whole < 3600 ? parts.slice(1) : parts.slice(0, 2);
  const units = whole < 3600 ? ["min", "s"] : ["h", "min"];
  return kept.flatMap((part, n) => (part === 0 && n > 0 ? [] : [`${part} ${units[n]}`])).join(" ");
}

/** Between two times in nanoseconds. */
export function between(start: number, end: number | null): number | null {
  return end === null ? null : (end - start) / 1e9;
}

export function signed(value: number | null): string {
  return value === null ? "–" : `${value > 0 ? "+" : ""}${short(Number(value.toPrecision(2)))}`;
}

/** The beginning of a text in one line; an ellipsis says that there is more. */
export function beginning(text: string, most = 90): string {
  const line = text
    .slice(0, 4 * most + 40)
    .replace(/\s+/g, " ")
    .trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

/** An id as people read it: of one that was made at random its first eight digits. */
export function shortId(id: string): string {
  return /^[0-9a-f]{32}$/.test(id) ? id.slice(0, 8) : id;
}

/** What it ended with: its error, or else its last reply. */
export function ending(one: {
  error: string | null;
  error_type: string | null;
  answer: string | null;
}): string {
  if (one.error === null && one.error_type === null) return one.answer ?? "";
  return [one.error_type, one.error].filter((each) => each !== null).join(": ");
}
