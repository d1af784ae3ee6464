// Lines over a common axis, with a legend that has the numbers of one point.

import type { JSX } from "preact";

import { useWidth } from "./hooks";

export interface Series {
  name: string;
  /** Class of its line, which gives its colour. */
  kind: string;
  /** A value for each point; null: not known, the line has a gap. */
  values: (number | null)[];
}

interface Props {
  title: string;
  series: Series[];
  /** Where each point is, in order, from 0 to 1; points after these are in the legend alone. */
  places: number[];
  labels: string[];
  /** True if the points have no order: they are not joined. */
  apart: boolean;
  low: number;
  high: number;
  format(value: number | null): string;
  /** The point whose numbers are shown. */
  at: number;
  choose(at: number): void;
}

const HEIGHT = 190;
const MARGIN = { top: 10, right: 16, bottom: 24, left: 52 };
const LETTER = 7;
const TICKS = 4;
/** Points of a line that are drawn one by one. */
const MOST_DOTS = 80;

/** Round numbers from below `low` to above `high`. */
export function ticks(low: number, high: number): number[] {
  const span = high - low || Math.abs(low) || 1;
  const rough = span / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 2.5, 5, 10].find((each) => each * power >= rough * 0.999) ?? 10) * power;
  const [from, to] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({ length: Math.max(2, to - from + 1) }, (_, n) =>
    Number(((from + n) * step).toPrecision(12)),
  );
}

export function Chart(props: Props): JSX.Element {
  const { series, places, at } = props;
  const [box, width] = useWidth();
  const marks = ticks(props.low, props.high);
  const [bottom, top] = [marks[0] ?? 0, marks.at(-1) ?? 1];
  const [inner, height] = [
    Math.max(10, width - MARGIN.left - MARGIN.right),
    HEIGHT - MARGIN.top - MARGIN.bottom,
  ];
  const x = (n: number) => MARGIN.left + (places[n] ?? 0) * inner;
  const y = (value: number) => MARGIN.top + (1 - (value - bottom) / (top - bottom)) * height;
  const nearest = (event: PointerEvent) => {
    const left = box.current?.getBoundingClientRect().left ?? 0;
    const place = (event.clientX - left - MARGIN.left) / inner;
    const far = places.map((each) => Math.abs(each - place));
    props.choose(far.indexOf(Math.min(...far)));
  };
  return (
    <figure class="chart" ref={box}>
      <figcaption>
        <h2>{props.title}</h2>
        {series.map((one) => (
          <span class={`key ${one.kind}`}>
            <i />
            {one.name} <b>{props.format(one.values[at] ?? null)}</b>
          </span>
        ))}
      </figcaption>
      {width > 0 && (
        <svg width={width} height={HEIGHT} aria-hidden="true" onPointerMove={nearest} onPointerDown={nearest}>
          {marks.map((mark) => (
            <g class="tick">
              <line x1={MARGIN.left} x2={width - MARGIN.right} y1={y(mark)} y2={y(mark)} />
              <text x={MARGIN.left - 8} y={y(mark) + 4} text-anchor="end">
                {props.format(mark)}
              </text>
            </g>
          ))}
          {named(props.labels.slice(0, places.length), places, inner).map((n) => (
            <text class="place" x={x(n)} y={HEIGHT - 7} text-anchor={anchor(places[n] ?? 0)}>
              {props.labels[n]}
            </text>
          ))}
          {at < places.length && (
            <line class="at" x1={x(at)} x2={x(at)} y1={MARGIN.top} y2={MARGIN.top + height} />
          )}
          {series.map((one) => (
            <Line series={one} length={places.length} x={x} y={y} apart={props.apart} at={at} />
          ))}
        </svg>
      )}
    </figure>
  );
}

function anchor(place: number): "start" | "middle" | "end" {
  return place < 0.02 ? "start" : place > 0.98 ? "end" : "middle";
}

/** The points whose labels have room beside each other. */
function named(labels: string[], places: number[], width: number): number[] {
  const found: number[] = [];
  let free = Number.NEGATIVE_INFINITY;
  const half = (n: number) => ((labels[n]?.length ?? 0) * LETTER) / 2 + 6;
  for (let n = 0; n < labels.length; n++) {
    const centre = (places[n] ?? 0) * width;
    const [start, end] = { start: [0, 2], middle: [1, 1], end: [2, 0] }[anchor(places[n] ?? 0)] as [
      number,
      number,
    ];
    if (centre - start * half(n) < free) continue;
    found.push(n);
    free = centre + end * half(n);
  }
  return found;
}

interface LineProps {
  series: Series;
  length: number;
  x(n: number): number;
  y(value: number): number;
  apart: boolean;
  at: number;
}

function Line({ series, length, x, y, apart, at }: LineProps): JSX.Element {
  const values = series.values.slice(0, length);
  const runs = apart ? values.map((_, n) => [n]) : runsOf(values);
  const point = (n: number, value: number) => `${x(n).toFixed(1)},${y(value).toFixed(1)}`;
  return (
    <g class={`series ${series.kind}`}>
      {runs.map(
        (run) => run.length > 1 && <polyline points={run.map((n) => point(n, values[n] ?? 0)).join(" ")} />,
      )}
      {values.map(
        (value, n) =>
          value !== null &&
          (values.length <= MOST_DOTS || n === at) && (
            <circle
              class={n === at ? "chosen" : ""}
              cx={x(n)}
              cy={y(value)}
              r={n === at ? 4.5 : apart ? 3.5 : 2.5}
            />
          ),
      )}
    </g>
  );
}

/** The places of values that are known, in runs without a gap. */
function runsOf(values: (number | null)[]): number[][] {
  const runs: number[][] = [[]];
  for (const [n, value] of values.entries()) {
    if (value !== null) runs.at(-1)?.push(n);
    else runs.push([]);
  }
  return runs;
}
