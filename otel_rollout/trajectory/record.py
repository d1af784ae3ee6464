"""The fields of a trajectory, and how they are recorded while its rollout runs.

A record is *live* until `seal`; then only a reward may still be set. What was exchanged is read
from its `Source` when it is asked for, and kept once the rollout has ended.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from functools import partial
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.errors import TrajectorySealedError
from otel_rollout.spans import Exchange, SpanRecord, as_records, group_key
from otel_rollout.trajectory.fixed import Fixed
from otel_rollout.trajectory.reward import AllRewards, OnChange, Reward, RewardKey
from otel_rollout.trajectory.source import Built, Contents, Recorded, Source
from otel_rollout.trajectory.steps import CallKey, Step, call_key
from otel_rollout.trajectory.values import Values
from otel_rollout.wire import Json

_UNCHECKED: Any = {"frozen": True}
"""Has `__init__` set fields without the check of their names, which costs thrice as much."""


@dataclass(kw_only=True, eq=False, repr=False, slots=True, **_UNCHECKED)
class Facts(Fixed):
    """The fields of one rollout, and in which form each may be given."""

    id: str = ""
    """Final from the start, and unique."""
    name: str = ""
    """Name of the rollout; of a decorated function its name, unless another was given."""
    trace_id: str = ""
    """Trace id of the rollout span, hex; "" where the rollout was on no trace."""
    span_id: str = ""
    """Span id of the rollout span, hex; "" where the rollout was on no trace."""
    parent_id: str | None = None
    """Id of the rollout that this one ran inside, or None."""
    task_id: str | None = None
    """The task that was worked on; None: not set."""
    group_id: str | None = None
    """Trajectories with one group id, and one `group_run`, are compared by the trainer."""
    group_run: str | None = None
    """Which run of this group it is in: `gather_group` gives each of its calls one. None: all with
    the group id are one group."""
    sample_index: int | None = None
    """Number of this sample within its group, from 0; None: not set."""
    group_size: int | None = None
    """Number of samples that the group is to have, wherever they run; None: not known."""
    policy_version: str | int | None = None
    """Version of the policy when the rollout began; None: not set."""
    trainable: bool = True
    """Whether a trainer should learn from any of it."""
    status: str = "complete"
    """`running`, `complete`, `error` or `cancelled`; `unknown` if it was not recorded."""
    termination_reason: str | None = None
    """Why it did not end by returning: `error`, `timeout` or `cancelled`; else None."""
    error: dict[str, str] | None = None
    """`type`, `message` and `traceback` of the exception that ended it, or None."""
    output: Json = None
    """Return value of the function, if that is JSON; else None."""
    start_time_ns: int = 0
    """Nanoseconds since 1970; 0 if unknown."""
    end_time_ns: int | None = None
    """Nanoseconds since 1970; None while the rollout runs, or if unknown."""
    metrics: MutableMapping[str, float] = field(default_factory=dict)
    """Numbers to watch, by name."""
    metadata: MutableMapping[str, Json] = field(default_factory=dict)
    """JSON values to keep with the trajectory, by name."""
    appended: dict[tuple[str, int], list[Json]] = field(default_factory=dict)
    """Messages that the agent appended after a completion (id, choice index)."""
    all_rewards: AllRewards = field(init=False)
    """Every reward by key, those of single completions included, in the order they were set."""
    main_call: CallKey | None = None
    """A call of the main history, span id and choice, as it was named. None: none was."""
    claimed: set[CallKey] = field(default_factory=set, init=False)
    """Calls of this rollout that are steps of trajectories inside it."""
    exchanges: InitVar[Sequence[Exchange]] = ()
    source: InitVar[Source | None] = None
    rewards: InitVar[Mapping[RewardKey, Reward] | None] = None
    reward: InitVar[float | None] = None
    logs: InitVar[Sequence[str]] = ()
    warnings: InitVar[Sequence[str]] = ()
    missing_calls: InitVar[Sequence[str]] = ()
    steps: InitVar[Sequence[Step] | None] = None
    sealed: InitVar[bool | None] = None
    _logs: list[str] = field(init=False)
    _warnings: list[str] = field(init=False)
    _missing_calls: list[str] = field(init=False)
    _built: list[Step] | None = field(init=False)
    """Steps that were built by hand; None for a captured trajectory."""
    _views: dict[CallKey, Step] = field(default_factory=dict, init=False)
    """Steps of a captured trajectory, by the completions that they show."""
    _steps: list[Step] = field(default_factory=list, init=False)
    """The same, in order."""
    _bound: Contents | None = field(default=None, init=False)
    """The contents that the steps have their completions from, once it is sealed."""
    _max_token_id: int | None = field(default=None, init=False)
    """The last id of the vocabulary, where an exporter was told. None: not known."""
    _sealed: bool = field(init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    _source: Source = field(init=False)
    _contents: Contents | None = field(default=None, init=False)
    """What the source gave, once the rollout has ended."""

    def __post_init__(
        self,
        exchanges: Sequence[Exchange],
        source: Source | None,
        rewards: Mapping[RewardKey, Reward] | None,
        reward: float | None,
        logs: Sequence[str],
        warnings: Sequence[str],
        missing_calls: Sequence[str],
        steps: Sequence[Step] | None,
        sealed: bool | None,
    ) -> None:
        """Set the fields that follow from what was given."""
        by_hand = steps is not None or not (self.id or source or exchanges)
        is_sealed = not by_hand if sealed is None else sealed
        id_ = self.id or uuid.uuid4().hex
        closed = id_ if is_sealed else None
        all_rewards = AllRewards.of(rewards)
        if source is None and not is_sealed:
            source = Built(lambda: self._built or ())
        put = partial(object.__setattr__, self)
        put("id", id_)
        put("metrics", Values("metrics", self.metrics, closed))
        put("metadata", Values("metadata", self.metadata, closed))
        put("appended", {key: list(messages) for key, messages in self.appended.items()})
        put("all_rewards", all_rewards)
        put("_logs", list(logs))
        put("_warnings", list(warnings))
        put("_missing_calls", list(missing_calls))
        put("_built", list(steps or ()) if by_hand else None)
        put("_sealed", is_sealed)
        put("_source", source or Recorded(exchanges, all_rewards, trainable=self.trainable))
        if reward is not None:
            all_rewards.put(Reward(reward))


Facts.__setattr__ = Fixed.__setattr__  # type: ignore[method-assign]
Facts.__delattr__ = object.__delattr__  # type: ignore[method-assign]
_APART = ("metrics", "metadata", "appended")
FIELDS = (
    *(each.name for each in fields(Facts) if each.init and each.name not in _APART),
    *("logs", "warnings"),
)
"""The fields that are written as they are."""


class RolloutRecord(Facts):
    """The fields of one rollout as they are recorded; `Trajectory` adds the views of them."""

    __slots__ = ()

    @property
    def group_key(self) -> str | None:
        """Its group as one text, `group_id` or `group_id@group_run`. None: it has no group."""
        return group_key(self.group_id, self.group_run)

    @property
    def logs(self) -> list[str]:
        """The lines that were logged; a copy, `log` adds to them."""
        return list(self._logs)

    @property
    def sealed(self) -> bool:
        """True once the rollout has ended."""
        return self._sealed

    @property
    def built_by_hand(self) -> bool:
        """Whether its steps were built by the agent, and are recorded with it."""
        return self._built is not None

    @property
    def exchanges(self) -> list[Exchange]:
        """Every call, also to endpoints that do not generate; [] while the rollout runs."""
        return list(self._read().exchanges)

    @property
    def warnings(self) -> list[str]:
        """Short sentences about what is missing or uncertain; a clean rollout has none."""
        found = self.recorded_warnings
        return [*found, *self._read().uncertain] if self._sealed else found

    @property
    def recorded_warnings(self) -> list[str]:
        """Those that do not follow from its exchanges."""
        if self._sealed:
            self._read()
        return self._warnings

    @property
    def missing_calls(self) -> list[str]:
        """The warnings about model calls that are not in it, or that it has none; a copy.

        [] where all of them are in it, and while its rollout runs.
        """
        if self._sealed:
            self._read()
        return list(self._missing_calls)

    def miss_calls(self, warning: str, *, instead_of: str | None) -> None:
        """Add a warning about calls that are not in it, in the place of an earlier one."""
        for warnings in (self.recorded_warnings, self._missing_calls):
            if instead_of in warnings:
                warnings.remove(instead_of)
            warnings.append(warning)

    def _read(self) -> Contents:
        """What was exchanged: read anew while the rollout runs, once after it has ended."""
        while not self._sealed:
            source = self._source
            contents = source.read()
            if source is self._source:  # else the rollout ended just now
                return contents
        with self._lock:
            if self._contents is None:
                self._contents = self._source.read()
                self._warnings += self._contents.warnings
                self._missing_calls += self._contents.missing_calls
                # Spans that were read are not needed any more.
                self._source = Recorded((), self.all_rewards)
            return self._contents

    @property
    def steps(self) -> list[Step]:
        """One step for each completion that said something, in order; or those built by hand.

        Side calls are no steps.
        A reward that is set on a step is the reward of its completion.
        """
        if self._built is None:
            return self._shown(self._read())
        if self._sealed and self._bound is not (contents := self._read()):
            self._bound = contents
            found = {call_key(c): c for c in contents.conversations.completions}
            for step in self._built:
                step.find(found)
        return self._built

    @steps.setter
    def steps(self, steps: Iterable[Step]) -> None:
        if self._built is not None:
            self._built, self._bound = list(steps), None
        else:
            self._views = {key: step for step in steps if (key := step.call_key or step.missing)}
            self._bound = None

    def _shown(self, contents: Contents) -> list[Step]:
        if self._bound is contents:
            return self._steps
        steps: list[Step] = []
        for completion in contents.conversations.completions:
            if completion.side_call is not None or call_key(completion) in self.claimed:
                continue
            if completion.items:
                step = self._views.setdefault(call_key(completion), Step())
                if step.completion is not completion:
                    step.show(completion)
                steps.append(step)
        self._steps, self._bound = steps, contents if self._sealed else None
        return steps

    def log(self, text: str) -> None:
        """Keep a line of text with the trajectory. TrajectorySealedError once it is sealed."""
        text = str(text)
        with self._lock:
            if self._sealed:
                raise TrajectorySealedError(
                    f"trajectory.log: the rollout {self.id} has ended; log while it runs"
                )
            self._logs.append(text)

    # --- while its rollout is recorded

    def reopen(self) -> None:
        """Take changes again, until `seal`: a trajectory that was built by hand is recorded now."""
        with self._lock:
            self._sealed, self._contents = False, None
            self._source = Built(lambda: self._built or ())
        self._close_values(None)

    def rewrite(self, change: Callable[[Json], Json]) -> None:
        """Change each text of the user in it, such as to redact it, before it is recorded."""
        with self._lock:
            self.output, self._logs = change(self.output), [str(change(log)) for log in self._logs]
            metadata, self.metadata = dict(self.metadata), Values("metadata", {}, None)
            self.metadata.update({name: change(value) for name, value in metadata.items()})
            for messages in self.appended.values():
                messages[:] = [change(message) for message in messages]
        for reward in self.all_rewards.all():
            explanation = change(reward.explanation)
            reward.explanation = None if explanation is None else str(explanation)
            label = change(reward.label)
            reward.label = None if label is None else str(label)

    def seal(self, on_reward: OnChange) -> None:
        """The rollout has ended: nothing but a reward may be set from now on.

        `on_reward` is called with each reward that is set or removed later.
        """
        with self._lock:
            self._sealed = True
        self.all_rewards.on_change = on_reward
        self._close_values(self.id)

    def _close_values(self, rollout_id: str | None) -> None:
        for values in (self.metrics, self.metadata):
            if isinstance(values, Values):
                values.close(rollout_id)

    def settle(self, source: Source, end_time_ns: int | None) -> None:
        """Take what was exchanged from this source, when somebody asks for it."""
        with self._lock:
            self.end_time_ns = end_time_ns
            self._source, self._contents = source, None

    def join(self, part: RolloutRecord) -> None:
        """Add what another process set on the same rollout; what is set here stays."""
        for mine, theirs in ((self.metrics, part.metrics), (self.metadata, part.metadata)):
            if isinstance(mine, Values):
                mine.join(theirs)
        for key, messages in part.appended.items():
            self.appended.setdefault(key, messages)
        self.all_rewards.join(part.all_rewards)
        self.main_call = self.main_call or part.main_call
        self._logs += part._logs
        self._warnings += part._warnings

    def add_spans(self, spans: Iterable[Any]) -> None:
        """Take in what another process recorded of this rollout, while it runs.

        `spans`: those of `continue_rollout(...)` there, or what `otel_rollout.otlp` reads; spans
        of other rollouts are passed over, and duplicates do no harm. TrajectorySealedError once
        the rollout has ended: then `reconstruct` the spans of both. SpanFormatError for what is no
        span.
        """
        records = [record for record in as_records(spans) if self._owns(record)]
        if self._sealed:
            raise TrajectorySealedError(
                f"trajectory.add_spans: the rollout {self.id} has ended; add the spans while it "
                f"runs, or reconstruct(...) the spans of all its processes"
            )
        self._source.take(records)

    def _owns(self, record: SpanRecord) -> bool:
        return record.text(sc.ROLLOUT_ID) == self.id and record.span_id != self.span_id
