// What keys do.

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { useKeys } from "./hooks";

const KEYS: [string, string][] = [
  ["j k  ↓ ↑", "next, previous"],
  ["Enter", "open"],
  ["/", "search"],
  ["g", "list of trajectories"],
  ["c", "curves of rewards"],
  ["← →", "point before, after on a curve"],
  ["1 … 5", "messages, tokens, not trained, time, details"],
  ["6", "group of the trajectory"],
  ["[ ]", "previous, next history"],
  ["n p", "next, previous sampled span of tokens"],
  ["← → Home End", "token before, after, first, last"],
  ["t", "go to a token"],
  ["Esc", "back, close"],
  ["?", "this help"],
];

export function Help({ close }: { close(): void }): JSX.Element {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  useKeys({ Escape: close, "?": close }, 9);
  return (
    <dialog
      ref={dialog}
      class="help"
      aria-label="Keys"
      onClose={close}
      onClick={(event) => event.target === dialog.current && close()}
    >
      <h2>Keys</h2>
      <dl>
        {KEYS.map(([keys, what]) => (
          <div>
            <dt>
              {keys
                .split(" ")
                .filter(Boolean)
                .map((key) => (key === "…" ? " … " : <kbd>{key}</kbd>))}
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <p class="muted">
        ● trains here · ○ is context. Every view has an address of its own that can be shared.
      </p>
      <button type="button" onClick={close} autofocus>
        Close
      </button>
    </dialog>
  );
}
