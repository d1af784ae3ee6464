"""OTLP/protobuf messages as spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import SpanEvent, SpanRecord


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
                    attributes={  # most are texts
                        row.key: (value := row.value).string_value or _value(value)
                        for row in span.attributes
                    },
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
                    dropped_attributes=span.dropped_attributes_count,
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
