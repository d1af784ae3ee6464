// Rewards by policy version, over time and by task: two charts over one axis, and a table of the points.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { type Address, type Change, changedBy, formatAddress, go } from "./address";
import { Chart, type Series } from "./chart";
import { Filters } from "./filters";
import { useKeys, useLoaded } from "./hooks";
import { revision, source } from "./source";
import { Name, count, many, plain, short, shortId } from "./text";
import type { CurvePoint, CurveView, State } from "./types";
import { hasClause, toggled } from "./where";

const TABS: [string, string][] = [
  ["policy_version", "Policy version"],
  ["time", "Time"],
  ["task_id", "Task"],
];
const NOT_KNOWN = "not known";
/** The greatest k of pass@k with a line of its own; the table has all. */
const MOST_K = 8;

interface Props {
  address: Address;
  by: string;
  state: State;
}

export function CurvesView({ address, by, state }: Props): JSX.Element {
  const filter = { where: address.where ?? "", search: address.search ?? "" };
  const pass = address.pass ?? "";
  const about = JSON.stringify([filter, by, pass]);
  const loaded = useLoaded(() => source.curve(filter, by, pass), `${about} ${revision(state)}`, about);
  const move = (change: Change) => go(changedBy(address, change));
  const curve = loaded.value;
  return (
    <div class="curves">
      {source.embedded ? null : <Filters address={address} state={state} move={move} error={loaded.error} />}
      <div class="curves-bar">
        <h1>Rewards by</h1>
        <nav class="tabs" aria-label="What the curves are by">
          {TABS.map(([name, title]) => (
            <a
              href={formatAddress(changedBy(address, { curve: name }))}
              aria-current={name === by ? "page" : undefined}
            >
              {title}
            </a>
          ))}
        </nav>
        {curve && <Threshold curve={curve} pass={pass} set={(text) => move({ pass: text })} />}
      </div>
      {curve && curve.points.length > 0 && <Points curve={curve} address={address} key={curve.by} />}
      {curve && curve.points.length === 0 && <p class="hint">No trajectory matches.</p>}
      {source.embedded && loaded.error !== null && <p class="hint">{loaded.error}</p>}
    </div>
  );
}

interface ThresholdProps {
  curve: CurveView;
  pass: string;
  set(text: string): void;
}

/** What counts as a pass; a page without a server has one answer. */
function Threshold({ curve, pass, set }: ThresholdProps): JSX.Element {
  if (source.embedded) return <span class="muted">a pass: reward ≥ {short(curve.threshold)}</span>;
  return (
    <label class="box pass">
      <span>a pass: reward ≥</span>
      <input
        name="pass"
        inputMode="decimal"
        value={pass || String(curve.threshold)}
        onChange={(event) => set(event.currentTarget.value.trim())}
      />
    </label>
  );
}

function Points({ curve, address }: { curve: CurveView; address: Address }): JSX.Element {
  const { points } = curve;
  const [at, setAt] = useState(points.length - 1);
  const chosen = Math.min(at, points.length - 1);
  useEffect(() => setAt(points.length - 1), [points.length]);
  const step = (by: number) => setAt(Math.max(0, Math.min(points.length - 1, chosen + by)));
  useKeys({
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    Home: () => step(-points.length),
    End: () => step(points.length),
    Enter: () => {
      const next = listOf(address, points[chosen]);
      if (next) go(next);
    },
  });
  const scored = points.filter((one) => one.mean !== null);
  const bands = points.map(bandOf);
  const usual = (k: number) => k > 1 && k <= MOST_K && 2 * known(points, k) >= scored.length;
  const most = curve.ks.filter(usual).at(-1);
  const common = {
    places: placesOf(points),
    labels: points.map((one) => labelOf(one)),
    apart: curve.by === "task_id",
    at: chosen,
    choose: setAt,
  };
  const rates: Series[] = [
    { name: "passed", kind: "passed", values: points.map((one) => one.pass_rate) },
    ...(most === undefined
      ? []
      : [{ name: `pass@${most}`, kind: "at-k", values: points.map((one) => one.pass_at[most] ?? null) }]),
  ];
  return (
    <>
      <p class="curves-at" role="status">
        {headOf(curve)}{" "}
        <b>
          <Name text={labelOf(points[chosen])} />
        </b>
        <span class="muted">
          {" "}
          · {count(points[chosen]?.scored)} of {many(points[chosen]?.count ?? 0, "trajectory")} scored
        </span>
      </p>
      <Chart
        title="Reward"
        series={[{ name: "mean ± std", kind: "mean", values: points.map((one) => one.mean), band: bands }]}
        low={Math.min(...bands.flatMap((ends) => ends ?? []), ...(scored.length ? [] : [0]))}
        high={Math.max(...bands.flatMap((ends) => ends ?? []), ...(scored.length ? [] : [1]))}
        format={short}
        {...common}
      />
      <Chart title="Pass rate" series={rates} low={0} high={1} format={percent} {...common} />
      <p class="muted curves-note">{noteOf(curve)}</p>
      <PointTable curve={curve} address={address} at={chosen} choose={setAt} />
    </>
  );
}

