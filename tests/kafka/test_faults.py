"""Brokers that answer with errors: nothing is lost, and a trainer gets each group once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import reconstruct
from tests.kafka.brokers import groups, play, rebuild, send
from tests.kit.recording import Clients, Recording

kafka = pytest.importorskip("confluent_kafka")
PRODUCE, FETCH, OFFSET_COMMIT, HEARTBEAT = 0, 1, 8, 12
"""Requests by their numbers in Kafka's protocol."""
TOPICS = {"spans": "spans", "trajectories": "trajectories"}


class Brokers:
    """The client's own small broker, which answers with errors on demand."""

    def __init__(self) -> None:
        folder = Path(kafka.__file__).parents[1] / "confluent_kafka.libs"
        libraries = [*folder.glob("librdkafka*")]
        if not libraries:
            pytest.skip("the client's library is not in its package")
        self._library: Any = ctypes.CDLL(str(libraries[0]))
        conf = self._call("rd_kafka_conf_new")
        self._call("rd_kafka_conf_set", conf, b"log_level", b"0", None, ctypes.c_size_t(0))
        self._client = self._call("rd_kafka_new", 0, conf, None, ctypes.c_size_t(0))
        self._cluster = self._call("rd_kafka_mock_cluster_new", self._client, 1)
        found = self._call("rd_kafka_mock_cluster_bootstraps", self._cluster)
        self.address = ctypes.string_at(found.value).decode()
        self.producer = kafka.Producer(
            {"bootstrap.servers": self.address, "linger.ms": 0, "log_level": 0}
        )
        for topic in TOPICS.values():
            name = topic.encode()
            self._call("rd_kafka_mock_topic_create", self._cluster, name, 2, 1)

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def answer(self, request: int, error: int, times: int) -> None:
        """Answer the next requests of a kind with an error."""
        errors = (ctypes.c_int * times)(*[error] * times)
        given = ctypes.c_int16(request), ctypes.c_size_t(times), errors
        self._call("rd_kafka_mock_push_request_errors_array", self._cluster, *given)

    def close(self) -> None:
        """End it."""
        self.producer.flush(10)
        del self.producer
        self._call("rd_kafka_mock_cluster_destroy", self._cluster)
        self._call("rd_kafka_destroy", self._client)


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    """One with the two topics."""
    made = Brokers()
    yield made
    made.close()


def arrives(brokers: Brokers, spans: Any) -> None:
    """Check that a trainer gets each group once, and whole."""
    found = groups(brokers.address, TOPICS)
    assert [each.missing for each in found] == [[]] * len(found)
    came = [t for each in found for t in (*each.group, *each.group.children)]
    live = sorted(reconstruct(spans), key=lambda t: t.id)
    assert sorted(came, key=lambda t: t.id) == live


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "times", "said"),
    [
        (PRODUCE, kafka.KafkaError.NOT_ENOUGH_REPLICAS, 10, ""),
        (PRODUCE, kafka.KafkaError.REQUEST_TIMED_OUT, 10, ""),
        (PRODUCE, kafka.KafkaError.MSG_SIZE_TOO_LARGE, 1, "was refused by Kafka"),
        (FETCH, kafka.KafkaError.KAFKA_STORAGE_ERROR, 10, ""),
        (FETCH, kafka.KafkaError.NOT_LEADER_FOR_PARTITION, 10, ""),
        (OFFSET_COMMIT, kafka.KafkaError.COORDINATOR_LOAD_IN_PROGRESS, 5, ""),
        (OFFSET_COMMIT, kafka.KafkaError.UNKNOWN, 5, "did not take the offsets"),
        (HEARTBEAT, kafka.KafkaError.REBALANCE_IN_PROGRESS, 2, ""),
        (HEARTBEAT, kafka.KafkaError.UNKNOWN_MEMBER_ID, 1, ""),
    ],
)
def test_errors_lose_nothing(
    recording: Recording,
    clients: Clients,
    brokers: Brokers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: int,
    error: int,
    times: int,
    said: str,
) -> None:
    """They pass; what Kafka refuses is logged, and written again."""
    monkeypatch.setattr("otel_rollout.kafka.rebuilder._REFUSED_SECONDS", 0.5)
    monkeypatch.setattr("otel_rollout.kafka.rebuilder._COMMIT_SECONDS", 0.1)
    play(recording, clients)
    send(brokers.producer, "spans", recording.spans)
    brokers.answer(kind, error, times)
    counts = rebuild(brokers.address, TOPICS, 8)
    assert counts["written"] >= 8
    assert said in caplog.text
    arrives(brokers, recording.spans)
