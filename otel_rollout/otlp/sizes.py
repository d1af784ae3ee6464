"""How large a span is in a request, and the same span with texts cut until it is no larger."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Status

from otel_rollout import semconv as sc

_FIXED = 256
"""Bytes of ids, times and counts, and of the messages around a span, at most."""
_ROW = 32
"""Bytes of an attribute besides its name and its text, at most; also of an item of a list."""
_KEPT = 1024
"""Bytes of a text that are never cut: they show what it was."""
_MARK = 96
"""Bytes of the note on one cut, besides its name, at most."""


def size_of(span: ReadableSpan) -> int:
    """Bytes of a request with this span alone, at most: with its resource and its scope.

    Never less than OTLP/protobuf has, and a few hundred bytes more.
    """
    scope = span.instrumentation_scope
    size = _FIXED + _size_of_resource(span.resource) + _text(span.name)
    if scope is not None:
        size += _text(scope.name) + _text(scope.version) + _text(scope.schema_url)
        size += _attributes(scope.attributes) if scope.attributes else 0
    if span.context is not None and span.context.trace_state:
        size += sum(_text(k) + _text(v) + 2 for k, v in span.context.trace_state.items())
    size += _attributes(span.attributes) + _text(span.status.description)
    for event in span.events:
        size += 2 * _ROW + _text(event.name) + _attributes(event.attributes)
    for link in span.links:
        size += 3 * _ROW + _attributes(link.attributes)
        size += sum(_text(k) + _text(v) + 2 for k, v in link.context.trace_state.items())
    return size


def _text(text: str | None) -> int:
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _attributes(attributes: Mapping[str, Any] | None) -> int:
    if not attributes:
        return 0
    # A plain dict: the SDK's mapping takes a lock at every access.
    rows = attributes.copy() if hasattr(attributes, "copy") else attributes
    size = 0
    for key, value in rows.items():
        size += _ROW + (len(key) if key.isascii() else _text(key))
        if isinstance(value, str):
            size += len(value) if value.isascii() else _text(value)
        elif type(value) not in _SCALARS:
            size += _value(value)
    return size


_SCALARS = frozenset((bool, int, float, type(None)))
"""Types of which a value has its place in `_ROW`."""


def _value(value: Any) -> int:
    """Bytes of a value besides `_ROW`."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Sequence):
        return _ROW * len(value) + sum(map(_value, value))
    if isinstance(value, Mapping):
        return sum(2 * _ROW + _text(str(key)) + _value(each) for key, each in value.items())
    return 0


def _size_of_resource(resource: Resource) -> int:
    """Bytes of a resource: that of the last one is kept, since nearly all spans share one."""
    global _last_resource
    last, size = _last_resource
    if last is not resource:
        size = _attributes(resource.attributes) + _text(resource.schema_url)
        _last_resource = (resource, size)
    return size


_last_resource: tuple[Resource | None, int] = (None, 0)


class _LongValue(NamedTuple):
    """A value of a span that may be cut."""

    size: int
    event: int | None
    """Index of its event. None: it is on the span itself."""
    key: str | None
    """Name of its attribute. None: the description of the span's status."""
    value: Any

    @property
    def name(self) -> str:
        """What the note on the cut calls it."""
        name = "the status's description" if self.key is None else self.key
        return name if self.event is None else f"{name} of event {self.event}"


def cut_to(span: ReadableSpan, max_bytes: int) -> ReadableSpan:
    """The span with its largest values cut until `size_of` it is at most `max_bytes`.

    `rollout.cut_attributes` lists them, with their new lengths. A span of ours has the lengths of
    its attributes, so what is rebuilt of it reports what is missing. Nothing is cut below a
    kilobyte, so a span with very many small values stays larger. A smaller one is returned as is.
    """
    excess = size_of(span) - max_bytes
    if excess <= 0:
        return span
    excess += _ROW + len(sc.CUT_ATTRIBUTES)
    cuts: dict[tuple[int | None, str | None], Any] = {}
    notes = []
    for place in sorted(_places(span), key=lambda place: place.size, reverse=True):
        note = _ROW + _MARK + _text(place.name)
        if excess <= 0 or place.size <= _KEPT + note:
            break
        excess += note
        value = _shortened(place.value, max(_KEPT, place.size - excess))
        excess -= place.size - _value(value)
        cuts[place.event, place.key] = value
        notes.append(_note(place, value))
    return _changed(span, cuts, notes) if cuts else span


def _places(span: ReadableSpan) -> Iterable[_LongValue]:
    for key, value in (span.attributes or {}).items():
        yield _LongValue(_value(value), None, key, value)
    for index, event in enumerate(span.events):
        for key, value in (event.attributes or {}).items():
            yield _LongValue(_value(value), index, key, value)
    yield _LongValue(_text(span.status.description), None, None, span.status.description)


def _shortened(value: Any, size: int) -> Any:
    """The first bytes of a text; of any other value, which has no use in part, nothing."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")
    return value[:size] if isinstance(value, bytes) else ()


def _note(place: _LongValue, value: Any) -> str:
    is_text = isinstance(place.value, str)
    unit = "characters" if is_text else "bytes" if isinstance(place.value, bytes) else "items"
    return f"{place.name}: the first {len(value)} of {len(place.value)} {unit}"


def _changed(
    span: ReadableSpan, cuts: Mapping[tuple[int | None, str | None], Any], notes: Sequence[str]
) -> ReadableSpan:
    """A copy of the span with other values, and with the notes on them."""

    def changed(
        attributes: Mapping[str, Any] | None, event: int | None, dropped: int, **more: Any
    ) -> BoundedAttributes:
        rows = {key: cuts.get((event, key), value) for key, value in (attributes or {}).items()}
        bounded = BoundedAttributes(attributes={**rows, **more}, immutable=False)
        bounded.dropped = dropped
        return bounded

    cut = copy.copy(span)
    noted = {sc.CUT_ATTRIBUTES: tuple(notes)}
    cut._attributes = changed(span.attributes, None, span.dropped_attributes, **noted)
    cut._events = BoundedList.from_seq(
        None,
        [
            Event(e.name, changed(e.attributes, index, e.dropped_attributes), e.timestamp)
            for index, e in enumerate(span.events)
        ],
    )
    cut._events.dropped = span.dropped_events
    if (None, None) in cuts:
        cut._status = Status(span.status.status_code, cuts[None, None])
    return cut
