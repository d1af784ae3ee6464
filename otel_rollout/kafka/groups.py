"""Whole groups of trajectories out of Kafka, for trainers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.kafka.brokers import (
    SECONDS,
    TRAJECTORIES,
    answered,
    client,
    consumer,
    is_of_rewards,
    key_of,
    partitions,
    place_of,
    received,
)
from otel_rollout.kafka.open_groups import LateReward, OpenGroup, OpenGroups, Resume, rewards_of
from otel_rollout.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, TopicPartition

logger = logging.getLogger("otel_rollout")
_REWARD_SECONDS = 7200.0
Position = Mapping[str, Resume]
"""Where to go on, as JSON: by the number of the partition."""


@dataclass(frozen=True, slots=True)
class KafkaGroup:
    """A group that came out of Kafka."""

    group: TrajectoryGroup
    """Its trajectories; those of rollouts inside them are its `children`."""
    missing: list[str]
    """What is missing of it, as sentences; [] if it is whole."""
    position: Position
    """`start` of a consumer that is to give what comes after this group."""
    partition: int


class KafkaGroups:
    """Iterator over the groups of a topic of trajectories, each given once, when it is whole.

        groups = KafkaGroups("broker:9092", start=checkpoint.get("kafka"))
        for each in groups:
            train(each.group)
            save_checkpoint(kafka=each.position)

    A trainer that keeps `position` with its weights goes on from there, or trains once more from
    any former one. Without `start`, the consumers of one `name` share the partitions, and go on
    after what they `commit`; groups may come again then, when one was stopped.

    A reward that was set after its rollout's end counts if it comes before its group is given; one
    that comes later, or of an unknown rollout, is logged.

    brokers: `HOST:PORT`, several with commas.
    start: position to go on from; a partition that it lacks is read from its beginning.
    group_seconds: how long after its last record a group that is not whole is given. None: never.
        So long, or else two hours, a reward waits for its rollout.
    idle_seconds: end when nothing has come for so long. None: wait for more.
    settings: further settings of librdkafka, such as those of `security.protocol`.
    ConfigurationError if no broker answers, or there is no such topic.
    """

    def __init__(
        self,
        brokers: str,
        *,
        topic: str = TRAJECTORIES,
        name: str = "otel-rollout-trainer",
        start: Position | None = None,
        group_seconds: float | None = None,
        idle_seconds: float | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._group_seconds, self._idle_seconds = group_seconds, idle_seconds
        self._partitions: dict[int, OpenGroups] = {}
        self._topic, self._is_closed = topic, False
        self._consumer: Consumer = consumer(brokers, name, settings or {})
        every = partitions(self._consumer, topic)
        if start is None:
            self._consumer.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked)
            return
        if unknown := start.keys() - {str(each.partition) for each in every}:
            raise ConfigurationError(
                f"KafkaGroups(start=): the topic {topic!r} has no partition {min(unknown)}"
            )
        for each in every:
            resume = start.get(str(each.partition))
            self._partitions[each.partition] = OpenGroups(resume=resume)
            each.offset = resume["offset"] if resume else client().OFFSET_BEGINNING
        self._consumer.assign(every)

    def __enter__(self) -> KafkaGroups:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[KafkaGroup]:
        last = time.monotonic()
        while True:
            polled = self._consumer.poll(1.0)
            now = time.monotonic()
            for message in received([polled] if polled else []):
                last = now
                yield from self._take(message, now)
            if self._idle_seconds is not None and now - last >= self._idle_seconds:
                return
            seconds = self._group_seconds
            for number, groups in list(self._partitions.items()):
                for group in () if seconds is None else groups.due(now, seconds):
                    yield self._give(number, group)
                for reward in groups.due_rewards(now, seconds or _REWARD_SECONDS):
                    _log_late(reward, "and its rollout did not")

    @property
    def position(self) -> Position:
        """`start` of a consumer that is to give what was not given yet."""
        return {str(number): groups.resume for number, groups in self._partitions.items()}

    @property
    def counts(self) -> dict[str, int]:
        """How many groups are `open`, and how many `lone_rewards` wait for their rollouts.

        copies: trajectories and rewards that came again. late: those that came too late.
        """
        every = self._partitions.values()
        return {
            "open": sum(map(len, every)),
            "lone_rewards": sum(len(each.lone_rewards) for each in every),
            "copies": sum(each.copies for each in every),
            "late": sum(each.late for each in every),
        }

    def commit(self, each: KafkaGroup) -> None:
        """Let consumers of this name go on after this group."""
        if each.partition not in self._partitions:
            logger.warning("partition %s is another's by now: it is read again", each.partition)
            return
        resume = each.position[str(each.partition)]
        place = client().TopicPartition(self._topic, each.partition, resume["offset"])
        answered(partial(self._consumer.commit, offsets=[place], asynchronous=False))

    def close(self) -> None:
        """Leave the partitions to others."""
        self._is_closed = True
        self._consumer.close()

    def _take(self, message: Message, now: float) -> Iterator[KafkaGroup]:
        number, offset = place_of(message)
        if (groups := self._partitions.get(number)) is None:
            return  # it was taken away meanwhile
        key = key_of(message)
        where = f"{self._topic}, partition {number}, offset {offset}"
        try:
            if is_of_rewards(message):
                for reward in rewards_of(message.value() or b""):
                    if groups.add_reward(reward, offset, now) == "late":
                        _log_late(reward, "when its group had been given")
                return
            trajectory = Trajectory.from_json(message.value() or b"")
        except SpanFormatError as error:
            logger.warning("%s: no trajectory: %s", where, error)
            groups.skip(offset)
            return
        if groups.add(key, trajectory, offset, now) == "late":
            logger.warning(
                "%s: rollout %s came when its group %r had been given without it",
                *(where, trajectory.id, key),
            )
        elif (group := groups.ready(key)) is not None:
            yield self._give(number, group)

    def _give(self, number: int, group: OpenGroup) -> KafkaGroup:
        missing = group.missing
        self._partitions[number].give(group)
        made = TrajectoryGroup.of(group.members)
        made.children = group.children
        return KafkaGroup(made, missing, self.position, number)

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if self._is_closed:
            return  # a consumer that closes gets no answers
        for place in answered(partial(consumer.committed, places, SECONDS)):
            self._partitions[place.partition] = OpenGroups(max(place.offset, 0))

    def _revoked(self, _: Consumer, places: list[TopicPartition]) -> None:
        for place in places:
            self._partitions.pop(place.partition, None)


def _log_late(reward: LateReward, why: str) -> None:
    late = reward.late
    logger.warning("rollout %s: a reward came, %s: %.200s", late.rollout, why, late.reward)
