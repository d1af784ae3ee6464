"""A span as plain data: what every source of spans (the SDK, a file, a backend) is read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_rollout.errors import SpanFormatError

AttributeValue = str | bool | int | float | Sequence[str | bool | int | float] | bytes | None


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """One event of a span."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span, whichever source it came from. Ids are lower-case hex, times ns since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_time_ns: int
    end_time_ns: int | None
    """None for a span that is still open."""
    attributes: Mapping[str, AttributeValue]
    scope: str = ""
    """Name of the instrumentation scope."""
    events: Sequence[SpanEvent] = ()
    status_error: str | None = None
    """Description of an ERROR status (may be empty); None for any other status."""

    def text(self, key: str) -> str | None:
        """The attribute if it is a string, else None."""
        value = self.attributes.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """The attribute if it is an integer or the text of one (some stores keep only text)."""
        value = self.attributes.get(key)
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                return None
        return value if isinstance(value, int) else None


def as_record(span: Any) -> SpanRecord:
    """The record of an SDK `ReadableSpan`; a `SpanRecord` is returned as it is.

    SpanFormatError for anything else.
    """
    if isinstance(span, SpanRecord):
        return span
    try:
        context = span.context
        return SpanRecord(
            name=span.name,
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_span_id=f"{span.parent.span_id:016x}" if span.parent else None,
            start_time_ns=span.start_time or 0,
            end_time_ns=span.end_time,
            attributes=_plain(span.attributes),
            scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
            events=[
                SpanEvent(event.name, event.timestamp, _plain(event.attributes))
                for event in span.events
            ],
            status_error=(span.status.description or "")
            if not span.status.is_ok and not span.status.is_unset
            else None,
        )
    except AttributeError as error:
        raise SpanFormatError(
            f"reconstruct takes SDK ReadableSpans or the SpanRecords that otel_rollout.otlp reads, "
            f"got {type(span).__name__!r} ({error})"
        ) from None


def _plain(attributes: Any) -> dict[str, AttributeValue]:
    """A dict of its own: the SDK's mapping takes a lock for every look."""
    return dict(attributes.copy()) if hasattr(attributes, "copy") else dict(attributes or {})
