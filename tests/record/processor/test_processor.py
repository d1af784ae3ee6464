"""The train lane: never in the agent's way, bounded, and honest about what it could not keep."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    TrajectorySpanProcessor,
    reconstruct,
    rollout,
)
from otel_rollout.spans.reader import ExchangeReader
from otel_rollout.testing import Reply
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Clients, Recording


def ask(client: openai.OpenAI, *texts: str) -> Any:
    messages: list[Any] = [{"role": "user", "content": text} for text in texts]
    return client.chat.completions.create(model="m", messages=messages)


class Exporter:
    """Does what a test wants of `export`, and remembers who called."""

    def __init__(self, export: Callable[[Trajectory], object], *, blocking: bool = True) -> None:
        self.blocking = blocking
        self.calls: list[str] = []
        self.threads: list[int] = []
        self._export = export

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        self.calls += [trajectory.name for trajectory in trajectories]
        self.threads.append(threading.get_ident())
        for trajectory in trajectories:
            self._export(trajectory)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    """A provider of the test's own; rollouts go to it."""
    made = TracerProvider()
    trace.set_tracer_provider(made)
    yield made
    made.shutdown()


# --- never in the agent's way


@pytest.mark.parametrize("blocking", [True, False])
def test_an_exporter_that_raises_is_logged_and_counted(
    provider: TracerProvider, caplog: pytest.LogCaptureFixture, blocking: bool
):
    """A broken exporter costs a log line; the agent and the other exporters do not notice."""
    error = RuntimeError("disk full")

    def broken(_: Trajectory) -> None:
        raise error

    memory = InMemoryTrajectoryExporter()
    processor = TrajectorySpanProcessor(Exporter(broken, blocking=blocking), memory)
    provider.add_span_processor(processor)
    for _ in range(2):
        with rollout("x") as trajectory:
            pass
    assert processor.force_flush()
    assert memory.get_finished_trajectories()[1] is trajectory
    assert processor.dropped == 2
    logged = [record for record in caplog.records if record.name == "otel_rollout"]
    logged = [record for record in logged if NO_CALL.words not in record.getMessage()]
    assert [record.levelno for record in logged] == [logging.ERROR] * 2
    assert trajectory.id in logged[1].getMessage()
    assert logged[1].exc_info
    assert logged[1].exc_info[1] is error


def test_a_slow_exporter_delays_nobody(provider: TracerProvider):
    """Rollouts end while an exporter waits on its own thread; it gets them in order, once each."""
    go = threading.Event()
    slow = Exporter(lambda _: go.wait(30))
    processor = TrajectorySpanProcessor(slow)
    provider.add_span_processor(processor)
    for name in ("a", "b"):
        with rollout(name):
            pass
    assert not processor.force_flush(100)
    assert "b" not in slow.calls
    go.set()
    assert processor.force_flush()
    assert slow.calls == ["a", "b"]
    assert len(set(slow.threads)) == 1
    assert threading.get_ident() not in slow.threads


def test_an_exporter_that_does_not_block_has_it_at_once(provider: TracerProvider):
    """`blocking = False`: the trajectory is there when the rollout's function returns."""
    quick = Exporter(lambda _: None, blocking=False)
    provider.add_span_processor(TrajectorySpanProcessor(quick))
    with rollout("x"):
        assert quick.calls == []
    assert quick.calls == ["x"]
    assert quick.threads == [threading.get_ident()]


@pytest.mark.parametrize("blocking", [True, False])
def test_calls_of_an_exporter_never_overlap(provider: TracerProvider, blocking: bool):
    """Rollouts that end on many threads at once reach an exporter one after the other."""
    inside, most = 0, 0

    def export(_: Trajectory) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1

    exporter = Exporter(export, blocking=blocking)
    processor = TrajectorySpanProcessor(exporter)
    provider.add_span_processor(processor)

    def run(_: int) -> None:
        with rollout("x"):
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(80)))
    assert processor.force_flush()
    assert len(exporter.calls) == 80
    assert most == 1


@pytest.mark.not_replayed("a trajectory must not be held")
def test_an_exporter_runs_in_no_rollout(provider: TracerProvider, clients: Clients):
    """What a blocking exporter does belongs to no rollout, and it holds no trajectory alive."""
    client = clients.sync(clients.serve())

    def judge(_: Trajectory) -> None:
        with rollout("judge"):
            ask(client, "good?")

    judging = Exporter(lambda t: judge(t) if t.name == "x" else None)
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[judging, memory])
    with rollout("x"):
        pass
    while len(judging.calls) < 2:
        time.sleep(0.001)
    first, judged = memory.take(2, timeout=10)
    assert (judged.name, judged.parent_id) == ("judge", None)
    assert judged.trace_id != first.trace_id
    lives = weakref.ref(first)
    with rollout("another"):
        pass
    provider.force_flush()
    del first
    gc.collect()
    assert lives() is None


