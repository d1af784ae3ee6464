"""A trajectory in one line: the row of lists, filters, checks and tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TabularList, columns_of, members
from otel_rollout.looking import ShownInNotebooks
from otel_rollout.spans import TokenPath
from otel_rollout.terminal import shortened
from otel_rollout.trajectory import Completion, Episode, TokenSequences, Trajectory, TrajectoryGroup
from otel_rollout.view.findings import Finding, findings_of, nothing_trains
from otel_rollout.view.messages import message_row
from otel_rollout.wire import Json, counts_of, finite, shown_message

PASS_THRESHOLD = 0.5
"""A reward from this one on is a pass, unless another one is given."""
MOST_TEXT = 2_000
"""Characters of a text in an overview."""


@dataclass(frozen=True, slots=True)
class Overview:
    """One trajectory in numbers and names; None is unknown, never zero."""

    id: str
    name: str
    task_id: str | None
    group_id: str | None
    sample_index: int | None
    group_size: int | None
    """Samples that its group is to have."""
    parent_id: str | None
    """The trajectory that it ran inside."""
    trace_id: str
    status: str
    termination_reason: str | None
    error_type: str | None
    """Name of the exception that it ended with."""
    error: str | None
    """The message of that exception, at most `MOST_TEXT` characters, as of the next two."""
    question: str | None
    """Text of the task: the first message of the user. None: no call has one."""
    answer: str | None
    """What the last reply says or calls, its reasoning aside. None: there is no reply."""
    reward: float | None
    turns: int
    """Replies of the model, side calls aside; several choices of one call count once."""
    calls: int
    """Calls to endpoints that generate, including failed ones and side calls."""
    histories: int
    rows: int
    """Token sequences that train."""
    prompt_tokens: int | None
    """Tokens of the prompts of all calls, by the server's counts, else by their ids; None: of one
    call neither is known, or a call is missing."""
    sampled_tokens: int | None
    """Tokens that the model sampled in all calls, in the same way."""
    trained_tokens: int
    """Tokens that a trainer learns from: the sum of the loss masks."""
    dropped: int
    """Completions that no row trains."""
    seconds: float | None
    """From its start to its end."""
    start_time_ns: int
    versions: tuple[str | int, ...]
    """Policy versions that its completions were sampled with, in order of their start."""
    models: tuple[str, ...]
    """Models that answered, in order of their first reply."""
    warnings: int
    findings: tuple[str, ...]
    """The kinds of its findings (`Finding.kind`), each once, in alphabetical order."""
    metrics: dict[str, float]
    rewards: dict[str, float]
    """Named rewards of the trajectory."""
    metadata: dict[str, Json]

    @classmethod
    def of(cls, trajectory: Trajectory, names: Collection[str] | None = None) -> Overview:
        """The overview of a trajectory. names: the only fields that are used; None: all are.

        Its calls are read if they are needed for these fields; else the others are None.
        """
        if names is not None and HEAD.issuperset(names):
            return cls(**{**_UNREAD, **_head(trajectory)})
        return examine(trajectory).overview

    def to_dict(self) -> dict[str, Json]:
        """The overview as JSON; tuples are lists, and what is no number is null."""
        return {each.name: finite(getattr(self, each.name)) for each in fields(self)}


class Examined(NamedTuple):
    """All that is computed of a trajectory to list, check or index it."""

    overview: Overview
    findings: list[Finding]
    trainable: bool
    """`Trajectory.trainable`."""
    untrained: Finding
    """That no token of it trains, if so."""
    hit: list[str] | None = None
    """The excerpt around what is searched for (`Search.hit`). None: nothing is searched for."""


def examine(trajectory: Trajectory, rows: TokenSequences | None = None) -> Examined:
    """Overview, findings and rows. rows: others than those of `Trajectory.token_sequences()`."""
    rows = trajectory.token_sequences() if rows is None else rows
    findings = findings_of(trajectory, rows=rows)
    completions = trajectory.completions
    models = [completion.model for completion in completions]
    prompt_tokens, sampled_tokens = tokens_in(trajectory)
    overview = Overview(
        **_head(trajectory),
        question=_question(trajectory.main_start or next(iter(completions), None)),
        answer=_answer(trajectory.main_end),
        turns=_turns(completions),
        calls=len({completion.span_id for completion in completions}),
        histories=sum(1 for _ in trajectory.conversations.ends(trajectory.appended)),
        rows=len(rows),
        prompt_tokens=prompt_tokens,
        sampled_tokens=sampled_tokens,
        trained_tokens=sum(row.trained_tokens for row in rows),
        dropped=sum(drop.completion is not None for drop in rows.dropped),
        versions=tuple(trajectory.policy_versions),
        models=tuple(each for each in dict.fromkeys(models) if each is not None),
        warnings=len(trajectory.warnings),
        findings=tuple(sorted({finding.kind for finding in findings})),
    )
    return Examined(overview, findings, trajectory.trainable, nothing_trains(rows))


_PLAIN = (
    *("id", "name", "task_id", "sample_index", "group_size", "parent_id"),
    *("trace_id", "status", "termination_reason", "start_time_ns"),
)
HEAD = frozenset(
    (
        *_PLAIN,
        "group_id",
        "error_type",
        "error",
        "reward",
        "rewards",
        "seconds",
        "metrics",
        "metadata",
    )
)
"""The fields for which no call is read."""
_UNREAD = dict.fromkeys(each.name for each in fields(Overview))


def _head(trajectory: Trajectory) -> dict[str, Any]:
    """The values of these fields."""
    reward = trajectory.reward
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "group_id": trajectory.group_key,
        "error_type": _cut(trajectory.error and trajectory.error.get("type")),
        "error": _cut(trajectory.error and trajectory.error.get("message")),
        "reward": None if reward is None else float(reward),
        "rewards": {name: float(value) for name, value in trajectory.rewards.items()},
        "seconds": _seconds(trajectory),
        "metrics": dict(trajectory.metrics),
        "metadata": dict(trajectory.metadata),
    }


def _question(first: Completion | None) -> str | None:
    for node in reversed([*((first and first.prompt) or ())]):
        row = message_row(node.message)
        if row.role in ("user", "text"):
            return _cut(row.text or shown_message(node.message))
    return None


def _answer(last: Completion | None) -> str | None:
    return None if last is None else _cut(shown_message(last.message, reasoning=False))


def _cut(text: Json) -> str | None:
    return None if text is None else shortened(str(text), MOST_TEXT)


def _turns(completions: list[Completion]) -> int:
    return len({c.span_id for c in completions if c.items and c.side_call is None})


def _seconds(trajectory: Trajectory) -> float | None:
    started, ended = trajectory.start_time_ns, trajectory.end_time_ns
    return (ended - started) / 1e9 if ended is not None and started else None


def tokens_in(trajectory: Trajectory) -> list[int | None]:
    """Tokens of all prompts, and sampled ones; None where those of one call are not known."""
    calls: dict[str, list[Completion]] = {}
    for completion in trajectory.completions:
        calls.setdefault(completion.span_id, []).append(completion)
    counts = [tokens_of(call) for call in calls.values()]
    if trajectory.missing_calls:
        counts.append((None, None))
    sides = ([count[side] for count in counts] for side in (0, 1))
    return [None if None in each else sum(filter(None, each)) for each in sides]


def tokens_of(call: Sequence[Completion]) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and sampled ones, of a call with these choices. None: not known.

    A count of 0 in `usage` is a placeholder of servers that do not count.
    """
    first = call[0]
    if not any(one.items for one in call) and (first.exchange.status_code or 0) >= 400:
        return 0, 0
    counts = counts_of({**(first.usage or {}), "completion_tokens": 0})
    prompts = {id(one.prompt): one for one in call}.values()
    asked = (counts.input if counts else 0) or _length(one.prompt_token_path for one in prompts)
    counted = first.sampled_count
    sampled = counted or _length(one.token_path for one in call)
    return asked, 0 if counted == 0 and sampled is None and first.ids_are_empty else sampled


