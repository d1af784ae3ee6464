"""The sender of a process: what it holds, what it counts, and what its exporter may do to it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler, TraceIdRatioBased

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    continue_rollout,
    lanes,
    propagate,
    reconstruct,
    record_reward,
    rollout,
    tool,
)
from otel_rollout import semconv as sc
from otel_rollout.otlp import JsonLinesSpanExporter, encode_spans, read
from otel_rollout.record import Outlet, Sender
from otel_rollout.record.sending.requests import size_of
from otel_rollout.spans import as_record
from tests.kit.conversations import user
from tests.kit.disks import full_disk
from tests.kit.played import ask
from tests.kit.programs import python
from tests.kit.recording import Clients

dropped = pytest.mark.not_replayed("spans are dropped")


class Exporter(SpanExporter):
    """Does what a test wants of `export`, and keeps what it was given."""

    def __init__(self, export: Callable[[], object] = lambda: None) -> None:
        self.spans: list[ReadableSpan] = []
        self._export = export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._export()
        if isinstance(result, SpanExportResult):
            return result
        self.spans += spans
        return SpanExportResult.SUCCESS

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def shutdown(self) -> None:
        pass


def end_spans(provider: TracerProvider, count: int, text: str = "") -> None:
    """End spans of ours."""
    tracer = provider.get_tracer(sc.SCOPE)
    for number in range(count):
        tracer.start_span(f"{number}", attributes={"text": text}).end()


def fail(error: BaseException) -> Callable[[], object]:
    def export() -> None:
        raise error

    return export


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "otel_rollout"]


def eventually(holds: Callable[[], object], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


# --- which spans


GROUP = {sc.ROLLOUT_GROUP_ID: "g", sc.ROLLOUT_GROUP_SIZE: 8}


@pytest.mark.not_replayed("a part of it comes after its end")
@pytest.mark.parametrize("sampler", [None, ALWAYS_OFF])
def test_every_kind_of_span_of_ours_has_its_group(clients: Clients, sampler: Sampler | None):
    """Start, call, part of another process, rollout, and rewards that come later."""
    client, exporter = clients.sync(clients.serve("ok")), Exporter()
    provider = None if sampler is None else TracerProvider(sampler=sampler)
    otel_rollout.configure(
        "x", span_exporters=[exporter], tracer_provider=provider, instrumentor=None
    )
    with rollout("x", group_id="g", group_size=8, sample_index=3) as live:
        ask(client, user("hi"))
        carrier = propagate()
        with tool("look"):
            pass
    with continue_rollout(carrier):
        ask(client, user("hi"))
    record_reward(1.0, name="late", trajectory=live)
    record_reward(1.0, name="by id", trajectory="elsewhere", group_id="g")
    assert otel_rollout.shutdown()
    written = {span.name: dict(span.attributes or {}) for span in exporter.spans}
    assert ("execute_tool look" in written) is (sampler is None)
    written.pop("execute_tool look", None)
    assert written["rollout started"].items() >= {**GROUP, sc.ROLLOUT_SAMPLE_INDEX: 3}.items()
    assert written.pop("evaluate rollout: reward by id")[sc.ROLLOUT_GROUP_ID] == "g"
    assert len(written) == 5
    assert [name for name, each in written.items() if not each.items() >= GROUP.items()] == []


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, TraceIdRatioBased(0.5)])
def test_rollouts_that_are_not_sampled_are_rebuilt(clients: Clients, sampler: Sampler):
    """All are equal from what was sent, and people see the spans of none, or of some."""
    client, exporter = clients.sync(clients.serve("ok")), Exporter()
    provider = TracerProvider(sampler=sampler)
    otel_rollout.configure("x", span_exporters=[exporter], tracer_provider=provider)
    live = []
    for number in range(8):
        with rollout(f"{number}", group_id="g") as trajectory:
            ask(client, user("hi"))
        live.append(trajectory)
    assert otel_rollout.shutdown()
    assert reconstruct(map(as_record, exporter.spans)) == live
    shown = exporter.names.count("chat m")
    assert shown == 0 if sampler is ALWAYS_OFF else shown < 8


def test_content_that_may_not_leave_is_not_sent(clients: Clients):
    """Spans of calls are not sampled then either, and stay here."""
    client, exporter = clients.sync(clients.serve("ok")), Exporter()
    otel_rollout.configure("x", span_exporters=[exporter], content="none", instrumentor=None)
    with rollout("x"):
        ask(client, user("hi"))
    assert otel_rollout.shutdown()
    assert exporter.names == ["rollout started", "invoke_agent x"]


def test_many_starts_share_requests():
    """The first is sent at once, those that come soon after it together, long before a batch."""
    requests = list[int]()
    exporter = Exporter(lambda: requests.append(len(exporter.spans)))
    otel_rollout.configure("x", span_exporters=[exporter], instrumentor=None)
    runs = [rollout(f"{number}") for number in range(50)]
    began = time.monotonic()
    for run in runs:
        run.__enter__()
    assert eventually(lambda: len(exporter.spans) == 50, 4)
    assert len(requests) <= 5 + 5 * (time.monotonic() - began)
    for run in reversed(runs):
        run.__exit__(None, None, None)
    assert otel_rollout.shutdown()


# --- what waits, and what is lost


def test_what_finds_no_room_is_counted(caplog: pytest.LogCaptureFixture):
    """The bound on bytes holds; the first drop is logged, and the end tells how many there were."""
    go = threading.Event()
    exporter = Exporter(lambda: go.wait(30) and None)
    provider = otel_rollout.configure("x", span_exporters=[exporter], max_bytes=1_000_000)
    end_spans(provider, 200, "x" * 100_000)
    go.set()
    assert not otel_rollout.shutdown()
    assert len(exporter.spans) == 9
    assert "no more may: further ones are dropped" in said(caplog)[0]
    assert said(caplog)[1:] == ["191 of 200 spans did not reach Exporter"]


def test_requests_of_the_look_lane_are_below_the_limit_of_grpc():
    """A batch of the SDK goes in several requests; one that fails is reported after all."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory := InMemorySpanExporter()))
    end_spans(provider, 5, "x" * (1 << 20))
    answers = chain([SpanExportResult.FAILURE], repeat(None))
    exporter = Exporter(lambda: next(answers))
    assert Outlet(exporter).export(memory.get_finished_spans()) is SpanExportResult.FAILURE
    assert exporter.names == ["2", "3", "4"]


