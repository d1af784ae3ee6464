// What the server answers. Times are nanoseconds since 1970; null is unknown, never zero.
// Written by tools/page_types.py from otel_rollout/view/page_types.py: `make page`.

/** One trajectory in numbers and names; None is unknown, never zero. */
export interface Overview {
  id: string;
  name: string;
  task_id: string | null;
  group_id: string | null;
  sample_index: number | null;
  /** Samples that its group is to have. */
  group_size: number | null;
  /** The trajectory that it ran inside. */
  parent_id: string | null;
  trace_id: string;
  status: string;
  termination_reason: string | null;
  /** Name of the exception that it ended with. */
  error_type: string | null;
  /** The message of that exception, at most `MOST_TEXT` characters, as of the next two. */
  error: string | null;
  /** Text of the task: the first message of the user. None: no call has one. */
  question: string | null;
  /** What the last reply says or calls, its reasoning aside. None: there is no reply. */
  answer: string | null;
  reward: number | null;
  /** Replies of the model, side calls aside; several choices of one call count once. */
  turns: number;
  /** Calls to endpoints that generate, including failed ones and side calls. */
  calls: number;
  histories: number;
  /** Token sequences that train. */
  rows: number;
  /** Tokens of the prompts of all calls, by the server's counts, else by their ids; None: of one call neither is known, or a call is missing. */
  prompt_tokens: number | null;
  /** Tokens that the model sampled in all calls, in the same way. */
  sampled_tokens: number | null;
  /** Tokens that a trainer learns from: the sum of the loss masks. */
  trained_tokens: number;
  /** Completions that no row trains. */
  dropped: number;
  /** From its start to its end. */
  seconds: number | null;
  start_time_ns: number;
  /** Policy versions that its completions were sampled with, in order of their start. */
  versions: (string | number)[];
  /** Models that answered, in order of their first reply. */
  models: string[];
  warnings: number;
  /** The kinds of its findings (`Finding.kind`), each once, in alphabetical order. */
  findings: string[];
  metrics: Record<string, number>;
  /** Named rewards of the trajectory. */
  rewards: Record<string, number>;
  metadata: Record<string, unknown>;
  advantage: number | null;
  hit?: string[] | null;
}

/** One thing to know before training on a trajectory. */
export interface Finding {
  kind:
    | "incomplete"
    | "inexact"
    | "damaged"
    | "drift"
    | "unscored"
    | "side_call"
    | "duplicate"
    | "failed"
    | "truncated"
    | "dropped"
    | "mixed_policy"
    | "uncertain";
  /** What is the matter, a sentence without a full stop; it may have ids. */
  text: string;
  /** What to do about it, one or two sentences with full stops. */
  advice: string;
  /** The completion that it is about; None: the trajectory. */
  completion_id: string | null;
  choice_index: number;
}

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
  /** The expression that the page was opened with, which holds for all that is listed. */
  where: string;
  /** Names that a filter may use. */
  fields: string[];
  /** The most rows that one request may ask for. */
  rowsLimit: number;
}

/** `from <= x < to`; the last one includes `to`. */
export interface Bin {
  from: number;
  to: number;
  count: number;
}

export interface Bins {
  bins: Bin[];
}

export interface Count {
  value: string;
  count: number;
}

/** Sums, and the number of trajectories that each is of: of the others it is not known. */
export interface TokenSums {
  prompt_tokens: number | null;
  prompt_tokens_known: number;
  sampled_tokens: number | null;
  sampled_tokens_known: number;
}

export interface Scored {
  prompt_tokens: number | null;
  prompt_tokens_known: number;
  sampled_tokens: number | null;
  sampled_tokens_known: number;
  count: number;
  scored: number;
  failed: number;
  mean: number | null;
}

export interface MetadataCount {
  key: string;
  /** As JSON. */
  values: Count[];
}

export interface ErrorCount {
  value: string;
  count: number;
  /** The most frequent message of this type of error, without ids. */
  text: string;
}

export interface GroupCount {
  prompt_tokens: number | null;
  prompt_tokens_known: number;
  sampled_tokens: number | null;
  sampled_tokens_known: number;
  count: number;
  scored: number;
  failed: number;
  mean: number | null;
  value: string;
  /** Id of the task, else its text. */
  task: string | null;
}

export interface VersionCount {
  prompt_tokens: number | null;
  prompt_tokens_known: number;
  sampled_tokens: number | null;
  sampled_tokens_known: number;
  count: number;
  scored: number;
  failed: number;
  mean: number | null;
  value: string | number;
}