def test_foreign_spans_are_passed_over(
    provider: TracerProvider, caplog: pytest.LogCaptureFixture, clients: Clients
):
    """Spans of others, even with attributes like ours, are no rollout and no reason to log."""
    memory = InMemoryTrajectoryExporter()
    provider.add_span_processor(TrajectorySpanProcessor(memory))
    for scope in ("other", "otel_rollout"):
        tracer = provider.get_tracer(scope)
        attributes: list[dict[str, Any]] = [
            {},
            {"rollout.id": 7},
            {"rollout.id": "x", "rollout.exchange.version": 1},
        ]
        for attribute in attributes:
            tracer.start_span("invoke_agent x", attributes=attribute).end()
    provider.get_tracer("other").start_span(
        "invoke_agent x", attributes={"rollout.id": "x", "rollout.schema_version": 1}
    ).end()
    assert memory.get_finished_trajectories() == ()
    assert caplog.records == []


# --- bounded


class WeakSpans(SpanProcessor):
    """Remembers every ended span without keeping it."""

    def __init__(self) -> None:
        self.ended: list[weakref.ref[ReadableSpan]] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(weakref.ref(span))


@pytest.mark.not_replayed("spans must not be held")
def test_nothing_is_kept_of_a_rollout_that_was_handed_over(clients: Clients):
    """After the end no buffer is left and the spans are garbage, though the trajectory lives."""
    memory = InMemoryTrajectoryExporter()
    provider = otel_rollout.configure("x", [memory])
    weak = WeakSpans()
    provider.add_span_processor(weak)
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        for number in range(5):
            ask(client, f"{number}")
        (processor,) = (
            found
            for found in provider._active_span_processor._span_processors
            if isinstance(found, TrajectorySpanProcessor)
        )
        assert len(processor._buffers) == 1
        assert processor._bytes > 0
    assert processor._buffers == {}
    assert processor._bytes == 0
    assert len(weak.ended) == 11
    gc.collect()
    assert [span() for span in weak.ended] == [None] * 11
    assert len(trajectory.completions) == 5
    lives = weakref.ref(trajectory)
    memory.clear()
    del trajectory
    gc.collect()
    assert lives() is None


@pytest.mark.not_replayed("only the processor knows what it did not keep")
def test_a_bound_on_memory_is_said(clients: Clients, provider: TracerProvider):
    """Calls beyond `max_bytes` are not kept, and the trajectory says how many and why."""
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[memory], max_bytes=50_000)
    client = clients.sync(clients.serve("ok"))
    with rollout("big") as trajectory:
        for text in ("small", "x" * 100_000, "y" * 100_000, "small again"):
            ask(client, text)
    kept = [completion.request_messages[0]["content"] for completion in trajectory.completions]
    assert kept == ["small", "small again"]
    assert trajectory.warnings[0] == (
        "2 model calls were not kept: the running rollouts held 50000 bytes "
        "(TrajectorySpanProcessor(max_bytes=...))"
    )
    for _ in range(20):  # each gives back what it held
        with rollout("next") as trajectory:
            ask(client, "z" * 1000)
        assert trajectory.warnings == []
        assert len(trajectory.completions) == 1


@pytest.mark.not_replayed("only the processor knows what it did not keep")
def test_a_call_that_refers_to_one_not_kept_is_not_trainable(
    clients: Clients, provider: TracerProvider
):
    """What continues a call that was not kept says what is missing, and does not train."""
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[memory], max_bytes=50_000)
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with rollout("x") as trajectory:
        messages: list[Any] = [{"role": "user", "content": "x" * 100_000}]
        for _ in range(3):  # a message is written twice, from then on referred to
            client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": "ok"})
            messages.append({"role": "user", "content": "more"})
    assert "2 model calls were not kept" in trajectory.warnings[0]
    assert any(sentence.startswith("exchange ") for sentence in trajectory.warnings)
    assert len(trajectory.completions) == 1
    assert not trajectory.completions[0].trainable


