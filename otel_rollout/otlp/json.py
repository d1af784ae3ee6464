"""OTLP/JSON as spans: one message."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import AttributeValue, SpanEvent, SpanRecord

SPANS_PREFIX = b'{"resourceSpans":'
"""Prefix of the lines that span exporters write."""
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What data of another shape than expected may raise."""
_ERROR = 2
_OTHER_SIGNALS = ("resourceLogs", "resourceMetrics", "resourceProfiles")
_HEX = frozenset("0123456789abcdef")


def in_camel_case(value: Any) -> Any:
    """The same JSON with the names of OTLP/JSON in the place of protobuf's, and without nulls."""
    if isinstance(value, Mapping):
        return {camel_case(k): in_camel_case(v) for k, v in value.items() if v is not None}
    return [in_camel_case(item) for item in value] if isinstance(value, list) else value


def camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def read_json(
    data: Any, *, on_error: Callable[[SpanFormatError], None] | None = None
) -> Iterator[SpanRecord]:
    """The spans of one OTLP/JSON `TracesData` object. SpanFormatError if it is not one.

    Members may have the names of protobuf too, such as `resource_spans`. An object of another
    signal has no spans: a collector may write logs to the same file.
    SpanFormatError for a span that cannot be read; with `on_error`, it is called with the error
    instead, and the other spans are read.
    """
    if isinstance(data, Mapping) and "resource_spans" in data:
        data = in_camel_case(data)
    if not isinstance(data, Mapping) or not isinstance(data.get("resourceSpans"), list):
        if isinstance(data, Mapping) and any(key in data for key in _OTHER_SIGNALS):
            return
        raise SpanFormatError(
            f"expected an OTLP/JSON object with 'resourceSpans', got {str(data)[:80]!r}"
        )
    for span, scope in _spans_in(data["resourceSpans"]):
        try:
            record = _json_span(span, scope)
        except UNREADABLE as error:
            problem = SpanFormatError(f"not an OTLP/JSON span: {error!r:.200}")
            if on_error is None:
                raise problem from error
            on_error(problem)
            continue
        yield record


def _spans_in(resources: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each span with the name of its scope; in place of spans what is broken and may hold some."""
    for resource in resources:
        for scope in _listed(resource, "scopeSpans"):
            if not isinstance(scope, Mapping):
                yield scope, ""
                continue
            about = scope.get("scope") or {}
            name = about.get("name", "") if isinstance(about, Mapping) else ""
            for span in _listed(scope, "spans"):
                yield span, name


def _listed(holder: Any, key: str) -> list[Any]:
    """A list in an object; [holder] where it is none, to be read, which fails."""
    found = holder.get(key) if isinstance(holder, Mapping) else holder
    return found if isinstance(found, list) else [] if found is None else [found]


def _json_span(span: Any, scope: str) -> SpanRecord:
    if not isinstance(span, Mapping):
        raise TypeError(f"expected an object, got {span!r:.80}")
    status = span.get("status") or {}
    end = int(span.get("endTimeUnixNano") or 0)
    return SpanRecord(
        name=span.get("name", ""),
        trace_id=_json_id(span["traceId"], 16),
        span_id=_json_id(span["spanId"], 8),
        parent_span_id=_json_id(span.get("parentSpanId") or "", 8) or None,
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
        dropped_attributes=int(span.get("droppedAttributesCount") or 0),
    )


def _json_id(text: str, size: int) -> str:
    """The id as lower-case hex: OTLP/JSON writes hex, plain protobuf JSON base64."""
    plain = text.lower()
    if not plain or (len(plain) == 2 * size and _HEX.issuperset(plain)):
        return plain
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) != size:
        raise ValueError(f"expected an id of {size} bytes in hex, got {text[:80]!r}")
    return raw.hex()


def _json_attributes(rows: Sequence[Mapping[str, Any]] | None) -> dict[str, AttributeValue]:
    return {row["key"]: _json_value(row.get("value") or {}) for row in rows or ()}


def _json_value(value: Mapping[str, Any]) -> Any:
    for kind, content in value.items():
        if kind in ("stringValue", "boolValue"):
            return content
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)  # also "NaN" and "Infinity"
        if kind == "bytesValue":
            return base64.b64decode(content)
        if kind == "arrayValue":
            return [_json_value(item) for item in content.get("values") or ()]
        if kind == "kvlistValue":
            return _json_attributes(content.get("values"))
    return None
