// A line of tokens, each in the colour of a signal.

import type { JSX } from "preact";

import type { About, Signal } from "./signals";
import { TokenText, count } from "./text";
import type { TokenWindow } from "./types";
import type { Tokens } from "./windows";

/** Tokens of a line; a block that is fetched has a whole number of lines. */
export const LINE = 64;

interface LineProps {
  line: number;
  length: number;
  tokens: Tokens;
  signal: Signal;
  about: About;
  /** Place of the chosen token in the row; -1: it is on another line. */
  chosen: number;
}

export function Line({ line, length, tokens, signal, about, chosen }: LineProps): JSX.Element {
  const start = line * LINE;
  const end = Math.min(length, start + LINE);
  const window = tokens.block(start);
  return (
    <div class="line">
      <span class="gutter">{count(start)}</span>
      {window ? (
        <div class="line-tokens">
          {Array.from({ length: end - start }, (_, n) => (
            <Token
              key={n}
              window={window}
              position={start + n}
              signal={signal}
              about={about}
              chosen={start + n === chosen}
            />
          ))}
        </div>
      ) : (
        <div class="line-tokens waiting">…</div>
      )}
    </div>
  );
}

const SPECIAL = /^(<\|.*\|>|<\/?[a-z_]{1,24}>|\[\/?[A-Z_]{2,24}\])\s*$/s;

interface TokenProps {
  window: TokenWindow;
  position: number;
  signal: Signal;
  about: About;
  chosen: boolean;
}

function Token({ window, position, signal, about, chosen }: TokenProps): JSX.Element {
  const place = position - window.start;
  const text = window.texts[place] ?? null;
  const { shade } = signal.of(window, place, about);
  const classes = ["token", shade];
  if (!window.sampled[place]) classes.push("context");
  if (text === null) classes.push("id-only");
  else if (SPECIAL.test(text)) classes.push("special");
  if (chosen) classes.push("chosen");
  const drawn = (
    <span class={classes.join(" ")} data-token={position} aria-current={chosen ? "true" : undefined}>
      {text === null ? String(window.ids[place] ?? "?") : text === "" ? "∅" : <TokenText text={text} />}
    </span>
  );
  return text?.endsWith("\n") ? (
    <>
      {drawn}
      <br />
    </>
  ) : (
    drawn
  );
}
