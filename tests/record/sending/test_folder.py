"""Spans that wait on the disk: those of a process that is killed, or that ends too early."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import ConfigurationError, reconstruct, rollout
from otel_rollout.record import Outlet, Sender
from otel_rollout.record.sending.spool import KeptSpan, Spool
from tests.kit.disks import full_disk
from tests.kit.receivers import AWAY, HttpReceiver

PROGRAM = """
import sys, time, otel_rollout
from otel_rollout import rollout
otel_rollout.configure("x", train_endpoint=sys.argv[1], train_folder=sys.argv[2],
    instrumentor=None, max_bytes=int(sys.argv[3]))
for number in range(20):
    with rollout(f"{number}", group_id="g") as trajectory:
        trajectory.metadata["text"] = "x" * 1000
"""
FORKS = """
import os
if os.fork() == 0:
    with rollout("child", group_id="g"):
        pass
    otel_rollout.shutdown(200)
    os._exit(0)
os.wait()
with rollout("parent", group_id="g"):
    pass
otel_rollout.shutdown(200)
"""


KILLED = """
import os, signal
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_AT_ONCE = """
import os, signal
with rollout("killed", group_id="g", group_size=2):
    os.kill(os.getpid(), signal.SIGKILL)
"""
NUMBERS = {str(number) for number in range(20)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders send soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def run(receiver: HttpReceiver, folder: Path, more: str, max_bytes: int = 1 << 20) -> int:
    """Run the program; its exit status. The receiver takes nothing meanwhile."""
    receiver.refuse = lambda _: AWAY
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + more]
    done = subprocess.run([*command, receiver.url, str(folder), f"{max_bytes}"], timeout=60)
    assert receiver.spans == []
    receiver.refuse = lambda _: 0
    return done.returncode


def configure(receiver: HttpReceiver, folder: Path) -> None:
    otel_rollout.configure("x", train_endpoint=receiver.url, train_folder=folder, instrumentor=None)


def send_what_is_there(receiver: HttpReceiver, folder: Path) -> set[str | None]:
    """The names of the rollouts that a process sends that does nothing else."""
    configure(receiver, folder)
    deadline = time.monotonic() + 20
    while not receiver.spans and time.monotonic() < deadline:
        time.sleep(0.02)
    assert otel_rollout.shutdown()
    return {each.name for each in reconstruct(receiver.spans)}


@pytest.mark.slow
def test_a_killed_process_is_continued(tmp_path: Path):
    """What it had on the disk the next process sends, also what found no room in memory."""
    with HttpReceiver() as receiver:
        assert run(receiver, tmp_path, KILLED, max_bytes=6000) == -signal.SIGKILL
        assert send_what_is_there(receiver, tmp_path) == NUMBERS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_process_is_killed_while_a_receiver_hangs(tmp_path: Path):
    """What began and ended meanwhile is on the disk."""
    with HttpReceiver() as receiver:
        receiver.go.clear()
        assert run(receiver, tmp_path, KILLED) == -signal.SIGKILL
        receiver.go.set()
        assert send_what_is_there(receiver, tmp_path) == NUMBERS


@pytest.mark.slow
def test_a_rollout_that_began_is_known(tmp_path: Path):
    """Its start is on the disk before its code runs, whatever waits before it."""
    with HttpReceiver() as receiver:
        assert run(receiver, tmp_path, KILLED_AT_ONCE) == -signal.SIGKILL
        send_what_is_there(receiver, tmp_path)
    started = [dict(s.attributes or {}) for s in receiver.spans if s.name == "rollout started"]
    assert len(started) == 21
    assert [s["gen_ai.agent.name"] for s in started if "rollout.group_size" in s] == ["killed"]


