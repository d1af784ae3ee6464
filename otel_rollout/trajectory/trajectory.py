"""The record of one rollout: what the model saw and said in it, and how well it went.

Data and views derived from it. A trajectory is *live* while its rollout runs (its reward, metrics
and metadata can be set) and *sealed* afterwards: then only a reward may still arrive. It stores
what was exchanged; completions and histories are views of that. None means unknown, never zero.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError, TrajectorySealedError, UnknownCompletionError
from otel_rollout.spans import (
    EXACT_SOURCE,
    Exchange,
    SpanRecord,
    TokenPath,
    as_record,
    context_key,
    extend_tokens,
)
from otel_rollout.trajectory.completion import Completion, completions_of, with_retrieved
from otel_rollout.trajectory.histories import build_histories, history_of, in_order, link
from otel_rollout.trajectory.history import History
from otel_rollout.trajectory.reward import Reward, RewardKey
from otel_rollout.trajectory.steps import Step, steps_of
from otel_rollout.trajectory.tokens import Dropped, TokenSequences, token_sequences
from otel_rollout.wire import Json, MessagePath, checked_json, copy_json, dumps, extend, loads

SCHEMA_VERSION = 1
"""Version of what `Trajectory.to_dict` gives."""


class LiveRollout(Protocol):
    """What a trajectory asks of its rollout while that runs in this process."""

    def completions(self) -> list[Completion]: ...

    def add_spans(self, records: Sequence[SpanRecord]) -> None: ...


LateReward = Callable[[RewardKey, "Reward | None"], None]
"""Puts a reward that came after the rollout on its trace; None for one that was taken back."""


class Contents(Protocol):
    """Where a trajectory gets what was exchanged from, when somebody first asks for it."""

    def exchanges(self) -> list[Exchange]: ...

    def doubts(self, trajectory: Trajectory) -> list[str]:
        """A sentence for whatever is missing or uncertain."""


class Values(MutableMapping[str, Any]):
    """A mapping of a trajectory: JSON values by name, checked when set, closed when sealed."""

    __slots__ = ("_closed", "_lock", "_values", "_what")

    def __init__(self, what: str, values: Mapping[str, Any], closed: str | None) -> None:
        self._what = what
        self._values: dict[str, Any] = dict(values)
        self._closed = closed
        self._lock = threading.RLock()
        """Held by who changes it: what came before it was closed is in it then."""

    def close(self, rollout_id: str | None) -> None:
        """Take no more changes: that rollout has ended. None: take them again."""
        with self._lock:
            self._closed = rollout_id

    def join(self, values: Mapping[str, Any]) -> None:
        """Add what another process set; what is there stays, also when closed."""
        self._values = {**values, **self._values}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        what = f"trajectory.{self._what}[{name!r}]"
        if self._what == "metrics" and not (
            isinstance(value, int | float) and math.isfinite(value)
        ):
            raise ValueError(f"{what}: expected a finite number or a bool, got {value!r}")
        value = checked_json(value, what)
        with self._lock:
            self._check(name)
            self._values[name] = value

    def __delitem__(self, name: str) -> None:
        with self._lock:
            self._check(name)
            del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))  # another thread may be setting one

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def _check(self, name: str) -> None:
        if not isinstance(name, str):
            raise ValueError(f"trajectory.{self._what}: expected a name (str), got {name!r}")
        if self._closed is not None:
            raise TrajectorySealedError(
                f"trajectory.{self._what}[{name!r}]: the rollout {self._closed} has ended; set it "
                f"while the rollout runs (only rewards may come later)"
            )


class Rewards(MutableMapping[str, Reward]):
    """The named rewards of a trajectory; may be set at any time, also after the rollout."""

    __slots__ = ("_trajectory",)

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def __getitem__(self, name: str) -> Reward:
        return self._trajectory.all_rewards[name, None, 0]

    def __setitem__(self, name: str, value: float) -> None:
        if not isinstance(name, str):
            raise ValueError(f"trajectory.rewards: expected a name (str), got {name!r}")
        why = getattr(value, "explanation", None)
        self._trajectory.add_reward(Reward(value, name=name, explanation=why))

    def __delitem__(self, name: str) -> None:
        self._trajectory.remove_reward(self[name].key)

    def __iter__(self) -> Iterator[str]:
        return iter(
            [
                name
                for name, completion_id, _ in list(self._trajectory.all_rewards)
                if name is not None and completion_id is None
            ]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr({name: float(reward) for name, reward in self.items()})


class Trajectory:
    """The record of one rollout."""

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
        contents: Contents | None = None,
        appended: Mapping[tuple[str, int], Sequence[Json]] | None = None,
        rewards: dict[RewardKey, Reward] | None = None,
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
        live: LiveRollout | None = None,
        steps: Sequence[Step] | None = None,
        reward: float | None = None,
        task: Any = None,
    ) -> None:
        self.id = id or uuid.uuid4().hex
        """Final from the start, and unique."""
        self.name = name
        self.trace_id = trace_id
        """Hex; "" where the rollout was not on a trace."""
        self.span_id = span_id
        """Span id of the rollout span, hex."""
        self.parent_id = parent_id
        """Id of the rollout that this one ran inside, or None."""
        self.task_id = task_id
        self.group_id = group_id
        """Trajectories with one group id are compared with each other by the trainer."""
        self.sample_index = sample_index
        """Which sample of its group this is."""
        self.policy_version = policy_version
        self.trainable = trainable
        self._exchanges = list(exchanges)
        self._contents = contents
        self._loading = False
        self._lock = threading.RLock()
        self.appended = {key: list(messages) for key, messages in (appended or {}).items()}
        """Messages that the agent appended behind a completion (id, choice index)."""
        self._completions: list[Completion] | None = None
        self._histories: list[History] | None = None
        self.all_rewards: dict[RewardKey, Reward] = {} if rewards is None else rewards
        """Every reward, those of single completions included, in the order they were set.

        Any thread may set one: iterate over a copy.
        """
        self.is_built = steps is not None or not (id or live or contents or exchanges)
        """Whether its steps were built by hand, and are recorded."""
        closed = None if live is not None or self.is_built else id
        self.metrics: MutableMapping[str, float] = Values("metrics", metrics or {}, closed)
        """Numbers to watch, by name."""
        self.metadata: MutableMapping[str, Json] = Values("metadata", metadata or {}, closed)
        """JSON values to keep with the trajectory, by name."""
        self._logs = list(logs)
        self.status = status
        """`running`, `complete`, `error` or `cancelled`."""
        self.termination_reason = termination_reason
        """Why it did not end by returning: `error`, `timeout` or `cancelled`; else None."""
        self.error = error
        """`type`, `message` and `traceback` of the exception that ended it, or None."""
        self.output = output
        """What the function returned, if that is JSON; else None."""
        self.start_time_ns = start_time_ns
        self.end_time_ns = end_time_ns
        self._warnings = list(warnings)
        self._live = live
        self._sealed = closed is not None
        self._late_reward: LateReward | None = None
        self.task = task
        """What the workflow was given, where one ran it; it is recorded with the episode."""
        self._steps: list[Step] | None = None if steps is None else list(steps)
        self._viewed: list[Completion] | None = None
        """The completions that the steps are a view of, once there will be no more of them."""
        self.claimed: set[tuple[str, int] | None] = set()
        """Completions (span id, choice index) that are steps of a trajectory inside it."""
        self._scores: dict[tuple[str, int] | None, Reward | None] = {}
        """Rewards of completions as its steps have them."""
        self._rewarded, self._scored = 0, (0, 0)
        self._recorded_steps: list[Json] | None = None
        """Steps that were read, until somebody asks for them."""
        if reward is not None:
            self.all_rewards[None, None, 0] = Reward(reward)

    @property
    def uid(self) -> str:
        """Its `id`, by the name that rLLM has for it."""
        return self.id

    @property
    def info(self) -> MutableMapping[str, Json]:
        """Its `metadata`, by the name that rLLM has for it."""
        return self.metadata

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
    def exchanges(self) -> list[Exchange]:
        """Every call, also to endpoints that do not generate; [] while the rollout runs."""
        self._load()
        return self._exchanges

    @property
    def warnings(self) -> list[str]:
        """Short sentences about whatever is missing or uncertain; a clean rollout has none."""
        self._load()
        return self._warnings

    def _load(self) -> None:
        if self._contents is None:
            return
        with self._lock:
            contents = self._contents
            if contents is None or self._loading:  # done by another thread, or being done by this
                return
            self._loading = True
            try:
                self._exchanges = contents.exchanges()
                self._warnings += contents.doubts(self)
                self._contents = None
            finally:
                self._loading = False

    @property
    def completions(self) -> list[Completion]:
        """Every choice of every exchange with a model that generates, in order of their start.

        Failed calls are here too: `message` None and `error` set.
        """
        live = self._live
        if live is not None:
            return live.completions()
        self._load()
        with self._lock:  # a completion is one object, whichever threads ask
            if self._completions is None:
                self._completions = in_order(
                    completion
                    for exchange in with_retrieved(self.exchanges)
                    for completion in completions_of(
                        exchange, self.all_rewards, trainable=self.trainable
                    )
                )
            return self._completions

    @property
    def policy_versions(self) -> list[str | int]:
        """The policy versions that its completions were sampled with, in order of their start."""
        versions = (completion.policy_version for completion in self.completions)
        return list(dict.fromkeys(version for version in versions if version is not None))

    @property
    def histories(self) -> list[History]:
        """The conversations, in order of their beginning; the first is the main one."""
        if self._live is not None:
            return build_histories(self.completions, self.appended)[0]
        self._load()
        with self._lock:
            if self._histories is None:
                self._histories, _ = build_histories(self.completions, self.appended)
            return self._histories

    def ambiguities(self) -> list[str]:
        """A sentence for each reply that could continue one of several identical samples."""
        self._histories, sentences = build_histories(self.completions, self.appended)
        return sentences

    def messages(self) -> list[Json]:
        """The wire messages of the main history; [] where there is none."""
        histories = self.histories
        return histories[0].messages() if histories else []

    def get_history(self, completion_id: str, choice: int = 0) -> History:
        """The conversation that ends in this completion, and what was appended behind it.

        UnknownCompletionError if the trajectory has no such completion.
        """
        completion = self._find(completion_id, choice)
        parents, _ = link(self.completions)
        history = history_of(completion, parents, self.appended)
        if not self.sealed:
            key = completion.id, completion.choice_index
            history._append = lambda message: self._append(key, message)
        return history

    def _append(self, key: tuple[str, int], message: Json) -> None:
        with self._lock:
            if self.sealed:
                raise TrajectorySealedError(
                    f"history.append: the rollout {self.id} has ended; append while it runs"
                )
            self.appended.setdefault(key, []).append(message)

    def _find(self, completion_id: str, choice: int) -> Completion:
        completions = self.completions
        for completion in reversed(completions):
            if completion.id == completion_id and completion.choice_index == choice:
                return completion
        there = ", ".join(
            f"{c.id!r}" + (f" (choice {c.choice_index})" if c.choice_index else "")
            for c in completions
        )
        raise UnknownCompletionError(
            f"trajectory {self.id} has no completion {completion_id!r}"
            + (f" with choice {choice}" if choice else "")
            + (f"; it has {there}" if there else "; no call of it has ended yet")
        )

    @property
    def steps(self) -> list[Step]:
        """One for each completion that said something, in order; or those built by hand.

        They can be changed, and rewards that are set on them stay with the trajectory object.
        """
        if self._recorded_steps is not None:
            recorded, self._recorded_steps = self._recorded_steps, None
            named = {(c.span_id, c.choice_index): c for c in self.completions}
            self._steps = [Step.from_dict(step, named) for step in recorded]
        elif not self.is_built or self._live is None:
            completions = self.completions
            if self._viewed is not completions:
                known = {_of(step): step for step in self._steps or ()}
                if not self.is_built:
                    found = steps_of(completions)
                    found = [step for step in found if _of(step) not in self.claimed]
                    self._steps = [known.get(_of(step), step) for step in found]
                for completion in completions:  # what they were while it ran is now complete
                    key = completion.span_id, completion.choice_index
                    if key in known:
                        known[key].completion = completion
                self._viewed = completions if self._live is None else None
        if self._steps is None:
            self._steps = []
        if not self.is_built:
            self._score_steps()
        return self._steps

    @steps.setter
    def steps(self, steps: Iterable[Step]) -> None:
        self._recorded_steps = self._viewed = None
        self._steps = list(steps)

    def _score_steps(self) -> None:
        """A reward that its completion got since a step was last looked at is the step's."""
        steps, rewarded = self._steps or (), self._rewarded
        if (rewarded, len(steps)) == self._scored:
            return
        self._scored = rewarded, len(steps)
        for step in steps:
            if step.completion is None:
                continue
            key, reward = _of(step), step.completion.reward
            if key in self._scores and reward != self._scores[key]:
                step.reward = 0.0 if reward is None else float(reward)
                step.scored = reward is not None
            self._scores[key] = reward

    def token_sequences(
        self,
        *,
        on_failure: Literal["drop", "keep"] = "drop",
        mask_truncated: bool = False,
        max_length: int | None = None,
    ) -> TokenSequences:
        """The trainable rows, in order of the calls that end them; `.dropped` says what is in none.

        on_failure: a rollout that failed and has no reward gives no rows, unless this is "keep".
        A cancelled one never does.
        mask_truncated: replies that a length limit cut stay as context and are not trained.
        max_length: longer rows are cut at their end. ValueError for a wrong option.
        """
        if on_failure not in ("drop", "keep"):
            raise ValueError(
                f"token_sequences(on_failure=...): expected 'drop' or 'keep', got {on_failure!r}"
            )
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(
                f"token_sequences(max_length=...): expected a number from 1 on, got {max_length!r}"
            )
        failed = self.status == "error" and self.reward is None and on_failure == "drop"
        if failed or self.status == "cancelled":
            reason = (
                "its rollout failed and has no reward (on_failure='keep' trains it all the same)"
                if failed
                else "its rollout was cancelled"
            )
            return TokenSequences((), [Dropped(c, reason) for c in self.completions])
        return token_sequences(
            self.completions,
            masked=lambda completion: mask_truncated and completion.truncated,
            max_length=max_length,
        )

    # --- how well it went

    @property
    def reward(self) -> float | None:
        """The trajectory's reward; None while unscored. May be set after the rollout too.

        Where it is not set itself, the sum of its named rewards times their weights, of those
        that have one.
        """
        own = self.all_rewards.get((None, None, 0))
        if own is not None:
            return own
        weighted = [
            reward * reward.weight
            for reward in list(self.all_rewards.values())
            if reward.weight is not None
        ]
        return math.fsum(weighted) if weighted else None

    @reward.setter
    def reward(self, value: float | None) -> None:
        if value is None:
            self.remove_reward((None, None, 0))
        else:
            self.add_reward(Reward(value, explanation=getattr(value, "explanation", None)))

    @property
    def rewards(self) -> Rewards:
        """Named rewards of the trajectory; may be set after the rollout too."""
        return Rewards(self)

    @rewards.setter
    def rewards(self, values: Mapping[str, float]) -> None:
        view = Rewards(self)
        view.clear()
        view.update({name: Reward(value, name=name) for name, value in values.items()})

    def add_reward(self, reward: Reward) -> None:
        """Set a reward of the trajectory or of one completion.

        UnknownCompletionError if it names a completion that the trajectory does not have.
        """
        if reward.completion_id is not None:
            self._find(reward.completion_id, reward.choice_index)
        self.put_reward(reward)

    def put_reward(self, reward: Reward) -> None:
        """Set a reward, of the trajectory or of a completion that is known to be its own."""
        self.all_rewards.pop(reward.key, None)
        self.all_rewards[reward.key] = reward
        self._rewarded += 1
        if self._late_reward is not None:
            self._late_reward(reward.key, reward)

    @property
    def is_copy(self) -> bool:
        """True for one that was read: nothing puts what is set on it on its trace."""
        return self._live is None and self._late_reward is None

    def remove_reward(self, key: RewardKey) -> None:
        """Make a reward unknown again."""
        self._rewarded += 1
        if self.all_rewards.pop(key, None) is not None and self._late_reward is not None:
            self._late_reward(key, None)

    def log(self, text: str) -> None:
        """Keep a line of text with the trajectory. TrajectorySealedError once it is sealed."""
        text = str(text)
        with self._lock:
            if self.sealed:
                raise TrajectorySealedError(
                    f"trajectory.log: the rollout {self.id} has ended; log while it runs"
                )
            self._logs.append(text)

    def open(self, live: LiveRollout) -> None:
        """Let one that was built by hand be changed until `seal`."""
        self._live, self._sealed = live, False
        self._completions = self._histories = self._viewed = None
        for values in (self.metrics, self.metadata):
            if isinstance(values, Values):
                values.close(None)

    def seal(self, late_reward: LateReward) -> None:
        """The rollout has ended: nothing but a reward may be set from now on."""
        with self._lock:
            self._sealed = True
        self._late_reward = late_reward
        for values in (self.metrics, self.metadata):
            if isinstance(values, Values):
                values.close(self.id)

    def add_spans(self, spans: Iterable[Any]) -> None:
        """Take in what another process recorded of this rollout, while it runs.

        `spans`: those of `continue_rollout(...)` there, or what `otel_rollout.otlp` reads; spans
        of other rollouts are passed over, and coming twice does no harm. TrajectorySealedError
        once the rollout has ended: then `reconstruct` the spans of both. SpanFormatError for
        what is no span.
        """
        records = [record for record in map(as_record, spans) if self._owns(record)]
        if self._live is None or self._sealed:
            raise TrajectorySealedError(
                f"trajectory.add_spans: the rollout {self.id} has ended; add the spans while it "
                f"runs, or reconstruct(...) the spans of all its processes"
            )
        self._live.add_spans(records)

    def _owns(self, record: SpanRecord) -> bool:
        return record.text(sc.ROLLOUT_ID) == self.id and record.span_id != self.span_id

    def join(self, part: Trajectory) -> None:
        """Add what another process set on the same rollout; what is set here stays."""
        for mine, theirs in ((self.metrics, part.metrics), (self.metadata, part.metadata)):
            if isinstance(mine, Values):
                mine.join(theirs)
        for key, messages in part.appended.items():
            self.appended.setdefault(key, messages)
        self._logs += part._logs
        self._warnings += part._warnings

    def fill(self, contents: Contents, end_time_ns: int | None) -> None:
        """Take what was exchanged from `contents`, when somebody asks for it."""
        self.end_time_ns = end_time_ns
        self._contents = contents
        self._live = None

    # --- as data

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON from which `from_dict` makes an equal trajectory; size linear in content.

        `messages` and `tokens` are trees: each row is [row of what is before it, or 0; content],
        rows count from 1. The exchanges name rows of them. A message that stands behind several
        beginnings is there once: the others are [row before, null, row that has it].
        """
        paths: _Rows[MessagePath] = _Rows()
        tokens: _Rows[TokenPath] = _Rows()
        params: dict[str, int] = {}
        exchanges = [
            _exchange_to_dict(exchange, paths, tokens, params) for exchange in self.exchanges
        ]
        plain = {name: getattr(self, name) for name in _PLAIN}
        data = {
            "schema_version": SCHEMA_VERSION,
            **plain,
            "metrics": dict(self.metrics),
            "metadata": dict(self.metadata),
            "reward": None if self.reward is None else float(self.reward),
            "rewards": [reward.to_dict() for reward in list(self.all_rewards.values())],
            "appended": [[*key, messages] for key, messages in list(self.appended.items())],
            "exchanges": exchanges,
            "params": [loads(text) for text in params],
            "messages": _message_rows(paths),
            **({"steps": [step.to_dict() for step in self.steps]} if self.is_built else {}),
            "tokens": [[parent, path.ids.tolist()] for parent, path in tokens],
        }
        return {key: copy_json(value) for key, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Trajectory:
        """The trajectory that `to_dict` described. SpanFormatError if it is not one."""
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != SCHEMA_VERSION:
            raise SpanFormatError(
                f"Trajectory.from_dict: expected an object with schema_version {SCHEMA_VERSION}, "
                f"got {version!r}: is it a line that JsonlTrajectoryExporter wrote?"
            )
        try:
            paths: list[MessagePath | None] = [None]
            messages: list[Json] = [None]
            for parent, message, *same in data["messages"]:
                messages.append(messages[same[0]] if same else message)
                paths.append(extend(paths[parent], messages[-1]))
            tokens: list[TokenPath | None] = [None]
            for parent, ids in data["tokens"]:
                tokens.append(extend_tokens(tokens[parent], ids))
            params = [(row, context_key(row)) for row in data["params"]]
            exchanges = [
                _exchange_from_dict(row, paths, tokens, *params[row["params"]])
                for row in data["exchanges"]
            ]
            rewards = {reward.key: reward for reward in map(Reward.from_dict, data["rewards"])}
            return cls(
                **{name: data[name] for name in (*_PLAIN, "metrics", "metadata")},
                exchanges=exchanges,
                appended={(id_, choice): messages for id_, choice, messages in data["appended"]},
                rewards=rewards,
            ).recorded(data.get("steps"))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise SpanFormatError(
                f"Trajectory.from_dict: the trajectory {data.get('id')!r} is damaged: {error!r}"
            ) from error

    def recorded(self, steps: Sequence[Json] | None) -> Trajectory:
        """The trajectory, with these steps of a hand-built one, in the form of `Step.to_dict`."""
        if steps is not None:
            self.is_built = True
            self._recorded_steps = list(steps)
        return self

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


_PLAIN = (
    "id",
    "name",
    "trace_id",
    "span_id",
    "parent_id",
    "task_id",
    "group_id",
    "sample_index",
    "policy_version",
    "trainable",
    "status",
    "termination_reason",
    "error",
    "output",
    "logs",
    "start_time_ns",
    "end_time_ns",
    "warnings",
)
_PLAIN_EXCHANGE = (
    "span_id",
    "start_time_ns",
    "end_time_ns",
    "process",
    "started",
    "ended",
    "path",
    "status",
    "error",
    "attempts",
    "status_code",
    "policy_version",
    "stream",
    "response_id",
    "key",
    "raw_request",
    "prompt_is_known",
    "damage",
)
_Node = TypeVar("_Node", MessagePath, TokenPath)


def _of(step: Step) -> tuple[str, int] | None:
    return (step.completion.span_id, step.completion.choice_index) if step.completion else None


class _Rows(Generic[_Node]):
    """Paths as rows, each behind the one that it continues; row numbers count from 1."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, _Node]] = []
        self._numbers: dict[int, int] = {}

    def number(self, path: _Node | None) -> int:
        missing: list[_Node] = []
        while path is not None and id(path) not in self._numbers:
            missing.append(path)
            path = path.parent
        row = 0 if path is None else self._numbers[id(path)]
        for node in reversed(missing):
            self._rows.append((row, node))
            row = self._numbers[id(node)] = len(self._rows)
        return row

    def __iter__(self) -> Iterator[tuple[int, _Node]]:
        return iter(self._rows)


