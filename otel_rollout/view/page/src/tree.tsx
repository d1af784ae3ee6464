// The tree of histories: how the conversations of a trajectory grew from each other.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";

import { formatAddress } from "./address";
import { Status } from "./overview";
import { Sign } from "./signs";
import { Name, beginning, between, count, many, plain, seconds, short } from "./text";
import type { Shown } from "./trajectory";
import type { CompletionView, Detail, HistoryView, Node, Overview } from "./types";
import { type ListHandle, VirtualList } from "./virtual";

type Line =
  | { kind: "history"; history: HistoryView; depth: number }
  | { kind: "head"; text: string }
  | { kind: "call"; place: number; call: CompletionView }
  | { kind: "child"; child: Overview };

const MEANINGS = {
  main: "the agent's own conversation",
  fork: "goes on otherwise from a reply of",
  resample: "the same prompt, another reply as in",
  restart: "shares only what was not sampled (a compaction, or an edit) with",
  separate: "shares nothing with another",
};
const DEEPEST = 8;

/** Histories below those that they come from, in order. */
export function nested(histories: HistoryView[]): { history: HistoryView; depth: number }[] {
  const numbers = new Set(histories.map((one) => one.number));
  const below = new Map<number | null, HistoryView[]>();
  for (const one of histories) {
    const known = one.from !== null && one.from !== one.number && numbers.has(one.from);
    const from = known && one.relation !== "separate" ? one.from : null;
    below.set(from, [...(below.get(from) ?? []), one]);
  }
  const lines: { history: HistoryView; depth: number }[] = [];
  const waiting = (below.get(null) ?? []).map((history) => ({ history, depth: 0 })).reverse();
  for (let line = waiting.pop(); line; line = waiting.pop()) {
    lines.push(line);
    const depth = line.depth + 1;
    const next = below.get(line.history.number) ?? [];
    waiting.push(...next.map((history) => ({ history, depth })).reverse());
  }
  return lines;
}

function linesOf(detail: Detail): Line[] {
  const lines: Line[] = nested(detail.histories).map((one) => ({ kind: "history", ...one }));
  const more = detail.historiesTotal - detail.histories.length;
  if (more > 0) lines.push({ kind: "head", text: `and ${count(more)} more histories` });
  const failed = detail.completions
    .map((call, place) => ({ kind: "call" as const, place, call }))
    .filter(({ call }) => call.status !== "complete");
  if (failed.length) lines.push({ kind: "head", text: "Failed or cut calls" }, ...failed);
  const children = detail.children.map((child) => ({ kind: "child" as const, child }));
  if (children.length) lines.push({ kind: "head", text: "Rollouts inside" }, ...children);
  return lines;
}

export function Tree({ detail, address, move, history }: Shown & { history: number | null }): JSX.Element {
  const lines = useMemo(() => linesOf(detail), [detail]);
  const list = useRef<ListHandle>(null);
  const place = lines.findIndex((line) => line.kind === "history" && line.history.number === history);
  useEffect(() => {
    if (place > 0) list.current?.show(place);
  }, [place]);
  const href = (change: object) =>
    formatAddress({ trajectory: address.trajectory ?? "", view: "messages", ...change });
  return (
    <nav class="tree" aria-label="Histories">
      <h2>{many(detail.historiesTotal, "history")}</h2>
      <VirtualList
        count={lines.length}
        estimate={44}
        label="Histories"
        handle={list}
        render={(index) => {
          const line = lines[index];
          if (!line) return null;
          if (line.kind === "head") return <h3>{line.text}</h3>;
          if (line.kind === "child") return <Child child={line.child} />;
          if (line.kind === "call") return <Call line={line} detail={detail} move={move} />;
          return (
            <History
              {...line}
              detail={detail}
              chosen={line.history.number === history}
              href={href({ history: line.history.number })}
            />
          );
        }}
      />
    </nav>
  );
}

/** What a message says or calls, before what was thought. */
export function doneIn(node: Node): string {
  const calls = node.toolCalls.map((call) => `${call.name}(${call.arguments})`);
  const done = beginning([node.text, ...calls].filter((text) => text !== "").join(" "));
  return done || (node.reasoning === null ? node.role : `(think) ${beginning(node.reasoning)}`);
}

interface HistoryProps {
  history: HistoryView;
  depth: number;
  detail: Detail;
  chosen: boolean;
  href: string;
}

function History({ history, depth, detail, chosen, href }: HistoryProps): JSX.Element {
  const { relation, from, common } = history;
  const title =
    relation === "main" || relation === "separate" || from === null
      ? MEANINGS[relation]
      : `${MEANINGS[relation]} history ${from + 1}, after ${many(common, "message")}`;
  const last = detail.nodes[history.leaf];
  return (
    <a
      class={`branch depth-${Math.min(depth, DEEPEST)} ${relation} ${chosen ? "chosen" : ""}`}
      href={href}
      aria-current={chosen ? "true" : undefined}
      title={`${title}; ${seconds(between(history.start, history.end))}`}
    >
      <Sign name={relation} />
      <span class="branch-name">
        {history.number + 1} <span class="relation">{relation}</span>
        {history.sideCall !== null && (
          <span class="tag" title={plain(history.sideCall)}>
            side call
          </span>
        )}
        {history.breaks.length > 0 && (
          <span class="tag" title="Reasoning was dropped on replay">
            break
          </span>
        )}
      </span>
      <span class="branch-facts">
        <span title={`${many(history.trains.length, "reply")} of ${history.completions.length} train in it`}>
          {history.trains.length ? `● ${history.trains.length}` : "○"}
        </span>
        <span title="Messages">{count(history.length)} msg</span>
      </span>
      <span class="branch-text">{last && <Name text={doneIn(last)} />}</span>
    </a>
  );
}

function Call({
  line,
  detail,
  move,
}: {
  line: { place: number; call: CompletionView };
  detail: Detail;
  move: Shown["move"];
}): JSX.Element {
  const { call, place } = line;
  const node = call.node ?? call.promptNode;
  const go = () => {
    if (node === null) return move({ view: "raw" });
    const path = detail.histories.find((one) => one.completions.includes(place));
    move({ view: "messages", node, ...(path ? { history: path.number } : {}) });
  };
  return (
    <button type="button" class="branch call" onClick={go} title={plain(call.error?.message ?? call.status)}>
      <Sign name="failed" />
      <span class="branch-name">
        call {place} <Status value={call.status} />
      </span>
      <span class="branch-facts">{seconds(between(call.start, call.end))}</span>
      <span class="branch-text">
        <Name
          text={call.error ? `${call.error.type}: ${beginning(call.error.message)}` : (call.dropped ?? "")}
        />
      </span>
    </button>
  );
}

function Child({ child }: { child: Overview }): JSX.Element {
  return (
    <a class="branch child" href={formatAddress({ trajectory: child.id })}>
      <Sign name="inside" />
      <span class="branch-name">
        <Name text={child.name} /> {child.status !== "complete" && <Status value={child.status} />}
      </span>
      <span class="branch-facts">
        <span>{many(child.turns, "turn")}</span>
        {child.reward !== null && <span>reward {short(child.reward)}</span>}
      </span>
      <span class="branch-text">
        <Name text={child.id} />
      </span>
    </a>
  );
}
