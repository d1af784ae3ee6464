"""The client of Kafka, with the settings under which nothing is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from otel_rollout.errors import ConfigurationError
from otel_rollout.extras import module_of

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer, TopicPartition

logger = logging.getLogger("otel_rollout")
SPANS = "spans"
TRAJECTORIES = "trajectories"
"""Topics, unless others are named."""
LATE_REWARDS = "late-rewards"
"""Header of a record of rewards among trajectories; its value is the id of their rollout."""
SECONDS = 30.0
"""How long brokers may take to answer."""
_AWAY_SECONDS = 600.0
"""How long brokers may be away when partitions come."""
Answer = TypeVar("Answer")
LARGEST = 1_000_000_000
"""Bytes of a record at most, as the client has it; the topic's own limit decides."""


def client() -> Any:
    """The package confluent_kafka. ConfigurationError where it is not installed."""
    return module_of("kafka", "confluent_kafka", "Kafka")


def consumer(brokers: str, group: str, settings: Mapping[str, str]) -> Consumer:
    """A consumer that commits nothing by itself, and begins at the beginning."""
    made: Consumer = client().Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "max.poll.interval.ms": 1_800_000,  # what an assignment reads first may be much
            "session.timeout.ms": 10_000,
            **settings,
        }
    )
    return made


def producer(brokers: str, settings: Mapping[str, str]) -> Producer:
    """A producer that repeats until the brokers have a record, and writes none twice by that."""
    made: Producer = client().Producer(
        {
            "bootstrap.servers": brokers,
            "enable.idempotence": True,
            "compression.type": "zstd",
            "partitioner": "murmur2_random",  # as other clients
            "message.max.bytes": LARGEST,
            "message.timeout.ms": 0,  # no limit
            "linger.ms": 20,
            **settings,
        }
    )
    return made


def partitions(consumer: Consumer, topic: str) -> list[TopicPartition]:
    """The partitions of a topic. ConfigurationError if it is not there, or no broker answers."""
    kafka = client()
    try:
        found = consumer.list_topics(topic, SECONDS).topics[topic]
    except kafka.KafkaException as error:
        raise ConfigurationError(f"no broker of Kafka answers: {_reason(error)}") from None
    if found.error is not None or not found.partitions:
        raise ConfigurationError(
            f"Kafka has no topic {topic!r} ({found.error}): create it, with a max.message.bytes of "
            "16777216 or more, or name another"
        )
    return [kafka.TopicPartition(topic, number) for number in sorted(found.partitions)]


def answered(ask: Callable[[], Answer]) -> Answer:
    """What brokers answer, asked again while they are away. ConfigurationError after minutes."""
    end = time.monotonic() + _AWAY_SECONDS
    while True:
        try:
            return ask()
        except client().KafkaException as error:
            if time.monotonic() > end:
                raise ConfigurationError(f"no broker of Kafka answers: {_reason(error)}") from None
            logger.warning("Kafka: %s: it is asked again", _reason(error))
            time.sleep(1.0)


def received(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages that are records; errors that pass are logged.

    ConfigurationError for one that does not pass, such as a topic that is gone.
    """
    codes = client().KafkaError
    for message in messages:
        error = message.error()
        if error is None:
            yield message
        elif error.fatal() or error.code() in (
            *(codes.UNKNOWN_TOPIC_OR_PART, codes.TOPIC_AUTHORIZATION_FAILED),
            codes.GROUP_AUTHORIZATION_FAILED,
        ):
            raise ConfigurationError(f"Kafka refuses: {error.str()}")
        else:
            logger.warning("Kafka: %s", error.str())


def place_of(message: Message) -> tuple[int, int]:
    """Partition and offset of a message that came."""
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return partition, offset


def key_of(message: Message) -> str:
    """The key of a record of trajectories."""
    return (message.key() or b"").decode(errors="replace")


def is_of_rewards(message: Message) -> bool:
    """True for a record of rewards, False for one of a trajectory."""
    headers: Any = message.headers() or ()
    return any(name == LATE_REWARDS for name, _ in headers)


def _reason(error: Any) -> str:
    return str(error.args[0].str()) if error.args else str(error)
