"""A collector on each host, as deploy/ has it: what arrives where, while anything is killed."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from otel_rollout import JsonlTrajectoryExporter, Trajectory
from tests.backends.deployed import DEPLOY, agents_collector, endpoint, receiver
from tests.backends.hosts import Host, Program, hosts
from tests.backends.judging import arrived, audited, judge, metric, open_rollouts
from tests.backends.programs import REPOSITORY, binary
from tests.kit.sending import A, request, spans_of, until

pytestmark = pytest.mark.scale

SIZE = 8
"""Rollouts of a group."""


@pytest.fixture(scope="session")
def otelcol() -> Path:
    """The collector with the parts for many hosts."""
    return binary("otelcol-scale")


@pytest.mark.parametrize("name", ["collector-agent.yaml", "collector-kafka.yaml"])
def test_the_shipped_config_is_valid(otelcol: Path, name: str, tmp_path: Path) -> None:
    """`otelcol validate` finds nothing wrong with it, and something with a broken copy."""
    text = (DEPLOY / name).read_text()
    broken = tmp_path / name
    broken.write_text(text.replace("max_elapsed_time:", "max_elapsed_tyme:"))
    for path, status in ((DEPLOY / name, 0), (broken, 1)):
        command = [str(otelcol), "validate", "--config", str(path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert found.returncode == status, found.stderr


@dataclass
class Tiers:
    """Two hosts of agents with a collector each, and two receivers."""

    folder: Path
    agents: list[Host]
    receivers: list[Program]
    collectors: list[Program]
    running: list[Program] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        """Where the collectors listen, over HTTP."""
        return [*map(endpoint, self.collectors)]

    def play(self, groups: int, processes: int = 2) -> None:
        """Start agents on both hosts: each has some samples of each group."""
        stride = len(self.agents) * processes
        for number in range(stride):
            host, folder = number % len(self.agents), self.folder / f"agents-{number}"
            arguments = [str(folder), str(groups), str(SIZE), str(number), str(stride)]
            program = Program(
                self.agents[host],
                [sys.executable, "-m", "tests.backends.scale_agents", *arguments],
                folder,
                "",
                {
                    "OTEL_ROLLOUT_TRAIN_ENDPOINT": self.endpoints[host],
                    "SCALE_SKEW": str(host * 600),
                    "PYTHONPATH": str(REPOSITORY),
                },
            )
            self.running.append(program.start())

    def truth(self) -> dict[str, Trajectory]:
        """The trajectories as they were in the agents' processes."""
        paths = [each.folder / "truth.jsonl" for each in self.running]
        return {t.id: t for path in paths for t in JsonlTrajectoryExporter.read(path)}

    def end(self) -> None:
        """End everything."""
        for each in (*self.running, *self.collectors, *self.receivers):
            each.kill()

    def wait(self, seconds: float) -> None:
        """Until the agents have ended; each says that all of its spans were acknowledged."""
        for program in self.running:
            assert program.wait(seconds) == 0, program.log.read_text()[-3000:]


@contextmanager
def tiers(folder: Path, otelcol: Path, *options: str, **environment: str) -> Iterator[Tiers]:
    """All of it, started. options, environment: of the receivers."""
    with hosts("agents-0", "agents-1", "receiver-0", "receiver-1") as net, ExitStack() as stack:
        receivers = [
            receiver(net[f"receiver-{n}"], folder / f"receiver-{n}", *options, **environment)
            for n in range(2)
        ]
        addresses = [each.command[-1] for each in receivers]
        collectors = [
            agents_collector(net[f"agents-{n}"], folder / f"collector-{n}", addresses)
            for n in range(2)
        ]
        made = Tiers(folder, [net["agents-0"], net["agents-1"]], receivers, collectors)
        stack.callback(made.end)
        for each in (*receivers, *collectors):
            each.start()
        yield made


