// Which messages of a trajectory are shown, and what is shown with them.

import { pathTo } from "./embedded";
import type { Shown } from "./trajectory";
import type { CompletionView, Detail, HistoryView, Node } from "./types";

/** A message, the results of the tools that it called, and calls that failed after it. */
export interface Said {
  node: Node;
  place: number;
  results: Map<string, Node>;
  failed: CompletionView[];
}

/** The messages of a path; a tool's result is with the call that it answers. */
export function spoken(path: Node[], completions: CompletionView[]): Said[] {
  const said: Said[] = [];
  const calls = new Map<string, Said>();
  const failed = new Map<number, CompletionView[]>();
  for (const call of completions) {
    if (call.node === null && call.promptNode !== null) {
      failed.set(call.promptNode, [...(failed.get(call.promptNode) ?? []), call]);
    }
  }
  path.forEach((node, place) => {
    const caller = node.toolCallId === null ? undefined : calls.get(node.toolCallId);
    if (caller && node.toolCallId !== null && !caller.results.has(node.toolCallId)) {
      caller.results.set(node.toolCallId, node);
      caller.failed.push(...(failed.get(node.id) ?? []));
      return;
    }
    const one = { node, place, results: new Map(), failed: [...(failed.get(node.id) ?? [])] };
    for (const call of node.toolCalls) if (call.id !== null) calls.set(call.id, one);
    said.push(one);
  });
  return said;
}

/** The last message that is shown: of a history, or the prompt of a call that failed in none. */
export function shownLeaf(
  detail: Detail,
  address: Shown["address"],
  history: HistoryView | undefined,
): number | null {
  if (history) return history.leaf;
  const failed = detail.completions.find((call) => call.node === null && call.promptNode !== null);
  return detail.nodes[address.node ?? -1]?.id ?? failed?.promptNode ?? null;
}

/** The history that an address means: the one it names, else one with its message or row.
 * Undefined for a message that is in none: the prompt of a call that failed. */
export function chosenHistory(detail: Detail, address: Shown["address"]): HistoryView | undefined {
  const named = detail.histories.find((one) => one.number === address.history);
  if (named) return named;
  const { node, row } = address;
  const holds = (one: HistoryView) => pathTo(detail.nodes, one.leaf).some((step) => step.id === node);
  const byNode = node === undefined ? undefined : detail.histories.find(holds);
  const number = row === undefined ? null : (detail.rows[row]?.history ?? null);
  if (node !== undefined && detail.nodes[node] && !byNode) return undefined;
  return byNode ?? detail.histories.find((one) => one.number === number) ?? detail.histories[0];
}
