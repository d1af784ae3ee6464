"""Spans in Kafka: what a rebuilder knows of one partition, its marks, and all of a topic."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from msgspec.structs import replace

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.evidence import Audit, Head, OpenRollouts, Unit, Verdict, rollout_of
from otel_rollout.journal import Place
from otel_rollout.kafka.brokers import (
    SECONDS,
    client,
    consumer,
    is_of_rewards,
    key_of,
    partitions,
    place_of,
    received,
)
from otel_rollout.kafka.open_groups import LateReward, OpenGroups, rewards_of
from otel_rollout.otlp import read_protobuf
from otel_rollout.spans import SpanRecord, as_records
from otel_rollout.trajectory import UNREADABLE, Trajectory
from otel_rollout.wire import loads

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, TopicPartition

DONE = "rollout-done"
"""Header of a mark: JSON with a `rollout` whose trajectory is written, and the `key` of that."""
SENT = "rewards-sent"
"""Header of a mark: the keys of late rewards that are sent on, with spaces."""
_REMEMBERED = 100_000
"""Marks that were passed, and are known again for what comes late. There are two for a rollout that
is written here: when it is, and when its mark is read."""


class At(NamedTuple):
    """Where spans are: in Kafka, and in the journal of this process."""

    offset: int
    place: Place


class Ready(NamedTuple):
    """A rollout to be written."""

    unit: Unit[At]
    key: str
    """That of its group, or of the outermost rollout around it."""
    rewards: list[LateReward]
    """Those that came after its spans were collected."""


class Partition:
    """The rollouts of a partition."""

    def __init__(
        self, start: int, done: dict[str, str], rollout_seconds: float, began: float
    ) -> None:
        self.next = start
        """The offset after the last record that was read."""
        self.committed = start
        self._ticked, self._end, self._seen = began, start, -1
        """When the last tick was; where the partition ended then, and `next` was."""
        self.now = 0.0
        """Seconds in which it was read to its end."""
        self.keys: dict[str, str] = {**done}
        """The keys of trajectories that are written, or being so, by their ids."""
        self._done: dict[str, None] = dict.fromkeys(done)
        self._passed = deque[str]()
        """Those whose marks were written or read; of the others spans are about to be read."""
        self._seconds = rollout_seconds
        self._count: dict[str, int] = {}
        """How many rollouts are inside one, by its id."""
        self._here: dict[str, set[str]] = {}
        """Those of them that were whole, or out of time."""
        self._waiting: dict[str, tuple[float, Unit[At]]] = {}
        """Rollouts that wait for the one around them, or for those inside, and since when."""
        self._rewards: dict[str, list[LateReward]] = {}
        """What came meanwhile of them."""
        self.sending = Counter[int]()
        """The offsets of rewards that are being sent on."""
        self._sent: dict[str, None] = {}
        """The keys of those that are, by the marks."""
        self.rollouts: OpenRollouts[At] = OpenRollouts(
            rollout_seconds=rollout_seconds,
            group_seconds=None,
            rollout_is_done=self._done.__contains__,
        )

    @property
    def low(self) -> int:
        """The offset of the oldest spans that are needed."""
        return min((*(at.offset for at in self.rollouts.held), *self.sending), default=self.next)

    def tick(self, end: int | None, now: float) -> bool:
        """The partition ends at this offset at this time. None: no broker answers.

        True if all was read that was there at the last tick: only then the time since then counts,
        as what is missing of a rollout may be what Kafka has not taken, or given.
        """
        seconds, self._ticked = now - self._ticked, now
        if end is None:
            return False
        kept_up = self.next >= self._end or self.next == self._seen
        self._end, self._seen = end, self.next
        self.now += seconds if kept_up else 0.0
        return kept_up

    def add(self, record: SpanRecord, at: At) -> Verdict:
        """Take in a span."""
        verdict, id_ = self.rollouts.add(record, at, self.now), rollout_of(record)
        if id_ is not None and record.kind == "rollout":
            if verdict != "late":
                self._count[id_] = record.integer(sc.ROLLOUT_NESTED_COUNT) or 0
            elif (around := record.text(sc.ROLLOUT_PARENT_ID)) and around not in self._done:
                self._here.setdefault(around, set()).add(id_)
        return verdict

    def key_of_reward(self, record: SpanRecord) -> str | None:
        """The key with which a reward is sent on, in no trajectory.

        "": it goes with its trajectory, later, or was sent before. None: it is to be added, as any
        other span.
        """
        id_ = rollout_of(record)
        if id_ is None or record.kind != "reward" or self.rollouts.is_waiting(id_):
            return None
        if LateReward.of(record).key in self._sent:
            return ""
        if id_ in self.keys:
            return self.keys[id_]
        if self.rollouts.is_open(id_):
            self._rewards.setdefault(id_, []).append(LateReward.of(record))
            return ""
        if sc.REWARD_NUMBER in record.attributes or sc.REWARD_NUMBER in record.cut:
            return None  # its process counts it, and sends the rollout in the same trace
        return record.group or record.text(sc.ROLLOUT_OUTER_GROUP_ID) or id_

    def sent(self, offset: int) -> None:
        """A reward of the record at this offset is sent on."""
        self.sending -= Counter([offset])

    def remember_sent(self, keys: Iterable[str]) -> None:
        """These rewards are sent on, by a mark."""
        self._sent |= dict.fromkeys(keys)
        while len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]

    def ready(self, *, is_tick: bool) -> Iterator[Ready]:
        """The rollouts to be written: those inside another one before it, all with its key.

        is_tick: also those that are out of time.
        """
        now = self.now
        units = [(now, unit) for unit in self.rollouts.whole()]
        if is_tick:
            units += [(now - self._seconds, unit) for unit in self.rollouts.due(now)]
        for since, unit in units:
            head = unit.heads[0]
            self._waiting[head.rollout] = since, unit
            if head.parent is not None and head.parent not in self._done:
                self._here.setdefault(head.parent, set()).add(head.rollout)
        if units or is_tick:
            for id_, (since, unit) in list(self._waiting.items()):
                if id_ in self._waiting and self._is_due(unit.heads[0], now - since):
                    yield from self._with_inside(unit)

    def _is_due(self, head: Head, seconds: float) -> bool:
        """True for a rollout that needs not wait for others, or has waited for so long."""
        if (around := self._around(head)) is not None and around not in self.keys:
            return seconds >= self._seconds and not self.rollouts.is_open(around)
        is_full = len(self._here.get(head.rollout, ())) >= self._count.get(head.rollout, 0)
        return is_full or seconds >= self._seconds

    def _with_inside(self, unit: Unit[At]) -> Iterator[Ready]:
        head = unit.heads[0]
        own = head.rollout if head.group is None else head.group
        self.keys[head.rollout] = self.keys.get(self._around(head) or "", own)
        del self._waiting[head.rollout]
        for _, inside in list(self._waiting.values()):
            if self._around(inside.heads[0]) == head.rollout:
                yield from self._with_inside(inside)
        rewards = self._rewards.pop(head.rollout, [])
        yield Ready(unit, self.keys[head.rollout], rewards)

    @staticmethod
    def _around(head: Head) -> str | None:
        """The rollout whose key it has; None: it is of a group itself, or outermost."""
        return head.parent if head.group is None else None

    def finish(self, ready: Ready) -> list[At]:
        """A rollout is written and marked; the places that nothing needs any more."""
        id_ = ready.unit.heads[0].rollout
        self._count.pop(id_, None)
        self._here.pop(id_, None)
        self.remember({id_: self.keys[id_]})
        return self.rollouts.done(ready.unit)

    def remember(self, done: dict[str, str]) -> None:
        """These rollouts are written: what comes of them is late."""
        for id_, key in done.items():
            self._done[id_], self.keys[id_] = None, key
            self._passed.append(id_)
        while len(self._passed) > _REMEMBERED:
            oldest = self._passed.popleft()
            self._done.pop(oldest, None)
            self.keys.pop(oldest, None)


def done_of(message: Message) -> dict[str, str]:
    """The rollouts that a message marks as written, with their keys."""
    found = {}
    headers: Any = message.headers() or ()
    for name, value in headers:
        if name == DONE and value is not None:
            try:
                mark: Any = loads(value)
                found[str(mark["rollout"])] = str(mark["key"])
            except UNREADABLE:
                continue  # another's header of that name
    return found


def sent_of(message: Message) -> list[str]:
    """The keys of the late rewards that a message marks as sent on."""
    headers: Any = message.headers() or ()
    every = [value or b"" for name, value in headers if name == SENT]
    return b" ".join(every).decode(errors="replace").split()


def marks_between(
    reader: Consumer, place: TopicPartition, end: int
) -> tuple[dict[str, str], list[str]]:
    """What is marked in a partition, from a place to an offset: as `done_of` and `sent_of`."""
    done, sent = dict[str, str](), list[str]()
    for message in _between(reader, place, end):
        done |= done_of(message)
        sent += sent_of(message)
    return done, sent


def audit_topic(address: str, audit: Audit, on_error: Callable[[SpanFormatError], None]) -> None:
    """Let an audit know what is in a topic by now, of spans or of trajectories.

    Of trajectories it reports what a trainer without time-outs finds late.

    address: `kafka://HOST:PORT,.../TOPIC?KEY=VALUE&...`; the keys are settings of librdkafka.
    on_error: called for each record that has neither.
    ConfigurationError if no broker answers, or there is no such topic.
    """
    parts = urlsplit(address)
    if not parts.netloc or not parts.path.strip("/"):
        raise ConfigurationError(f"expected kafka://HOST:PORT/TOPIC, got {address!r}")
    settings = {"enable.partition.eof": "true", **dict(parse_qsl(parts.query))}
    reader = consumer(parts.netloc, "otel-rollout-reader", settings)
    try:
        for place in partitions(reader, parts.path.strip("/")):
            place.offset, end = reader.get_watermark_offsets(place, SECONDS)
            groups = OpenGroups()
            for message in _between(reader, place, end):
                try:
                    _audit_record(message, audit, groups)
                except SpanFormatError as error:
                    where = f"partition {place.partition}, offset {message.offset()}"
                    on_error(SpanFormatError(f"{address}, {where}: {error}"))
            for reward in groups.lone_rewards:
                audit.add_late(reward.late)
    except client().KafkaException as error:
        raise ConfigurationError(f"{address} cannot be read: {error.args[0].str()}") from None
    finally:
        reader.close()


def _audit_record(message: Message, audit: Audit, groups: OpenGroups) -> None:
    value, (_, offset) = message.value() or b"", place_of(message)
    if is_of_rewards(message):
        for reward in rewards_of(value):
            if groups.add_reward(reward, offset, 0.0) == "late":
                audit.add_late(reward.late)
    elif value[:1] == b"{":
        trajectory = Trajectory.from_json(value)
        key = key_of(message)
        is_late = groups.add(key, trajectory, offset, 0.0) == "late"
        audit.add_trajectory(replace(Head.of(trajectory), is_extra=is_late))
        if (group := groups.ready(key)) is not None:
            groups.give(group)
    else:
        for record in as_records(read_protobuf(value)):
            audit.see(record)


def _between(reader: Consumer, place: TopicPartition, end: int) -> Iterator[Message]:
    """The records of a partition from a place to an offset."""
    if place.offset >= end:
        return
    reader.assign([place])
    while True:
        for message in reader.consume(500, 1.0):
            error = message.error()
            if error is not None and error.code() == client().KafkaError._PARTITION_EOF:
                reader.unassign()
                return
            for record in received([message]):
                yield record
                if (record.offset() or 0) + 1 >= end:
                    reader.unassign()
                    return
