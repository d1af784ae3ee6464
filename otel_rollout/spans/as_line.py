"""A span record as a line of JSON, and back: for files that hold more spans than memory does."""

from __future__ import annotations

import base64
import json
from typing import Any

from otel_rollout.spans.record import SpanEvent, SpanRecord

_BYTES = "\0bytes"
"""The only member of an object that stands for bytes."""


def to_line(record: SpanRecord) -> bytes:
    """The record as JSON. ValueError or RecursionError for values that have none."""
    fields = [
        record.name,
        record.trace_id,
        record.span_id,
        record.parent_span_id,
        record.start_time_ns,
        record.end_time_ns,
        dict(record.attributes),
        record.scope,
        [[event.name, event.time_ns, dict(event.attributes)] for event in record.events],
        record.status_error,
        sorted(record.cut),
        record.dropped_attributes,
    ]
    return json.dumps(fields, default=_bytes, separators=(",", ":")).encode()


def from_line(line: bytes) -> SpanRecord:
    """The record that `to_line` wrote."""
    *fields, events, status_error, cut, dropped = json.loads(line, object_hook=_object)
    return SpanRecord(
        *fields,
        events=[SpanEvent(*event) for event in events],
        status_error=status_error,
        cut=frozenset(cut),
        dropped_attributes=dropped,
    )


def _bytes(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise ValueError(f"expected a value of an attribute, got {value!r:.80}")


def _object(value: dict[str, Any]) -> Any:
    if value.keys() != {_BYTES}:
        return value
    try:
        return base64.b64decode(value[_BYTES])
    except (TypeError, ValueError):  # an attribute that somebody named so
        return value
