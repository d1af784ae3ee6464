// Small charts that filter when clicked.

import type { ComponentChildren, JSX } from "preact";

import { count, short } from "./text";
import type { Bin } from "./types";

const HEIGHT = 100;

interface HistogramProps {
  bins: Bin[];
  label: string;
  /** Below its ends, in place of numbers. */
  format?: (value: number) => string;
  chosen?(bin: Bin, last: boolean): boolean;
  choose?: ((bin: Bin, last: boolean) => void) | undefined;
  tall?: boolean;
}

export function Histogram(props: HistogramProps): JSX.Element {
  const { bins, label, choose } = props;
  const format = props.format ?? short;
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  const width = 100 / Math.max(1, bins.length);
  if (bins.length === 0) return <p class="nothing">None is known.</p>;
  return (
    <div class={`histogram ${props.tall ? "tall" : ""}`} role="group" aria-label={label}>
      <svg viewBox={`0 0 100 ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        {bins.map((bin, place) => (
          <rect
            class={props.chosen?.(bin, place === bins.length - 1) ? "bar chosen" : "bar"}
            x={place * width + 0.4}
            width={Math.max(0.5, width - 0.8)}
            y={HEIGHT - height(bin.count, most)}
            height={height(bin.count, most)}
          />
        ))}
      </svg>
      <div class="bins">
        {bins.map((bin, place) => {
          const last = place === bins.length - 1;
          const range = bin.from === bin.to ? format(bin.from) : `${format(bin.from)} to ${format(bin.to)}`;
          const title = `${label} ${range}: ${count(bin.count)}`;
          return choose ? (
            <button
              type="button"
              title={title}
              aria-label={title}
              disabled={bin.count === 0}
              onClick={() => choose(bin, last)}
            />
          ) : (
            <span title={title} />
          );
        })}
      </div>
      <div class="ends">
        <span>{format(bins[0]?.from ?? 0)}</span>
        <span>{format(bins.at(-1)?.to ?? 0)}</span>
      </div>
    </div>
  );
}

/** What is there at all can be seen. */
function height(value: number, most: number): number {
  return value === 0 ? 0 : Math.max(2.5, (value / most) * HEIGHT);
}

interface BarProps {
  label: ComponentChildren;
  value: number;
  most: number;
  note?: ComponentChildren;
  title?: string;
  chosen?: boolean;
  choose?: (() => void) | undefined;
  kind?: string;
}

/** A row of a table of counts, with its share as a bar below. */
export function Bar({ label, value, most, note, title, chosen, choose, kind }: BarProps): JSX.Element {
  const inside = (
    <>
      <span class="bar-label">{label}</span>
      {note !== undefined && <span class="bar-note">{note}</span>}
      <span class="bar-count">{count(value)}</span>
      <svg class={`share ${kind ?? ""}`} viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">
        <rect width={(value / Math.max(1, most)) * 100} height="1" />
      </svg>
    </>
  );
  if (!choose)
    return (
      <div class="count" title={title}>
        {inside}
      </div>
    );
  return (
    <button type="button" class="count" aria-pressed={chosen === true} title={title} onClick={choose}>
      {inside}
    </button>
  );
}