def test_a_full_queue_is_counted(provider: TracerProvider, caplog: pytest.LogCaptureFixture):
    """Trajectories that find the queue full are counted and logged; the agent goes on."""
    go = threading.Event()
    stuck = Exporter(lambda _: go.wait(30))
    memory = InMemoryTrajectoryExporter()
    processor = TrajectorySpanProcessor(stuck, memory, max_queue_size=2)
    provider.add_span_processor(processor)
    with rollout("first"):
        pass
    while not stuck.calls:
        time.sleep(0.001)
    for number in range(5):
        with rollout(f"{number}"):
            pass
    assert processor.dropped == 3
    assert not processor.force_flush(10)
    go.set()
    assert processor.force_flush()
    assert stuck.calls == ["first", "0", "1"]
    assert len(memory.get_finished_trajectories()) == 6  # it does not block, so it missed none
    messages = [r.getMessage() for r in caplog.records if NO_CALL.words not in r.getMessage()]
    assert len(messages) == 3
    assert all("max_queue_size" in message for message in messages)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_queue_size": "9"}])
def test_wrong_bounds_are_refused(options: dict[str, Any]):
    """A bound that is no positive number is refused by name."""
    with pytest.raises(ConfigurationError, match=rf"{next(iter(options))}=...\): expected"):
        TrajectorySpanProcessor(InMemoryTrajectoryExporter(), **options)


def test_what_is_no_exporter_is_refused():
    """A class, or an object without the methods, is refused with what is missing."""
    wrong: Any = InMemoryTrajectoryExporter
    with pytest.raises(ConfigurationError, match="make an instance of it"):
        TrajectorySpanProcessor(wrong)
    wrong = InMemorySpanExporter
    with pytest.raises(ConfigurationError, match="expected a TrajectoryExporter, got the class"):
        TrajectorySpanProcessor(wrong)
    wrong = []
    with pytest.raises(ConfigurationError, match="has no export, force_flush, shutdown"):
        TrajectorySpanProcessor(wrong)


# --- set up in other ways


def test_two_processors_on_one_provider(provider: TracerProvider, clients: Clients):
    """Two processors each hand over the same trajectory, once."""
    first, second = InMemoryTrajectoryExporter(), InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[first])
    provider.add_span_processor(TrajectorySpanProcessor(second))
    client = clients.sync(clients.serve())
    with rollout("x") as trajectory:
        ask(client, "a")
        assert len(trajectory.completions) == 1
    assert first.get_finished_trajectories() == second.get_finished_trajectories() == (trajectory,)
    assert second.get_finished_trajectories()[0] is trajectory
    assert len(trajectory.completions) == 1
    assert trajectory.warnings == []


def test_set_up_by_hand(provider: TracerProvider, clients: Clients):
    """A processor, the instrumentor and `capture.instrument` record as `configure` does."""
    from otel_rollout.look.instrumentors import unwrap
    from otel_rollout.record import capture

    memory, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider.add_span_processor(TrajectorySpanProcessor(memory))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    instrumentor = OpenAIInstrumentor()
    instrumentor.instrument()
    capture.instrument()
    capture.instrument()
    try:
        client = clients.sync(clients.serve())
        with rollout("x") as trajectory:
            ask(client, "a")
        ask(client, "outside")
    finally:
        capture.uninstrument()
        instrumentor.uninstrument()
        unwrap()
    assert memory.get_finished_trajectories() == (trajectory,)
    assert [m["content"] for m in trajectory.messages()] == ["a", "You said: a"]
    assert trajectory.warnings == []
    names = [span.name for span in spans.get_finished_spans()]
    assert names == ["recording /chat/completions", "openai.chat", "invoke_agent x", "openai.chat"]
    assert reconstruct(spans.get_finished_spans()) == [trajectory]


# --- the end


def test_shutdown_with_an_open_rollout(provider: TracerProvider, clients: Clients):
    """A rollout that runs while the provider is shut down is handed over so far, and says so."""
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[memory])
    client = clients.sync(clients.serve())
    with rollout("x", task_id="t") as live:
        ask(client, "before")
        provider.shutdown()
        (partial,) = memory.get_finished_trajectories()
        assert (partial.id, partial.name, partial.task_id) == (live.id, "x", "t")
        assert [m["content"] for m in partial.messages()] == ["before", "You said: before"]
        assert partial.sealed
        assert partial.status not in ("complete", "running")
        assert any("was shut down while this rollout was running" in w for w in partial.warnings)
        assert ask(client, "after").choices[0].message.content == "You said: after"
    assert memory.get_finished_trajectories() == (partial,)
    assert memory.dropped == 0


