"""What has come of one rollout so far, and the trajectory that it is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from otel_rollout import semconv as sc
from otel_rollout.rebuild.warnings import after_sentence, damage_of, late_sentence, uncertain
from otel_rollout.spans import Exchange, ExchangeReader, SpanRecord, as_record, united
from otel_rollout.trajectory import (
    AllRewards,
    Completion,
    Contents,
    Conversations,
    Recorded,
    Reward,
    Source,
    Step,
    Trajectory,
    completions_of,
    is_in_background,
    with_retrieved,
)
from otel_rollout.wire import Json, loads


@dataclass(slots=True)
class Assembly:
    """All spans of one rollout that have come so far: the source of its trajectory.

    Spans may come in any order, more than once, or not at all. Any thread may ask.
    """

    rollout_id: str
    trainable: bool = True
    """Whether the rollout is to be learned from, as far as its spans tell."""
    rewards: AllRewards = field(default_factory=AllRewards)
    """The trajectory's rewards; the live trajectory's own while the rollout runs."""
    refused: int = 0
    """Exchanges that whoever collected the spans did not keep; a note says why."""
    notes: list[str] = field(default_factory=list)
    """Warnings of whoever collected the spans, such as that a limit was hit."""
    spans: dict[str, SpanRecord] = field(default_factory=dict)
    """All that have come, by span id."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _rollout: SpanRecord | None = None
    _reader: ExchangeReader = field(default_factory=ExchangeReader)
    _exchanges: dict[str, SpanRecord] = field(default_factory=dict)
    _evaluations: dict[str, SpanRecord] = field(default_factory=dict)
    _parts: dict[str, SpanRecord] = field(default_factory=dict)
    """Spans of other processes that continued the rollout, by span id."""
    _pending: list[SpanRecord] = field(default_factory=list)
    _read: dict[str, Exchange] = field(default_factory=dict)
    """Exchanges that were read and lack nothing, by span id."""
    _completions: dict[str, list[Completion]] = field(default_factory=dict)
    _claimed: set[str] = field(default_factory=set)
    """Exchanges that belong to trajectories inside it, by span id."""
    _conversations: Conversations | None = None
    """The completions that were linked; None: to be made anew."""
    _unlinked: list[str] = field(default_factory=list)
    """Exchanges that are not in `_conversations` yet, by span id."""

    def add(self, record: SpanRecord) -> None:
        """Take in a span of this rollout, as `as_record` gives it.

        One that is still open counts only for what it carries.
        """
        known = self.spans.get(record.span_id)
        if known is not None:
            record = united(known, record)
            self._conversations = None
        self.spans[record.span_id] = record
        if sc.EXCHANGE_VERSION in record.attributes:
            self._reader.add(record)
            if record.end_time_ns is not None:
                self._exchanges[record.span_id] = record
                self._unlinked.append(record.span_id)
        elif sc.REWARD in record.attributes or sc.REWARD in record.cut:
            self._evaluations[record.span_id] = record
        elif sc.ROLLOUT_PART in record.attributes:
            self._parts[record.span_id] = record
        elif sc.ROLLOUT_SCHEMA_VERSION in record.attributes:
            self._rollout = record

    def add_later(self, records: Iterable[SpanRecord]) -> None:
        """Take in spans of this rollout when somebody asks for what they hold."""
        self._pending += records

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for record in pending:
            self.add(as_record(record))

    def take(self, records: Sequence[SpanRecord]) -> None:
        """Take in spans that another process recorded of the rollout."""
        with self._lock:
            for record in records:
                self.add(record)

    def read(self) -> Contents:
        """The contents of the rollout, which has ended."""
        with self._lock:
            exchanges = self.exchanges()
            conversations = self.conversations()
            return Contents(conversations, exchanges, self._warnings(exchanges, conversations))

    def conversations(self) -> Conversations:
        """The completions of the calls that have ended, linked.

        Only calls that are new since the last time are read, unless the reply of one may be on
        another span, or something that a span refers to has not come yet.
        """
        with self._lock:
            self._settle()
            if self._conversations is None or not self._extend(self._conversations):
                exchanges = self.exchanges()
                conversations = Conversations(
                    completion
                    for exchange in with_retrieved(exchanges)
                    for completion in self._completions_of(exchange)
                )
                self._unlinked = []
                if any(map(_may_change, exchanges)):
                    return conversations
                self._conversations = conversations
            return self._conversations

    def _extend(self, conversations: Conversations) -> bool:
        """Add what is new; False where all has to be read again."""
        new = [id_ for id_ in self._unlinked if not _is_late(self._exchanges[id_])]
        exchanges = [self._exchange(span_id) for span_id in new]
        if any(map(_may_change, exchanges)) or not self._claimed.isdisjoint(new):
            return False
        for exchange in exchanges:
            for completion in self._completions_of(exchange):
                conversations.add(completion)
        self._unlinked = []
        return True

    def _completions_of(self, exchange: Exchange) -> list[Completion]:
        known = self._completions.get(exchange.span_id)
        if known is not None and all(completion.exchange is exchange for completion in known):
            return known
        completions = completions_of(exchange, self.rewards, trainable=self.trainable)
        if not exchange.damage:
            self._completions[exchange.span_id] = completions
        return completions

    def _exchange(self, span_id: str) -> Exchange:
        exchange = self._read.get(span_id) or self._reader.read(span_id)
        if not exchange.damage:  # what is missing may still come
            self._read[span_id] = exchange
        return exchange

    def exchanges(self, *, claimed: bool = False) -> list[Exchange]:
        """The calls that are part of the rollout, in order of their start.

        `claimed`: instead those that were given to other trajectories.
        """
        with self._lock:
            self._settle()
            exchanges = [
                self._exchange(span_id)
                for span_id, record in self._exchanges.items()
                if not _is_late(record) and (span_id in self._claimed) is claimed
            ]
        return sorted(exchanges, key=lambda e: (e.start_time_ns, e.started, e.span_id))

    @property
    def claims(self) -> frozenset[str]:
        """Exchanges of the rollout around this one that belong to it."""
        text = self._rollout.text(sc.ROLLOUT_CLAIMS) if self._rollout else None
        return frozenset(loads(text)) if text else frozenset()

    @property
    def is_empty_workflow(self) -> bool:
        """Whether it is a workflow without a reward, and calls but those of its trajectories."""
        if self._rollout is None or not self._rollout.name.startswith(_WORKFLOW):
            return False  # before anything is read: nobody may ever ask for it
        self._settle()
        return not (self.rewards.has_own or self._exchanges.keys() - self._claimed)

    def claim(
        self,
        span_ids: Iterable[str],
        rewards: AllRewards,
        *,
        trainable: bool,
        own: Assembly | None = None,
    ) -> Source:
        """Give these exchanges to another trajectory; the result is its source.

        `rewards` and `trainable` are that trajectory's; `own` has the spans that it has itself.
        """
        span_ids = frozenset(span_ids)
        with self._lock:
            self._claimed |= span_ids
            self._conversations = None
        return _Claimed(self, span_ids, rewards, trainable, own)

    def trajectory(self) -> Trajectory:
        """The trajectory of what has come."""
        if self._rollout is None:
            self._settle()
        if self._rollout is None:
            trajectory = self._without_rollout_span()
        else:
            trajectory = _read_rollout(self._rollout, self.rewards, self)
        self.trainable = trajectory.trainable
        self.join_parts(trajectory)
        for record in _in_order(self._evaluations.values()):
            _apply_reward(record, self.rewards)
        return trajectory

    def join_parts(self, trajectory: Trajectory) -> None:
        """Add what other processes set on the rollout; what it set itself stays."""
        for record in sorted(self._parts.values(), key=lambda r: (r.start_time_ns, r.span_id)):
            trajectory.join(_read_rollout(record, AllRewards(), None))

    def _warnings(self, exchanges: Sequence[Exchange], conversations: Conversations) -> list[str]:
        """A short sentence for whatever is missing or uncertain."""
        there = [*exchanges, *self.exchanges(claimed=True)]
        return [
            *self.notes,
            *self._incomplete(there),
            *self.lost_rewards(),
            *damage_of(exchanges),
            *uncertain(conversations),
        ]

    def lost_rewards(self) -> list[str]:
        """A warning where rewards that came after the rollout are missing or truncated."""
        unreadable = sum(map(_is_unreadable, self._evaluations.values()))
        numbers = {record.integer(sc.REWARD_NUMBER) for record in self._evaluations.values()}
        known = {number for number in numbers if number is not None}
        missing = max(known, default=-1) + 1 - len(known) - unreadable
        sentences: list[str] = []
        if unreadable:
            sentences.append(
                f"{unreadable} rewards that came after the rollout were cut; what they may have "
                f"replaced is None"
            )
        if missing > 0:
            sentences.append(
                f"{missing} rewards that came after the rollout are missing: their spans did not "
                f"come, what they replaced may still be there"
            )
        return sentences

    def _without_rollout_span(self) -> Trajectory:
        records = [*self._exchanges.values(), *self._evaluations.values()]
        first = min(records, key=lambda r: (r.start_time_ns, r.span_id), default=None)
        return Trajectory(
            id=self.rollout_id,
            trace_id=first.trace_id if first else "",
            start_time_ns=first.start_time_ns if first else 0,
            status="unknown",
            trainable=bool(self._exchanges)
            and all(
                record.boolean(sc.ROLLOUT_TRAINABLE) is not False
                for record in self._exchanges.values()
            ),
            rewards=self.rewards,
            source=self,
            warnings=[
                "the rollout's own span did not come: its name, rewards, how it ended and how "
                "many model calls it made are not known"
            ],
        )

    def _incomplete(self, exchanges: Sequence[Exchange]) -> list[str]:
        sentences: list[str] = []
        present = Counter(exchange.process for exchange in exchanges)
        began = still_open = missing = 0
        counted: set[str | None] = {""}
        for record in (self._rollout, *self._parts.values()):
            if record is None:
                continue
            if not record.cut.isdisjoint(_COUNTS):
                sentences.append("how many model calls it made is not known")
                continue
            counted.add(record.text(sc.ROLLOUT_PROCESS))
            count = record.integer(sc.ROLLOUT_EXCHANGE_COUNT) or 0
            unended = record.integer(sc.ROLLOUT_OPEN_COUNT) or 0
            came = present[record.text(sc.ROLLOUT_PROCESS) or ""]
            refused = self.refused if record is self._rollout else 0
            missing += max(0, count - unended - came - refused)
            began, still_open = began + count, still_open + unended
        if missing:
            kept_back = self._rollout and self._rollout.text(sc.ROLLOUT_CONTENT) == "none"
            why = (
                "content was kept off its spans (configure(content='none')), trajectories are "
                "whole only in its own process"
                if kept_back
                else "their spans did not come"
            )
            sentences.append(f"{missing} of {began} model calls are missing: {why}")
        if gaps := sum(map(self._gaps, present.keys() - counted)):
            sentences.append(
                f"at least {gaps} model calls are missing: their spans did not come, or they had "
                f"not ended"
            )
        if still_open:
            sentences.append(late_sentence(still_open))
        late = sum(map(_is_late, self._exchanges.values()))
        if late > still_open:
            sentences.append(after_sentence(late - still_open))
        own = self._rollout.text(sc.ROLLOUT_PROCESS) if self._rollout else None
        handed_on = self._rollout and self._rollout.attributes.get(sc.ROLLOUT_PROPAGATED)
        if handed_on in (True, "true") and not self._parts and not present.keys() - {own}:
            sentences.append(
                "it was handed on to another process, of which no span is here: calls that were "
                "made there are missing (reconstruct from the spans of both, or add_spans)"
            )
        return sentences

    def _gaps(self, process: str) -> int:
        """Calls of a process that must have been: it numbers them."""
        records = [r for r in self._exchanges.values() if r.text(sc.EXCHANGE_PROCESS) == process]
        numbers = {record.integer(sc.EXCHANGE_STARTED) or 0 for record in records}
        return max(0, max(numbers) - len(records))


