// Answers of a self-contained page, from the JSON that it carries.

import type { Source } from "./source";
import type { Detail, Embedded, Group, Node, Overview, TokenWindow } from "./types";

const WINDOW = 200;

function found<T>(value: T | undefined, what: string, more = ""): T {
  if (value === undefined) throw new Error(`This page does not hold ${what}. ${more}`.trim());
  return value;
}

function compare(a: unknown, b: unknown): number {
  if (a === b) return 0;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a) < String(b) ? -1 : 1;
}

/** Rows in order of a field; rows without it come last, whichever way. */
export function sorted(rows: Overview[], sort: string): Overview[] {
  const down = sort.startsWith("-");
  const field = (down ? sort.slice(1) : sort) as keyof Overview;
  if (!field) return rows;
  return [...rows].sort((x, y) => {
    const [a, b] = [x[field] ?? null, y[field] ?? null];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    return down ? compare(b, a) : compare(a, b);
  });
}

/** The messages from the first one to this one. */
export function pathTo(nodes: Node[], leaf: number | null): Node[] {
  const path: Node[] = [];
  for (let at = leaf; at !== null;) {
    const node = nodes[at];
    if (!node || path.length > nodes.length) break;
    path.push(node);
    at = node.parent;
  }
  return path.reverse();
}

function sameMessage(a: Node | undefined, b: Node | undefined): boolean {
  const key = (node: Node) =>
    JSON.stringify([node.role, node.text, node.toolCalls.map((c) => [c.name, c.arguments])]);
  return a !== undefined && b !== undefined && key(a) === key(b);
}

/** Id and text of the task that they share. */
function taskOf(members: Overview[]): Pick<Group, "task" | "question"> {
  const first = members.find((one) => one.question !== null) ?? members[0];
  return { task: first?.task_id ?? null, question: first?.question ?? null };
}

export function embeddedAnswers(page: Embedded): Source {
  const rows = page.trajectories.rows;
  const detail = (id: string): Detail => {
    const names = Object.keys(page.details);
    const name = id in page.details ? id : names.find((known) => known.startsWith(id));
    return found(
      name === undefined ? undefined : page.details[name],
      `the details of trajectory ${id}`,
      page.missing,
    );
  };
  const group = (id: string): Group => {
    const members = rows.filter((row) => row.group_id === id);
    const known = page.groups.find((one) => one.id === id);
    return (
      known ??
      found(members.length ? { id, ...taskOf(members), members, first: null } : undefined, `group ${id}`)
    );
  };
  const window = (id: string, row: number) =>
    found(page.tokens[`${detail(id).overview.id} ${row}`], `the tokens of row ${row}`, page.missing);
  const main = (one: Detail) => pathTo(one.nodes, one.histories[0]?.leaf ?? null);
  const firstToken = (a: Detail, b: Detail) => {
    const [x, y] = [a, b].map((one) => page.tokens[`${one.overview.id} 0`]) as (TokenWindow | undefined)[];
    if (!x || !y) return null;
    let position = 0;
    while (position < x.ids.length && x.ids[position] === y.ids[position]) position++;
    if (position >= x.ids.length && position >= y.ids.length) return null;
    const at = (w: TokenWindow) => [w.ids[position] ?? null, w.texts[position] ?? null] as const;
    const [[a_id, a_text], [b_id, b_text]] = [at(x), at(y)];
    return { row_a: 0, row_b: 0, position, a_id, b_id, a_text, b_text };
  };

  return {
    embedded: true,
    start: page.start,
    state: async () => page.state,
    summary: async () => page.summary,
    trajectories: async (filter, sort, offset, limit) => {
      const words = filter.search.toLowerCase();
      const kept = words ? rows.filter((r) => JSON.stringify(r).toLowerCase().includes(words)) : rows;
      return { total: kept.length, rows: sorted(kept, sort).slice(offset, offset + limit) };
    },
    groups: async () => ({ total: page.summary.groups.length, rows: [] }),
    curve: async (_, by) => found(page.curves[by], `a curve by ${by}`),
    group: async (id) => group(id),
    diff: async (idA, idB) => {
      const [a, b] = [detail(idA), detail(idB)];
      const [left, right] = [main(a), main(b)];
      let common = 0;
      while (sameMessage(left[common], right[common])) common++;
      const rest = (path: Node[]) => path.slice(common, common + WINDOW);
      return {
        a: a.overview,
        b: b.overview,
        messages: { common, a: rest(left), b: rest(right) },
        tokens: firstToken(a, b),
      };
    },
    trajectory: async (id) => detail(id),
    message: async (id, node) => ({
      message: found(detail(id).nodes[node], `message ${node}`),
      whole: false,
    }),
    tokens: async (id, row, start, count) => {
      const whole = window(id, row);
      const [from, to] = [start - whole.start, start - whole.start + count];
      const cut = <T>(list: T[]) => list.slice(Math.max(0, from), Math.max(0, to));
      const alternatives = Object.fromEntries(
        Object.entries(whole.alternatives)
          .map(([place, them]) => [Number(place) - from, them] as const)
          .filter(([place]) => place >= 0 && place < count),
      );
      return {
        ...whole,
        start,
        ids: cut(whole.ids),
        texts: cut(whole.texts),
        textsFrom: cut([...whole.textsFrom]).join(""),
        logprobs: cut(whole.logprobs),
        mask: cut(whole.mask),
        sampled: cut(whole.sampled),
        completions: cut(whole.completions),
        entropy: cut(whole.entropy),
        alternatives,
      };
    },
    search: async (id, text) => {
      const words = text.toLowerCase();
      const nodes = detail(id).nodes;
      return nodes.filter((n) => JSON.stringify(n).toLowerCase().includes(words)).map((n) => n.id);
    },
  };
}