def test_a_rollout_that_was_cut_off_says_so_itself(provider: TracerProvider, clients: Clients):
    """The agent's own trajectory, too, has the calls until the shutdown and says what happened."""
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[memory])
    client = clients.sync(clients.serve())
    with rollout("x") as live:
        ask(client, "before")
        provider.shutdown()
    assert [m["content"] for m in live.messages()] == ["before", "You said: before"]
    assert any("was shut down while this rollout was running" in w for w in live.warnings)


def test_nothing_is_called_after_shutdown(provider: TracerProvider):
    """Each exporter is shut down once and hears nothing more."""
    exporter = Exporter(lambda _: None)
    processor = TrajectorySpanProcessor(exporter)
    provider.add_span_processor(processor)
    with rollout("x"):
        pass
    processor.shutdown()
    processor.shutdown()
    with rollout("late"):
        pass
    assert processor.force_flush(1000)
    assert exporter.calls == ["x", "shutdown"]


@pytest.mark.slow
def test_a_stuck_exporter_does_not_keep_the_process(caplog: pytest.LogCaptureFixture):
    """Shutdown ends in its time though an exporter never returns, and counts what is lost."""
    go = threading.Event()
    stuck = Exporter(lambda _: go.wait(60))
    provider = otel_rollout.configure("x", [stuck])
    (processor,) = (
        found
        for found in provider._active_span_processor._span_processors
        if isinstance(found, TrajectorySpanProcessor)
    )
    for _ in range(3):
        with rollout("x"):
            pass
    began = time.monotonic()
    assert not otel_rollout.shutdown(timeout_millis=300)
    assert time.monotonic() - began < 15
    assert processor.dropped == 2
    assert "2 trajectories were not exported" in caplog.text
    assert stuck.calls == ["x", "shutdown"]
    go.set()


def test_shutdown_with_a_full_queue_ends(provider: TracerProvider):
    """Neither does a stuck exporter with a full queue hang the shutdown."""
    go = threading.Event()
    stuck = Exporter(lambda _: go.wait(60))
    processor = TrajectorySpanProcessor(stuck, max_queue_size=1)
    provider.add_span_processor(processor)
    for _ in range(2):
        with rollout("x"):
            pass
        while not stuck.calls:
            time.sleep(0.001)
    ending = threading.Thread(target=processor.shutdown, args=(300,), daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
    go.set()


FORK = """
import os, sys, threading, time
import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, rollout

otel_rollout.configure("x", [JsonlTrajectoryExporter(sys.argv[1])], instrumentor=None)
with rollout("parent-before"):
    pass
with rollout("parent-open"):
    child = os.fork()
    with rollout("child" if child == 0 else "parent-after"):
        pass
assert otel_rollout.shutdown(10_000)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_exports_its_own(tmp_path: Path):
    """A child neither hangs nor exports what is its parent's; its own rollouts it does export."""
    path = tmp_path / "t.jsonl"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(path)],
        check=True,
        env=environment,
        timeout=30,
    )
    names = [trajectory.name for trajectory in JsonlTrajectoryExporter.read(path)]
    assert sorted(names) == ["child", "parent-after", "parent-before", "parent-open"]


def test_spans_end_on_any_thread(recording: Recording, clients: Clients):
    """Calls that end on threads while another reads the live trajectory are all kept."""
    client = clients.sync(clients.serve(lambda _: Reply("x", delay=0.002)))
    with rollout("x") as trajectory:
        with ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(ask, client, f"{number}") for number in range(100)]
            seen = 0
            while not all(call.done() for call in calls):
                count = len(trajectory.completions)
                assert count >= seen
                seen = count
        assert len(trajectory.completions) == 100
    assert len(trajectory.completions) == 100
    assert trajectory.warnings == []
    assert reconstruct(recording.spans) == [trajectory]


def test_a_rollout_that_ends_reads_nothing(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """What was exchanged is read when somebody asks for it, not on the agent's time."""
    read: list[object] = []
    add = ExchangeReader.add

    def counted(reader: ExchangeReader, span: Any) -> None:
        read.append(span)
        add(reader, span)

    monkeypatch.setattr(ExchangeReader, "add", counted)
    client = clients.sync(clients.serve("yes"))
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert read == []
    assert len(recording.trajectory.completions) == 1
    assert len(read) == 1
