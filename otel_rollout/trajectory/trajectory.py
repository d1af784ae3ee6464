"""A trajectory: the record of one rollout, what the model saw and said in it and how well it went.

It is *live* while its rollout runs: reward, metrics and metadata can be set. It is *sealed* once
the rollout has ended: only a reward may still arrive. What was exchanged comes from one `Source`;
completions, histories, steps and token sequences are views of it. None is unknown, never zero.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from otel_rollout import semconv as sc
from otel_rollout.errors import (
    ExportError,
    SpanFormatError,
    TrajectorySealedError,
    UnknownCompletionError,
)
from otel_rollout.notebook import Printed, ShownInNotebooks, drift_of
from otel_rollout.spans import Exchange, SpanRecord, as_records
from otel_rollout.trajectory.as_json import FACTS, as_json, damaged, parameters_of
from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.conversations import Conversations
from otel_rollout.trajectory.drift import Drift
from otel_rollout.trajectory.fixed import Fixed
from otel_rollout.trajectory.history import History
from otel_rollout.trajectory.reward import (
    AllRewards,
    OnChange,
    Reward,
    RewardKey,
    Rewards,
    texts_of,
)
from otel_rollout.trajectory.side_calls import Rule, known_side_call, reasons_by
from otel_rollout.trajectory.source import Built, Contents, Recorded, Source
from otel_rollout.trajectory.steps import CallKey, Step, call_key
from otel_rollout.trajectory.tokens import Cause, Dropped, TokenSequences, token_sequences
from otel_rollout.trajectory.values import Values
from otel_rollout.wire import Json


class Trajectory(Fixed, ShownInNotebooks, Printed):
    """The record of one rollout."""

    __slots__ = (
        "_bound",
        "_built",
        "_contents",
        "_lock",
        "_logs",
        "_missing_calls",
        "_sealed",
        "_source",
        "_steps",
        "_views",
        "_warnings",
        "all_rewards",
        "appended",
        "claimed",
        "end_time_ns",
        "error",
        "group_id",
        "id",
        "metadata",
        "metrics",
        "name",
        "output",
        "parent_id",
        "policy_version",
        "sample_index",
        "span_id",
        "start_time_ns",
        "status",
        "task_id",
        "termination_reason",
        "trace_id",
        "trainable",
    )

    id: str
    """Final from the start, and unique."""
    name: str
    """Name of the rollout; of a decorated function its name, unless another was given."""
    trace_id: str
    """Trace id of the rollout span, hex; "" where the rollout was on no trace."""
    span_id: str
    """Span id of the rollout span, hex; "" where the rollout was on no trace."""
    parent_id: str | None
    """Id of the rollout that this one ran inside, or None."""
    task_id: str | None
    """The task that was worked on; None: not set."""
    group_id: str | None
    """Trajectories with one group id are compared with each other by the trainer."""
    sample_index: int | None
    """Number of this sample within its group, from 0; None: not set."""
    policy_version: str | int | None
    """Version of the policy when the rollout began; None: not set."""
    trainable: bool
    """Whether a trainer should learn from any of it."""
    appended: dict[tuple[str, int], list[Json]]
    """Messages that the agent appended after a completion (id, choice index)."""
    all_rewards: AllRewards
    """Every reward by key, those of single completions included, in the order they were set."""
    _built: list[Step] | None
    """Steps that were built by hand; None for a captured trajectory."""
    _views: dict[CallKey, Step]
    """Steps of a captured trajectory, by the completions that they show."""
    _steps: list[Step]
    """The same, in order."""
    claimed: set[CallKey]
    """Calls of this rollout that are steps of trajectories inside it."""
    _bound: Contents | None
    """The contents that the steps have their completions from, once it is sealed."""
    _sealed: bool
    metrics: MutableMapping[str, float]
    """Numbers to watch, by name."""
    metadata: MutableMapping[str, Json]
    """JSON values to keep with the trajectory, by name."""
    _logs: list[str]
    status: str
    """`running`, `complete`, `error` or `cancelled`; `unknown` where nothing tells."""
    termination_reason: str | None
    """Why it did not end by returning: `error`, `timeout` or `cancelled`; else None."""
    error: dict[str, str] | None
    """`type`, `message` and `traceback` of the exception that ended it, or None."""
    output: Json
    """Return value of the function, if that is JSON; else None."""
    start_time_ns: int
    """Nanoseconds since 1970; 0 where it is not known."""
    end_time_ns: int | None
    """Nanoseconds since 1970; None while the rollout runs, or where it is not known."""
    _warnings: list[str]
    _missing_calls: list[str]
    _lock: threading.RLock
    _source: Source
    _contents: Contents | None
    """What the source gave, once the rollout has ended."""

    def __init__(
        self,
        *,
        id: str = "",  # noqa: A002 - the field's name
        name: str = "",
        trace_id: str = "",
        span_id: str = "",
        parent_id: str | None = None,
        task_id: str | None = None,
        group_id: str | None = None,
        sample_index: int | None = None,
        policy_version: str | int | None = None,
        trainable: bool = True,
        exchanges: Sequence[Exchange] = (),
        source: Source | None = None,
        appended: Mapping[tuple[str, int], Sequence[Json]] | None = None,
        rewards: Mapping[RewardKey, Reward] | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Json] | None = None,
        logs: Sequence[str] = (),
        status: str = "complete",
        termination_reason: str | None = None,
        error: dict[str, str] | None = None,
        output: Json = None,
        start_time_ns: int = 0,
        end_time_ns: int | None = None,
        warnings: Sequence[str] = (),
        missing_calls: Sequence[str] = (),
        steps: Sequence[Step] | None = None,
        reward: float | None = None,
        sealed: bool | None = None,
    ) -> None:
        given = locals()
        by_hand = steps is not None or not (id or source or exchanges)
        is_sealed = not by_hand if sealed is None else sealed
        own = id or uuid.uuid4().hex
        closed = own if is_sealed else None
        if not isinstance(rewards, AllRewards):
            rewards = AllRewards(rewards)
        if source is None:
            source = Recorded(exchanges, rewards, trainable=trainable)
            if not is_sealed:
                source = Built(lambda: self._built or ())
        put = object.__setattr__  # each name is right: what `Fixed` checks costs thrice as much
        for name_, value in (
            *((field, given[field]) for field in FACTS),
            ("id", own),
            ("appended", {key: list(rows) for key, rows in appended.items()} if appended else {}),
            ("all_rewards", rewards),
            ("_built", list(steps or ()) if by_hand else None),
            ("_views", {}),
            ("_steps", []),
            ("claimed", set()),
            ("_bound", None),
            ("_sealed", is_sealed),
            ("metrics", Values("metrics", metrics or {}, closed)),
            ("metadata", Values("metadata", metadata or {}, closed)),
            ("_logs", list(logs)),
            ("_warnings", list(warnings)),
            ("_missing_calls", list(missing_calls)),
            ("_lock", threading.RLock()),
            ("_source", source),
            ("_contents", None),
        ):
            put(self, name_, value)
        if reward is not None:
            self.all_rewards.put(Reward(reward))

    # --- what the model saw and said

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

    @property
    def why_empty(self) -> str | None:
        """Why it has no completion; None where it has some, or none is known to be missing."""
        return None if self.completions else "; ".join(self.missing_calls) or None

    def miss_calls(self, warning: str, *, instead_of: str | None) -> None:
        """Add a warning about calls that are not in it, in the place of an earlier one."""
        for warnings in (self.warnings, self._missing_calls):
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
    def completions(self) -> list[Completion]:
        """Every choice of every exchange with a model that generates, in order of their start.

        Failed calls are here too: `message` None and `error` set.
        """
        return self._read().conversations.completions

    @property
    def conversations(self) -> Conversations:
        """Its completions, linked: which one continues which."""
        return self._read().conversations

    @property
    def policy_versions(self) -> list[str | int]:
        """The policy versions that its completions were sampled with, in order of their start."""
        versions = (completion.policy_version for completion in self.completions)
        return list(dict.fromkeys(version for version in versions if version is not None))

    @property
    def histories(self) -> list[History]:
        """The conversations, in order of their first call; the first is the main one."""
        return self._read().conversations.histories(self.appended)

    def each_history(self) -> Iterator[History]:
        """The same, one at a time: those that share long prefixes are not in memory together."""
        return self._read().conversations.each_history(self.appended)

    def messages(self) -> list[Json]:
        """The wire messages of the main history; [] where there is none."""
        histories = self.histories
        return histories[0].messages() if histories else []

    def get_history(self, completion_id: str, choice: int = 0) -> History:
        """The conversation that ends in this completion, and the messages appended after it.

        UnknownCompletionError if the trajectory has no such completion.
        """
        completion = self._find(completion_id, choice)
        history = self._read().conversations.history(completion, self.appended)
        if not self._sealed:
            key = completion.id, completion.choice_index
            history._append = lambda message: self._append(key, message)
        return history

    def _append(self, key: tuple[str, int], message: Json) -> None:
        with self._lock:
            if self._sealed:
                raise TrajectorySealedError(
                    f"history.append: the rollout {self.id} has ended; append while it runs"
                )
            self.appended.setdefault(key, []).append(message)

    def _find(self, completion_id: str, choice: int) -> Completion:
        conversations = self._read().conversations
        completion = conversations.get(completion_id, choice)
        if completion is not None:
            return completion
        there = ", ".join(
            f"{c.id!r}" + (f" (choice {c.choice_index})" if c.choice_index else "")
            for c in conversations.completions
        )
        raise UnknownCompletionError(
            f"trajectory {self.id} has no completion {completion_id!r}"
            + (f" with choice {choice}" if choice else "")
            + (f"; it has {there}" if there else "; no call of it has ended yet")
        )

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

    def token_sequences(
        self,
        *,
        on_failure: Literal["drop", "keep"] = "drop",
        on_abort: Literal["drop", "keep"] = "drop",
        on_side_call: Literal["drop", "keep"] = "drop",
        constrained_logprobs: Literal["keep", "nan"] = "keep",
        mask_truncated: bool = False,
        max_length: int | None = None,
        require_all_calls: bool = False,
    ) -> TokenSequences:
        """The trainable rows, in order of the calls that end them.

        `dropped` of what is returned lists the completions that no row trains, with the reason.

        on_failure: a rollout that failed and has no reward gives no rows, unless this is "keep".
        A cancelled one never does.
        on_abort: replies that the server gave up, as it may around an update of the weights, are
        not trained; "keep" trains what had come, flagged as truncated.
        on_side_call: calls beside the agent, such as for a title (`Completion.side_call`), are not
        trained; "keep" trains them as any other.
        constrained_logprobs: log-probabilities of constrained decoding (a schema, a grammar, a
        forced tool call) are not the policy's; "nan" makes them unknown, "keep" hands them on.
        mask_truncated: replies that the model did not end itself stay as context and are not
        trained.
        max_length: longer rows are cut at their end, in tokens.
        require_all_calls: True refuses a trajectory that would train beside model calls which are
        not in it (`missing_calls`: not captured, lost, late, still open, or none at all).

        ValueError for a wrong option, ExportError for a trajectory that is refused.
        """
        _check_option("on_failure", on_failure, ("drop", "keep"))
        _check_option("on_abort", on_abort, ("drop", "keep"))
        _check_option("on_side_call", on_side_call, ("drop", "keep"))
        _check_option("constrained_logprobs", constrained_logprobs, ("keep", "nan"))
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(
                f"token_sequences(max_length=...): expected a number from 1 on, got {max_length!r}"
            )
        if (why := self.why_empty) is not None:
            if require_all_calls:
                self.check_calls()
            return TokenSequences((), [Dropped(None, why, "no_calls")])
        failed = self.status == "error" and self.reward is None and on_failure == "drop"
        if failed or self.status == "cancelled":
            reason = (
                "its rollout failed and has no reward (on_failure='keep' trains it all the same)"
                if failed
                else "its rollout was cancelled"
            )
            cause: Cause = "rollout_failed" if failed else "rollout_cancelled"
            return TokenSequences((), [Dropped(c, reason, cause) for c in self.completions])
        if require_all_calls:
            self.check_calls()
        return token_sequences(
            self.completions,
            masked=lambda completion: mask_truncated and completion.truncated,
            max_length=max_length,
            keep_aborted=on_abort == "keep" and self.trainable,
            keep_side_calls=on_side_call == "keep",
            constrained_logprobs=constrained_logprobs,
        )

    def drift(self) -> Drift:
        """The calls whose messages continue an earlier call, and whose token ids do not, with why.

        Each begins a row of its own in `token_sequences`. Worked out anew at each call.
        """
        found: Drift = drift_of(self._read().conversations)
        return found

    def check_calls(self) -> None:
        """ExportError if it is to be trained on, and model calls of its rollout are not in it."""
        if self.trainable and (missing := self.missing_calls):
            raise ExportError(
                f"trajectory {self.id!r} ({self.name!r}), require_all_calls=True: expected all "
                f"model calls of its rollout, but {'; '.join(missing)}. Have them captured, or "
                f"leave the trajectory out"
            )

    # --- how well it went

    @property
    def reward(self) -> float | None:
        """The trajectory's reward; None while unscored. May be set after the rollout too.

        While it is not set itself: the sum of its named rewards times their weights, of those
        that have one.
        """
        return self.all_rewards.total

    @reward.setter
    def reward(self, value: float | None) -> None:
        if value is None:
            self.remove_reward((None, None, 0))
        else:
            self.all_rewards.put(Reward(value, **texts_of(value)))

    @property
    def rewards(self) -> Rewards:
        """Named rewards of the trajectory; may be set after the rollout too."""
        return Rewards(self.all_rewards)

    @rewards.setter
    def rewards(self, values: Mapping[str, float]) -> None:
        view = self.rewards
        view.clear()
        view.update({name: Reward(value, name=name) for name, value in values.items()})

    def add_reward(self, reward: Reward) -> None:
        """Set a reward of the trajectory or of one completion.

        UnknownCompletionError if it names a completion that the trajectory does not have.
        """
        if reward.completion_id is not None:
            self._find(reward.completion_id, reward.choice_index)
        self.all_rewards.put(reward)

    def remove_reward(self, key: RewardKey) -> None:
        """Make a reward unknown again."""
        self.all_rewards.remove(key)

    @property
    def is_copy(self) -> bool:
        """True for one that was read: nothing puts a reward that is set on it on its trace."""
        return self._sealed and self.all_rewards.on_change is None

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

    def join(self, part: Trajectory) -> None:
        """Add what another process set on the same rollout; what is set here stays."""
        for mine, theirs in ((self.metrics, part.metrics), (self.metadata, part.metadata)):
            if isinstance(mine, Values):
                mine.join(theirs)
        for key, messages in part.appended.items():
            self.appended.setdefault(key, messages)
        self.all_rewards.join(part.all_rewards)
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

    # --- as data

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON from which `from_dict` makes an equal trajectory; size linear in content."""
        return as_json(self)

    def with_side_calls(self, rules: Sequence[Rule] = (known_side_call,)) -> Trajectory:
        """A copy of it, ended, whose side calls are those that these rules find; () finds none.

        What other rules said when it was recorded does not hold in the copy.
        """
        found, data = reasons_by(rules, self.completions), self.to_dict()
        for row in data["exchanges"]:
            row["side_call"] = found.get(row["span_id"], "")
        return Trajectory.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Trajectory:
        """The trajectory that `to_dict` described. SpanFormatError if it is not one."""
        try:
            return cls(**parameters_of(data), sealed=True)
        except SpanFormatError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise damaged(data, error) from error

    def __eq__(self, other: object) -> bool:
        """Equal in everything: `to_dict()` of both is the same."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        return self is other or self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are sealed trajectories of their own."""
        return Trajectory.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        return (
            f"<Trajectory {self.name!r} {self.id} {self.status}: {len(self.completions)} "
            f"completions, {len(self.histories)} histories, reward {self.reward}>"
        )


def _check_option(name: str, value: object, expected: tuple[str, str]) -> None:
    if value not in expected:
        first, second = expected
        raise ValueError(
            f"token_sequences({name}=...): expected {first!r} or {second!r}, got {value!r}"
        )
