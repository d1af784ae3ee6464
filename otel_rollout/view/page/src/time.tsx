// Calls, the time between them, and rollouts inside, on one axis.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";

import { formatAddress } from "./address";
import { pathTo } from "./embedded";
import { Name, between, many, plain, seconds, short } from "./text";
import { doneIn } from "./tree";
import type { Shown } from "./trajectory";
import type { CompletionView, Detail, HistoryView } from "./types";
import { VirtualList } from "./virtual";

interface Span {
  kind: "call" | "bad" | "side" | "tools" | "child";
  start: number;
  end: number;
  title: string;
  /** Place of the call in `Detail.completions`. */
  call: number | null;
}

interface Lane {
  label: string;
  spans: Span[];
  child: string | null;
}

export function TimeView({ detail, move }: Shown): JSX.Element {
  const lanes = useMemo(() => lanesOf(detail), [detail]);
  const [zoom, setZoom] = useState(1);
  const times = lanes.flatMap((lane) => lane.spans);
  if (times.length === 0) return <p class="hint">No call has a time.</p>;
  const start = times.reduce((least, one) => Math.min(least, one.start), Infinity);
  const end = times.reduce((most, one) => Math.max(most, one.end), -Infinity);
  const open = (call: number) => {
    const node = detail.completions[call]?.node ?? detail.completions[call]?.promptNode ?? null;
    const history = detail.histories.find((one) => one.completions.includes(call));
    if (node !== null) move({ view: "messages", node, history: history?.number });
  };
  const axis = { start, length: Math.max(1, end - start) };
  return (
    <div class="time-view">
      <div class="toolbar">
        <span class="numbers">
          <b>{seconds(between(start, end))}</b> in all · {many(detail.completions.length, "call")}
        </span>
        <span class="legend-line">
          <span class="swatch call" /> call <span class="swatch bad" /> failed or cut{" "}
          <span class="swatch side" /> side call <span class="swatch tools" /> time between calls, with the
          tools that were asked for <span class="swatch child" /> rollout inside
        </span>
        <span class="spread" />
        <button
          type="button"
          aria-label="Narrower"
          onClick={() => setZoom(Math.max(1, zoom / 2))}
          disabled={zoom === 1}
        >
          −
        </button>
        <span class="muted">{zoom}×</span>
        <button type="button" aria-label="Wider" onClick={() => setZoom(Math.min(64, zoom * 2))}>
          +
        </button>
      </div>
      <div class="lanes">
        <div class="lanes-inner" style={{ width: `${zoom * 100}%` }}>
          <Axis length={axis.length} zoom={zoom} />
          <VirtualList
            count={lanes.length}
            estimate={34}
            label="Lanes"
            render={(index) => {
              const lane = lanes[index];
              return lane && <LaneRow lane={lane} axis={axis} open={open} />;
            }}
          />
        </div>
      </div>
    </div>
  );
}

