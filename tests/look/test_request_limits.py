"""Requests of spans at the limits of their receivers, and receivers that are away: what arrives."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.otlp import JsonLinesSpanExporter, SplittingSpanExporter, read
from tests.kit.disks import full_disk
from tests.kit.receivers import GrpcReceiver, HttpReceiver, Receiver
from tests.kit.recording import Clients

MIB = 1 << 20
BOTH = pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])
dropped = pytest.mark.not_replayed("spans are cut or dropped")


def end_spans(provider: TracerProvider, *sizes: int) -> list[str]:
    """End a span of each size; their names, sorted."""
    tracer = provider.get_tracer("test")
    names = [f"{number:04}" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        tracer.start_span(name, attributes={"text": "é" * (size // 2)}).end()
    return names


def quick(monkeypatch: pytest.MonkeyPatch, pause: float = 0.1, patience: float = 300) -> None:
    """Let the queue send soon, give up soon, and try again soon."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr("otel_rollout.look.span_queue._PAUSE_SECONDS", pause)
    monkeypatch.setattr("otel_rollout.look.span_queue._PATIENCE_SECONDS", patience)


def ask(client: openai.OpenAI, text: str) -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def eventually(holds: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def configure(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, **options: Any
) -> TracerProvider:
    """As users do: the address is in the environment."""
    is_grpc = isinstance(receiver, GrpcReceiver)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)  # type: ignore[attr-defined]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if is_grpc else "http/protobuf")
    return otel_rollout.configure("x", **options)


@BOTH
def test_requests_are_below_the_limit_of_grpc(
    kind: type[HttpReceiver | GrpcReceiver], monkeypatch: pytest.MonkeyPatch
):
    """Over HTTP too, since a receiver may pass them on: large spans, and very many attributes."""
    with kind() as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[300_000] * 40)
        many = {f"key of number {number}": number for number in range(120)}
        for _ in range(1000):
            provider.get_tracer("test").start_span("many", attributes=many).end()
        assert otel_rollout.shutdown()
    assert receiver.names() == sorted([*names, *["many"] * 1000])
    assert max(receiver.sizes) < 4 * MIB
    assert receiver.refused == []
    assert not any(sc.CUT_ATTRIBUTES in span.attributes for span in receiver.spans)


