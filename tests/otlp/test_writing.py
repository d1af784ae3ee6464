"""Spans written as OTLP/JSON lines, as the collector writes them."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

import otel_rollout
from otel_rollout import ConfigurationError, reconstruct, rollout
from otel_rollout.otlp import JsonLinesSpanExporter, read, writing
from tests.kit.disks import full_disk
from tests.kit.receivers import HttpReceiver
from tests.kit.recording import Clients
from tests.kit.transports import to_json_line


def test_spans_are_written_as_the_collector_does(clients: Clients, tmp_path: Path):
    """Lines of a run without a collector rebuild its trajectories."""
    path = tmp_path / "spans.jsonl"
    memory = otel_rollout.InMemoryTrajectoryExporter()
    otel_rollout.configure(
        service_name="writer",
        exporters=[memory],
        span_exporters=[JsonLinesSpanExporter(path)],
    )
    client = clients.sync(clients.serve())
    with rollout("r"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "é"}])
    otel_rollout.shutdown()
    assert reconstruct(read(path)) == list(memory.get_finished_trajectories())
    (resource,) = json.loads(path.read_text().splitlines()[-1])["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "writer"}} in resource["resource"][
        "attributes"
    ]


def test_links_are_written_with_their_ids(spans: Any):
    """A link's ids are in hex too."""
    scopes = json.loads(to_json_line(spans))["resourceSpans"][0]["scopeSpans"]
    (link,) = next(s for s in scopes[0]["spans"] if s["name"] == "inner")["links"]
    assert (link["traceId"], link["spanId"]) == (f"{5:032x}", f"{6:016x}")


def test_batches_are_appended(spans: Any, tmp_path: Path):
    """Each batch is a line behind what is there, also of an exporter before it."""
    path = tmp_path / "spans.jsonl"
    for _ in range(2):
        exporter = JsonLinesSpanExporter(path)
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        assert exporter.force_flush()
        exporter.shutdown()
    assert path.read_bytes().count(b"\n") == 2


def test_a_file_that_cannot_be_written(
    spans: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A missing folder is said at once; a failure later is logged and does not raise."""
    with pytest.raises(ConfigurationError, match="does not exist"):
        JsonLinesSpanExporter(tmp_path / "no" / "spans.jsonl")
    exporter = JsonLinesSpanExporter(tmp_path)
    assert exporter.export(spans) is SpanExportResult.FAILURE
    assert "2 spans were not written" in caplog.text


def test_spans_that_do_not_fit_are_taken_back(
    spans: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A batch that the disk takes half of is a failure, and the file holds whole lines only."""
    path = tmp_path / "spans.jsonl"
    exporter = JsonLinesSpanExporter(path)
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    whole = path.read_bytes()
    with full_disk(len(whole) + 100):
        assert exporter.export(spans) is SpanExportResult.FAILURE
    assert "2 spans were not written" in caplog.text
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-20])
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    assert path.read_bytes() == whole[:-20] + b"\n" + whole


def test_a_request_is_prepared_once(monkeypatch: pytest.MonkeyPatch):
    """Again for other headers, and each time where there is a cookie or it is signed."""
    made = list[str]()
    prepare = requests.Session.prepare_request

    def counted(session: requests.Session, request: requests.Request) -> requests.PreparedRequest:
        made.append(str(request.url))
        return prepare(session, request)

    def sends(several: int, times: int) -> None:
        for number in range(several):
            span = TracerProvider().get_tracer("x").start_span("x" * (number + 1) ** 3)
            span.end()
            assert exporter.export([span]) is SpanExportResult.SUCCESS
        assert len(made) == times
        made.clear()

    monkeypatch.setattr(requests.Session, "prepare_request", counted)
    with HttpReceiver() as receiver:
        exporter: Any = receiver.exporter()
        session = writing._session_of(exporter)
        writing.prepare_once(exporter)
        writing.prepare_once(exporter)
        sends(3, 1)
        session.headers["authorization"] = "first"
        sends(3, 1)
        exporter._client._headers["authorization"] = "second"
        sends(2, 1)
        session.auth = ("user", "password")
        sends(2, 2)
        session.auth = None
        session.cookies["a"] = "b"
        sends(2, 2)
    assert receiver.keys == {None, "first", "second", "Basic dXNlcjpwYXNzd29yZA=="}
    assert sorted(set(receiver.names())) == ["x", "x" * 8, "x" * 27]


def test_a_session_of_another_class_prepares_each_request():
    """It may sign each request."""

    class Signing(requests.Session):
        def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
            made = super().prepare_request(request)
            made.headers["authorization"] = made.headers["content-length"]
            return made

    with HttpReceiver() as receiver:
        exporter = OTLPSpanExporter(f"{receiver.url}/v1/traces", session=Signing())
        writing.prepare_once(exporter)
        for name in ("a", "bc"):
            span: Any = TracerProvider().get_tracer("x").start_span(name)
            span.end()
            assert exporter.export([span]) is SpanExportResult.SUCCESS
    assert receiver.keys == {f"{size}" for size in receiver.sizes}
    assert len(receiver.keys) == 2


def test_when_a_receiver_wants_to_be_asked_again():
    """Retry-After is in seconds or a date; anything else says nothing."""
    later = formatdate(time.time() + 100, usegmt=True)
    for text, low, high in (("7", 7, 7), (later, 90, 100), ("Thu, 01 Jan 1970 00:00:00 GMT", 0, 0)):
        assert low <= writing._seconds(text) <= high
    for text in ("", "soon", "-5", "1.5", "\u0663 x", "Thu, 99 Foo 1970"):
        assert writing._seconds(text) == 0
