"""What has come of one rollout so far, and the trajectory that it is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from otel_rollout import semconv as sc
from otel_rollout.rebuild.late_rewards import apply_rewards, lost_rewards
from otel_rollout.rebuild.missing_calls import Calls, is_late
from otel_rollout.rebuild.ownership import counted, doubts_of, own_of, trusted_parts
from otel_rollout.rebuild.rollout_span import Fields, read_rollout, side_calls_of, texts
from otel_rollout.spans import (
    Exchange,
    ExchangeReader,
    SpanKey,
    SpanRecord,
    absent,
    as_record,
    united,
)
from otel_rollout.trajectory import (
    AllRewards,
    Completion,
    Contents,
    Conversations,
    Recorded,
    SideCalls,
    Source,
    Trajectory,
    any_in_background,
    completions_of,
    sentences,
    with_retrieved,
)


@dataclass(slots=True)
class Assembly(Source):
    """All spans of one rollout that have come so far: the source of its trajectory.

    Spans may come in any order, more than once, or not at all. Any thread may ask.
    """

    rollout_id: str
    trainable: bool = True
    """Whether the rollout is to be learned from, by its spans."""
    rewards: AllRewards = field(default_factory=AllRewards)
    """The trajectory's rewards; the live trajectory's own while the rollout runs."""
    side_calls: SideCalls = field(default_factory=SideCalls)
    """Finds the side calls among the calls that were linked."""
    refused: int = 0
    """Exchanges that whoever collected the spans did not keep; a note says why."""
    notes: list[str] = field(default_factory=list)
    """Warnings of whoever collected the spans."""
    lost_calls: list[str] = field(default_factory=list)
    """Warnings of whoever collected the spans about calls that it did not keep, or not get."""
    spans: dict[SpanKey, SpanRecord] = field(default_factory=dict)
    """All that have come. Trace and span id name one: a span id alone is anybody's."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _rollout: SpanRecord | None = None
    """The rollout's own span; of several that say so the first."""
    _rollouts: dict[SpanKey, SpanRecord] = field(default_factory=dict)
    """Spans that say that they are the rollout's own."""
    _reader: ExchangeReader = field(default_factory=ExchangeReader)
    _exchanges: dict[SpanKey, SpanRecord] = field(default_factory=dict)
    _in_time: dict[SpanKey, SpanRecord] = field(default_factory=dict)
    """Those of them that are part of the rollout."""
    _evaluations: dict[SpanKey, SpanRecord] = field(default_factory=dict)
    _parts: dict[SpanKey, SpanRecord] = field(default_factory=dict)
    """Spans of other processes that continued the rollout."""
    _pending: list[SpanRecord] = field(default_factory=list)
    _doubts: dict[SpanKey, str] = field(default_factory=dict)
    """Why calls may not be the rollout's; known once it has ended."""
    _verdicts: dict[SpanKey, str] = field(default_factory=dict)
    """What rules of the user's own said of calls; known once it has ended."""
    _read: dict[SpanKey, Exchange] = field(default_factory=dict)
    """Exchanges that were read and lack nothing."""
    _completions: dict[str, list[Completion]] = field(default_factory=dict)
    _claimed: Counter[str] = field(default_factory=Counter)
    """How many trajectories inside it say that an exchange belongs to them, by its span id."""
    _conversations: Conversations | None = None
    """The completions that were linked; None: to be made anew."""
    _unlinked: list[SpanKey] = field(default_factory=list)
    """Exchanges that are not in `_conversations` yet."""

    def add(self, record: SpanRecord) -> None:
        """Take in a span of this rollout, as `as_record` gives it.

        One that is still open counts only for what it carries.
        """
        key, copy = record.key, record
        known = self.spans.get(key)
        if known is not None:
            record = united(known, record)
            self._conversations = None
            self._read.pop(key, None)
            for place in (self._exchanges, self._in_time, self._evaluations, self._parts):
                place.pop(key, None)
            self._rollouts.pop(key, None)
        self.spans[key] = record
        kind = record.kind
        if kind == "rollout":
            self._rollouts[key] = record
        elif kind == "exchange":
            # What others refer to may be in a part in which the copies differ: digests decide.
            self._reader.add(copy)
            if known is not None:
                self._reader.add(record)
            if record.end_time_ns is not None:
                self._exchanges[key] = record
                if not is_late(record):
                    self._in_time[key] = record
                    self._unlinked.append(key)
        elif kind == "reward":
            self._evaluations[key] = record
        elif kind == "part":
            self._parts[key] = record
        if known is not None or kind == "rollout":
            self._rollout = own_of(self._rollouts.values())

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
            self.judge()
            calls = self._calls()
            missing = [
                *self.lost_calls,
                *calls.incomplete(),
                *calls.not_captured(),
                *calls.none(),
                *calls.programs(),
            ]
            warnings = [*self.notes, *self._disputes(), *missing, *self.lost_rewards()]
            after = calls.after()
            return Contents(self.conversations, self.exchanges(), warnings + after, missing + after)

    def judge(self) -> None:
        """Find the calls that may not be the rollout's, and what its own rules said of them.

        All that will come has come.
        """
        with self._lock:
            self._settle()
            spans = self._in_time, self._rollout, self._trusted_parts()
            doubts, verdicts = doubts_of(*spans), side_calls_of(*spans)
            if (doubts, verdicts) != (self._doubts, self._verdicts):
                self._doubts, self._verdicts, self._conversations = doubts, verdicts, None

    def _trusted_parts(self) -> list[SpanRecord]:
        return trusted_parts(self._rollout, self._parts.values()) if self._parts else []

    @property
    def is_disputed(self) -> bool:
        """True if several spans say that they are the rollout's own, or its copies differ."""
        own = self._rollout
        return len(self._rollouts) > 1 or bool(own and own.cut and own.disputed)

    def conversations(self) -> Conversations:
        """The completions of the calls that have ended, linked.

        Only calls that are new since the last time are read, unless the reply of one may be on
        another span, or something that a span refers to has not come yet.
        """
        with self._lock:
            self._settle()
            if self._conversations is None or not self._extend(self._conversations):
                exchanges = self.exchanges()
                self.side_calls.clear()
                for exchange in self.exchanges(claimed=True) if self._claimed else ():
                    for completion in self._completions_of(exchange):  # they have tools, maybe
                        self.side_calls.add(completion)
                completions = (
                    completion
                    for exchange in with_retrieved(exchanges)
                    for completion in self._completions_of(exchange)
                )
                conversations = Conversations(completions, self.side_calls)
                self._unlinked = []
                if _may_change(exchanges):
                    return conversations
                self._conversations = conversations
            return self._conversations

    def _extend(self, conversations: Conversations) -> bool:
        """Add what is new; False where all has to be read again."""
        exchanges = list(map(self._exchange, self._unlinked))
        if _may_change(exchanges) or any(e.span_id in self._claimed for e in exchanges):
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
        completions = completions_of(
            exchange, self.rewards, trainable=self.trainable, side_calls=self.side_calls
        )
        if not exchange.damage:
            self._completions[exchange.span_id] = completions
        return completions

    def _exchange(self, key: SpanKey) -> Exchange:
        exchange = self._read.get(key)
        if exchange is None:
            exchange = self._reader.read(self._in_time[key])
        if not exchange.damage:  # what is missing may still come
            self._read[key] = exchange
        exchange.side_call = self._verdicts.get(key)
        doubts = [self._doubts[key]] if key in self._doubts else []
        if self._claimed[key[1]] > 1:
            doubts.append(f"{self._claimed[key[1]]} trajectories claim it")
        return replace(exchange, damage=[*exchange.damage, *doubts]) if doubts else exchange

    def exchanges(self, *, claimed: bool = False) -> list[Exchange]:
        """The calls that are part of the rollout, in order of their start.

        `claimed`: instead those that were given to other trajectories.
        """
        with self._lock:
            self._settle()
            records = [
                record
                for record in self._in_time.values()
                if (record.span_id in self._claimed) is claimed
            ]
            records.sort(key=_start)
            return [self._exchange(record.key) for record in records]

    @property
    def trace_id(self) -> str | None:
        """The trace of the rollout's own span; None where that did not come."""
        return self._rollout.trace_id if self._rollout else None

    @property
    def claims(self) -> frozenset[str]:
        """Exchanges of the rollout around this one that belong to it."""
        fields = self._rollout and Fields(self._rollout, [])
        return frozenset((fields and fields.read(sc.ROLLOUT_CLAIMS, texts)) or ())

    @property
    def around(self) -> str | None:
        """The rollout around this one, by its id, if calls of it are claimed; else None."""
        return self._rollout.text(sc.ROLLOUT_PARENT_ID) if self._rollout and self.claims else None

    @property
    def is_empty_workflow(self) -> bool:
        """Whether it is a workflow without a reward, and calls but those of its trajectories."""
        operation = self._rollout and self._rollout.text(sc.GEN_AI_OPERATION_NAME)
        if operation != sc.OPERATION_INVOKE_WORKFLOW:
            return False  # before anything is read: nobody may ever ask for it
        self._settle()
        ids = {record.span_id for record in self._exchanges.values()}
        return not (self.rewards.has_own or ids - self._claimed.keys())

    def not_captured(self) -> list[str]:
        """A warning for the calls that were seen and not captured."""
        return self._calls().not_captured()

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
            self._claimed.update(span_ids)
            self._conversations = None
        return _Claimed(self, span_ids, rewards, trainable, own)

    def trajectory(self) -> Trajectory:
        """The trajectory of what has come."""
        if self._rollout is None:
            self._settle()
        if self._rollout is None:
            trajectory = self._without_rollout_span()
        else:
            trajectory = read_rollout(self._rollout, self.rewards, self)
        self.trainable = trajectory.trainable
        self.join_parts(trajectory)
        apply_rewards(self._evaluations.values(), self.rewards)
        return trajectory

    def join_parts(self, trajectory: Trajectory) -> None:
        """Add what other processes set on the rollout; what it set itself stays.

        A rollout of which it is disputed which span is its own is not to be trained on.
        """
        if self.is_disputed:
            trajectory.trainable = self.trainable = False
        for record in self._trusted_parts() if self._parts else ():
            trajectory.join(read_rollout(record, AllRewards(), None))

    def _calls(self) -> Calls:
        """The calls of the rollout, also those that were given to other trajectories."""
        return Calls(
            self._rollout,
            self._trusted_parts(),
            list(self._exchanges.values()),
            counted(r.text(sc.EXCHANGE_PROCESS) or "" for r in self._in_time.values()),
            was_continued=bool(self._parts),
            refused=self.refused,
        )

    def without_calls(self) -> list[str]:
        """Why a rollout that has ended has no call, as warnings; [] if it has one, or needs none.

        Cheap: asked of every rollout as it ends.
        """
        with self._lock:
            calls = self._calls()
            return (
                [*calls.not_captured(), *calls.none(), *calls.programs()] if calls.are_none else []
            )

    def lost(self) -> list[str]:
        """What has not come of the rollout, or came damaged, as warnings; [] if it is whole.

        From attributes alone: no request and no reply is read, and they need not be on the spans.
        """
        with self._lock:
            found = [] if self._rollout else [sentences.NO_SPAN()]
            found += self._calls().incomplete(late=False)
            for record in self.spans.values():
                found += [_damage(record, why) for why in absent(record)]
            doubts = doubts_of(self._in_time, self._rollout, self._trusted_parts())
            found += [_damage(self.spans[key], why) for key, why in doubts.items()]
            return found + self._disputes() + self.lost_rewards()

    def claimed_of(self, around: Assembly | None) -> list[str]:
        """A warning where calls that the rollout claims of the one around it have not come."""
        if not (claims := self.claims):
            return []
        there = {span_id for _, span_id in around._in_time} if around is not None else ()
        missing = len(claims.difference(there))
        return [sentences.MISSING(missing=missing, began=len(claims))] if missing else []

    def lost_rewards(self) -> list[str]:
        """A warning where rewards that came after the rollout are missing or truncated."""
        return lost_rewards(self._evaluations.values())

    def _disputes(self) -> list[str]:
        """A warning for what others may have sent in its name."""
        found: list[str] = []
        if len(self._rollouts) > 1:
            found.append(sentences.DISPUTED(count=len(self._rollouts)))
        strangers = len(self._parts) - len(self._trusted_parts())
        if strangers:
            found.append(sentences.STRANGERS(count=strangers))
        return found

    def _without_rollout_span(self) -> Trajectory:
        records = [*self._exchanges.values(), *self._evaluations.values()]
        first = min(records, key=lambda r: (r.start_time_ns, r.key), default=None)
        of_calls = self._exchanges.values() or self._evaluations.values()
        of_group = min(filter(_names_group, of_calls), key=_start, default=None)  # a reward may
        return Trajectory(
            id=self.rollout_id,
            trace_id=first.trace_id if first else "",
            start_time_ns=first.start_time_ns if first else 0,
            group_id=of_group.text(sc.ROLLOUT_GROUP_ID) if of_group else None,
            group_run=of_group.text(sc.ROLLOUT_GROUP_RUN) if of_group else None,
            group_size=of_group.integer(sc.ROLLOUT_GROUP_SIZE) if of_group else None,
            status="unknown",
            trainable=bool(self._exchanges)
            and all(
                record.boolean(sc.ROLLOUT_TRAINABLE) is not False
                for record in self._exchanges.values()
            ),
            rewards=self.rewards,
            source=self,
            warnings=[sentences.NO_SPAN()],
            missing_calls=[sentences.NO_SPAN()],
        )