def test_what_has_arrived_makes_room():
    """More than may wait passes through, a part at a time."""
    exporter = Exporter()
    provider = otel_rollout.configure("x", span_exporters=[exporter], max_bytes=1_000_000)
    for _ in range(3):
        end_spans(provider, 6, "x" * 100_000)
        assert provider.force_flush(10_000)
    assert otel_rollout.shutdown()
    assert len(exporter.spans) == 18


def test_the_size_is_rather_more_than_what_is_sent():
    """So requests stay below the limit that they are made for: text of any alphabet, events."""
    tracer = TracerProvider().get_tracer("x")
    for text in ("x" * 9000, "é" * 9000, "\u4e2d" * 9000, "\U0001f600" * 9000):
        span: Any = tracer.start_span("x", attributes={"text": text, "list": (text, "a")})
        span.set_attributes({f"k{number}": number for number in range(60)})
        span.add_event("said", {"text": text})
        span.end()
        exact = encode_spans([span]).ByteSize()
        assert exact <= size_of(span) + 256 <= 1.5 * exact


@pytest.mark.parametrize("error", [ValueError(), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_an_exporter_that_raises_stops_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
):
    """Neither its own thread ends, nor does the other exporter lose a span; it is logged once."""
    raising, other = Exporter(fail(error)), Exporter()
    provider = otel_rollout.configure("x", span_exporters=[raising, other])
    end_spans(provider, 600)
    assert not otel_rollout.shutdown(700)
    assert len(other.spans) == 600
    assert said(caplog)[1:] == ["600 of 600 spans did not reach Exporter"]


def test_an_exporter_that_raises_now_and_then_gets_all():
    """A failure means only that the spans have not arrived."""
    turns = chain([ValueError(), None, OSError(), KeyboardInterrupt()], repeat(None))
    exporter = Exporter(lambda: None if (error := next(turns)) is None else fail(error)())
    provider = otel_rollout.configure("x", span_exporters=[exporter])
    end_spans(provider, 700)
    assert otel_rollout.shutdown()
    assert sorted(map(int, exporter.names)) == list(range(700))


def test_a_full_disk_that_has_room_again_gets_what_waited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A file is a receiver too; `shutdown` tries for all of its time."""
    path = tmp_path / "spans.jsonl"
    provider = otel_rollout.configure("x", span_exporters=[JsonLinesSpanExporter(path)])
    with full_disk(100):
        end_spans(provider, 9)
        done = list[bool]()
        ending = threading.Thread(target=lambda: done.append(otel_rollout.shutdown()))
        ending.start()
        assert eventually(lambda: "were not written" in caplog.text)
    ending.join()
    assert done == [True]
    assert [span.name for span in read(path)] == [f"{number}" for number in range(9)]


@dropped
def test_a_disk_that_stays_full_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """After all of the time, and not before, `shutdown` returns False and logs how many."""
    exporter = JsonLinesSpanExporter(tmp_path / "spans")
    provider = otel_rollout.configure("x", span_exporters=[exporter])
    began = time.monotonic()
    with full_disk(100):
        end_spans(provider, 5)
        assert not provider.force_flush(300)
        assert not otel_rollout.shutdown(700)
    assert 1 <= time.monotonic() - began < 5
    assert "5 of 5 spans did not reach JsonLinesSpanExporter" in caplog.text


def test_the_end_of_a_provider_tries_for_a_while():
    """As at the exit of a program that does not call `shutdown`."""
    turns = chain([ValueError()] * 3, repeat(None))
    exporter = Exporter(lambda: None if (error := next(turns)) is None else fail(error)())
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Sender(Outlet(exporter)))
    end_spans(provider, 20)
    provider.shutdown()
    assert len(exporter.spans) == 20
    end_spans(provider, 1)
    assert len(exporter.spans) == 20


def test_an_exporter_that_is_used_again_is_counted_again():
    """After one `shutdown` its losses are losses, as long as it takes anything."""
    turns = iter(range(9))
    exporter = Exporter(lambda: SpanExportResult.FAILURE if next(turns) >= 3 else None)
    for is_whole in (True, False):
        provider = otel_rollout.configure("x", span_exporters=[exporter])
        for _ in range(2):
            end_spans(provider, 1)
            provider.force_flush(100)
        assert otel_rollout.shutdown(100) is is_whole


@pytest.mark.parametrize("where", ["export", "force_flush", "shutdown"])
def test_an_exporter_that_hangs_is_left_behind(where: str, monkeypatch: pytest.MonkeyPatch):
    """`shutdown` ends in its time and says so, wherever an exporter of spans is stuck."""
    go = threading.Event()
    stuck = Exporter()
    monkeypatch.setattr(stuck, where, lambda *_, **__: go.wait(60))
    provider = otel_rollout.configure("x", span_exporters=[stuck])
    monkeypatch.setattr("otel_rollout.lanes._LAST_SECONDS", 0.2)
    monkeypatch.setattr("otel_rollout.record.sending.sender._LAST_SECONDS", 0.2)
    end_spans(provider, 3)
    began = time.monotonic()
    done = otel_rollout.shutdown(1000)
    assert time.monotonic() - began < 10
    assert done is (where == "force_flush")  # a batch processor does not flush its exporter
    go.set()


@pytest.mark.parametrize("where", ["shutdown", "force_flush"])
def test_a_trajectory_exporter_that_hangs_is_left_behind(where: str):
    """`shutdown` says so, though every trajectory has arrived, and the spans as well."""
    go = threading.Event()
    stuck, spans = InMemoryTrajectoryExporter(), Exporter()
    stuck.blocking = True
    setattr(stuck, where, lambda *_: go.wait(60))
    otel_rollout.configure("x", [stuck], span_exporters=[spans])
    with rollout("x"):
        pass
    assert not otel_rollout.shutdown(1000)
    assert len(stuck.get_finished_trajectories()) == 1
    assert spans.names == ["rollout started", "invoke_agent x"]
    go.set()


def test_others_run_while_spans_are_encoded(monkeypatch: pytest.MonkeyPatch):
    """There is a pause after each span that took long; none where somebody waits for the end."""
    monkeypatch.setattr("otel_rollout.record.sending.requests._TURN_SECONDS", 0)
    pauses = list[float]()
    monkeypatch.setattr("otel_rollout.record.sending.requests.time.sleep", pauses.append)
    outlet = Outlet(exporter := Exporter())
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory := InMemorySpanExporter()))
    end_spans(provider, 10)
    found = memory.get_finished_spans()
    for in_haste in (lambda: False, lambda: True):
        assert outlet.send(found, in_haste)[0]
    assert exporter.names == [*map(str, range(10))] * 2
    assert len(pauses) == 10


@pytest.mark.parametrize(
    ("variables", "queue", "batch"),
    [
        ({}, 16_384, 512),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": ""}, 16_384, 512),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, 100, 100),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100000"}, 100_000, 100_000),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "9", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3"}, 9, 3),
    ],
)
def test_the_variables_of_the_look_lane_hold(
    variables: dict[str, str], queue: int, batch: int, monkeypatch: pytest.MonkeyPatch
):
    """Sizes that are asked for are used; the other one follows."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert lanes._sizes() == (queue, batch)


def test_a_delay_that_the_sdk_refuses_is_its_default(monkeypatch: pytest.MonkeyPatch):
    """Zero, or no number: a variable does not keep a program from starting."""
    for text in ("0", "soon"):
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", text)
        otel_rollout.configure("x", span_exporters=[Exporter()])
        assert otel_rollout.shutdown()


# --- processes

FORK = """
import os, sys, otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.otlp import JsonLinesSpanExporter, read

exporters = [JsonLinesSpanExporter(sys.argv[1])]
otel_rollout.configure("x", span_exporters=exporters, instrumentor=None)
for number in range(50):
    with rollout(f"parent {number}"):
        pass
child = os.fork()
with rollout("child" if child == 0 else "parent"):
    pass
assert otel_rollout.shutdown()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
names = sorted(span.name for span in read(sys.argv[1]))
assert names.count("rollout started") == 52, names
assert len(names) == 104, names
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_counts_its_own(tmp_path: Path):
    """What waits at a fork is the parent's, in the file once and in the count of one process."""
    python("-W", "ignore", "-c", FORK, str(tmp_path / "spans"))
