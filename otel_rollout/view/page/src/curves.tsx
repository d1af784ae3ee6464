// Rates by policy version and by task: two charts over one axis, and a table of the points.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { type Address, type Change, changedBy, formatAddress, go } from "./address";
import { Chart, type Series } from "./chart";
import { Filters } from "./filters";
import { useKeys, useLoaded } from "./hooks";
import { revision, source } from "./source";
import { Name, count, many, plain, short, shortId, tokenSum, tokens } from "./text";
import type { CurvePoint, CurveView, State } from "./types";
import { hasClause, toggled } from "./where";

const TABS: [string, string][] = [
  ["policy_version", "Policy version"],
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
  const scored = address.scored ?? "";
  const about = JSON.stringify([filter, by, pass, scored]);
  const loaded = useLoaded(
    () => source.curve(filter, by, pass, scored),
    `${about} ${revision(state)}`,
    about,
  );
  const move = (change: Change) => go(changedBy(address, change));
  const curve = loaded.value;
  return (
    <div class="curves">
      {source.embedded ? null : <Filters address={address} state={state} move={move} error={loaded.error} />}
      <div class="curves-bar">
        <h1>Rates by</h1>
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
        {curve && <Failures curve={curve} set={(only) => move({ scored: only ? "only" : "failed" })} />}
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

/** The rule for failures; a page without a server has one answer. */
function Failures({ curve, set }: { curve: CurveView; set(only: boolean): void }): JSX.Element {
  const rule = curve.scoredOnly ? "rates of what has a reward alone" : "a failure has not passed";
  if (source.embedded) return <span class="muted">{rule}</span>;
  return (
    <label>
      <input
        type="checkbox"
        name="failures"
        checked={!curve.scoredOnly}
        onChange={(event) => set(!event.currentTarget.checked)}
      />{" "}
      a failure has not passed
    </label>
  );
}

function Points({ curve, address }: { curve: CurveView; address: Address }): JSX.Element {
  const { points } = curve;
  const first = opening(curve);
  const [at, setAt] = useState(first);
  const chosen = Math.min(at, points.length - 1);
  useEffect(() => setAt(first), [points.length]);
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
  const rated = points.filter((one) => one.pass_rate !== null);
  const usual = (k: number) => k > 1 && k <= MOST_K && 2 * known(points, k) >= rated.length;
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
    { name: "failed", kind: "failed", values: points.map((one) => one.failed / Math.max(1, one.count)) },
  ];
  const used: Series[] = [
    {
      name: "prompt",
      kind: "mean",
      values: points.map((one) => perTrajectory(one.prompt_tokens, one.prompt_tokens_known)),
    },
    {
      name: "sampled",
      kind: "passed",
      values: points.map((one) => perTrajectory(one.sampled_tokens, one.sampled_tokens_known)),
    },
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
          · {many(points[chosen]?.count ?? 0, "trajectory")}, {count(points[chosen]?.failed)} failed,{" "}
          {count(points[chosen]?.scored)} scored
        </span>
      </p>
      <Chart title="Pass rate and failures" series={rates} low={0} high={1} format={percent} {...common} />
      <Chart
        title="Tokens per trajectory"
        series={used}
        low={0}
        high={high(used)}
        format={tokens}
        {...common}
      />
      <p class="muted curves-note">{noteOf(curve)}</p>
      <PointTable curve={curve} address={address} at={chosen} choose={setAt} />
    </>
  );
}

/** The point that is shown first: the newest version, the hardest task; never what is not known. */
function opening({ by, points }: CurveView): number {
  const named = points.flatMap((one, n) => (one.value === null ? [] : [n]));
  return (by === "policy_version" ? named.at(-1) : named[0]) ?? 0;
}

/** Mean of a count of tokens over the trajectories that have it. */
const perTrajectory = (sum: number | null, of: number) => (sum === null ? null : sum / Math.max(1, of));

const high = (series: Series[]) =>
  Math.max(1, ...series.flatMap((one) => one.values.map((value) => value ?? 0)));

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

const headOf = ({ by }: CurveView) => TABS.find(([name]) => name === by)?.[1] ?? by;

function labelOf(point: CurvePoint | undefined): string {
  const value = point?.value ?? null;
  return value === null ? NOT_KNOWN : plain(shortId(String(value)));
}

const percent = (value: number | null) => (value === null ? "–" : `${Number((100 * value).toFixed(1))} %`);

function noteOf({ count: all, rated, scoredOnly, several, total, points, ks }: CurveView): string {
  const parts = [
    scoredOnly ? "Rates are of the trajectories with a reward alone" : "A failure has not passed",
    `rates are of ${count(rated)} of ${many(all, "trajectory")}`,
  ];
  if (ks.length) parts.push("pass@k is the mean over the tasks with k rated trajectories, of so many tasks");
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
    scored: undefined,
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
            {["Count", "Failed", "Scored", "Mean", "Passed", ...curve.ks.map((k) => `pass@${k}`)].map(
              (head) => (
                <th scope="col">{head}</th>
              ),
            )}
            <th scope="col">Prompt tokens</th>
            <th scope="col">Sampled</th>
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
                <td class={point.failed ? "bad" : ""}>{count(point.failed)}</td>
                <td>{count(point.scored)}</td>
                <td>{short(point.mean)}</td>
                <td>{percent(point.pass_rate)}</td>
                {curve.ks.map((k) => (
                  <td>
                    {percent(point.pass_at[k] ?? null)}
                    {(point.pass_at[k] ?? null) !== null && (
                      <span class="muted"> of {count(point.pass_at_tasks[k])}</span>
                    )}
                  </td>
                ))}
                <td>{tokenSum(point.prompt_tokens, point.prompt_tokens_known, point.count)}</td>
                <td>{tokenSum(point.sampled_tokens, point.sampled_tokens_known, point.count)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