export interface FindingCount {
  kind: string;
  text: string;
  advice: string;
  /** Trajectories that have it. */
  count: number;
  /** Their completions that it is about; 0: it is about the trajectories. */
  replies: number;
}

export interface RewardCount {
  bins: Bin[];
  count: number;
  missing: number;
  mean: number | null;
}

export interface Summary {
  total: number;
  rewards: RewardCount;
  statuses: Count[];
  terminationReasons: Count[];
  errors: ErrorCount[];
  /** Names of rollouts. */
  names: Count[];
  metadata: MetadataCount[];
  groups: GroupCount[];
  groupsTotal: number;
  versions: VersionCount[];
  findings: FindingCount[];
  seconds: Bins;
  turns: Bins;
  tokens: TokenSums;
  promptTokens: Bins;
  sampledTokens: Bins;
}

export interface CurvePoint {
  prompt_tokens: number | null;
  prompt_tokens_known: number;
  sampled_tokens: number | null;
  sampled_tokens_known: number;
  count: number;
  scored: number;
  failed: number;
  mean: number | null;
  /** The policy version or the task; null: not known. */
  value: string | number | null;
  /** The version on an axis of numbers; null: a name. */
  place: number | null;
  /** The filter that keeps its trajectories. */
  where: string | null;
  /** Trajectories that rates are of: those with a reward and, unless `scoredOnly`, failures. */
  rated: number;
  passed: number;
  pass_rate: number | null;
  /** Mean pass@k of its tasks that have k rated trajectories, by k. */
  pass_at: Record<string, number | null>;
  /** The number of these tasks, by k. */
  pass_at_tasks: Record<string, number>;
  tasks: number;
}

export interface CurveView {
  by: string;
  /** The least reward of a pass. */
  threshold: number;
  /** False: a failure has not passed. True: what has no reward is in no rate. */
  scoredOnly: boolean;
  count: number;
  rated: number;
  failed: number;
  /** Trajectories that count at several points. */
  several: number;
  ks: number[];
  total: number;
  /** At most the first thousand. */
  points: CurvePoint[];
}

export interface Difference {
  kind: "message" | "token" | "none";
  position: number;
}

export interface FirstDifference {
  a: string;
  b: string;
  place: Difference;
}

export interface Group {
  id: string;
  task: string | null;
  /** Text of the task. */
  question: string | null;
  members: Overview[];
  first: FirstDifference | null;
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

/** It shares `common` messages with the history `from`. */
export interface HistoryView {
  from: number | null;
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
  common: number;
  /** Nodes whose reasoning was dropped on replay. */
  breaks: number[];
}

export interface Failure {
  type: string;
  message: string;
}

export interface TracedFailure {
  type: string;
  message: string;
  traceback?: string;
}

export interface CompletionView {
  id: string;
  choice: number;
  span: string;
  status: string;
  error: Failure | null;
  model: string | null;
  requestModel: string | null;
  policyVersion: string | number | null;
  finishReason: string | null;
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
  node: number | null;
  promptNode: number | null;
  row: number | null;
  rowStart: number | null;
  path: string;
  /** HTTP status of the answer. */
  statusCode: number | null;
}

export interface Span {
  completion: number;
  start: number;
  end: number;
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
  spans: Span[];
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
  error: TracedFailure | null;
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
  /** A name to try as `--tokenizer`, for the texts of prompts; null: one was given. */
  tokenizer: string | null;
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

export interface Messages {
  common: number;
  a: Node[];
  b: Node[];
}

export interface TokenDifference {
  row_a: number;
  row_b: number;
  position: number;
  a_id: number | null;
  b_id: number | null;
  a_text: string | null;
  b_text: string | null;
}

export interface Diff {
  a: Overview;
  b: Overview;
  messages: Messages;
  tokens: TokenDifference | null;
}

export interface MessageAnswer {
  message: unknown;
  whole: boolean;
}

export interface OverviewPage {
  total: number;
  rows: Overview[];
}

export interface GroupPage {
  total: number;
  rows: GroupCount[];
}

/** What a self-contained page carries in place of a server. */
export interface Embedded {
  state: State;
  summary: Summary;
  trajectories: OverviewPage;
  details: Record<string, Detail>;
  /** By trajectory id and number of the row: "id row". */
  tokens: Record<string, TokenWindow>;
  groups: Group[];
  /** By what the page asks for: policy_version, task_id. */
  curves: Record<string, CurveView>;
  /** The address that it begins with; empty: the list, or its only trajectory. */
  start: string;
  /** What to do about a trajectory that is listed without its details. */
  missing: string;
}
