"""A receiver that is killed at random moments: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import grpc
import pytest

from otel_rollout.receive import HeadFile
from tests.kit.ports import free_ports
from tests.kit.sending import Span, lines, post, request, spans_of, start_of, until

KILLS = int(os.environ.get("RECEIVER_KILLS", "3"))
"""How often it is killed; a longer run names more."""
GROUPS, SIZE = 4 * KILLS, 4
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


_MAIN = "import sys; from otel_rollout.command import main; sys.exit(main())"


class Program:
    """`otel-rollout receive`, begun again and again."""

    def __init__(self, folder: Path) -> None:
        self.grpc, self.http = free_ports(2)
        self.out, self.journal = folder / "out.jsonl", folder / "journal"
        self.starts = 0
        self._log = folder / "log"

    def start(self) -> None:
        """Begin it, and wait until it listens."""
        self.starts += 1
        arguments = (
            *("--out", self.out, "--journal", self.journal, "--jobs", "1"),
            *("--grpc", f"127.0.0.1:{self.grpc}", "--http", f"127.0.0.1:{self.http}"),
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, "receive", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        expected = f"grpc 127.0.0.1:{self.grpc} http http://127.0.0.1:{self.http}\n"
        assert line == expected, self._log.read_text()[-2000:]

    def children(self) -> list[Path]:
        """The processes that it has begun."""
        own = Path(f"/proc/{self._process.pid}/task")
        found = [path.read_text().split() for path in own.glob("*/children")]
        return [Path("/proc") / pid for each in found for pid in each]

    def end(self, number: signal.Signals) -> int:
        """Send it a signal, and wait for its end."""
        self._process.send_signal(number)
        status = self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


def pieces(number: int, order: random.Random) -> Iterator[list[Span]]:
    """The spans of the rollouts of a group, in pieces, some of them twice."""
    spans = list[Span]()
    for sample in range(SIZE):
        named = {"ROLLOUT_GROUP_ID": f"g{number}", "ROLLOUT_GROUP_SIZE": SIZE}
        rollout = f"{number:04x}{sample:04x}" * 4
        spans += [start_of(rollout, **named), *spans_of(rollout, 3, text="x" * 500, **named)]
    order.shuffle(spans)
    spans += spans[::5]
    while spans:
        count = order.randint(1, 8)
        yield spans[:count]
        del spans[:count]


def send_http(program: Program, body: bytes) -> bool:
    """Send over HTTP; True if it was acknowledged."""
    try:
        return post(f"http://127.0.0.1:{program.http}", body)[0] == 200
    except (OSError, ValueError):
        return False


def send_grpc(program: Program, body: bytes) -> bool:
    """Send over gRPC; likewise."""
    with grpc.insecure_channel(f"127.0.0.1:{program.grpc}") as channel:
        try:
            channel.unary_unary(METHOD)(body, timeout=5)
        except grpc.RpcError:
            return False
    return True


def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path):
    """Each group is there once, whole, its lines one after the other."""
    program, order = Program(tmp_path), random.Random(KILLS)
    program.start()
    senders = list[threading.Thread]()
    for way, send in enumerate((send_http, send_grpc)):
        bodies = [
            request(piece) for number in range(way, GROUPS, 2) for piece in pieces(number, order)
        ]

        def send_all(bodies: list[bytes] = bodies, send: object = send) -> None:
            for body in bodies:
                while not send(program, body):  # type: ignore[operator]
                    time.sleep(0.02)
                time.sleep(0.005)

        senders.append(threading.Thread(target=send_all))
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders) and program.starts <= KILLS:
        time.sleep(order.uniform(0.05, 0.5))
        program.end(signal.SIGKILL)
        program.start()
    for sender in senders:
        sender.join()
    until(lambda: len(lines(program.out)) >= GROUPS * SIZE)
    time.sleep(0.3)
    assert program.end(signal.SIGTERM) == 0
    found = lines(program.out)
    assert Counter(line["id"] for line in found) == Counter(
        f"{number:04x}{sample:04x}" * 4 for number in range(GROUPS) for sample in range(SIZE)
    )
    assert not any(line["missing_calls"] for line in found if "missing_calls" in line)
    runs = [group for group, _ in groupby(line["group_id"] for line in found)]
    assert len(runs) == GROUPS
    heads = HeadFile(program.journal, reads=True)
    assert all(unit.is_done and unit.whole == SIZE for unit in heads.units())
    assert [*heads.late_spans()] == []
    assert all(head.is_whole for head in heads.heads())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_a_killed_receiver_leaves_no_process(tmp_path: Path):
    """What it has begun ends with it."""
    program = Program(tmp_path)
    program.start()
    assert send_http(program, request(spans_of("a" * 32)))
    until(lambda: len(lines(program.out)) == 1)
    children = program.children()
    assert children
    program.end(signal.SIGKILL)
    until(lambda: not any(path.exists() for path in children))
