"""The queue of spans for people: it holds the runs in flight, and what it loses is counted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.command.checks.check import check
from otel_rollout.look import SpanQueue
from otel_rollout.otlp import JsonLinesSpanExporter
from tests.kit.disks import full_disk


class Exporter(SpanExporter):
    """Does what a test wants of `export`, and counts what it was given."""

    def __init__(self, export: Callable[[], object] = lambda: None) -> None:
        self.spans: list[str] = []
        self._export = export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._export()
        self.spans += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def end_spans(provider: TracerProvider, count: int, text: str = "") -> None:
    tracer = provider.get_tracer("test")
    for number in range(count):
        tracer.start_span(f"{number}", attributes={"text": text}).end()


def fail(error: BaseException) -> Callable[[], object]:
    def export() -> None:
        raise error

    return export


def test_the_spans_of_many_long_rollouts_arrive():
    """A burst far beyond the SDK's 2,048, while the exporter is busy, loses nothing."""
    go = threading.Event()
    exporter = Exporter(lambda: go.wait(30))
    provider = otel_rollout.configure("x", span_exporters=[exporter])
    end_spans(provider, 20_000)
    go.set()
    assert otel_rollout.shutdown()
    assert sorted(map(int, exporter.spans)) == list(range(20_000))


def test_what_finds_the_queue_full_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A user's size holds; the first drop is logged, and `shutdown` says how many there were."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    go = threading.Event()
    exporter = Exporter(lambda: go.wait(30))
    provider = otel_rollout.configure("x", span_exporters=[exporter])
    end_spans(provider, 1000)
    go.set()
    assert not otel_rollout.shutdown()
    lost = 1000 - len(exporter.spans)
    assert 1000 - 300 < lost <= 900  # one batch is at the exporter, and a queue waits
    said = [record.getMessage() for record in caplog.records if record.name == "otel_rollout"]
    assert "further ones are dropped" in said[0]
    assert f"{lost} of 1000 spans did not reach Exporter" in said[-1]
    assert len(said) == 2


def test_the_text_that_waits_is_bounded(caplog: pytest.LogCaptureFixture):
    """A collector that is stuck does not fill the memory: `max_bytes` holds for spans too."""
    go = threading.Event()
    exporter = Exporter(lambda: go.wait(30))
    provider = otel_rollout.configure("x", span_exporters=[exporter], max_bytes=1_000_000)
    end_spans(provider, 200, "x" * 100_000)
    go.set()
    assert not otel_rollout.shutdown()
    assert 1 <= len(exporter.spans) < 12
    assert f"{200 - len(exporter.spans)} of 200 spans" in caplog.text


