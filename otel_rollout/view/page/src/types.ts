// What the server answers. Times are nanoseconds since 1970; null is unknown, never zero.

export interface State {
  version: number | string;
  sources: string[];
  indexed: number;
  /** Grows whenever a trajectory was read, also one that takes another's place. */
  changes: number;
  /** The trajectory that was asked for with it, if one was. */
  open: string;
  /** `changes` of `open` alone; null without one. */
  changed: number | null;
  /** False while the sources are still being read. */
  complete: boolean;
  errors: string[];
  jaeger: string | null;
  /** Names that a filter may use. */
  fields: string[];
  /** The most rows that one request may ask for. */
  rowsLimit: number;
}

/** Changes when more was read: lists are asked for anew. */
export function revision({ version, indexed, changes, complete }: State): string {
  return `${version} ${indexed} ${changes} ${complete}`;
}

export interface Overview {
  id: string;
  name: string;
  task_id: string | null;
  group_id: string | null;
  sample_index: number | null;
  parent_id: string | null;
  trace_id: string;
  status: string;
  termination_reason: string | null;
  reward: number | null;
  turns: number;
  calls: number;
  histories: number;
  rows: number;
  sampled_tokens: number | null;
  trained_tokens: number;
  dropped: number;
  seconds: number | null;
  start_time_ns: number;
  versions: (string | number)[];
  models: string[];
  warnings: number;
  findings: string[];
  metrics: Record<string, number>;
  rewards: Record<string, number>;
  metadata: Record<string, unknown>;
  advantage: number | null;
}

export interface Page<T> {
  total: number;
  rows: T[];
}

/** `from <= x < to`; the last one includes `to`. */
export interface Bin {
  from: number;
  to: number;
  count: number;
}

export interface Count<T> {
  value: T;
  count: number;
}

export interface Scored<T> extends Count<T> {
  scored: number;
  mean: number | null;
  std: number | null;
}

export interface FindingCount {
  kind: string;
  text: string;
  advice: string;
  count: number;
}

export interface Summary {
  total: number;
  rewards: {
    count: number;
    missing: number;
    mean: number | null;
    std: number | null;
    min: number | null;
    max: number | null;
    bins: Bin[];
  };
  statuses: Count<string>[];
  terminationReasons: Count<string | null>[];
  groups: Scored<string | null>[];
  groupsTotal: number;
  versions: Scored<string | number | null>[];
  findings: FindingCount[];
  seconds: { bins: Bin[] };
  turns: { bins: Bin[] };
  sampledTokens: { bins: Bin[] };
}

export interface Finding {
  kind: string;
  text: string;
  advice: string;
  completion_id: string | null;
  choice_index: number;
}

export interface Difference {
  kind: "message" | "token" | "none";
  position: number;
}

export interface Group {
  id: string;
  members: Overview[];
  first: { a: string; b: string; place: Difference } | null;
}

export interface ToolCall {
  id: string | null;
  name: string;
  arguments: string;
}

/** A message; `parent` is the place of the one before it. */
export interface Node {
  id: number;
  parent: number | null;
  role: string;
  /** What a person reads, at most 20,000 characters; `whole` is false where it was cut. */
  text: string;
  whole: boolean;
  /** Characters in all. */
  size: number;
  reasoning: string | null;
  toolCalls: ToolCall[];
  toolCallId: string | null;
  images: string[];
  links: string[];
  /** Place in `Detail.completions` of the call that sampled it. */
  completion: number | null;
  parts: string[] | null;
}

export interface HistoryView {
  number: number;
  leaf: number;
  length: number;
  tools: string[];
  sideCall: string | null;
  completions: number[];
  trains: number[];
  start: number;
  end: number | null;
  relation: "main" | "fork" | "resample" | "restart" | "separate";
  /** The history that it shares `common` messages with. */
  from: number | null;
  common: number;
  /** Nodes whose reasoning was dropped on replay. */
  breaks: number[];
}

export interface CompletionView {
  id: string;
  choice: number;
  span: string;
  status: string;
  error: { type: string; message: string } | null;
  model: string | null;
  requestModel: string | null;
  policyVersion: string | number | null;
  finishReason: string | null;
  stream: boolean;
  truncated: boolean;
  sideCall: string | null;
  trains: boolean;
  /** Why no row trains it. */
  dropped: string | null;
  reward: number | null;
  promptTokens: number | null;
  sampledTokens: number | null;
  start: number;
  end: number | null;
  attempts: number;
  sampling: Record<string, unknown>;
  usage: unknown;
  node: number | null;
  promptNode: number | null;
  row: number | null;
  rowStart: number | null;
  path: string;
}

export interface RowView {
  row: number;
  length: number;
  promptLength: number;
  trained: number;
  sampled: number;
  truncated: boolean;
  history: number | null;
  advantage: number | null;
  reward: number | null;
  spans: { completion: number; start: number; end: number }[];
}

export interface RewardView {
  name: string | null;
  value: number;
  weight: number | null;
  label: string | null;
  explanation: string | null;
  completion_id: string | null;
  choice_index: number;
}

export interface Detail {
  overview: Overview;
  /** `State.changed` of it. */
  changed: number;
  output: unknown;
  error: { type: string; message: string; traceback?: string } | null;
  logs: string[];
  warnings: string[];
  rewards: RewardView[];
  findings: Finding[];
  nodes: Node[];
  histories: HistoryView[];
  historiesTotal: number;
  completions: CompletionView[];
  rows: RowView[];
  parent: Overview | null;
  children: Overview[];
  /** Address of the trace in Jaeger, if one was given. */
  trace: string | null;
}

export interface Alternative {
  text: string;
  id: number | null;
  logprob: number;
}

/** Part of a row; all lists are as long as `ids`. */
export interface TokenWindow {
  row: number;
  start: number;
  /** Of the whole row. */
  length: number;
  ids: number[];
  texts: (string | null)[];
  /** null where the token was not sampled, or its log-probability did not come. */
  logprobs: (number | null)[];
  mask: number[];
  sampled: number[];
  completions: (number | null)[];
  /** By place in the window. */
  alternatives: Record<string, Alternative[]>;
  /** Nats, over the alternatives that came: a lower bound. */
  entropy: (number | null)[];
  /** A letter for each token: its text came here (h), with the same id elsewhere (e), from the tokenizer (t). */
  textsFrom: string;
}

export interface Diff {
  a: Overview;
  b: Overview;
  messages: { common: number; a: Node[]; b: Node[] };
  tokens: {
    row_a: number;
    row_b: number;
    position: number;
    a_id: number | null;
    b_id: number | null;
    a_text: string | null;
    b_text: string | null;
  } | null;
}

export interface MessageAnswer {
  message: unknown;
  whole: boolean;
}

/** What a self-contained page carries in place of a server. */
export interface Embedded {
  state: State;
  summary: Summary;
  trajectories: Page<Overview>;
  details: Record<string, Detail>;
  /** By trajectory id and number of the row: "id row". */
  tokens: Record<string, TokenWindow>;
  groups: Record<string, Group> | Group[];
}
