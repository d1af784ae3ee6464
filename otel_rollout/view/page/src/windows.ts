// The tokens of a row, fetched in blocks as they are needed.

import { useRef, useState } from "preact/hooks";

import { messageOf } from "./hooks";
import { source } from "./source";
import type { TokenWindow } from "./types";

export const BLOCK = 2048;

export interface Tokens {
  error: string | null;
  /** Blocks that are there. */
  loaded: number;
  /** The block that has this token, once it is there. */
  block(position: number): TokenWindow | undefined;
  need(first: number, last: number): void;
}

export function useTokens(id: string, row: number): Tokens {
  const [, redraw] = useState(0);
  const key = `${id} ${row}`;
  const store = useRef({
    key,
    blocks: new Map<number, TokenWindow>(),
    asked: new Set<number>(),
    error: null as string | null,
  });
  if (store.current.key !== key) {
    store.current = { key, blocks: new Map(), asked: new Set(), error: null };
  }
  const mine = store.current;
  const ask = (block: number) => {
    if (mine.asked.has(block)) return;
    mine.asked.add(block);
    source
      .tokens(id, row, block * BLOCK, BLOCK)
      .then((window) => void mine.blocks.set(block, window))
      .catch((reason: unknown) => {
        mine.error = messageOf(reason);
      })
      .finally(() => redraw((n) => n + 1));
  };
  return {
    error: mine.error,
    loaded: mine.blocks.size,
    block: (position) => mine.blocks.get(Math.floor(position / BLOCK)),
    need: (first, last) => {
      for (let block = Math.floor(first / BLOCK); block <= Math.floor(last / BLOCK); block++) ask(block);
    },
  };
}
