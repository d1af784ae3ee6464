"""Spans from and to OTLP: the collector's file, protobuf requests, Jaeger's API.

Every reader gives `SpanRecord`s, which `reconstruct` takes. They are read as they come, in
constant memory, so a file may be larger than the memory.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import AttributeValue, SpanEvent, SpanRecord

_ERROR = 2


# --- JSON


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[SpanRecord]:
    """The spans of a file of OTLP/JSON lines, such as the collector's file exporter writes.

    Each line is one `TracesData` object, not one trace. A last line that was cut is passed over.
    SpanFormatError, with the line's number, for any other line that is not OTLP/JSON.
    """
    with open(path, "rb") as file:
        cut: int | None = None
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if cut is not None:
                raise SpanFormatError(
                    f"{os.fspath(path)}, line {cut}: not JSON: is this a file of OTLP/JSON lines?"
                )
            try:
                data = json.loads(line)
            except ValueError:
                cut = number
                continue
            try:
                yield from read_json(data)
            except SpanFormatError as error:
                raise SpanFormatError(f"{os.fspath(path)}, line {number}: {error}") from None


def read_json(data: Any) -> Iterator[SpanRecord]:
    """The spans of one OTLP/JSON `TracesData` object. SpanFormatError if it is not one."""
    if not isinstance(data, Mapping) or not isinstance(data.get("resourceSpans"), list):
        raise SpanFormatError(
            f"expected an OTLP/JSON object with 'resourceSpans', got {str(data)[:80]!r}"
        )
    try:
        for resource in data["resourceSpans"]:
            for scope in resource.get("scopeSpans") or ():
                name = (scope.get("scope") or {}).get("name", "")
                for span in scope.get("spans") or ():
                    yield _json_span(span, name)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SpanFormatError(f"not an OTLP/JSON span: {error!r}") from error


def _json_span(span: Mapping[str, Any], scope: str) -> SpanRecord:
    status = span.get("status") or {}
    end = int(span.get("endTimeUnixNano") or 0)
    return SpanRecord(
        name=span.get("name", ""),
        trace_id=span["traceId"].lower(),
        span_id=span["spanId"].lower(),
        parent_span_id=(span.get("parentSpanId") or "").lower() or None,
        start_time_ns=int(span.get("startTimeUnixNano") or 0),
        end_time_ns=end or None,
        attributes=_json_attributes(span.get("attributes")),
        scope=scope,
        events=[
            SpanEvent(
                event.get("name", ""),
                int(event.get("timeUnixNano") or 0),
                _json_attributes(event.get("attributes")),
            )
            for event in span.get("events") or ()
        ],
        status_error=status.get("message", "")
        if status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
        else None,
    )


def _json_attributes(rows: Sequence[Mapping[str, Any]] | None) -> dict[str, AttributeValue]:
    return {row["key"]: _json_value(row.get("value") or {}) for row in rows or ()}


def _json_value(value: Mapping[str, Any]) -> Any:
    for kind, content in value.items():
        if kind in ("stringValue", "boolValue", "bytesValue"):
            return content
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)  # also "NaN" and "Infinity"
        if kind == "arrayValue":
            return [_json_value(item) for item in content.get("values") or ()]
        if kind == "kvlistValue":
            return {row["key"]: _json_value(row.get("value") or {}) for row in content["values"]}
    return None


# --- protobuf


def read_protobuf(data: bytes) -> Iterator[SpanRecord]:
    """The spans of an OTLP/protobuf message: `TracesData` or `ExportTraceServiceRequest`.

    SpanFormatError if it is neither.
    """
    try:
        traces = TracesData.FromString(data)
    except DecodeError as error:
        raise SpanFormatError(f"not an OTLP/protobuf message ({error})") from None
    for resource in traces.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SpanRecord(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_span_id=span.parent_span_id.hex() or None,
                    start_time_ns=span.start_time_unix_nano,
                    end_time_ns=span.end_time_unix_nano or None,
                    attributes={row.key: _value(row.value) for row in span.attributes},
                    scope=scope.scope.name,
                    events=[
                        SpanEvent(
                            event.name,
                            event.time_unix_nano,
                            {row.key: _value(row.value) for row in event.attributes},
                        )
                        for event in span.events
                    ],
                    status_error=span.status.message
                    if span.status.code == Status.STATUS_CODE_ERROR
                    else None,
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {row.key: _value(row.value) for row in value.kvlist_value.values}
    return getattr(value, kind)


# --- Jaeger


def read_jaeger(url: str, trace_id: str, *, timeout: float = 30.0) -> list[SpanRecord]:
    """The spans of one trace from a Jaeger query service, such as `http://127.0.0.1:16686`.

    LookupError if Jaeger does not have the trace (yet), SpanFormatError if the answer is not that
    of Jaeger's API v3, OSError if there is none.
    """
    # Jaeger before 2.20 knows only the first spelling, later ones prefer the second; without it
    # Jaeger mends what it thinks is wrong with a trace.
    query = urllib.parse.urlencode({"raw_traces": "true", "rawTraces": "true"})
    address = f"{url.rstrip('/')}/api/v3/traces/{urllib.parse.quote(trace_id)}?{query}"
    if not address.startswith(("http://", "https://")):
        raise SpanFormatError(f"expected the http address of a Jaeger query service, got {url!r}")
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:  # noqa: S310 - checked
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                raise LookupError(f"Jaeger at {url} has no trace {trace_id}") from None
            raise SpanFormatError(
                f"Jaeger at {url} answered {error.code}: {error.read(200)!r}"
            ) from None
    try:
        data = json.loads(body)
    except ValueError:
        raise SpanFormatError(
            f"{address} is not Jaeger's API v3: it answered {body[:80]!r}"
        ) from None
    return list(read_json(data["result"] if isinstance(data, dict) and "result" in data else data))


# --- writing


class SplittingSpanExporter(SpanExporter):
    """Hands spans on in batches of at most so many bytes.

    Batch processors count spans, receivers refuse by bytes (4 MiB over gRPC, 20 MiB over HTTP by
    default), and a batch that is refused is lost with all that is in it. A single larger span is
    sent alone.
    """

    def __init__(self, exporter: SpanExporter, max_bytes: int = 3 << 20) -> None:
        self._exporter = exporter
        self._max_bytes = max_bytes

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """FAILURE if any batch failed; the others are sent all the same."""
        results = [self._exporter.export(batch) for batch in self._batches(spans)]
        failed = SpanExportResult.FAILURE in results
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def _batches(self, spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
        batch: list[ReadableSpan] = []
        total = 0
        for span in spans:
            size = _size(span)
            if batch and total + size > self._max_bytes:
                yield batch
                batch, total = [], 0
            batch.append(span)
            total += size
        if batch:
            yield batch

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter behind."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Shut the exporter behind down."""
        self._exporter.shutdown()


def _size(span: ReadableSpan) -> int:
    """About how many bytes a span takes; texts are all that is ever large."""
    size = 512
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        for key, value in (attributes or {}).items():
            size += len(key) + 16
            if isinstance(value, str):
                size += len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
            elif isinstance(value, Sequence):
                size += 16 * len(value) + sum(len(v) for v in value if isinstance(v, str))
    return size
