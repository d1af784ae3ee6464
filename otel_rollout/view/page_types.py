"""What the page is answered, as types: `page/src/types.ts` is generated from them.

`tools/page_types.py` writes that file; tests/view/test_page_types.py compares. Times are
nanoseconds since 1970; None is unknown, never zero.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from otel_rollout.view.findings import Finding
from otel_rollout.view.overview import Overview
from otel_rollout.view.tree import Relation
from otel_rollout.wire import Json


class State(TypedDict):
    version: int | str
    sources: list[str]
    indexed: int
    changes: int
    """Grows whenever a trajectory was read, also one that takes another's place."""
    open: str
    """The trajectory that was asked for with it, if one was."""
    changed: int | None
    """`changes` of `open` alone; null without one."""
    complete: bool
    """False while the sources are still being read."""
    errors: list[str]
    where: str
    """The expression that the page was opened with, which holds for all that is listed."""
    fields: list[str]
    """Names that a filter may use."""
    rowsLimit: int
    """The most rows that one request may ask for."""


_BinFrom = TypedDict("_BinFrom", {"from": float})


class Bin(_BinFrom):
    """`from <= x < to`; the last one includes `to`."""

    to: float
    count: int


class Bins(TypedDict):
    bins: list[Bin]


class Count(TypedDict):
    value: str
    count: int


class TokenSums(TypedDict):
    """Sums, and the number of trajectories that each is of: of the others it is not known."""

    prompt_tokens: int | None
    prompt_tokens_known: int
    sampled_tokens: int | None
    sampled_tokens_known: int


class Scored(TokenSums):
    count: int
    scored: int
    failed: int
    mean: float | None


class MetadataCount(TypedDict):
    key: str
    values: list[Count]
    """As JSON."""


class ErrorCount(Count):
    text: str
    """The most frequent message of this type of error, without ids."""


class GroupCount(Scored):
    value: str
    task: str | None
    """Id of the task, else its text."""


class VersionCount(Scored):
    value: str | int


class FindingCount(TypedDict):
    kind: str
    text: str
    advice: str
    count: int
    """Trajectories that have it."""
    replies: int
    """Their completions that it is about; 0: it is about the trajectories."""


class RewardCount(Bins):
    count: int
    missing: int
    mean: float | None


class Summary(TypedDict):
    total: int
    rewards: RewardCount
    statuses: list[Count]
    terminationReasons: list[Count]
    errors: list[ErrorCount]
    names: list[Count]
    """Names of rollouts."""
    metadata: list[MetadataCount]
    groups: list[GroupCount]
    groupsTotal: int
    versions: list[VersionCount]
    findings: list[FindingCount]
    seconds: Bins
    turns: Bins
    tokens: TokenSums
    promptTokens: Bins
    sampledTokens: Bins


class CurvePoint(Scored):
    value: str | int | float | None
    """The policy version or the task; null: not known."""
    place: float | None
    """The version on an axis of numbers; null: a name."""
    where: str | None
    """The filter that keeps its trajectories."""
    rated: int
    """Trajectories that rates are of: those with a reward and, unless `scoredOnly`, failures."""
    passed: int
    pass_rate: float | None
    pass_at: dict[str, float | None]
    """Mean pass@k of its tasks that have k rated trajectories, by k."""
    pass_at_tasks: dict[str, int]
    """The number of these tasks, by k."""
    tasks: int


class CurveView(TypedDict):
    by: str
    threshold: float
    """The least reward of a pass."""
    scoredOnly: bool
    """False: a failure has not passed. True: what has no reward is in no rate."""
    count: int
    rated: int
    failed: int
    several: int
    """Trajectories that count at several points."""
    ks: list[int]
    total: int
    points: list[CurvePoint]
    """At most the first thousand."""


class Difference(TypedDict):
    kind: Literal["message", "token", "none"]
    position: int


class FirstDifference(TypedDict):
    a: str
    b: str
    place: Difference


class Group(TypedDict):
    id: str
    task: str | None
    question: str | None
    """Text of the task."""
    members: list[Overview]
    first: FirstDifference | None


class ToolCall(TypedDict):
    id: str | None
    name: str
    arguments: str


class Node(TypedDict):
    """A message; `parent` is the place of the one before it."""

    id: int
    parent: int | None
    role: str
    text: str
    """What a person reads, at most 20,000 characters; `whole` is false where it was cut."""
    whole: bool
    size: int
    """Characters in all."""
    reasoning: str | None
    toolCalls: list[ToolCall]
    toolCallId: str | None
    images: list[str]
    links: list[str]
    completion: int | None
    """Place in `Detail.completions` of the call that sampled it."""
    parts: list[str] | None