_COUNTS = (sc.ROLLOUT_EXCHANGE_COUNT, sc.ROLLOUT_OPEN_COUNT, sc.ROLLOUT_PROCESS)


def _is_late(record: SpanRecord) -> bool:
    """Whether it is no part of the rollout; where that was cut, it is none."""
    return bool(record.boolean(sc.EXCHANGE_LATE)) or sc.EXCHANGE_LATE in record.cut


@dataclass(slots=True)
class _Claimed:
    """Source of a trajectory whose calls were made in the rollout around it."""

    around: Assembly
    span_ids: frozenset[str]
    rewards: AllRewards
    trainable: bool
    own: Assembly | None

    def read(self) -> Contents:
        """The exchanges that it claims, as far as they have come."""
        found = self.around.exchanges(claimed=True)
        exchanges = [exchange for exchange in found if exchange.span_id in self.span_ids]
        contents = Recorded(exchanges, self.rewards, trainable=self.trainable).read()
        warnings = [*self.own.notes, *self.own.lost_rewards()] if self.own else []
        missing = len(self.span_ids) - len(exchanges)
        if missing:
            warnings.append(
                f"{missing} of {len(self.span_ids)} model calls are missing: their spans did not "
                f"come"
            )
        warnings += [*damage_of(exchanges), *uncertain(contents.conversations)]
        return Contents(contents.conversations, exchanges, warnings)

    def take(self, records: Sequence[SpanRecord]) -> None:
        """Its rollout has ended: nothing is taken."""


