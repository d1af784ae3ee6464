"""The shipped collector-config.yaml and tools/jaeger.yaml, in the real programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

if TYPE_CHECKING:
    from tests.backends.programs import Collector, Jaeger, RunCollector

pytestmark = pytest.mark.backend

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "collector-config.yaml"
WAIT_SECONDS = 30.0

Json = dict[str, Any]


def open_url(request: str | urllib.request.Request) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=WAIT_SECONDS) as response:
        assert response.status == 200
        return bytes(response.read())


def send(collector: Collector, request: ExportTraceServiceRequest) -> None:
    headers = {"Content-Type": "application/x-protobuf"}
    body = request.SerializeToString()
    open_url(urllib.request.Request(f"{collector.otlp_http}/v1/traces", body, headers))


def request_of(*spans: Span) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    service = resource_spans.resource.attributes.add(key="service.name")
    service.value.string_value = "test-config"
    resource_spans.scope_spans.add().spans.extend(spans)
    return request


def span_of(trace_id: bytes, name: str = "a span") -> Span:
    now = time.time_ns()
    return Span(
        trace_id=trace_id,
        span_id=os.urandom(8),
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=now,
        end_time_unix_nano=now + 1,
    )


def spans_in(traces: Json, trace_id: bytes) -> list[Json]:
    return [
        span
        for resource_spans in traces["resourceSpans"]
        for scope_spans in resource_spans["scopeSpans"]
        for span in scope_spans["spans"]
        if span["traceId"] == trace_id.hex()
    ]


def spans_in_file(path: Path, trace_id: bytes) -> list[Json]:
    with path.open(encoding="utf-8") as lines:  # not str.splitlines: U+2028 is no end of a line
        return [span for line in lines for span in spans_in(json.loads(line), trace_id)]


def spans_in_jaeger(jaeger: Jaeger, trace_id: bytes, count: int) -> list[Json]:
    # 2.13 knows the first name only, 2.20 prefers the second; either ignores the other.
    query = "raw_traces=true&rawTraces=true"
    url = f"{jaeger.api_url}/api/v3/traces/{trace_id.hex()}?{query}"
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            spans = spans_in(json.loads(open_url(url))["result"], trace_id)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                raise
            spans = []
        if len(spans) >= count or time.monotonic() > deadline:
            return spans
        time.sleep(0.1)


def validate(binary: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [str(binary), "validate", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)


def test_collector_accepts_the_shipped_config(otelcol: Path) -> None:
    """`otelcol validate` finds nothing wrong with collector-config.yaml as it is."""
    result = validate(otelcol, CONFIG)
    assert result.returncode == 0, result.stderr


def test_collector_rejects_a_broken_config(otelcol: Path, tmp_path: Path) -> None:
    """The check has teeth: a copy with an unknown setting is refused, by that setting's name."""
    broken = tmp_path / "broken.yaml"
    broken.write_text(CONFIG.read_text().replace("create_directory:", "create_dictionary:"))
    result = validate(otelcol, broken)
    assert result.returncode != 0
    assert "create_dictionary" in result.stderr


def test_jaeger_accepts_the_shipped_config(jaeger_binary: Path) -> None:
    """`jaeger validate` finds nothing wrong with tools/jaeger.yaml as it is."""
    result = validate(jaeger_binary, REPOSITORY / "tools" / "jaeger.yaml")
    assert result.returncode == 0, result.stderr


