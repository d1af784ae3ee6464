"""Brokers that answer with errors: nothing is lost, and a trainer gets each group once."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from otel_rollout import reconstruct, record_reward, rollout
from otel_rollout import semconv as sc
from otel_rollout.journal import Journal
from otel_rollout.kafka import KafkaGroups, Rebuilder
from tests.kafka.brokers import SETTINGS, groups, play, rebuild, send
from tests.kit.recording import Clients, Recording

kafka = pytest.importorskip("confluent_kafka")
PRODUCE, FETCH, LIST_OFFSETS, OFFSET_COMMIT, HEARTBEAT = 0, 1, 2, 8, 12
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

    def recover(self, request: int) -> None:
        """Answer the next requests of a kind without an error."""
        self._call("rd_kafka_mock_clear_request_errors", self._cluster, ctypes.c_int16(request))

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


@pytest.mark.slow
def test_a_reward_that_is_refused_is_sent_again(
    recording: Recording,
    brokers: Brokers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also by the next process: no offset after it is committed."""
    monkeypatch.setattr("otel_rollout.kafka.rebuilder._COMMIT_SECONDS", 0.1)
    record_reward(0.5, trajectory="a" * 32, group_id="g")
    send(brokers.producer, "spans", recording.spans)
    brokers.answer(PRODUCE, kafka.KafkaError.MSG_SIZE_TOO_LARGE, 1)
    with closing(Rebuilder(brokers.address, settings=SETTINGS)) as rebuilder:
        run(rebuilder, lambda: "were refused by Kafka" in caplog.text)
        run(rebuilder, lambda: False, seconds=1)
        assert rebuilder.counts["rewards"] == 0
    assert rebuild(brokers.address, TOPICS, 1, "rewards")["rewards"] == 1


@pytest.mark.slow
def test_one_that_closes_waits_for_no_partitions(brokers: Brokers) -> None:
    """Those that come meanwhile are not asked about: brokers answer nothing any more."""
    address, closed = brokers.address, list[str]()
    for made in (
        KafkaGroups(address, topic=TOPICS["trajectories"], settings=SETTINGS),
        Rebuilder(address, settings=SETTINGS),
    ):
        made._consumer.poll(0.05)
        time.sleep(5)  # a broker gives partitions after three

        def close(made: KafkaGroups | Rebuilder = made) -> None:
            made.close()
            closed.append(type(made).__name__)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(20)
    assert closed == ["KafkaGroups", "Rebuilder"]


@pytest.mark.slow
def test_time_does_not_run_while_no_broker_answers(
    recording: Recording, clients: Clients, brokers: Brokers
) -> None:
    """What is missing of a rollout waits in collectors then."""
    play(recording, clients, groups=1)
    send(brokers.producer, "spans", recording.spans[1:])  # a call is missing
    with closing(Rebuilder(brokers.address, rollout_seconds=1, settings=SETTINGS)) as rebuilder:
        run(rebuilder, lambda: rebuilder.counts["new"] > 0)
        brokers.answer(LIST_OFFSETS, kafka.KafkaError.KAFKA_STORAGE_ERROR, 1000)
        run(rebuilder, lambda: False, seconds=5)
        assert rebuilder.counts["incomplete"] == 0
        brokers.recover(LIST_OFFSETS)
        run(rebuilder, lambda: rebuilder.counts["incomplete"] == 1)
        assert rebuilder.counts["incomplete"] == 1


@pytest.mark.slow
def test_a_long_rollout_keeps_its_own_spans_alone(
    recording: Recording,
    clients: Clients,
    brokers: Brokers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Not those of others that are in the same segments."""
    segments = partial(Journal, segment_bytes=500_000)
    monkeypatch.setattr("otel_rollout.kafka.rebuilder.Journal", segments)
    monkeypatch.setattr("otel_rollout.kafka.rebuilder._COMMIT_SECONDS", 0.2)
    client = clients.sync(clients.serve())
    with closing(Rebuilder(brokers.address, folder=tmp_path, settings=SETTINGS)) as rebuilder:
        for number in range(20):
            before = len(recording.spans)
            with rollout("agent"):
                for _ in range(4):
                    message: Any = {"role": "user", "content": f"{number} " * 500}
                    client.chat.completions.create(model="m", messages=[message])
            spans = [*recording.spans[before:]]
            if number % 4 == 0:  # its first call is missing
                spans.remove(next(s for s in spans if sc.EXCHANGE_VERSION in (s.attributes or {})))
            send(brokers.producer, "spans", spans)
        run(rebuilder, lambda: (rebuilder.counts["written"], len(rebuilder)) == (15, 5))
        calls = [s for s in recording.spans if sc.EXCHANGE_VERSION in (s.attributes or {})]
        sent = sum(encode_spans([span]).ByteSize() for span in calls)

        def kept() -> float:
            return sum(path.stat().st_size for path in tmp_path.rglob("*.segment")) / sent

        run(rebuilder, lambda: kept() < 0.3)
        assert len(rebuilder) == 5
        assert 0.1 < kept() < 0.3


@pytest.mark.slow
def test_rebuilders_come_and_go(
    recording: Recording, clients: Clients, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While spans come, and brokers answer with errors: what one leaves the others read again."""
    monkeypatch.setattr("otel_rollout.kafka.rebuilder._COMMIT_SECONDS", 0.1)
    play(recording, clients, groups=6)
    running, left = list[Rebuilder](), list[Rebuilder]()
    for number in range(6):
        running.append(Rebuilder(brokers.address, settings=SETTINGS))
        if len(running) > 2:
            running[0].close()
            left.append(running.pop(0))
        send(brokers.producer, "spans", recording.spans[number::6])
        brokers.answer(HEARTBEAT, kafka.KafkaError.REBALANCE_IN_PROGRESS, 1)
        brokers.answer(OFFSET_COMMIT, kafka.KafkaError.COORDINATOR_LOAD_IN_PROGRESS, 1)
        for _ in range(20):
            for each in running:
                each.run_once(0.05)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for each in running:
            each.run_once(0.05)
        if sum(each.counts["written"] for each in (*left, *running)) >= 24 and not any(
            map(len, running)
        ):
            break
    for each in running:
        each.close()
    assert sum(each.counts["incomplete"] for each in (*left, *running)) == 0
    arrives(brokers, recording.spans)


def run(rebuilder: Rebuilder, holds: Callable[[], bool], seconds: float = 30) -> None:
    """Run it until something holds."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        rebuilder.run_once(0.05)