/** Seconds between marks of the axis; below and above in tens. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];

function Axis({ length, zoom }: { length: number; zoom: number }): JSX.Element {
  const wish = length / 1e9 / (8 * zoom);
  const tens = 10 ** Math.ceil(Math.log10(wish));
  const step = wish < 1 ? tens : (STEPS.find((one) => one >= wish) ?? tens);
  const marks = Array.from({ length: Math.floor(length / 1e9 / step) + 1 }, (_, n) => n * step);
  return (
    <div class="lane axis">
      <span class="lane-label muted">from the first call</span>
      <div class="lane-spans">
        {marks.map((mark) => (
          <span class="tick" style={{ left: `${((mark * 1e9) / length) * 100}%` }}>
            {mark === 0 ? "0" : seconds(mark)}
          </span>
        ))}
      </div>
    </div>
  );
}

const WIDTH = 10_000;

interface LaneProps {
  lane: Lane;
  axis: { start: number; length: number };
  open(call: number): void;
}

function LaneRow({ lane, axis, open }: LaneProps): JSX.Element {
  const x = (time: number) => ((time - axis.start) / axis.length) * WIDTH;
  const label = <Name text={lane.label} />;
  return (
    <div class="lane">
      <span class="lane-label">
        {lane.child === null ? label : <a href={formatAddress({ trajectory: lane.child })}>{label}</a>}
      </span>
      <svg
        class="lane-spans"
        viewBox={`0 0 ${WIDTH} 20`}
        preserveAspectRatio="none"
        role="group"
        aria-label={plain(lane.label)}
      >
        {lane.spans.map((span) => {
          const thin = span.kind === "tools";
          return (
            <rect
              class={`span ${span.kind}`}
              x={x(span.start)}
              width={Math.max(8, x(span.end) - x(span.start))}
              y={thin ? 8 : 2}
              height={thin ? 4 : 16}
              tabindex={span.call === null ? -1 : 0}
              role={span.call === null ? "img" : "button"}
              aria-label={span.title}
              onClick={() => span.call !== null && open(span.call)}
              onKeyDown={(event) => event.key === "Enter" && span.call !== null && open(span.call)}
            >
              <title>{span.title}</title>
            </rect>
          );
        })}
      </svg>
    </div>
  );
}

/** A lane for each history with the calls that are first in it, then for calls without, then rollouts inside. */
export function lanesOf(detail: Detail): Lane[] {
  const drawn = new Set<number>();
  const lanes: Lane[] = [];
  for (const history of detail.histories) {
    const fresh = history.completions.filter((call) => !drawn.has(call));
    if (fresh.length === 0) continue;
    for (const call of fresh) drawn.add(call);
    const calls = fresh.map((call) => callSpan(detail, call));
    lanes.push({
      label: nameOf(detail, history),
      spans: [...toolSpans(detail, history, new Set(fresh)), ...calls],
      child: null,
    });
  }
  const rest = detail.completions.map((_, place) => place).filter((place) => !drawn.has(place));
  if (rest.length)
    lanes.push({ label: "in no history", spans: rest.map((call) => callSpan(detail, call)), child: null });
  for (const child of detail.children) {
    const { start_time_ns: start, seconds: long } = child;
    const end = start + (long ?? 0) * 1e9;
    const title = plain(`${child.name}: ${seconds(long)}, ${many(child.turns, "turn")}, ${child.status}`);
    lanes.push({
      label: `↳ ${child.name}`,
      spans: [{ kind: "child", start, end, title, call: null }],
      child: child.id,
    });
  }
  return lanes;
}

/** Number, relation and last message, as in the tree. */
function nameOf(detail: Detail, history: HistoryView): string {
  const last = detail.nodes[history.leaf];
  const kind = history.sideCall === null ? history.relation : "side call";
  return [`${history.number + 1} ${kind}`, last ? doneIn(last) : ""].filter(Boolean).join(" · ");
}

function kindOf(call: CompletionView): Span["kind"] {
  if (call.status !== "complete") return "bad";
  return call.sideCall === null ? "call" : "side";
}

function callSpan(detail: Detail, place: number): Span {
  const call = detail.completions[place] as CompletionView;
  const words = [
    `call ${place}: ${seconds(between(call.start, call.end))}`,
    call.model ?? call.requestModel ?? "",
    `${short(call.promptTokens)} prompt tokens, ${short(call.sampledTokens)} sampled`,
    call.status,
  ];
  return {
    kind: kindOf(call),
    start: call.start,
    end: call.end ?? call.start,
    title: plain(words.filter(Boolean).join(" · ")),
    call: place,
  };
}

/** Between a reply that asks for tools and the next call of its history, where both are of this lane. */
function toolSpans(detail: Detail, history: HistoryView, lane: Set<number>): Span[] {
  const byCompletion = new Map(pathTo(detail.nodes, history.leaf).map((node) => [node.completion, node]));
  const spans: Span[] = [];
  history.completions.slice(0, -1).forEach((place, n) => {
    const [call, following] = [detail.completions[place], history.completions[n + 1] ?? -1];
    const next = detail.completions[following];
    const names = byCompletion.get(place)?.toolCalls.map((one) => one.name) ?? [];
    if (
      !call ||
      !next ||
      call.end === null ||
      names.length === 0 ||
      next.start <= call.end ||
      !lane.has(place) ||
      !lane.has(following)
    )
      return;
    const title = plain(
      `tools: ${[...new Set(names)].join(", ")}: ${seconds(between(call.end, next.start))} between the calls`,
    );
    spans.push({ kind: "tools", start: call.end, end: next.start, title, call: null });
  });
  return spans;
}