def _may_change(exchange: Exchange) -> bool:
    """Whether spans that come later may add to it."""
    return bool(exchange.damage) or is_in_background(exchange)


_WORKFLOW = f"{sc.OPERATION_INVOKE_WORKFLOW} "


def _read_rollout(record: SpanRecord, rewards: AllRewards, source: Source | None) -> Trajectory:
    warnings = [f"its {key} was cut, or did not come" for key in sorted(record.cut)]

    def json(key: str) -> Json:
        text = record.text(key)
        if text is None:
            return None
        try:
            return loads(text)
        except (ValueError, RecursionError):
            warnings.append(f"its {key} cannot be read")
            return None

    for row in json(sc.ROLLOUT_REWARDS) or ():
        reward = Reward.from_dict(row)
        if reward.key not in rewards:
            rewards.put(reward)
    steps = json(sc.ROLLOUT_STEPS)
    if (record.integer(sc.ROLLOUT_SCHEMA_VERSION) or 0) > sc.SCHEMA_VERSION:
        warnings.append("it was written by a newer otel-rollout: what that added is not read")
    return Trajectory(
        id=record.text(sc.ROLLOUT_ID) or "",
        name=record.text(sc.GEN_AI_AGENT_NAME) or "",
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_id=record.text(sc.ROLLOUT_PARENT_ID),
        task_id=record.text(sc.ROLLOUT_TASK_ID),
        group_id=record.text(sc.ROLLOUT_GROUP_ID),
        sample_index=record.integer(sc.ROLLOUT_SAMPLE_INDEX),
        policy_version=record.label(sc.ROLLOUT_POLICY_VERSION),
        source=source,
        trainable=record.boolean(sc.ROLLOUT_TRAINABLE) is not False
        and sc.ROLLOUT_TRAINABLE not in record.cut,
        appended={
            (id_, choice): messages for id_, choice, messages in json(sc.ROLLOUT_APPENDED) or ()
        },
        rewards=rewards,
        metrics=json(sc.ROLLOUT_METRICS),
        metadata=json(sc.ROLLOUT_METADATA),
        logs=json(sc.ROLLOUT_LOGS) or (),
        status=record.text(sc.ROLLOUT_STATUS) or "unknown",
        termination_reason=record.text(sc.ROLLOUT_TERMINATION_REASON),
        error=json(sc.ROLLOUT_ERROR),
        output=json(sc.ROLLOUT_OUTPUT),
        start_time_ns=record.start_time_ns,
        end_time_ns=record.end_time_ns,
        steps=None if steps is None else [Step.from_dict(step) for step in steps],
        warnings=warnings,
        sealed=True,
    )


