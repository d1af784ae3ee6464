"""A trainer that is much slower than its agents: the receiver keeps what it has room for."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from otel_rollout import JsonlTrajectoryExporter
from tests.kit.programs import ROOT
from tests.kit.sending import A, B, post, request, spans_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
GROUPS, SIZE, PROCESSES = 16, 8, 4
JOURNAL = 8 << 20
"""Far less than is sent; a group is a seventh of it."""
_RECEIVER = f"""
import sys, time
from otel_rollout import JsonlTrajectoryExporter
from otel_rollout.receive import Limits, TrajectoryReceiver

class Trainer:
    def __init__(self):
        self._file = JsonlTrajectoryExporter("out.jsonl")
    def export(self, trajectories):
        time.sleep(0.3)
        self._file.export(trajectories)
    def shutdown(self):
        self._file.shutdown()

with TrajectoryReceiver(
    Trainer(),
    journal="journal",
    journal_bytes={JOURNAL},
    limits=Limits(body_bytes={JOURNAL}),
    grpc=("127.0.0.1", 0),
    http=("127.0.0.1", 0),
    rollout_seconds=300,
    group_seconds=300,
) as receiver:
    print(receiver.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def slow_trainer(folder: Path) -> Iterator[tuple[int, str]]:
    """The process id and the address of a receiver with a slow trainer behind it."""
    with subprocess.Popen(
        [sys.executable, "-c", _RECEIVER],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().decode().strip()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def memory_of(pid: int, name: str) -> int:
    """Bytes that a process has (VmRSS), or had at most (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def test_memory_is_bounded(tmp_path: Path):
    """Requests that have no room are answered "retry", and are not kept."""
    half = request(spans_of(A, text="x" * (JOURNAL // 8))[:-1])
    body = request(spans_of(B, text="x" * (JOURNAL // 8))[:-1])
    with slow_trainer(tmp_path) as (pid, url):
        assert post(url, half)[0] == 200
        before = memory_of(pid, "VmRSS")
        with ThreadPoolExecutor(8) as senders:
            answers = [*senders.map(lambda _: post(url, body)[0], range(200))]
        grown = memory_of(pid, "VmHWM") - before
    assert answers == [503] * 200
    assert grown < 200 * len(body) // 4


def counts_of(url: str) -> dict[str, float]:
    """What a receiver has counted."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        rows = [line.decode().rpartition(" ") for line in answer]
    return {name.removeprefix("otel_rollout_receiver_"): float(count) for name, _, count in rows}


@pytest.mark.scale
def test_agents_keep_what_has_no_room(tmp_path: Path):
    """Parts of many groups come from several processes; all are whole in the end, and come once."""
    folders = [tmp_path / f"agents-{number}" for number in range(PROCESSES)]
    with slow_trainer(tmp_path) as (_, url):
        agents = []
        for number, folder in enumerate(folders):
            folder.mkdir()
            command = [sys.executable, "-m", "tests.backends.scale_agents", str(folder)]
            places = {"PYTHONPATH": str(ROOT), "OTEL_ROLLOUT_TRAIN_ENDPOINT": url}
            agents.append(
                subprocess.Popen(
                    [*command, str(GROUPS), str(SIZE), str(number), str(PROCESSES)],
                    cwd=folder,
                    env=os.environ | places,
                )
            )
        assert [each.wait(600) for each in agents] == [0] * PROCESSES
        until(lambda: counts_of(url)["open_rollouts"] == 0)
        counts = counts_of(url)
    came = [*JsonlTrajectoryExporter.read(tmp_path / "out.jsonl")]
    truth = {
        t.id: t for folder in folders for t in JsonlTrajectoryExporter.read(folder / "truth.jsonl")
    }
    assert counts["received_retry"] > 0
    assert counts["handed_over_whole"] == len(truth) == 2 * GROUPS * SIZE
    assert Counter(t.id for t in came) == Counter(truth.keys())
    assert all(truth[t.id] == t for t in came)
