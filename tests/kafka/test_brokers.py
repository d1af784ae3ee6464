"""Spans through the client's own small brokers: rebuilt, in groups, and again from any position."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from otel_rollout import ConfigurationError, reconstruct, record_reward, rollout
from otel_rollout.command import main
from otel_rollout.kafka import KafkaGroups, Rebuilder
from tests.kafka.brokers import SETTINGS, groups, play, rebuild, send
from tests.kit.recording import Clients, Recording

kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A producer that has the brokers in its process."""
    made = kafka.Producer({"test.mock.num.brokers": 1, "linger.ms": 0})
    yield made
    made.flush(10)


@pytest.fixture
def topics(cluster: Any, request: pytest.FixtureRequest) -> dict[str, str]:
    """Topics of this test."""
    name = f"{request.node.name}-{os.getpid()}"
    return {"spans": f"{name}.spans", "trajectories": f"{name}.trajectories"}


@pytest.fixture
def brokers(cluster: Any, topics: dict[str, str]) -> str:
    """Their address; the topics are there."""
    (broker,) = cluster.list_topics(timeout=10).brokers.values()
    for topic in topics.values():
        cluster.list_topics(topic, timeout=10)
    return f"{broker.host}:{broker.port}"


def test_groups_come_whole_and_again(
    recording: Recording,
    clients: Clients,
    cluster: Any,
    brokers: str,
    topics: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Spans in any order and twice; every position gives what comes after it."""
    play(recording, clients)
    spans = recording.spans
    send(cluster, topics["spans"], [*reversed(spans), *spans])
    counts = rebuild(brokers, topics, 8)
    found = groups(brokers, topics)
    assert sorted(each.group.id or "" for each in found) == ["g0", "g1"]
    assert [each.missing for each in found] == [[], []]
    assert all(len(each.group) == len(each.group.children) == 2 for each in found)
    came = [t for each in found for t in (*each.group, *each.group.children)]
    live = reconstruct(spans)
    assert sorted(came, key=lambda t: t.id) == sorted(live, key=lambda t: t.id)
    assert counts["written"] == 8
    again = groups(brokers, topics, found[0].position)
    assert [each.group.id for each in again] == [found[1].group.id]
    assert groups(brokers, topics, found[1].position) == []
    assert main(["audit", "--json", f"kafka://{brokers}/{topics['spans']}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ended"] == report["whole"] == 8


def test_marks_keep_what_is_written_from_being_written_again(
    recording: Recording, clients: Clients, cluster: Any, brokers: str, topics: dict[str, str]
) -> None:
    """A rollout that is open holds the offset back: the next process reads the others' marks."""
    with rollout("open"):
        client = clients.sync(clients.serve())
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        play(recording, clients)
        send(cluster, topics["spans"], recording.spans)
        first = rebuild(brokers, topics, 8)
    send(cluster, topics["spans"], recording.spans[-1:])
    second = rebuild(brokers, topics, 1)
    assert (first["written"], second["written"]) == (8, 1)
    assert second["late"] == 16  # a call and an end of each
    keys = [each.group.id for each in groups(brokers, topics)]
    assert sorted(map(str, keys)) == ["None", "g0", "g1"]


def test_a_reward_that_comes_late_is_logged(
    recording: Recording,
    cluster: Any,
    brokers: str,
    topics: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When the trajectory was written; or by its id alone, perhaps in another partition."""
    with rollout("x") as trajectory:
        pass
    record_reward(0.25, trajectory=trajectory)
    (own,) = recording.spans_named("invoke_agent")
    (reward,) = recording.spans_named("evaluate")
    send(cluster, topics["spans"], [own])
    rebuild(brokers, topics, 1)
    record_reward(0.75, trajectory="a" * 32)
    (by_id,) = [span for span in recording.spans_named("evaluate") if span is not reward]
    send(cluster, topics["spans"], [reward, by_id])
    options: dict[str, Any] = {**topics, "rollout_seconds": 0.1, "settings": SETTINGS}
    rebuilder = Rebuilder(brokers, **options)
    deadline = time.monotonic() + 30
    while rebuilder.counts["never_ended"] < 1 and time.monotonic() < deadline:
        rebuilder.run_once(0.05)
    rebuilder.close()
    assert f"rollout {trajectory.id}: a reward came when its trajectory" in caplog.text
    assert "0.25" in caplog.text
    assert "only its start, or a reward, came here; {" in caplog.text
    assert "0.75" in caplog.text


def test_what_is_no_span_is_counted(cluster: Any, brokers: str, topics: dict[str, str]) -> None:
    """A record of something else costs no other, and is reported with its place."""
    cluster.produce(topics["spans"], b"no spans")
    cluster.flush(10)
    rebuilder = Rebuilder(
        brokers, spans=topics["spans"], trajectories=topics["trajectories"], settings=SETTINGS
    )
    deadline = time.monotonic() + 20
    while not rebuilder.counts and time.monotonic() < deadline:
        rebuilder.run_once(0.05)
    rebuilder.close()
    assert rebuilder.counts == {"unreadable": 1}


def test_no_broker_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there."""
    monkeypatch.setattr("otel_rollout.kafka.brokers.SECONDS", 0.5)
    with pytest.raises(ConfigurationError, match="no broker of Kafka answers"):
        KafkaGroups("127.0.0.1:9")
    assert main(["audit", "kafka://127.0.0.1:9/spans"]) == 2
    assert main(["audit", "kafka://127.0.0.1:9"]) == 2