def settled(made: Tiers, seconds: float) -> list[dict[str, Trajectory]]:
    """What is at the receivers once nothing is on its way, and no rollout is open."""
    deadline = time.monotonic() + seconds
    while any(map(waiting, made.collectors)) or any(map(open_rollouts, made.receivers)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return arrived(made.receivers)


def end_of_time(made: Tiers, seconds: float) -> None:
    """Once nothing is on its way, start the receivers with time-outs of seconds."""
    deadline = time.monotonic() + seconds
    while any(map(waiting, made.collectors)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    for each in made.receivers:
        each.command[2:2] = ["--rollout-timeout", "5", "--group-timeout", "5"]
        each.restart()


def waiting(collector: Program) -> float:
    """Bytes in the collector's queue, as it counts them."""
    address = f"127.0.0.1:{collector.environment['OTEL_ROLLOUT_METRICS_PORT']}"
    return metric(collector.host, address, "otelcol_exporter_queue_size")


def test_each_group_is_whole_at_one_receiver(otelcol: Path, tmp_path: Path) -> None:
    """Samples of a group from several processes of two hosts, whose traces have other groups."""
    with tiers(tmp_path, otelcol) as made:
        made.play(12)
        made.wait(120)
        truth = made.truth()
        found = settled(made, 60)
        audit = audited(made.receivers)
    assert len(truth) == 12 * SIZE * 2  # each has one inside it
    assert judge(truth, found, audit) == []
    assert all(len(each) > SIZE for each in found)
    assert audit["status"] == 0
    assert audit["announced"] == audit["ended"] == audit["whole"] == len(truth)


def test_nothing_is_lost_in_silence(otelcol: Path, tmp_path: Path) -> None:
    """Agents, collectors, receivers are killed, stopped, cut off; clocks differ.

    At first the queue of a collector and the disk of a receiver are full.
    SCALE_ROLLOUTS=2000 runs more than 400 rollouts, SCALE_SEED= in another order.
    """
    groups = int(os.environ.get("SCALE_ROLLOUTS", "400")) // SIZE
    chance = random.Random(int(os.environ.get("SCALE_SEED", "1")))
    done = Counter[str]()
    with tiers(tmp_path, otelcol) as made:
        with full_queue(made.collectors[0]), full_disk(made.receivers[1]):
            made.play(groups)
            time.sleep(5)
            with made.receivers[0].stopped(), made.receivers[1].stopped():
                time.sleep(5)
        while running := [each for each in made.running if not each.has_ended()]:
            victim = chance.choice([*made.collectors, *made.receivers, chance.choice(running)])
            done[harm(victim, chance, longest=min(60, groups / 4))] += 1
            time.sleep(chance.uniform(0.5, 3))
        made.wait(1)
        truth = made.truth()
        end_of_time(made, 180)
        found = settled(made, 300)
        audit = audited(made.receivers)
    shown = {key: value for key, value in audit.items() if isinstance(value, int)}
    shown |= {key: len(value) for key, value in audit.items() if isinstance(value, list)}
    print(len(truth), "trajectories;", dict(done), shown)
    assert len(truth) >= groups * SIZE * 2
    assert judge(truth, found, audit) == []
    assert audit["incomplete"] == []
    at_kills = LOST_AT_A_KILL * done["agents: killed"]
    assert len(audit["never_ended"]) <= at_kills


LOST_AT_A_KILL = 16
"""Rollouts at most that run in a process of agents, those inside them included."""


def harm(victim: Program, chance: random.Random, longest: float) -> str:
    """Kill, stop or cut off a program, for some seconds; what was done to what."""
    kind = victim.folder.name.partition("-")[0]
    how = chance.choice(("killed", "away", "stopped", "cut"))
    if how == "killed" or kind == "agents":
        victim.restart()
        return f"{kind}: killed"
    if how == "away":
        victim.kill()
        time.sleep(chance.uniform(1, longest / 3))
        victim.start()
    elif how == "stopped":  # as slow as can be
        with victim.stopped():
            time.sleep(chance.uniform(1, longest / 3))
    else:
        with victim.host.cut_off():
            time.sleep(chance.uniform(1, longest))
    return f"{kind}: {how}"


@contextmanager
def full_queue(collector: Program) -> Iterator[None]:
    """The queue of a collector takes 4 MiB meanwhile: it refuses, and senders keep what they have.

    A disk that is full is another matter: what the collector has acknowledged may be lost then.
    """
    environment = collector.environment
    collector.environment = {**environment, "OTEL_ROLLOUT_QUEUE_BYTES": str(4 << 20)}
    collector.restart()
    yield
    collector.environment = environment
    collector.restart()


@contextmanager
def full_disk(receiver: Program) -> Iterator[None]:
    """The journal of a receiver is on a disk of 4 MiB meanwhile, where disks can be mounted."""
    journal, moved = receiver.folder / "journal", receiver.folder / "moved"
    receiver.stop()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(journal)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    receiver.start()
    yield
    if is_mounted:
        receiver.stop()
        shutil.copytree(journal, moved)
        subprocess.run(["umount", str(journal)], check=True)
        shutil.copytree(moved, journal, dirs_exist_ok=True)
        receiver.start()


@pytest.mark.parametrize("size", [3000, 9000])
def test_what_receivers_refuse_for_good_is_named(otelcol: Path, tmp_path: Path, size: int) -> None:
    """The collector drops it and logs that; the rollout is incomplete by its counts."""
    given = {"OTEL_ROLLOUT_RECEIVER_BODY_BYTES": "6000"}
    call, own = spans_of(A, 1, text="x" * size)
    (tmp_path / "call").write_bytes(request([call]))
    (tmp_path / "own").write_bytes(request([own]))
    with tiers(tmp_path, otelcol, "--rollout-timeout", "1", **given) as made:
        for name in ("call", "own"):
            sent = ["curl", "-sf", "-H", "Content-Type: application/x-protobuf", "--data-binary"]
            sent += [f"@{tmp_path / name}", f"{made.endpoints[0]}/v1/traces"]
            subprocess.run(made.agents[0].command(*sent), check=True, timeout=60)
        until(lambda: any(arrived(made.receivers)))
        until(lambda: "Dropping data" in made.collectors[0].log.read_text())
        report = audited(made.receivers)
    assert (report["status"], report["whole"]) == (1, 0)
    assert [each["rollout"] for each in report["incomplete"]] == [A]