@BOTH
def test_a_span_over_the_limit_is_cut_and_takes_no_neighbour_along(
    kind: type[HttpReceiver | GrpcReceiver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """All arrive; the two large ones say what was cut, and the log does once and at the end."""
    with kind(4 * MIB) as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[100] * 25, 5_000_000, *[100] * 25, 6_000_000)
        assert otel_rollout.shutdown()
    assert receiver.names() == names
    cut = [span for span in receiver.spans if sc.CUT_ATTRIBUTES in span.attributes]
    assert [span.name for span in cut] == ["0025", "0051"]
    kept = len(str(cut[0].attributes["text"]))
    notes = [f"text: the first {kept} of 2500000 characters"]
    assert cut[0].attributes[sc.CUT_ATTRIBUTES] == notes
    assert 1_800_000 < kept < 2_100_000
    said = [each.getMessage() for each in caplog.records if each.name == "otel_rollout"]
    assert len(said) == 2
    assert "'0025' of 500" in said[0]
    assert "2 spans were cut" in said[1]


@dropped
def test_a_trajectory_that_was_cut_says_so(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """The one call is missing and named, the others are as they were."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with HttpReceiver(MIB) as receiver:
        configure(monkeypatch, receiver, instrumentor=None)
        with rollout("x") as live:
            for text in ("one", "x" * 2_000_000, "three"):
                ask(client, text)
        assert otel_rollout.shutdown()
    (rebuilt,) = reconstruct(receiver.spans)
    assert live.missing_calls == []
    assert any("was cut, or did not come" in warning for warning in rebuilt.warnings)
    for index in (0, 2):
        assert (
            rebuilt.completions[index].request_messages == live.completions[index].request_messages
        )


@BOTH
def test_a_span_is_whole_where_the_receiver_takes_it(
    kind: type[HttpReceiver | GrpcReceiver], monkeypatch: pytest.MonkeyPatch
):
    """No limit is guessed: the shipped collector takes 64 MiB."""
    with kind(64 * MIB) as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, 24_000_000, 100)
        assert otel_rollout.shutdown()
    assert receiver.names() == names
    assert max(receiver.sizes) > 24_000_000
    assert not any(sc.CUT_ATTRIBUTES in span.attributes for span in receiver.spans)


def test_a_refused_request_goes_in_halves_and_further_ones_are_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A web server that takes 1 MiB refuses few requests and no span."""
    with HttpReceiver(MIB) as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[30_000] * 800)
        assert otel_rollout.shutdown()
    assert receiver.names() == names
    assert len(receiver.refused) <= 6
    assert "did not reach" not in caplog.text


@dropped
def test_what_is_refused_for_good_is_lost_alone_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A span of which nothing can be cut: the others arrive, and `shutdown` says how many not."""
    with HttpReceiver(20_000) as receiver:
        provider = configure(monkeypatch, receiver)
        many = {f"key of number {number}": "x" * 500 for number in range(120)}
        names = end_spans(provider, *[100] * 20)
        provider.get_tracer("test").start_span("many", attributes=many).end()
        assert not otel_rollout.shutdown()
    assert receiver.names() == names
    assert "1 of 21 spans did not reach OTLPSpanExporter" in caplog.text


def test_the_limit_can_be_said(monkeypatch: pytest.MonkeyPatch):
    """A `SplittingSpanExporter` gives its limit to the queue, and works without one too."""
    for own in (False, True):
        with HttpReceiver() as receiver:
            splitting = SplittingSpanExporter(receiver.exporter(), max_bytes=100_000)
            if own:
                provider = TracerProvider()
                provider.add_span_processor(BatchSpanProcessor(splitting))
                names = end_spans(provider, *[30_000] * 20, 500_000)
                provider.shutdown()
            else:
                provider = otel_rollout.configure("x", span_exporters=[splitting])
                names = end_spans(provider, *[30_000] * 20, 500_000)
                assert otel_rollout.shutdown()
        assert receiver.names() == names
        assert max(receiver.sizes) <= 100_000
        (cut,) = [span for span in receiver.spans if sc.CUT_ATTRIBUTES in span.attributes]
        assert cut.name == "0020"


@pytest.mark.parametrize("max_bytes", [0, -1, "4MiB", 1.5])
def test_a_wrong_limit_is_an_error(max_bytes: Any):
    """It names what was expected."""
    with pytest.raises(otel_rollout.ConfigurationError, match="expected a number of bytes, got"):
        SplittingSpanExporter(InMemorySpanExporter(), max_bytes=max_bytes)


@BOTH
def test_a_receiver_that_comes_later_gets_every_span(
    kind: type[HttpReceiver | GrpcReceiver],
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
):
    """Rollouts run while it is away; then what waited arrives, without further spans or a flush."""
    quick(monkeypatch)
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    with kind() as first:
        port = int(first.url.rpartition(":")[2])
    configure(monkeypatch, first)
    live = []
    for number in range(5):
        with rollout(f"r{number}") as trajectory:
            ask(client, "hi")
        live.append(trajectory)
        time.sleep(0.3)
    time.sleep(3)  # the queue has tried to send the last one: from now on nothing ends
    with kind(port=port) as receiver:
        assert eventually(lambda: len({span.span_id for span in receiver.spans}) == 20)
        assert otel_rollout.shutdown()
    assert reconstruct(receiver.spans) == live


@BOTH
def test_a_receiver_that_restarts_misses_nothing(
    kind: type[HttpReceiver | GrpcReceiver],
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
):
    """What it had is there, what came while it was away too; no rollout has a warning."""
    quick(monkeypatch)
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    live = []

    def play(count: int) -> None:
        for number in range(count):
            with rollout(f"r{number}") as trajectory:
                ask(client, "hi")
            live.append(trajectory)

    with kind() as before:
        configure(monkeypatch, before)
        play(3)
        assert eventually(lambda: len(before.spans) == 12)
    play(3)
    time.sleep(1.5)
    with kind(port=int(before.url.rpartition(":")[2])) as after:
        play(3)
        assert eventually(lambda: len({span.span_id for span in after.spans}) >= 24)
        assert otel_rollout.shutdown()
    assert reconstruct(before.spans + after.spans) == live


@dropped
def test_a_receiver_that_stays_away_costs_what_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """After its time what waits is dropped, said once, and counted at the end."""
    quick(monkeypatch, patience=0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with HttpReceiver() as gone:
        pass
    provider = configure(monkeypatch, gone)
    for _ in range(4):
        end_spans(provider, 100, 100, 100)
        time.sleep(1)
    assert not otel_rollout.shutdown()
    said = [each.getMessage() for each in caplog.records if each.name == "otel_rollout"]
    said = [
        each for each in said if "did not export" not in each
    ]  # as each try says, with SDK 1.38
    assert len(said) == 2
    assert "has taken no span for" in said[0]
    assert "12 of 12 spans did not reach OTLPSpanExporter" in said[1]


@dropped
@BOTH
def test_a_receiver_that_hangs_stops_no_rollout(
    kind: type[HttpReceiver | GrpcReceiver],
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Fifty calls are done before it has answered one request, and `shutdown` ends and says so."""
    client = clients.sync(clients.serve("ok", token_ids=False, logprobs=False))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with kind() as receiver:
        receiver.go.clear()
        configure(monkeypatch, receiver)
        with rollout("x") as live:
            for _ in range(50):
                ask(client, "hi")
        assert receiver.spans == []
        assert len(live.completions) == 50
        assert live.missing_calls == []
        assert not otel_rollout.shutdown(1000)
        assert "of 102 spans did not reach OTLPSpanExporter" in caplog.text


def test_a_full_disk_that_has_room_again_gets_what_waited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A file is a receiver too."""
    quick(monkeypatch)
    path = tmp_path / "spans.jsonl"
    provider = otel_rollout.configure("x", span_exporters=[JsonLinesSpanExporter(path)])
    with full_disk(100):
        names = end_spans(provider, *[100] * 9)
        assert eventually(lambda: "were not written" in caplog.text)
    assert eventually(lambda: [span.name for span in read(path)] == names)
    assert otel_rollout.shutdown()


def test_an_exporter_that_raises_that_nobody_answers_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As the HTTP exporter of older SDKs does: the spans wait, and the log says so."""
    quick(monkeypatch)
    exporter, tries = InMemorySpanExporter(), list[int]()
    export = exporter.export

    def refuse(spans: Any) -> Any:
        tries.append(len(spans))
        if len(tries) < 4:
            raise ConnectionRefusedError("nobody listens")
        return export(spans)

    exporter.export = refuse  # type: ignore[method-assign]
    provider = otel_rollout.configure("x", span_exporters=[exporter])
    names = end_spans(provider, 100, 100, 100)
    assert eventually(lambda: len(exporter.get_finished_spans()) == 3)
    assert [span.name for span in exporter.get_finished_spans()] == names
    assert "did not export 3 spans: nobody listens" in caplog.text
    assert otel_rollout.shutdown()


def test_a_receiver_that_fails_for_a_while_gets_every_span(monkeypatch: pytest.MonkeyPatch):
    """It answers, and takes no span, as a collector whose disk is full: they wait, none is cut."""
    quick(monkeypatch)
    with HttpReceiver(max_bytes=0) as receiver:
        provider = configure(monkeypatch, receiver)
        names = end_spans(provider, *[100] * 300, 100_000)
        assert eventually(lambda: len(receiver.refused) > 30)
        receiver.max_bytes = 20 * MIB
        assert eventually(lambda: receiver.names() == names)
        assert otel_rollout.shutdown()
    assert not any(sc.CUT_ATTRIBUTES in span.attributes for span in receiver.spans)
