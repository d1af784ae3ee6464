"""A span record as a line of JSON, and back: for files that hold more spans than memory does."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

from otel_rollout.spans.record import SpanEvent, SpanRecord

_FIELDS = tuple(field.name for field in dataclasses.fields(SpanRecord))
_BYTES = "\0bytes"
"""The only member of an object that stands for bytes."""


def to_line(record: SpanRecord) -> bytes:
    """The record as JSON. ValueError or RecursionError for values that have none."""
    fields = {name: getattr(record, name) for name in _FIELDS}
    fields["attributes"] = dict(record.attributes)
    fields["events"] = [[e.name, e.time_ns, dict(e.attributes)] for e in record.events]
    fields["cut"] = sorted(record.cut)
    return json.dumps(list(fields.values()), default=_bytes, separators=(",", ":")).encode()


def from_line(line: bytes) -> SpanRecord:
    """The record that `to_line` wrote."""
    fields = dict(zip(_FIELDS, json.loads(line, object_hook=_object), strict=True))
    fields["events"] = [SpanEvent(*event) for event in fields["events"]]
    fields["cut"] = frozenset(fields["cut"])
    return SpanRecord(**fields)


def _bytes(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise ValueError(f"expected a value of an attribute, got {value!r:.80}")


def _object(value: dict[str, Any]) -> Any:
    if value.keys() != {_BYTES}:
        return value
    try:
        return base64.b64decode(value[_BYTES], validate=True)
    except (TypeError, ValueError):  # an attribute that somebody named so
        return value