def test_span_reaches_file_and_jaeger_unchanged(collector: Collector, jaeger: Jaeger) -> None:
    """Every kind of value, event and link is in the file and in Jaeger exactly as it was sent."""
    trace_id, linked = os.urandom(16), os.urandom(8)
    span = span_of(trace_id, "naïve \u2028 😀")
    span.parent_span_id = os.urandom(8)
    span.flags = 0x101
    span.dropped_attributes_count = 1
    span.attributes.add(key="int").value.int_value = 2**53 + 1
    span.attributes.add(key="double").value.double_value = 0.1
    span.attributes.add(key="bool").value.bool_value = False
    span.attributes.add(key="empty").value.string_value = ""
    span.attributes.add(key="bytes").value.bytes_value = b"\x00\xff"
    span.attributes.add(key="none").value.array_value.SetInParent()
    span.attributes.add(key="two").value.array_value.values.add().string_value = "b"
    span.attributes.add(key="map").value.kvlist_value.values.add(key="k").value.int_value = -1
    span.attributes.add(key="large").value.string_value = "å" * 3_000_000
    span.events.add(name="event", time_unix_nano=span.start_time_unix_nano)
    span.links.add(trace_id=trace_id, span_id=linked)
    send(collector, request_of(span))

    expected = {
        "traceId": trace_id.hex(),
        "spanId": span.span_id.hex(),
        "parentSpanId": span.parent_span_id.hex(),
        "flags": 0x101,
        "name": "naïve \u2028 😀",
        "kind": 1,
        "startTimeUnixNano": str(span.start_time_unix_nano),
        "endTimeUnixNano": str(span.end_time_unix_nano),
        "droppedAttributesCount": 1,
        "attributes": [
            {"key": "int", "value": {"intValue": str(2**53 + 1)}},
            {"key": "double", "value": {"doubleValue": 0.1}},
            {"key": "bool", "value": {"boolValue": False}},
            {"key": "empty", "value": {"stringValue": ""}},
            {"key": "bytes", "value": {"bytesValue": "AP8="}},
            {"key": "none", "value": {"arrayValue": {}}},
            {"key": "two", "value": {"arrayValue": {"values": [{"stringValue": "b"}]}}},
            {
                "key": "map",
                "value": {"kvlistValue": {"values": [{"key": "k", "value": {"intValue": "-1"}}]}},
            },
            {"key": "large", "value": {"stringValue": "å" * 3_000_000}},
        ],
        "events": [{"name": "event", "timeUnixNano": str(span.start_time_unix_nano)}],
        "links": [{"traceId": trace_id.hex(), "spanId": linked.hex()}],
        "status": {},
    }
    assert spans_in_file(collector.traces_file, trace_id) == [expected]
    assert spans_in_jaeger(jaeger, trace_id, 1) == [expected]


def test_large_request_is_accepted(collector: Collector, jaeger: Jaeger) -> None:
    """3,000 spans in one request of 30 MB, over every default limit, reach the file and Jaeger."""
    trace_id = os.urandom(16)
    spans = [span_of(trace_id) for _ in range(3_000)]
    for span in spans:
        span.attributes.add(key="text").value.string_value = "x" * 10_000
    send(collector, request_of(*spans))
    sent = {span.span_id.hex() for span in spans}
    kept = spans_in_file(collector.traces_file, trace_id)
    assert len(kept) == len(sent)
    assert {span["spanId"] for span in kept} == sent
    shown = spans_in_jaeger(jaeger, trace_id, len(sent))
    assert {span["spanId"] for span in shown} == sent


def test_without_jaeger_the_file_is_written(run_collector: RunCollector, tmp_path: Path) -> None:
    """With nobody at Jaeger's address each request is answered at once and written once."""
    trace_id = os.urandom(16)
    with run_collector(tmp_path) as collector:
        started = time.monotonic()
        for _ in range(20):
            send(collector, request_of(span_of(trace_id)))
        assert time.monotonic() - started < 10, "waited for Jaeger"
        assert len(spans_in_file(collector.traces_file, trace_id)) == 20


def test_full_queue_to_jaeger_is_no_error(run_collector: RunCollector, tmp_path: Path) -> None:
    """When the look lane's queue is full, senders are not told to send again what the file has."""
    trace_id = os.urandom(16)
    config = tmp_path / "tiny-queue.yaml"
    text = CONFIG.read_text()
    assert text.count("queue_size: 268435456") == 1
    config.write_text(text.replace("queue_size: 268435456", "queue_size: 500"))
    with run_collector(tmp_path, config) as collector:
        for _ in range(20):
            send(collector, request_of(span_of(trace_id)))
        assert len(spans_in_file(collector.traces_file, trace_id)) == 20
    assert "queue is full" in (tmp_path / "log.txt").read_text()


def test_acknowledged_spans_survive_a_kill(run_collector: RunCollector, tmp_path: Path) -> None:
    """What a sender was told is kept is on disk, even after SIGKILL; a restart appends to it."""
    trace_id = os.urandom(16)
    place = {"OTEL_ROLLOUT_TRACES_FILE": "new/folder/mine.jsonl"}
    with run_collector(tmp_path, **place) as collector:
        send(collector, request_of(span_of(trace_id, "before")))
        os.kill(collector.pid, signal.SIGKILL)
    with run_collector(tmp_path, **place) as collector:
        send(collector, request_of(span_of(trace_id, "after")))
    names = [span["name"] for span in spans_in_file(collector.traces_file, trace_id)]
    assert names == ["before", "after"]