def test_a_rollout_that_starts_while_another_start_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On the same thread, as a handler of a signal may: it waits no longer than it must."""
    keep, inside = Spool.keep, list[bool]()

    def interrupted(spool: Spool, span: ReadableSpan) -> KeptSpan:
        if not inside:
            inside.append(True)
            with rollout("handler"):
                pass
        return keep(spool, span)

    monkeypatch.setattr(Spool, "keep", interrupted)
    with HttpReceiver() as receiver:
        configure(receiver, tmp_path)
        with rollout("x"):
            pass
        assert otel_rollout.shutdown()
        assert {each.name for each in reconstruct(receiver.spans)} == {"x", "handler"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_keeps_its_own(tmp_path: Path):
    """Each has a journal; both leave there what `shutdown` could not send."""
    with HttpReceiver() as receiver:
        assert run(receiver, tmp_path, FORKS) == 0
        assert len([*tmp_path.rglob("*.segment")]) == 2
        assert send_what_is_there(receiver, tmp_path) == NUMBERS | {"child", "parent"}
        names = [span.name for span in receiver.spans]
    assert len(names) == len({span.span_id for span in receiver.spans}) == 44
    assert list(tmp_path.iterdir()) == []


def test_what_shutdown_could_not_send_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It is False, the log names the folder, and the next set-up of this process sends it."""
    with HttpReceiver() as receiver:
        receiver.refuse = lambda _: AWAY
        configure(receiver, tmp_path)
        with rollout("x") as live:
            pass
        assert not otel_rollout.shutdown(300)
        said = caplog.records[-1].getMessage()
        assert re.match(
            r"2 of 2 spans did not reach OTLPSpanExporter \(\S+\); 2 of them are in ", said
        )
        assert str(tmp_path) in said
        receiver.refuse = lambda _: 0
        assert send_what_is_there(receiver, tmp_path) == {"x"}
    assert reconstruct(receiver.spans) == [live]
    assert list(tmp_path.iterdir()) == []


def test_what_ends_while_a_receiver_hangs_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It was in memory alone until `shutdown`."""
    with HttpReceiver() as receiver:
        receiver.go.clear()
        configure(receiver, tmp_path)
        with rollout("x"):
            time.sleep(0.3)  # its start is at the receiver now
        assert not otel_rollout.shutdown(300)
        assert "; 2 of them are in " in caplog.text
        receiver.go.set()
        assert send_what_is_there(receiver, tmp_path) == {"x"}


def test_what_arrived_is_not_kept(tmp_path: Path):
    """While the process runs, too: a segment is deleted when all in it has arrived."""
    with HttpReceiver() as receiver:
        configure(receiver, tmp_path)
        with rollout("x"):
            assert [*tmp_path.glob("*/lock")]
        assert otel_rollout.shutdown()
        assert len(receiver.spans) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_span_that_cannot_be_written_costs_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The others are in the folder, and the log says that it is not."""
    keep = Spool.keep

    def picky(spool: Spool, span: ReadableSpan) -> KeptSpan:
        if span.name == "invoke_agent 2":
            time.sleep(0.3)  # the others end meanwhile
        if span.name == "invoke_agent 1":
            raise ValueError("odd")
        return keep(spool, span)

    with HttpReceiver() as receiver:
        receiver.refuse = lambda _: AWAY
        configure(receiver, tmp_path)
        monkeypatch.setattr(Spool, "keep", picky)
        with rollout("0"), rollout("1"), rollout("2"):
            pass
        assert not otel_rollout.shutdown(300)
        assert "a span waits in memory" in caplog.text
        monkeypatch.undo()
        receiver.refuse = lambda _: 0
        send_what_is_there(receiver, tmp_path)
    names = [span.name for span in receiver.spans]
    assert sorted(names) == ["invoke_agent 0", "invoke_agent 2", *["rollout started"] * 3]


def test_a_damaged_record_costs_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The others are sent, and the log names the place."""
    with HttpReceiver() as receiver:
        receiver.refuse = lambda _: AWAY
        configure(receiver, tmp_path)
        for number in range(3):
            with rollout(f"{number}"):
                pass
        assert not otel_rollout.shutdown(300)
        (segment,) = tmp_path.rglob("*.segment")
        data = segment.read_bytes()
        segment.write_bytes(data.replace(b"invoke_agent 1", b"invoke_agent 7"))
        receiver.refuse = lambda _: 0
        assert "1" not in send_what_is_there(receiver, tmp_path)
    assert "spans are lost" in caplog.text
    names = [span.name for span in receiver.spans]
    assert sorted(names) == ["invoke_agent 0", "invoke_agent 2", *["rollout started"] * 3]


def test_a_folder_needs_an_exporter_that_takes_what_is_in_it(tmp_path: Path):
    """Another one would send requests without spans."""
    with pytest.raises(ConfigurationError, match="expected an OTLP exporter of a version"):
        Sender(Outlet(InMemorySpanExporter()), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_full_lets_spans_wait_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """They arrive all the same, and the log says so."""
    with HttpReceiver() as receiver, full_disk(50):
        configure(receiver, tmp_path)
        with rollout("x"):
            pass
        assert otel_rollout.shutdown()
    assert len(receiver.spans) == 2
    assert "spans wait in memory, not in " in caplog.text
