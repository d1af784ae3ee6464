"""Ways that spans take to a reader: the SDK's objects, OTLP/JSON, protobuf, rows of ClickHouse."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout.otlp import read, read_protobuf
from otel_rollout.otlp.encoding import json_lines


def as_it_is(spans: Sequence[ReadableSpan]) -> Iterable[Any]:
    """The SDK's spans."""
    return spans


def to_json_line(spans: Iterable[ReadableSpan]) -> str:
    """The spans as OTLP/JSON: a line with its newline, unless they are very large."""
    return b"".join(json_lines(spans)).decode()


def as_json_lines(spans: Sequence[ReadableSpan]) -> Iterable[Any]:
    """OTLP/JSON lines, in batches."""
    batches = [spans[start : start + 7] for start in range(0, len(spans), 7)]
    return read(io.BytesIO("".join(map(to_json_line, batches)).encode()))


@lru_cache(maxsize=1)
def _encoded(spans: tuple[ReadableSpan, ...]) -> ExportTraceServiceRequest:
    """The request of OpenTelemetry's encoder, made once for both transports that begin with it."""
    return encode_spans(spans)


def as_protobuf(spans: Sequence[ReadableSpan]) -> Iterable[Any]:
    """An OTLP/protobuf message."""
    return read_protobuf(_encoded(tuple(spans)).SerializeToString())


def as_clickhouse(spans: Sequence[ReadableSpan]) -> Iterable[Any]:
    """Lines of `FORMAT JSONEachRow`."""
    return read(io.BytesIO("".join(json.dumps(row) + "\n" for row in rows(spans)).encode()))


def rows(spans: Sequence[ReadableSpan]) -> Iterator[dict[str, Any]]:
    """What the collector's ClickHouse exporter inserts: every value of an attribute is a text."""
    for resource in _encoded(tuple(spans)).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "Timestamp": _time(span.start_time_unix_nano),
                    "TraceId": span.trace_id.hex(),
                    "SpanId": span.span_id.hex(),
                    "ParentSpanId": span.parent_span_id.hex(),
                    "TraceState": "",
                    "SpanName": span.name,
                    "SpanKind": "Internal",
                    "ServiceName": "tests",
                    "ResourceAttributes": {},
                    "ScopeName": scope.scope.name,
                    "ScopeVersion": "",
                    "SpanAttributes": {a.key: _text(a.value) for a in span.attributes},
                    "Duration": str(span.end_time_unix_nano - span.start_time_unix_nano),
                    "StatusCode": ["Unset", "Ok", "Error"][span.status.code],
                    "StatusMessage": span.status.message,
                    "Events.Timestamp": [_time(e.time_unix_nano) for e in span.events],
                    "Events.Name": [e.name for e in span.events],
                    "Events.Attributes": [
                        {a.key: _text(a.value) for a in e.attributes} for e in span.events
                    ],
                }


def _time(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}.{rest:09d}"


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return json.dumps([_plain(item) for item in value.array_value.values])
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return ""
    plain = getattr(value, kind)
    if isinstance(plain, bytes):
        return base64.b64encode(plain).decode()
    if isinstance(plain, float):
        if not math.isfinite(plain):
            return f"json: unsupported value: {plain}"
        return int(plain) if plain.is_integer() else plain
    return plain


TRANSPORTS: tuple[Callable[[Sequence[ReadableSpan]], Iterable[Any]], ...] = (
    as_it_is,
    as_json_lines,
    as_protobuf,
    as_clickhouse,
)
