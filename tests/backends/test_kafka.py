"""The real Kafka between agents and a trainer, while its broker and the rebuilders are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from otel_rollout import (
    JsonlTrajectoryExporter,
    Trajectory,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout.kafka import KafkaGroup, KafkaGroups, Rebuilder
from otel_rollout.testing import Reply
from tests.backends.deployed import endpoint, here, kafka_collector, rebuilder
from tests.backends.hosts import Program
from tests.backends.kafka_broker import Broker, broker
from tests.backends.programs import REPOSITORY
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.scale
SIZE = 8
"""Rollouts of a group; each has one inside it."""


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Broker]:
    """A broker with the two topics."""
    made = broker(tmp_path / "kafka")
    try:
        made.start().create("spans", "trajectories")
        yield made
    finally:
        made.program.kill()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """Programs that a test has started; they are ended with it."""
    started: list[Program] = []
    yield started
    for each in started:
        each.kill()


def agents(folder: Path, collector: Program, groups: int, number: int, stride: int) -> Program:
    """Agents with each `stride`-th sample of each group."""
    arguments = [str(folder), str(groups), str(SIZE), str(number), str(stride)]
    return Program(
        collector.host,
        [sys.executable, "-m", "tests.backends.scale_agents", *arguments],
        folder,
        "",
        {
            "OTEL_ROLLOUT_TRAIN_ENDPOINT": endpoint(collector),
            "PYTHONPATH": str(REPOSITORY),
        },
    )


def groups_of(kafka: Broker, start: Any, idle: float, count: int | None = None) -> list[KafkaGroup]:
    """The groups from a position on, so many of them, or those that come until it is quiet."""
    found: list[KafkaGroup] = []
    with KafkaGroups(kafka.address, start=start, idle_seconds=idle) as reader:
        for each in reader:
            found.append(each)
            if len(found) == count:
                break
    return found


def test_nothing_is_lost_in_silence(kafka: Broker, programs: list[Program], tmp_path: Path) -> None:
    """Broker, collector and rebuilders by SIGKILL; a rebuilder comes and goes. Each group once.

    SCALE_ROLLOUTS=80 runs fewer than 400 rollouts, SCALE_SEED= in another order.
    """
    groups = int(os.environ.get("SCALE_ROLLOUTS", "400")) // SIZE
    chance = random.Random(int(os.environ.get("SCALE_SEED", "1")))
    front = kafka_collector(here(), tmp_path / "collector", kafka.address)
    workers = [rebuilder(tmp_path / f"rebuilder-{n}", kafka.address) for n in range(2)]
    players = [agents(tmp_path / f"agents-{n}", front, groups, n, 2) for n in range(2)]
    programs += [front, *workers, *players]
    for each in programs:
        each.start()
    victims: list[Program | Broker] = [front, *workers, *workers, kafka]
    done = list[str]()
    while not all(each.has_ended() for each in players):
        victim = chance.choice(victims)
        if isinstance(victim, Broker):
            victim.program.kill()
            victim.start()
            done.append("broker")
        else:
            is_killed = chance.random() < 0.7
            (victim.kill if is_killed else victim.stop)()
            time.sleep(chance.uniform(0, 5))
            victim.start()
            done.append(f"{victim.folder.name} {'killed' if is_killed else 'stopped'}")
        time.sleep(chance.uniform(1, 4))
    assert [each.wait(1) for each in players] == [0, 0]
    truth: dict[str, Trajectory] = {}
    for each in players:
        truth |= {t.id: t for t in JsonlTrajectoryExporter.read(each.folder / "truth.jsonl")}
    half = groups_of(kafka, {}, 60, groups // 2)
    found = half + groups_of(kafka, half[-1].position, 30)
    command = [str(Path(sys.executable).with_name("otel-rollout")), "audit", "--json"]
    command += [f"kafka://{kafka.address}/spans"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    audit = json.loads(shown.stdout)
    assert shown.returncode == 0
    assert audit["announced"] == audit["ended"] == audit["whole"] == len(truth)
    print(done, kafka.records("spans"), kafka.records("trajectories"))
    came = [t for each in found for t in (*each.group, *each.group.failures, *each.group.children)]
    assert [each.missing for each in found if each.missing] == []
    assert len(found) == len({each.group.id for each in found}) == groups
    assert len(came) == len(truth) == 2 * SIZE * groups
    assert all(truth[t.id] == t for t in came)


@pytest.mark.not_replayed("the process does not know the rewards that others set")
def test_a_late_reward_counts_until_its_group_is_given(
    recording: Recording, kafka: Broker, programs: list[Program], tmp_path: Path
) -> None:
    """Whichever rebuilder has it, and however often that is killed."""
    workers = [rebuilder(tmp_path / f"rebuilder-{n}", kafka.address).start() for n in range(2)]
    programs += workers
    producer = import_module("confluent_kafka").Producer({"bootstrap.servers": kafka.address})

    def sends(*spans: Any) -> None:
        for span in spans:
            value = encode_spans([span]).SerializeToString()
            producer.produce("spans", value, f"{span.context.trace_id:032x}")
        producer.flush(30)

    def until(records: int) -> None:
        deadline = time.monotonic() + 90
        while kafka.records("trajectories") < records and time.monotonic() < deadline:
            time.sleep(0.2)

    for group, index in itertools.product(range(20), range(2)):
        with rollout("agent", group_id=f"g{group}", group_size=2, sample_index=index):
            pass
    live = {t.id: t for t in recording.trajectories}
    last = {t.trace_id for t in live.values() if t.sample_index == 1}
    first = [s for s in recording.spans if f"{s.context.trace_id:032x}" not in last]
    ends = [s for s in recording.spans if s not in first]
    sends(*first)
    until(20)
    for number, (id_, each) in enumerate(live.items()):
        record_reward(number / 8, trajectory=id_, group_id=each.group_id)
    rewards = recording.spans_named("evaluate")
    for number, reward in enumerate(rewards):
        sends(reward, reward)
        if number % 16 == 8:
            workers[number // 16 % 2].kill()
            workers[number // 16 % 2].start()
    until(20 + len(rewards))
    time.sleep(15)
    sends(*ends)
    found = groups_of(kafka, {}, 40)
    came = [t for each in found for t in each.group]
    assert [each.missing for each in found] == [[]] * 20
    expected = reconstruct(recording.spans)
    assert sorted(came, key=lambda t: t.id) == sorted(expected, key=lambda t: t.id)
    assert {t.id: t.reward for t in came} == {id_: n / 8 for n, id_ in enumerate(live)}
    record_reward(1.0, trajectory=came[0].id, name="too late", group_id=came[0].group_id)
    sends(recording.spans_named("evaluate")[-1])
    time.sleep(20)
    command = [str(Path(sys.executable).with_name("otel-rollout")), "audit", "--json"]
    command += [f"kafka://{kafka.address}/{topic}" for topic in ("spans", "trajectories")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    audit = json.loads(shown.stdout)
    assert audit["announced"] == audit["ended"] == audit["whole"] == 40
    assert [each["rollout"] for each in audit["late"]] == [came[0].id]


def test_a_trajectory_over_the_limit_is_kept(
    recording: Recording,
    clients: Clients,
    kafka: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is named with its size, its spans are kept, and it comes when the limit is raised."""
    monkeypatch.setattr("otel_rollout.kafka.rebuilder._REFUSED_SECONDS", 0.5)
    kafka.create("small", limit=2000)
    with rollout("large") as live:
        client = clients.sync(clients.serve([Reply(random.Random(1).randbytes(900).hex())]))
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    producer = import_module("confluent_kafka").Producer({"bootstrap.servers": kafka.address})
    producer.produce("spans", encode_spans(recording.spans).SerializeToString(), live.trace_id)
    producer.flush(30)
    rebuilder = Rebuilder(kafka.address, trajectories="small")

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            rebuilder.run_once(0.1)

    until(lambda: "was refused by Kafka" in caplog.text)
    assert live.id in caplog.text
    assert "max.message.bytes of the topic 'small'" in caplog.text
    assert len(rebuilder) == 1
    kafka.limit("small", 1 << 20)
    until(lambda: rebuilder.counts["written"] == 1)
    rebuilder.close()
    with KafkaGroups(kafka.address, topic="small", start={}, idle_seconds=5) as reader:
        assert [list(each.group) for each in reader] == [[live]]


def test_a_request_that_no_record_can_hold_is_refused(
    kafka: Broker, programs: list[Program], tmp_path: Path
) -> None:
    """The sender is told; the exporter would drop it."""
    front = kafka_collector(here(), tmp_path / "collector", kafka.address)
    programs.append(front.start())
    url = f"http://{front.environment['OTEL_ROLLOUT_OTLP_HTTP']}/v1/traces"
    request = urllib.request.Request(
        url, bytes(16 << 20), {"Content-Type": "application/x-protobuf"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    refused.value.close()
    assert refused.value.code == 400
    assert kafka.records("spans") == 0