def _in_order(evaluations: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Late rewards by time; a process's own ones by their number, whatever its clock said.

    Those that cannot be read come last: what they replaced is not known.
    """
    records = sorted(evaluations, key=lambda r: (r.start_time_ns, r.span_id))
    numbered = [r for r in records if r.integer(sc.REWARD_NUMBER) is not None]
    times: dict[str, int] = {}
    latest = 0
    for record in sorted(numbered, key=lambda r: r.integer(sc.REWARD_NUMBER) or 0):
        times[record.span_id] = latest = max(latest, record.start_time_ns)
    return sorted(
        records,
        key=lambda r: (
            _is_unreadable(r),
            times.get(r.span_id, r.start_time_ns),
            r.integer(sc.REWARD_NUMBER) or 0,
        ),
    )


def _is_unreadable(record: SpanRecord) -> bool:
    return not record.cut.isdisjoint((sc.REWARD, sc.REWARD_NUMBER))


def _apply_reward(record: SpanRecord, rewards: AllRewards) -> None:
    if _is_unreadable(record):  # the span's name says which rewards it may have replaced
        for key in [key for key in rewards if record.name == evaluation_name(key[0])]:
            rewards.remove(key)
        return
    row = loads(record.text(sc.REWARD) or "")
    key = row.get("name"), row.get("completion_id"), row.get("choice_index", 0)
    if row.get("value") is None:
        rewards.remove(key)
    else:
        rewards.put(Reward.from_dict(row))


def evaluation_name(name: str | None) -> str:
    """The name of the span of a reward with this name."""
    return f"{sc.OPERATION_EVALUATE} {name or 'reward'}"
