// Where the page's data comes from: the server that it was loaded from, or the page itself.

import { embeddedAnswers } from "./embedded";
import type {
  CurveView,
  Detail,
  Diff,
  Embedded,
  Group,
  GroupPage,
  MessageAnswer,
  OverviewPage,
  State,
  Summary,
  TokenWindow,
} from "./types";

/** Changes when more was read: lists are asked for anew. */
export function revision({ version, indexed, changes, complete }: State): string {
  return `${version} ${indexed} ${changes} ${complete}`;
}

export interface Filter {
  where: string;
  search: string;
}

/** Every question that the page asks. A refusal is an Error whose message is the server's. */
export interface Source {
  /** Nothing stands behind the page: no filter expressions, no changes. */
  embedded: boolean;
  /** The address to begin with; empty: the list. */
  start: string;
  /** `id`: a trajectory that is open, if one is. */
  state(id: string): Promise<State>;
  summary(filter: Filter): Promise<Summary>;
  trajectories(filter: Filter, sort: string, offset: number, limit: number): Promise<OverviewPage>;
  groups(filter: Filter, offset: number, limit: number): Promise<GroupPage>;
  /** `by`: policy_version or task_id; `pass`, `scored`: as in an address. */
  curve(filter: Filter, by: string, pass: string, scored: string): Promise<CurveView>;
  group(id: string): Promise<Group>;
  diff(a: string, b: string): Promise<Diff>;
  trajectory(id: string): Promise<Detail>;
  message(id: string, node: number): Promise<MessageAnswer>;
  tokens(id: string, row: number, start: number, count: number): Promise<TokenWindow>;
  search(id: string, text: string): Promise<number[]>;
}

type Query = Record<string, string | number>;

async function get<T>(path: string, query: Query = {}): Promise<T> {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== "") words.set(name, String(value));
  }
  let answer: Response;
  try {
    answer = await fetch(`api/${path}?${words}`);
  } catch {
    throw new Error("The server does not answer: is `otel-rollout view` still running?");
  }
  const body = (await answer.json().catch(() => null)) as (T & { error?: string }) | null;
  if (answer.ok && body !== null) return body;
  throw new Error(body?.error ?? `The server answered ${answer.status} to api/${path}.`);
}

const overHttp: Source = {
  embedded: false,
  start: "",
  state: (id) => get("state", { id }),
  summary: (filter) => get("summary", { ...filter }),
  trajectories: (filter, sort, offset, limit) => get("trajectories", { ...filter, sort, offset, limit }),
  groups: (filter, offset, limit) => get("groups", { ...filter, offset, limit }),
  curve: (filter, by, pass, scored) => get("curve", { ...filter, by, pass, scored }),
  group: (id) => get("group", { id }),
  diff: (a, b) => get("diff", { a, b }),
  trajectory: (id) => get("trajectory", { id }),
  message: (id, node) => get("message", { id, node }),
  tokens: (id, row, start, count) => get("tokens", { id, row, start, count }),
  search: async (id, text) => (await get<{ nodes: number[] }>("search", { id, text })).nodes,
};

function chooseSource(): Source {
  const text = document.getElementById("otel-rollout")?.textContent;
  return text ? embeddedAnswers(JSON.parse(text) as Embedded) : overHttp;
}

export const source = chooseSource();