def test_others_run_while_spans_are_encoded(monkeypatch: pytest.MonkeyPatch):
    """There is a pause after each span that took long; none where somebody waits for the end."""
    monkeypatch.setattr("otel_rollout.look.span_queue._TURN_SECONDS", 0)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    pauses = list[float]()
    monkeypatch.setattr("otel_rollout.look.span_queue.time.sleep", pauses.append)
    seen = list[list[str]]()

    class Encoding(Exporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            seen.append([span.name for span in spans])
            return SpanExportResult.SUCCESS

    queue = SpanQueue(Encoding())
    monkeypatch.setattr(queue, "_batch_size", 20)
    provider = TracerProvider()
    provider.add_span_processor(queue)
    end_spans(provider, 10)
    deadline = time.monotonic() + 30
    while sum(map(len, seen)) < 10 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert len(pauses) == 10
    monkeypatch.setattr(queue, "_delay", 60)
    threading.Event().wait(0.05)
    end_spans(provider, 10)
    assert queue.force_flush()
    assert [name for names in seen for name in names] == [*map(str, range(10))] * 2
    assert len(pauses) == 10
    queue.shutdown()


@pytest.mark.parametrize("error", [ValueError(), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_an_exporter_that_raises_stops_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
):
    """Neither its own thread ends, nor does the other exporter lose a span."""
    raising, other = Exporter(fail(error)), Exporter()
    provider = otel_rollout.configure("x", span_exporters=[raising, other])
    for _ in range(3):
        end_spans(provider, 600)
        provider.force_flush()
    assert not otel_rollout.shutdown()
    assert len(other.spans) == 1800
    assert "1800 of 1800 spans did not reach Exporter" in caplog.text


def test_spans_on_a_full_disk_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A failure that an exporter reports is a loss."""
    exporter = JsonLinesSpanExporter(tmp_path / "spans")
    provider = otel_rollout.configure("x", span_exporters=[exporter])
    with full_disk(100):
        end_spans(provider, 5)
        assert not otel_rollout.shutdown()
    assert "5 of 5 spans did not reach JsonLinesSpanExporter" in caplog.text


def test_an_exporter_that_is_used_again_is_counted_again():
    """After one `shutdown` its losses are losses, as long as it takes anything."""
    turns = iter(range(9))
    exporter = Exporter(lambda: next(turns) != 2 or fail(ValueError())())
    for is_whole in (True, False):
        provider = otel_rollout.configure("x", span_exporters=[exporter])
        for _ in range(2):
            end_spans(provider, 1)
            provider.force_flush()
        assert otel_rollout.shutdown() is is_whole


@pytest.mark.parametrize("where", ["export", "force_flush", "shutdown"])
def test_an_exporter_that_hangs_is_left_behind(where: str, monkeypatch: pytest.MonkeyPatch):
    """`shutdown` ends in its time and says so, wherever an exporter of spans is stuck."""
    go = threading.Event()
    stuck = Exporter()
    monkeypatch.setattr(stuck, where, lambda *_, **__: go.wait(60))
    provider = otel_rollout.configure("x", span_exporters=[stuck])
    monkeypatch.setattr("otel_rollout.wiring._LAST_SECONDS", 0.2)
    monkeypatch.setattr("otel_rollout.look.span_queue._LAST_SECONDS", 0.2)
    end_spans(provider, 3)
    began = time.monotonic()
    done = otel_rollout.shutdown(2000)
    assert time.monotonic() - began < 15
    assert done is (where == "force_flush")  # a batch processor does not flush its exporter
    go.set()


def test_a_trajectory_exporter_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    """`shutdown` says so, though every trajectory has arrived."""
    go = threading.Event()
    stuck = InMemoryTrajectoryExporter()
    monkeypatch.setattr(stuck, "shutdown", lambda *_: go.wait(60))
    otel_rollout.configure("x", [stuck])
    with rollout("x"):
        pass
    assert not otel_rollout.shutdown(300)
    assert len(stuck.get_finished_trajectories()) == 1
    go.set()


def test_a_trajectory_exporter_that_hangs_takes_no_time_of_the_spans():
    """What waited for an exporter of spans arrives all the same."""
    go = threading.Event()
    stuck = InMemoryTrajectoryExporter()
    stuck.blocking = True
    stuck.force_flush = lambda *_: go.wait(60)  # type: ignore[method-assign]
    spans = Exporter()
    otel_rollout.configure("x", [stuck], span_exporters=[spans])
    with rollout("x"):
        pass
    assert not otel_rollout.shutdown(2000)
    assert spans.spans == ["rollout started", "invoke_agent x"]
    go.set()


@pytest.mark.parametrize(
    ("variables", "queue", "batch"),
    [
        ({}, 1 << 16, 512),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "3000"}, 3000, 512),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": ""}, 1 << 16, 512),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, 100, 100),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100000"}, 100_000, 100_000),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "9", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3"}, 9, 3),
    ],
)
def test_the_variables_hold(
    variables: dict[str, str], queue: int, batch: int, monkeypatch: pytest.MonkeyPatch
):
    """Sizes that are asked for are used; what is not asked for follows."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made: Any = SpanQueue(InMemorySpanExporter())
    assert (made._max_queue_size, made._batch_size) == (queue, batch)
    made.shutdown()


def test_doctor_warns_of_the_sdks_default():
    """A batch processor of the user's with 2,048 places is too small; ours is not."""
    provider = otel_rollout.configure("x", span_exporters=[InMemorySpanExporter()])
    assert "span queue" not in [finding.subject for finding in check(self_test=False)]
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    (finding,) = [each for each in check(self_test=False) if each.subject == "span queue"]
    assert finding.level == "warning"
    assert "holds 2048 spans" in finding.text


FORK = """
import os, sys, otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.otlp import JsonLinesSpanExporter, read

otel_rollout.configure("x", span_exporters=[JsonLinesSpanExporter(sys.argv[1])])
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
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path / "spans")]
    subprocess.run(command, check=True, env=environment, timeout=60)


def test_a_rollout_that_is_not_sampled_is_no_loss(caplog: pytest.LogCaptureFixture):
    """What the sampler drops was never on its way."""
    exporter = Exporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    otel_rollout.configure("x", span_exporters=[exporter], tracer_provider=provider)
    with rollout("x"):
        pass
    assert otel_rollout.shutdown()
    assert exporter.spans == []
    assert "did not reach" not in caplog.text


def test_many_starts_share_requests():
    """The first is sent at once, those that come soon after it together, long before a batch."""
    requests = list[list[str]]()

    class Requests(Exporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            requests.append([span.name for span in spans])
            return SpanExportResult.SUCCESS

    otel_rollout.configure("x", span_exporters=[Requests()], instrumentor=None)
    runs = [rollout(f"{number}") for number in range(50)]
    began = time.monotonic()
    for run in runs:
        run.__enter__()
    while sum(map(len, requests)) < 50 and time.monotonic() < began + 4:
        time.sleep(0.01)
    assert sum(map(len, requests)) == 50
    assert len(requests) <= 5 + 5 * (time.monotonic() - began)
    for run in reversed(runs):
        run.__exit__(None, None, None)
    otel_rollout.shutdown()
