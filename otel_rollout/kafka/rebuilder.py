"""Spans out of Kafka, trajectories into it. Kafka has all state: this process may be killed.

Spans are keyed by trace, so a rollout is in one partition, and in one of the processes that share
them. A trajectory is written when its rollout is whole; then a mark into the partition of its
spans: a record without spans, whose header names the rollout. An offset is committed only up to the
oldest spans that no mark covers; whoever has the partition next reads the marks from there on, then
the spans. A kill between a trajectory and its mark writes it twice; `KafkaGroups` gives it once.

A rollout inside another one is written before that one, with its key, which is that of the group.
Rewards on spans of their own go the same way, each in a record of its own, before the trajectory
that has them or after it: `KafkaGroups` applies those that no trajectory has.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_rollout.errors import SpanFormatError
from otel_rollout.evidence import rollout_of
from otel_rollout.journal import Journal
from otel_rollout.kafka.brokers import (
    LATE_REWARDS,
    SECONDS,
    SPANS,
    TRAJECTORIES,
    answered,
    client,
    consumer,
    partitions,
    place_of,
    producer,
    received,
)
from otel_rollout.kafka.open_groups import LateReward, value_of
from otel_rollout.kafka.spans import (
    DONE,
    SENT,
    At,
    Partition,
    Ready,
    done_of,
    marks_between,
    sent_of,
)
from otel_rollout.otlp import read_protobuf
from otel_rollout.rebuild import reconstruct
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import dumps

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

logger = logging.getLogger("otel_rollout")
_AT_ONCE = 500
"""Records that are read together."""
_COMMIT_SECONDS = 5.0
_PIECE = 16
"""Records that are moved at once."""
_TICK_SECONDS = 1.0
_REFUSED_SECONDS = 60.0
"""Pause after the brokers refused a record for good."""


class Rebuilder:
    """Rebuilds trajectories from a topic of spans into one of trajectories, until it is stopped.

    Any number may run, each with some of the partitions; they may come and go.

    brokers: `HOST:PORT`, several with commas.
    rollout_seconds: how long after its last span a rollout that is not whole is written as it is.
        The time begins anew when another process takes over its partition, and does not run while
        no broker answers, or spans of the partition are not read yet.
    folder: for spans of open rollouts; what is in it is worth nothing to another process.
    settings: further settings of librdkafka, such as those of `security.protocol`.
    ConfigurationError if no broker answers, or there is no such topic.
    """

    def __init__(
        self,
        brokers: str,
        *,
        spans: str = SPANS,
        trajectories: str = TRAJECTORIES,
        name: str = "otel-rollout",
        rollout_seconds: float = 3600.0,
        folder: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._spans, self._trajectories, self._seconds = spans, trajectories, rollout_seconds
        # Cooperative: what a process keeps at a rebalance need not be read again.
        settings = {"partition.assignment.strategy": "cooperative-sticky", **(settings or {})}
        self._consumer: Consumer = consumer(brokers, name, settings)
        for topic in (trajectories, spans):
            partitions(self._consumer, topic)
        settings.pop("partition.assignment.strategy")
        self._marks = consumer(
            brokers, f"{name}-marks", {"enable.partition.eof": "true", **settings}
        )
        self._producer = producer(brokers, settings)
        self._scratch = tempfile.TemporaryDirectory(prefix="otel-rollout-kafka-", dir=folder)
        self._journal = Journal(self._scratch.name, fsync=False)
        self._partitions: dict[int, Partition] = {}
        self._refused: list[tuple[float, Callable[[], None]]] = []
        """What to write again, and when."""
        self._last_commit = self._last_tick = time.monotonic()
        self._is_closed = False
        self.counts = Counter[str]()
        """Spans by `Verdict`; trajectories that were `written`, and `incomplete` ones of them;
        rollouts that `never_ended`; late `rewards`; `unreadable` records; offsets that were
        `deleted` unread."""
        self._consumer.subscribe(
            [spans], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def __len__(self) -> int:
        """Number of rollouts that are open."""
        return sum(len(each.rollouts) for each in self._partitions.values())

    def run_once(self, seconds: float = 1.0) -> None:
        """Read what is there, or wait so long for more; write what is whole, or out of time."""
        now = time.monotonic()
        is_tick = now - self._last_tick >= _TICK_SECONDS
        timed = self._tick(now) if is_tick else set[Partition]()
        self._take(received(self._consumer.consume(_AT_ONCE, seconds)))
        self._producer.poll(0)
        for number, partition in self._partitions.items():
            for ready in partition.ready(is_tick=partition in timed):
                self._write(number, partition, ready)
        if is_tick:
            waiting, self._refused = self._refused, []
            for when, write in waiting:
                if when <= now:
                    write()
                else:
                    self._refused.append((when, write))
        if now - self._last_commit >= _COMMIT_SECONDS:
            self._last_commit = now
            self._commit(self._partitions)
            self._compact()

    def close(self) -> None:
        """Finish what is being written, and leave the partitions to others."""
        self._is_closed = True
        self._producer.flush(SECONDS)
        self._commit(self._partitions)
        self._consumer.close()  # calls `_revoked`, and `_assigned` of a rebalance under way
        self._marks.close()
        self._journal.close()
        self._scratch.cleanup()

    # --- spans

    def _take(self, messages: Iterable[Message]) -> None:
        read = list[tuple[int, int, list[SpanRecord]]]()
        values = list[bytes]()
        for message in messages:
            number, offset = place_of(message)
            if (partition := self._partitions.get(number)) is None:
                continue  # it was taken away meanwhile
            partition.next = offset + 1
            partition.remember(done_of(message))
            partition.remember_sent(sent_of(message))
            if records := self._records(message):
                read.append((number, offset, records))
                values.append(message.value() or b"")
        for (number, offset, records), place in zip(
            read, self._journal.append(values), strict=True
        ):
            partition, at = self._partitions[number], At(offset, place)
            for record in records:
                self._add(number, partition, record, at)
            if at not in partition.rollouts.held:
                self._journal.release([place])

    def _tick(self, now: float) -> set[Partition]:
        """Count the time since the last tick; the partitions for which it counts."""
        self._last_tick = now
        ends = [(each, self._end_of(number)) for number, each in self._partitions.items()]
        return {each for each, end in ends if each.tick(end, now)}

    def _end_of(self, number: int) -> int | None:
        """Where a partition ends; None if no broker answers."""
        place = client().TopicPartition(self._spans, number)
        try:
            return int(self._consumer.get_watermark_offsets(place, _TICK_SECONDS)[1])
        except client().KafkaException:
            return None

    def _compact(self) -> None:
        """Move spans out of segments in which most are not needed, as a long rollout has."""
        held = {
            at.place: (number, at)
            for number, partition in self._partitions.items()
            for at in partition.rollouts.movable()
        }
        places = self._journal.sparse(held)
        while piece := places[:_PIECE]:
            del places[:_PIECE]
            moves = defaultdict[int, dict[At, At]](dict)
            records = [self._journal.read(place) for place in piece]
            for old, new in zip(piece, self._journal.append(records), strict=True):
                number, at = held[old]
                moves[number][at] = At(at.offset, new)
            for number, moved in moves.items():
                self._partitions[number].rollouts.move(moved)
            self._journal.release(piece)

    def _add(self, number: int, partition: Partition, record: SpanRecord, at: At) -> None:
        key = partition.key_of_reward(record)
        if key is None:
            self.counts[partition.add(record, at)] += 1
        elif key:
            self._send_on(number, partition, key, [LateReward.of(record)], at.offset)

    def _records(self, message: Message) -> list[SpanRecord]:
        try:
            return [as_record(record) for record in read_protobuf(message.value() or b"")]
        except SpanFormatError as error:
            number, offset = place_of(message)
            self.counts["unreadable"] += 1
            logger.error("%s, partition %s, offset %s: %s", self._spans, number, offset, error)
            return []

    # --- trajectories

    def _write(self, number: int, partition: Partition, ready: Ready) -> None:
        """Write the trajectory of a rollout, then its mark."""
        head = ready.unit.heads[0]
        found, rewards = self._trajectory_of(ready)
        if rewards:
            first = min(at.offset for at in ready.unit.places)
            self._send_on(number, partition, ready.key, rewards, first)
        if found is None:
            self.counts["never_ended"] += 1
            logger.warning(
                "rollout %s never ended: only its start, or a reward, came here%s",
                *(head.rollout, "".join(f"; {reward:.200}" for reward in head.rewards)),
            )
            self._mark(number, partition, ready)
            return
        if not head.is_whole:
            self.counts["incomplete"] += 1
            logger.warning(
                "rollout %s is written without what is missing: %s",
                *(head.rollout, ", ".join(head.missing) or "its end"),
            )
        value = found.to_json().encode()

        def written(error: KafkaError | None, _: Any) -> None:
            if error is None:
                self.counts["written"] += 1
                self._mark(number, partition, ready)
                return
            logger.error(
                "the trajectory of rollout %s, of %s bytes, was refused by Kafka (%s): it and the "
                "spans from offset %s on are kept and it is tried again. Is max.message.bytes of "
                "the topic %r too small?",
                *(head.rollout, len(value), error, partition.low, self._trajectories),
            )
            self._later(partition, number, lambda: self._write(number, partition, ready))

        self._produce(self._trajectories, value, written, key=ready.key)

    def _trajectory_of(self, ready: Ready) -> tuple[Trajectory | None, list[LateReward]]:
        """The trajectory of a rollout, and its late rewards, which may be in it or not.

        None if nothing but its start, or rewards, came.
        """
        head, records = ready.unit.heads[0], list[SpanRecord]()
        for at in ready.unit.places:
            records += map(as_record, read_protobuf(self._journal.read(at.place)))
        own = (r for r in records if r.kind == "reward" and rollout_of(r) == head.rollout)
        rewards = [*map(LateReward.of, own), *ready.rewards]
        for found in reconstruct(records):
            if found.id == head.rollout and (head.ended or found.completions):
                return found, rewards
        return None, rewards

    def _send_on(
        self,
        number: int,
        partition: Partition,
        key: str,
        rewards: Sequence[LateReward],
        offset: int,
    ) -> None:
        """Write rewards for whoever has their trajectory; their spans are needed until then."""
        rollout_id = rewards[0].rollout
        partition.sending[offset] += 1

        def write() -> None:
            headers = [(LATE_REWARDS, rollout_id.encode())]
            self._produce(self._trajectories, value_of(rewards), sent, key=key, headers=headers)

        def sent(error: KafkaError | None, _: Any) -> None:
            if error is None:
                self.counts["rewards"] += len(rewards)
                partition.sent(offset)
                mark = [(SENT, " ".join(each.key for each in rewards).encode())]
                # If it is lost they are sent again, which their readers notice.
                self._produce(self._spans, b"", lambda *_: None, partition=number, headers=mark)
                return
            logger.error("rewards of rollout %s were refused by Kafka (%s)", rollout_id, error)
            self._later(partition, number, write)

        write()

    def _mark(self, number: int, partition: Partition, ready: Ready) -> None:
        """Note that a trajectory is written; then its spans are not needed any more."""
        id_ = ready.unit.heads[0].rollout

        def marked(error: KafkaError | None, _: Any) -> None:
            if self._partitions.get(number) is not partition:
                return
            if error is None:
                self._journal.release(at.place for at in partition.finish(ready))
                return
            logger.error("the mark of rollout %s was refused by Kafka (%s)", id_, error)
            self._later(partition, number, lambda: self._mark(number, partition, ready))

        headers = [(DONE, dumps({"rollout": id_, "key": ready.key}).encode())]
        self._produce(self._spans, b"", marked, partition=number, headers=headers)

    def _produce(
        self, topic: str, value: bytes, delivered: Callable[[Any, Any], None], **more: Any
    ) -> None:
        while True:
            try:
                self._producer.produce(topic, value, on_delivery=delivered, **more)
            except BufferError:  # much waits for the brokers
                self._producer.poll(1.0)
            except client().KafkaException as error:
                delivered(error.args[0], None)
                return
            else:
                return

    def _later(self, partition: Partition, number: int, write: Callable[[], None]) -> None:
        def again() -> None:
            if self._partitions.get(number) is partition:
                write()

        self._refused.append((time.monotonic() + _REFUSED_SECONDS, again))

    # --- partitions that come and go

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if self._is_closed:
            return  # a consumer that closes gets no answers
        for place in answered(partial(consumer.committed, places, SECONDS)):
            number = place.partition
            low, high = answered(partial(consumer.get_watermark_offsets, place, SECONDS))
            if 0 <= place.offset < low:
                self.counts["deleted"] += low - place.offset
                logger.error(
                    "%s, partition %s: Kafka deleted the offsets %s to %s before they were read. "
                    "Raise retention.ms and retention.bytes of the topic.",
                    *(self._spans, number, place.offset, low - 1),
                )
            place.offset = max(place.offset, low)
            done, sent = marks_between(self._marks, place, high)
            partition = Partition(place.offset, done, self._seconds, time.monotonic())
            partition.remember_sent(sent)
            self._partitions[number] = partition
            consumer.incremental_assign([place])

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if not self._is_closed:  # else it is done; in `close` a client may wait for it for good
            self._producer.flush(SECONDS)
            self._commit(self._partitions)
        self._lost(consumer, places)

    def _lost(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        """Forget partitions that others may have already."""
        for place in places:
            if (partition := self._partitions.pop(place.partition, None)) is not None:
                self._journal.release(at.place for at in partition.rollouts.held)
        consumer.incremental_unassign(places)

    def _commit(self, some: Mapping[int, Partition]) -> None:
        offsets = [
            client().TopicPartition(self._spans, number, partition.low)
            for number, partition in some.items()
            if partition.low != partition.committed
        ]
        if not offsets:
            return
        try:
            done = self._consumer.commit(offsets=offsets, asynchronous=False)
        except client().KafkaException as error:
            logger.warning("Kafka did not take the offsets (%s): they are sent again", error)
            return
        for place in done:
            if place.error is None:
                some[place.partition].committed = place.offset