/** Mean and spread, within the rewards that there are. */
function bandOf({ mean, std, min, max }: CurvePoint): [number, number] | null {
  if (mean === null || std === null || min === null || max === null) return null;
  return [Math.max(min, mean - std), Math.min(max, mean + std)];
}

const known = (points: CurvePoint[], k: number) =>
  points.filter((one) => (one.pass_at[k] ?? null) !== null).length;

/** From 0 to 1: as their numbers are, or in equal steps where one has none. What is not known has no place. */
function placesOf(all: CurvePoint[]): number[] {
  const points = all.filter((one) => one.value !== null);
  const numbers = points.map((one) => one.place);
  const [low, high] = [Math.min(...numbers.map(Number)), Math.max(...numbers.map(Number))];
  if (numbers.includes(null) || low === high) {
    return points.map((_, n) => (points.length > 1 ? n / (points.length - 1) : 0.5));
  }
  return numbers.map((number) => (Number(number) - low) / (high - low));
}

/** Times are in UTC. */
const headOf = ({ by }: CurveView) =>
  TABS.find(([name]) => name === by)?.[1] ?? `${by[0]?.toUpperCase()}${by.slice(1)} from (UTC)`;

function labelOf(point: CurvePoint | undefined): string {
  const value = point?.value ?? null;
  return value === null ? NOT_KNOWN : plain(shortId(String(value)));
}

const percent = (value: number | null) => (value === null ? "–" : `${Number((100 * value).toFixed(1))} %`);

function noteOf({ count: all, scored, several, total, points, ks }: CurveView): string {
  const parts = [
    `${count(scored)} of ${many(all, "trajectory")} scored; the others are in no mean and no rate`,
  ];
  if (ks.length) parts.push("pass@k is the mean over the tasks with at least k scored trajectories");
  const unknown = points.find((one) => one.value === null);
  if (unknown)
    parts.push(`${many(unknown.count, "trajectory")} without a place on the axis, in the table alone`);
  if (several) parts.push(`${many(several, "trajectory")} of several versions, in each of them`);
  if (points.length < total) parts.push(`the first ${count(points.length)} of ${count(total)}`);
  return `${parts.join("; ")}.`;
}

/** The list of a point's trajectories, where a filter can give it. */
function listOf(address: Address, point: CurvePoint | undefined): Address | null {
  if (!point || point.where === null || source.embedded) return null;
  const where = address.where ?? "";
  const clause = point.where;
  return changedBy(address, {
    curve: undefined,
    pass: undefined,
    where: hasClause(where, clause) ? where : toggled(where, clause),
  });
}

interface TableProps {
  curve: CurveView;
  address: Address;
  at: number;
  choose(at: number): void;
}

function PointTable({ curve, address, at, choose }: TableProps): JSX.Element {
  return (
    <div class="points" tabIndex={0} aria-label="The points as a table" role="region">
      <table>
        <thead>
          <tr>
            <th scope="col">{headOf(curve)}</th>
            {["Count", "Scored", "Mean", "Std", "Min", "Max", "Passed"].map((head) => (
              <th scope="col">{head}</th>
            ))}
            {curve.ks.map((k) => (
              <th scope="col">pass@{k}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {curve.points.map((point, n) => {
            const list = listOf(address, point);
            const name = <Name text={labelOf(point)} title={String(point.value ?? NOT_KNOWN)} />;
            return (
              <tr class={n === at ? "chosen" : ""} onPointerEnter={() => choose(n)}>
                <th scope="row">
                  {list ? (
                    <a href={formatAddress(list)} onFocus={() => choose(n)}>
                      {name}
                    </a>
                  ) : (
                    name
                  )}
                </th>
                <td>{count(point.count)}</td>
                <td>{count(point.scored)}</td>
                {[point.mean, point.std, point.min, point.max].map((value) => (
                  <td>{short(value)}</td>
                ))}
                {[point.pass_rate, ...curve.ks.map((k) => point.pass_at[k] ?? null)].map((value) => (
                  <td>{percent(value)}</td>
                ))}
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
