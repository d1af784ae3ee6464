// Signs drawn as paths, since fonts have them or not.

import type { JSX } from "preact";

const PATHS = {
  main: "M8 3v10M5 6l3-3 3 3",
  fork: "M4 3v10M4 9c0-3 8-1 8-6M9.5 5.5 12 3l2.5 2.5",
  resample: "M12.5 8A4.5 4.5 0 1 1 8 3.5h4M10 1l2.5 2.5L10 6",
  restart: "M3 4h6M3 8h3M3 12h10M11 9.5l2.5 2.5-2.5 2.5",
  separate: "M8 4.5a3.5 3.5 0 1 1 0 7 3.5 3.5 0 0 1 0-7Z",
  failed: "M8 2.5 14 13H2ZM8 6.5v3M8 11v.6",
  inside: "M4 3v6h8M9.5 6.5 12 9l-2.5 2.5",
} as const;

export type SignName = keyof typeof PATHS;

export function Sign({ name }: { name: SignName }): JSX.Element {
  return (
    <svg class={`sign ${name}`} viewBox="0 0 16 16" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
