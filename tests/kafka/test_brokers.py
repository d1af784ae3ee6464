"""Spans through the client's own small brokers: rebuilt, in groups, and again from any position."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from otel_rollout import ConfigurationError, reconstruct, record_reward, rollout
from otel_rollout import semconv as sc
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


@pytest.mark.not_replayed("the process does not know the rewards that others set")
def test_a_late_reward_counts_until_its_group_is_given(
    recording: Recording,
    clients: Clients,
    cluster: Any,
    brokers: str,
    topics: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before and after its trajectory is written, in its trace or another, by another rebuilder.

    A reader that goes on from any position has the same; what comes too late is in an audit.
    """
    play(recording, clients)
    live, spans = {t.id: t for t in recording.trajectories}, recording.spans
    first, *_ = g0 = [t for t in live.values() if t.group_id == "g0"]
    inner = next(t for t in live.values() if t.parent_id == first.id)
    record_reward(0.75, trajectory=g0[1].id, name="early", group_id="g0")
    (early,) = recording.spans_named("evaluate")
    others = {t.trace_id for t in live.values() if t.group_id == "g1"}
    last = next(s for s in spans if s.attributes and s.attributes.get(sc.ROLLOUT_ID) == g0[1].id)
    of_g0 = [s for s in spans if f"{s.context.trace_id:032x}" not in others and s is not last]
    send(cluster, topics["spans"], [early, *of_g0, early])
    rebuild(brokers, topics, 2)
    record_reward(0.25, trajectory=first)
    record_reward(0.5, trajectory=inner)
    record_reward(0.125, trajectory=first.id, name="judge", group_id="g0")
    late = [s for s in recording.spans_named("evaluate") if s is not early]
    send(cluster, topics["spans"], [*late, *late])
    assert rebuild(brokers, topics, 3, "rewards")["rewards"] >= 3
    send(cluster, topics["spans"], [last])
    rebuild(brokers, topics, 2)
    record_reward(0.0625, trajectory=first.id, name="too late", group_id="g0")
    record_reward(0.03125, trajectory="a" * 32)
    too_late = [s for s in recording.spans_named("evaluate") if s not in (early, *late)]
    send(cluster, topics["spans"], too_late)
    rebuild(brokers, topics, 2, "rewards")
    (found,) = groups(brokers, topics)
    came = [*found.group, *found.group.children]
    expected = reconstruct([s for s in recording.spans if s not in too_late])
    assert sorted(came, key=lambda t: t.id) == sorted(
        (t for t in expected if t.trace_id not in others), key=lambda t: t.id
    )
    by_id = {t.id: t for t in came}
    assert (by_id[first.id].reward, by_id[inner.id].reward) == (0.25, 0.5)
    assert by_id[first.id].rewards == {"judge": 0.125}
    assert by_id[g0[1].id].rewards == {"early": 0.75}
    assert f"rollout {first.id}: a reward came, when its group had been given: " in caplog.text
    assert "0.0625" in caplog.text
    assert main(["audit", "--json", f"kafka://{brokers}/{topics['trajectories']}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ended"] == report["whole"] == 4
    assert sorted((e["rollout"], e["group"]) for e in report["late"]) == sorted(
        [(first.id, "g0"), ("a" * 32, None)]
    )


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
