"""A span as plain data, whichever source it was read from: the SDK, a file, a backend.

Limits and stores truncate attributes, and the rest may still look whole: `12` of a count of 123, an
id without its end. So each span of ours has the lengths of its attributes (`with_lengths`), and a
record holds only attributes that have theirs (`as_record`); the names of the others are in `cut`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.wire import loads

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
    cut: frozenset[str] = frozenset()
    """Names of attributes that were truncated or dropped; they are not in `attributes`."""
    dropped_attributes: int = 0
    """Number of attributes that the SDK dropped at its limit, if the source tells; else 0."""

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

    def boolean(self, key: str) -> bool | None:
        """The attribute if it is a boolean or the text of one, else None."""
        value = self.attributes.get(key)
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value)
        return value if isinstance(value, bool) else None

    def label(self, key: str) -> str | int | None:
        """The attribute that `label(key, value)` wrote, of the type that the value had."""
        value = self.attributes.get(key)
        if isinstance(value, str):
            return self.integer(key) if self.attributes.get(key + _TYPE) == "int" else value
        return value if isinstance(value, int) else None


_TYPE = "_type"


def label(key: str, value: str | int | None) -> dict[str, AttributeValue]:
    """Attributes for a value that is a text or an integer.

    Stores that keep only text lose which of both it was, so an integer says so beside it.
    """
    if value is None:
        return {}
    attributes: dict[str, AttributeValue] = {key: carried(value)}
    return attributes | ({key + _TYPE: "int"} if isinstance(value, int) else {})


def carried(value: AttributeValue) -> AttributeValue:
    """The value in a form that every transport carries; any other would cost its whole batch.

    Lone surrogates are written escaped, integers of more than 64 bits as text.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(value)
    return value


def with_lengths(
    attributes: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The last attributes of a span of ours, and `rollout.lengths`: the length of every attribute.

    `before`: those that were set earlier.
    """
    lengths = [
        f"{_quoted(key)}:{len(value) if isinstance(value, str) else len(str(value))}"
        for key, value in ({**before, **attributes} if before else attributes).items()
        if isinstance(value, str | int)
    ]
    return {**attributes, sc.LENGTHS: f"{{{','.join(lengths)}}}"}


@cache
def _quoted(key: str) -> str:
    return f'"{key.removeprefix(sc.PREFIX)}"'


def _length(value: object) -> int | None:
    """Characters of a value as text; None for a float, which stores write in ways of their own."""
    if isinstance(value, str):
        return len(value)
    return len(str(value)) if isinstance(value, int) else None


_KINDS = (sc.EXCHANGE_VERSION, sc.ROLLOUT_SCHEMA_VERSION, sc.ROLLOUT_PART, sc.REWARD)
"""One of these is on each span that has lengths."""


def _checked(record: SpanRecord) -> SpanRecord:
    """The record without what was truncated. A span that is still open has no lengths yet."""
    there = record.attributes
    ours = sc.LENGTHS in there or any(kind in there for kind in _KINDS)
    if not ours or record.end_time_ns is None or record.cut:
        return record
    try:
        lengths = loads(record.text(sc.LENGTHS) or "")
        wrong = {
            name
            for key, length in lengths.items()
            for name in (sc.PREFIX + key if key.startswith(".") else key,)
            if _length(there.get(name)) != length
        }
    except (ValueError, AttributeError):  # the seal itself: nothing but what the span is stands
        wrong = (there.keys() | {sc.LENGTHS}) - {sc.ROLLOUT_ID, *_KINDS[:-1]}
    if not wrong:
        return record
    kept = {key: value for key, value in there.items() if key not in wrong}
    return replace(record, attributes=kept, cut=frozenset(wrong))


def united(first: SpanRecord, second: SpanRecord) -> SpanRecord:
    """One record of two copies of a span: an attribute that was cut in one may be whole in both.

    The result is the same in either order.
    """
    if first.end_time_ns is None or second.end_time_ns is None:
        return second if first.end_time_ns is None else first
    if not first.cut or not second.cut:
        return second if first.cut else first
    attributes = {**first.attributes, **second.attributes}
    cut = (first.cut | second.cut) - attributes.keys()
    return replace(first, attributes=attributes, cut=cut)


def as_record(span: Any) -> SpanRecord:
    """The record of an SDK `ReadableSpan`, or of a `SpanRecord`, without what was cut.

    SpanFormatError for anything else.
    """
    return _checked(span if isinstance(span, SpanRecord) else unchecked_record(span))


def unchecked_record(span: Any) -> SpanRecord:
    """The record of an SDK `ReadableSpan` as it is; `as_record` of it finds what was cut."""
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
            dropped_attributes=span.dropped_attributes,
        )
    except AttributeError as error:
        raise SpanFormatError(
            f"reconstruct takes SDK ReadableSpans or the SpanRecords that otel_rollout.otlp reads, "
            f"got {type(span).__name__!r} ({error})"
        ) from None


def _plain(attributes: Any) -> dict[str, AttributeValue]:
    """A plain dict: the SDK's mapping takes a lock at every access."""
    return dict(attributes.copy()) if hasattr(attributes, "copy") else dict(attributes or {})