def _message_rows(paths: _Rows[MessagePath]) -> list[list[Json]]:
    first: dict[int, int] = {}
    rows: list[list[Json]] = []
    for number, (parent, path) in enumerate(paths, 1):
        same = first.setdefault(id(path.message), number)
        rows.append([parent, path.message] if same == number else [parent, None, same])
    return rows


def _exchange_to_dict(
    exchange: Exchange,
    paths: _Rows[MessagePath],
    tokens: _Rows[TokenPath],
    params: dict[str, int],
) -> dict[str, Json]:
    reply, text = exchange.reply, None
    if reply is None:
        text = exchange.response()
    elif any(word in (exchange.body or exchange.events or "") for word in ("NaN", "Infinity")):
        text = dumps(reply)  # a file of JSON lines has to be JSON, whatever the server says
    return {
        **{name: getattr(exchange, name) for name in _PLAIN_EXCHANGE},
        **(
            {"source": exchange.source, "lost": exchange.lost}
            if exchange.source != EXACT_SOURCE
            else {}
        ),
        "prompt": paths.number(exchange.prompt),
        "params": params.setdefault(dumps(exchange.params), len(params)),
        "response": None if text is not None else reply,
        "response_text": text,
        "prompt_token_ids": [tokens.number(path) for path in exchange.prompts],
    }


def _exchange_from_dict(
    row: Mapping[str, Json],
    paths: list[MessagePath | None],
    tokens: list[TokenPath | None],
    params: dict[str, Json],
    context: bytes,
) -> Exchange:
    reply, text = row["response"], row["response_text"]
    return Exchange(
        **{name: row[name] for name in _PLAIN_EXCHANGE},
        **{name: row[name] for name in ("source", "lost") if name in row},
        prompt=paths[row["prompt"]],
        params=params,
        body=text,
        events=None,
        prompts=[tokens[number] for number in row["prompt_token_ids"]],
        context_key=context,
        _reply=... if reply is None else reply,
    )