_HistoryFrom = TypedDict("_HistoryFrom", {"from": int | None})


class HistoryView(_HistoryFrom):
    """It shares `common` messages with the history `from`."""

    number: int
    leaf: int
    length: int
    tools: list[str]
    sideCall: str | None
    completions: list[int]
    trains: list[int]
    start: int
    end: int | None
    relation: Relation
    common: int
    breaks: list[int]
    """Nodes whose reasoning was dropped on replay."""


class Failure(TypedDict):
    type: str
    message: str


class TracedFailure(Failure, total=False):
    traceback: str


class CompletionView(TypedDict):
    id: str
    choice: int
    span: str
    status: str
    error: Failure | None
    model: str | None
    requestModel: str | None
    policyVersion: str | int | None
    finishReason: str | None
    truncated: bool
    sideCall: str | None
    trains: bool
    dropped: str | None
    """Why no row trains it."""
    reward: float | None
    promptTokens: int | None
    sampledTokens: int | None
    start: int
    end: int | None
    attempts: int
    sampling: dict[str, Json]
    node: int | None
    promptNode: int | None
    row: int | None
    rowStart: int | None
    path: str
    statusCode: int | None
    """HTTP status of the answer."""


class Span(TypedDict):
    completion: int
    start: int
    end: int


class RowView(TypedDict):
    row: int
    length: int
    promptLength: int
    trained: int
    sampled: int
    truncated: bool
    history: int | None
    advantage: float | None
    reward: float | None
    spans: list[Span]


class RewardView(TypedDict):
    name: str | None
    value: float
    weight: float | None
    label: str | None
    explanation: str | None
    completion_id: str | None
    choice_index: int


class Detail(TypedDict):
    overview: Overview
    changed: int
    """`State.changed` of it."""
    output: Json
    error: TracedFailure | None
    logs: list[str]
    warnings: list[str]
    rewards: list[RewardView]
    findings: list[Finding]
    nodes: list[Node]
    histories: list[HistoryView]
    historiesTotal: int
    completions: list[CompletionView]
    rows: list[RowView]
    parent: Overview | None
    children: list[Overview]
    tokenizer: str | None
    """A name to try as `--tokenizer`, for the texts of prompts; null: one was given."""
    trace: str | None
    """Address of the trace in Jaeger, if one was given."""


class Alternative(TypedDict):
    text: str
    id: int | None
    logprob: float


class TokenWindow(TypedDict):
    """Part of a row; all lists are as long as `ids`."""

    row: int
    start: int
    length: int
    """Of the whole row."""
    ids: list[int]
    texts: list[str | None]
    logprobs: list[float | None]
    """null where the token was not sampled, or its log-probability did not come."""
    mask: list[int]
    sampled: list[int]
    completions: list[int | None]
    alternatives: dict[str, list[Alternative]]
    """By place in the window."""
    entropy: list[float | None]
    """Nats, over the alternatives that came: a lower bound."""
    textsFrom: str
    """A letter for each token: its text came here (h), with the same id elsewhere (e), from the
    tokenizer (t)."""


class Messages(TypedDict):
    common: int
    a: list[Node]
    b: list[Node]


class TokenDifference(TypedDict):
    row_a: int
    row_b: int
    position: int
    a_id: int | None
    b_id: int | None
    a_text: str | None
    b_text: str | None


class Diff(TypedDict):
    a: Overview
    b: Overview
    messages: Messages
    tokens: TokenDifference | None


class MessageAnswer(TypedDict):
    message: Json
    whole: bool


class OverviewPage(TypedDict):
    total: int
    rows: list[Overview]


class GroupPage(TypedDict):
    total: int
    rows: list[GroupCount]


class Embedded(TypedDict):
    """What a self-contained page carries in place of a server."""

    state: State
    summary: Summary
    trajectories: OverviewPage
    details: dict[str, Detail]
    tokens: dict[str, TokenWindow]
    """By trajectory id and number of the row: "id row"."""
    groups: list[Group]
    curves: dict[str, CurveView]
    """By what the page asks for: policy_version, task_id."""
    start: str
    """The address that it begins with; empty: the list, or its only trajectory."""
    missing: str
    """What to do about a trajectory that is listed without its details."""
