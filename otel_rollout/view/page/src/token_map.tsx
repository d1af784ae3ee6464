// What colours mean, and the whole row in one strip.

import type { JSX } from "preact";

import type { About, Signal } from "./signals";
import { Name } from "./text";
import type { RowView } from "./types";

export function Legend({ signal, about }: { signal: Signal; about: About }): JSX.Element {
  return (
    <ul class="legend" aria-label={`Colours: ${signal.title}`}>
      {signal.legend(about).map(({ shade, text }) => (
        <li>
          <span class={`swatch token ${shade}`} aria-hidden="true" /> <Name text={text} />
        </li>
      ))}
    </ul>
  );
}

const MAP_WIDTH = 1000;

/** The whole row: where something was sampled, and what part is in view. A click goes there. */
export function MiniMap({
  row,
  range,
  choose,
}: {
  row: RowView;
  range: [number, number];
  choose(position: number): void;
}): JSX.Element {
  const scale = MAP_WIDTH / Math.max(1, row.length);
  const [first, last] = [range[0], Math.min(row.length, range[1])];
  return (
    <svg
      class="minimap"
      viewBox={`0 0 ${MAP_WIDTH} 10`}
      preserveAspectRatio="none"
      aria-hidden="true"
      onClick={(event) => {
        const box = event.currentTarget.getBoundingClientRect();
        choose(Math.floor(((event.clientX - box.left) / box.width) * row.length));
      }}
    >
      <rect class="ground" width={MAP_WIDTH} height="10" />
      {row.spans.map((one) => (
        <rect
          class="sampled"
          x={one.start * scale}
          width={Math.max(0.6, (one.end - one.start) * scale)}
          y="2"
          height="6"
        />
      ))}
      <rect class="window" x={first * scale} width={Math.max(2, (last - first) * scale)} height="10" />
    </svg>
  );
}
