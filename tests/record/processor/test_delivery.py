"""Exporters that raise, hang or are slow: each costs what it was given, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    TrajectorySpanProcessor,
    rollout,
)
from otel_rollout.record.delivery import Delivery


class Exporter:
    """Counts what it was given; a test replaces what it needs."""

    def __init__(
        self, export: Callable[[], object] = lambda: None, *, blocking: bool = True
    ) -> None:
        self.blocking = blocking
        self.names: list[str] = []
        self._export = export

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        self._export()
        self.names += [trajectory.name for trajectory in trajectories]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        pass


def fail(error: BaseException) -> Callable[[], object]:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    """A provider of the test's own; rollouts go to it."""
    made = TracerProvider()
    trace.set_tracer_provider(made)
    yield made
    made.shutdown()


def run(count: int, text: str = "") -> list[str]:
    names = [f"{number}" for number in range(count)]
    for name in names:
        with rollout(name) as trajectory:
            trajectory.metadata["text"] = text
    return names


@pytest.mark.parametrize("error", [ValueError(), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_whatever_an_exporter_raises_stops_no_other(error: BaseException, provider: TracerProvider):
    """Also what would end a program: the others have all, the thread goes on, all is counted."""
    raising, other, memory = Exporter(fail(error)), Exporter(), InMemoryTrajectoryExporter()
    processor = TrajectorySpanProcessor(raising, other, memory)
    provider.add_span_processor(processor)
    names = run(50)
    assert processor.force_flush()
    assert other.names == names
    assert len(memory.get_finished_trajectories()) == 50
    assert processor.dropped == 50


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_what_ends_a_program_does_not_reach_the_agent(
    error: BaseException, provider: TracerProvider
):
    """An exporter that is called on the agent's thread cannot end the agent either."""
    raising, other = Exporter(fail(error), blocking=False), Exporter(blocking=False)
    processor = TrajectorySpanProcessor(raising, other)
    provider.add_span_processor(processor)
    assert other.names == run(3)
    assert processor.dropped == 3


def test_an_interrupt_reaches_the_agent_and_the_other_exporters(provider: TracerProvider):
    """Ctrl-C during an export is the user's; the trajectory still goes to the other exporters."""
    interrupted = Exporter(fail(KeyboardInterrupt()), blocking=False)
    others = Exporter(blocking=False), Exporter()
    processor = TrajectorySpanProcessor(others[0], interrupted, others[1])
    provider.add_span_processor(processor)
    with pytest.raises(KeyboardInterrupt), rollout("x"):
        pass
    assert processor.force_flush()
    assert [other.names for other in others] == [["x"], ["x"]]


@pytest.mark.parametrize("end", ["force_flush", "shutdown"])
@pytest.mark.parametrize("error", [ValueError(), SystemExit(3)])
def test_an_exporter_that_fails_to_end_stops_no_other(
    end: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
):
    """Each is flushed and shut down, and the failure is the result."""
    raising, other = Exporter(), Exporter()
    calls: list[str] = []
    monkeypatch.setattr(raising, end, fail(error))
    monkeypatch.setattr(other, end, lambda *_: calls.append(end))
    otel_rollout.configure("x", [raising, other])
    names = run(2)
    assert not otel_rollout.shutdown()
    assert other.names == names
    assert calls[0] == end


@pytest.mark.parametrize("where", ["export", "force_flush", "shutdown"])
def test_a_hanging_exporter_is_left_behind(where: str, monkeypatch: pytest.MonkeyPatch):
    """The end comes in time, and an exporter beside it has everything."""
    go = threading.Event()
    stuck, other = Exporter(), Exporter()
    monkeypatch.setattr(stuck, where, lambda *_: go.wait(60))
    otel_rollout.configure("x", [stuck, other])
    monkeypatch.setattr("otel_rollout.record.processor._LAST_SECONDS", 0.2)
    monkeypatch.setattr("otel_rollout.lanes._LAST_SECONDS", 0.2)
    names = run(5)
    began = time.monotonic()
    assert not otel_rollout.shutdown(2000)
    assert time.monotonic() - began < 15
    assert other.names == names
    go.set()


@pytest.mark.not_replayed("texts are on no span that is exported")
def test_what_waits_is_bounded_without_content_too():
    """Texts that `content="none"` keeps off the spans are in memory all the same."""
    go = threading.Event()
    provider = otel_rollout.configure(
        "x", [Exporter(lambda: go.wait(30))], content="none", max_bytes=1 << 20
    )
    run(100, "x" * 100_000)
    (processor, *_) = provider._active_span_processor._span_processors
    assert isinstance(processor, TrajectorySpanProcessor)
    assert 85 < processor.dropped < 97
    go.set()
    assert not otel_rollout.shutdown()


def test_what_comes_after_the_end_is_counted(caplog: pytest.LogCaptureFixture):
    """A rollout may end just when the exporters are closed: it is not lost without a word."""
    delivery = Delivery(Exporter(), max_waiting=10, max_bytes=10)
    delivery.close()
    delivery.hand_over(Trajectory(id="late"), 1)
    assert delivery.dropped == 1
    assert "trajectory late was not exported" in caplog.text


def test_a_stuck_exporter_holds_bounded_text(
    provider: TracerProvider, caplog: pytest.LogCaptureFixture
):
    """What waits is bounded in bytes, not in number alone; the rest is counted and logged."""
    go = threading.Event()
    stuck = Exporter(lambda: go.wait(30))
    processor = TrajectorySpanProcessor(stuck, max_bytes=1 << 20)
    provider.add_span_processor(processor)
    run(100, "x" * 100_000)
    dropped = processor.dropped
    assert 85 < dropped < 97
    assert caplog.text.count("(TrajectorySpanProcessor(max_bytes=...))") == dropped
    go.set()
    assert processor.force_flush()
    assert len(stuck.names) == 100 - dropped
    assert run(1, "x" * 3_000_000) == ["0"]  # there is room for one of any size, if none waits
    assert processor.force_flush()
    assert stuck.names[-1] == "0"
    assert processor.dropped == dropped


def test_shutdown_says_that_trajectories_were_lost(caplog: pytest.LogCaptureFixture):
    """Also long before it: the number is in the log."""
    otel_rollout.configure("x", [Exporter(fail(ValueError()))])
    run(3)
    assert not otel_rollout.shutdown()
    assert "3 trajectories did not reach their exporters" in caplog.text
    otel_rollout.configure("x", [Exporter()])
    run(3)
    assert otel_rollout.shutdown()


EXIT = """
import sys, threading, otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, JsonlTrajectoryExporter, rollout

class Stuck(InMemoryTrajectoryExporter):
    def {where}(self, *_):
        threading.Event().wait()

stuck = Stuck()
stuck.blocking = True
exporters = [stuck, JsonlTrajectoryExporter(sys.argv[1])]
provider = otel_rollout.configure("x", exporters, instrumentor=None)
with rollout("x"):
    pass
otel_rollout.record.processor._LAST_SECONDS = 0.5
if {explicit}:
    otel_rollout.shutdown(2000)
else:
    processor = provider._active_span_processor._span_processors[0]
    processor.shutdown.__func__.__defaults__ = (2000,)
print("done")
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("where", ["export", "force_flush", "shutdown"])
def test_a_program_with_a_hanging_exporter_ends(where: str, explicit: bool, tmp_path: Path):
    """With its own output and exit code, also without a word about shutdown."""
    path = tmp_path / "t.jsonl"
    program = EXIT.format(where=where, explicit=explicit)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert [trajectory.name for trajectory in JsonlTrajectoryExporter.read(path)] == ["x"]