@dataclass(slots=True)
class _Claimed(Source):
    """Source of a trajectory whose calls were made in the rollout around it."""

    around: Assembly
    span_ids: frozenset[str]
    rewards: AllRewards
    trainable: bool
    own: Assembly | None

    def read(self) -> Contents:
        """The exchanges that it claims, as far as they have come."""
        self.around.judge()
        found = self.around.exchanges(claimed=True)
        exchanges = [exchange for exchange in found if exchange.span_id in self.span_ids]
        recorded = Recorded(exchanges, self.rewards, trainable=self.trainable)
        warnings = [*self.own.notes, *self.own.lost_rewards()] if self.own else []
        missing = self.around.not_captured()
        if count := len(self.span_ids) - len(exchanges):
            missing.append(sentences.MISSING(missing=count, began=len(self.span_ids)))
        return Contents(recorded.conversations, exchanges, warnings + missing, missing)


def _start(record: SpanRecord) -> tuple[int, int, str, str]:
    started = record.integer(sc.EXCHANGE_STARTED) or 0
    return record.start_time_ns, started, record.span_id, record.trace_id


def _damage(record: SpanRecord, why: str) -> str:
    """A warning about a span; that about a call names it."""
    is_call = record.kind == "exchange"
    return sentences.DAMAGED(span=record.span_id, damage=why) if is_call else why


def _names_group(record: SpanRecord) -> bool:
    return record.text(sc.ROLLOUT_GROUP_ID) is not None


def _may_change(exchanges: Sequence[Exchange]) -> bool:
    """Whether spans that come later may add to one of them."""
    return any(exchange.damage for exchange in exchanges) or any_in_background(exchanges)
