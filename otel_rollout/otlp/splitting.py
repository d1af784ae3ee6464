"""Requests of spans that receivers take: small enough, and in parts where one is refused.

A batch processor counts spans, but receivers limit bytes, and all spans of a refused request are
lost. The result of an exporter has no reason: so an empty request is sent after a
failure. If that one is taken, the receiver is there and has refused what was in the other.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Status

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.otlp.encoding import plain, use_encoder

logger = logging.getLogger("otel_rollout")

_MIB = 1 << 20
_MAX_BYTES = 3 * _MIB
"""Several spans together: below the 4 MiB of gRPC, also where the receiver passes them on."""
_LIMITS = (20 * _MIB, 4 * _MIB, _MIB, _MIB // 4, _MIB // 16, _MIB // 64)
"""Usual limits of a request: OTLP over HTTP, gRPC, a web server; then whatever is smaller."""
_SMALL = _LIMITS[-1]
"""Bytes that no receiver refuses."""
_TRIES = 3
"""Spans that are refused one by one before the receiver counts as away, if it has taken none."""
_SECONDS = 60.0
"""Time for the parts of one refused request; an exporter may need ten seconds for each failure."""


class SplittingSpanExporter(SpanExporter):
    """Passes spans on to `exporter` in requests that its receiver takes.

        provider.add_span_processor(BatchSpanProcessor(SplittingSpanExporter(OTLPSpanExporter())))

    The queues that `configure` makes do this already. A request that is refused though the receiver
    is there is sent again in halves, and further ones are smaller. A single span that is refused is
    cut: its attribute `rollout.cut_attributes` lists the texts that were cut; the first is logged.

    max_bytes: bytes of a request, at most; a single span that is larger is cut to it. None
        (default): 3 MiB, and a single span that is larger is sent as it is, and cut if it is
        refused, since receivers differ: by default 4 MiB over gRPC, 20 MiB over HTTP.
    """

    def __init__(self, exporter: SpanExporter, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 1):
            raise ConfigurationError(
                f"SplittingSpanExporter(max_bytes=...): expected a number of bytes, got "
                f"{max_bytes!r}; None is 3 MiB, and larger spans as the receiver takes them"
            )
        self.exporter = exporter
        """The exporter that sends the requests."""
        use_encoder(exporter)
        self._max_bytes = _MAX_BYTES if max_bytes is None else max_bytes
        self._largest = max_bytes
        """Bytes to which a larger span is cut. None: no span was refused so far."""
        self._cut = 0
        """Spans that were cut."""
        self.refused = 0
        """Spans that the receiver did not take in any form, but others that were with them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send every span. FAILURE if any of them did not arrive."""
        refused = self.refused
        away = [span for batch in self.batches(spans) for span in self.send(batch)]
        failed = away or self.refused > refused
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def batches(self, spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
        """The spans in requests that receivers take."""
        batch: list[ReadableSpan] = []
        total = 0
        for span in spans:
            size = size_of(span)
            if batch and total + size > self._max_bytes:
                yield batch
                batch, total = [], 0
            batch.append(span)
            total += size
        if batch:
            yield batch

    def send(self, batch: list[ReadableSpan]) -> list[ReadableSpan]:
        """Send spans in one request, in parts if it is refused.

        The spans that did not arrive since the receiver is away, or takes none at all; they may be
        sent again. Those that it refuses, and not their neighbours, are counted in `refused`.
        """
        if len(batch) == 1 and self._largest is not None:
            batch = [self._cut_to(batch[0], self._largest)]
        if self._takes(batch):
            return []
        is_small = len(batch) == 1 and size_of(batch[0]) <= _SMALL
        if is_small or not self._takes([]):
            return batch
        alone, away = self._send_parts(batch)
        if len(alone) + len(away) == len(batch) > 1:
            return batch  # the receiver takes nothing now, whatever is in it
        for span in alone:
            if not self._takes([]):
                away.append(span)
            elif not self._send_shortened(span):
                if len(batch) == 1:
                    return batch
                self.refused += 1
        return away

    def _send_parts(
        self, batch: list[ReadableSpan]
    ) -> tuple[list[ReadableSpan], list[ReadableSpan]]:
        """Send halves, quarters, ... of a request that was refused, the larger ones first.

        The spans that were refused alone, and those of parts that were given up.
        """
        deadline = time.monotonic() + _SECONDS
        largest, alone, away = 0, list[ReadableSpan](), list[ReadableSpan]()
        refused = deque([batch])
        while refused:
            part = refused.popleft()
            if len(part) == 1:
                alone += part
                continue
            for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                if time.monotonic() > deadline or (not largest and len(alone) >= _TRIES):
                    away += half
                elif self._takes(half):
                    largest = max(largest, sum(map(size_of, half)))
                else:
                    refused.append(half)
        if largest and not alone and not away:
            self._max_bytes = min(self._max_bytes, max(largest, _SMALL))
        return alone, away

    def _takes(self, spans: list[ReadableSpan]) -> bool:
        try:
            result = self.exporter.export(spans)
        except OSError as error:  # SDK 1.38 raises that a connection was refused
            if spans:
                logger.warning("%s did not export %d spans: %s", self, len(spans), error)
            return False
        return result is not SpanExportResult.FAILURE

    def _send_shortened(self, span: ReadableSpan) -> bool:
        """Send a span that was refused: once more as it is, then cut to one limit after another."""
        if self._takes([span]):
            return True  # the receiver was away before
        for max_bytes in (limit - limit // 16 for limit in _LIMITS):
            cut = cut_to(span, max_bytes)
            if cut is not span and self._takes([cut]):
                self._largest = max_bytes
                self._max_bytes = min(self._max_bytes, max_bytes)
                self._report_cut(span, max_bytes)
                return True
        return False

    def _cut_to(self, span: ReadableSpan, max_bytes: int) -> ReadableSpan:
        cut = cut_to(span, max_bytes)
        if cut is not span:
            self._report_cut(span, max_bytes)
        return cut

    def _report_cut(self, span: ReadableSpan, max_bytes: int) -> None:
        """Count a span that was cut; the first is logged."""
        self._cut += 1
        if self._cut == 1:
            logger.warning(
                "%s: the span %r of %d bytes is larger than its receiver takes, and was cut to %d: "
                "what is rebuilt from there is incomplete, and says so. Further ones are not "
                "logged. Raise the limit of the receiver (collector-config.yaml shows where)",
                self,
                span.name,
                size_of(span),
                max_bytes,
            )

    def __str__(self) -> str:
        return type(self.exporter).__name__

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the wrapped exporter."""
        return self.exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Shut the wrapped exporter down, and log how many spans were cut."""
        if self._cut > 1:
            logger.warning("%d spans were cut for %s", self._cut, self)
            self._cut = 0
        self.exporter.shutdown()


# --- sizes of spans


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
    size = 0
    for key, value in plain(attributes).items():
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