def _length(paths: Iterable[TokenPath | None]) -> int | None:
    lengths = [path.length if path else None for path in paths]
    return None if None in lengths else sum(filter(None, lengths))


def check_threshold(option: str, value: object) -> float:
    """The least reward of a pass. ConfigurationError if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{option}: expected a finite number, got {value!r:.100}")
    return float(value)


class Overviews(TabularList[Overview], ShownInNotebooks):
    """Overviews of trajectories, in order, and a table of them.

    In Arrow `metrics` and `rewards` are maps, and `metadata` is JSON text.
    """

    pass_threshold = PASS_THRESHOLD
    """A reward from this one on is a pass, in the curves that a notebook shows."""
    scored_only = False
    """False: in them a failure has not passed. True: what has no reward is in no rate."""
    _columns: ClassVar = columns_of(Overview)

    def _dicts(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self]


def overviews(
    trajectories: Iterable[Trajectory | Episode] | TrajectoryGroup | Episode | Trajectory,
    *,
    pass_threshold: float = PASS_THRESHOLD,
    scored_only: bool = False,
) -> Overviews:
    """A line of names and numbers for each trajectory: a list that is a table, too.

        frame = otel_rollout.overviews(trajectories).to_pandas()
        frame.groupby("group_id")["reward"].mean()

    trajectories: as for `to_token_rows`; the failures and the children of a group are in it.
    Each line is an `Overview`: status, reward, turns, tokens, seconds, what does not train.
    A notebook shows them as curves of pass rate, pass@k, failures and tokens, and as a list.
    pass_threshold: a reward from this one on is a pass.
    scored_only: True leaves what has no reward out of the rates; else a failure has not passed.
    """
    found = Overviews(map(Overview.of, members(trajectories, "overviews")))
    found.pass_threshold = check_threshold("overviews(pass_threshold=...)", pass_threshold)
    found.scored_only = scored_only
    return found
