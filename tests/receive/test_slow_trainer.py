"""A trainer that is much slower than its agents: the receiver keeps what it has room for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.programs import ROOT
from tests.kit.sending import A, B, post, request, spans_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
JOURNAL = 2 << 20
"""Far less than is sent."""
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
