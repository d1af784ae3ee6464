"""Requests of spans: below 4 MiB, encoded bit by bit, one at a time to an exporter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout.export import renew_after_fork
from otel_rollout.otlp import plain, prepare_once, use_encoder, watch_answers
from otel_rollout.record.boundary import contained

logger = logging.getLogger("otel_rollout")

REQUEST_BYTES = 3 << 20
"""Bytes of several spans in a request, at most: below the 4 MiB of gRPC with what is around them,
and over HTTP too, where the receiver may pass them on."""
REQUEST_SPANS = 512
"""The SDK's number of spans in a request, at most."""
_TURN_SECONDS = 0.001
"""Time for which encoding keeps the interpreter; whoever waits for it takes it only after 5 ms."""
_BREAK_SECONDS = 0.0001
"""Time that encoding pauses then, long enough for a thread that waits to go on."""
_NOT_EXPORTED = "%s did not export %d spans"
_FIXED = 256
"""Bytes of the ids, times and counts of a span, and of the messages around it."""
_ROW = 32
"""Bytes of an attribute besides its name and its text."""


class _Quiet(logging.Filter):
    """Passes over what exporters of OpenTelemetry log of a try, on the threads that try again."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = set[int]()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread not in self.threads

    def watch(self, exporter: SpanExporter) -> None:
        """Pass over what this exporter logs."""
        for module in {each.__module__ for each in type(exporter).__mro__}:
            if module.startswith("opentelemetry.exporter."):
                logging.getLogger(module).addFilter(self)


_quiet = _Quiet()


class Outlet(SpanExporter):
    """An exporter that several processors share: it is called by one thread at a time.

    users: processors that share it; the last that shuts it down shuts the exporter down.
    """

    def __init__(self, exporter: SpanExporter, users: int = 1) -> None:
        self.exporter = exporter
        """The exporter that sends the requests."""
        self._users = users
        self._renew()
        renew_after_fork(self, Outlet._renew)
        _quiet.watch(exporter)
        watch_answers(exporter, self._note)
        prepare_once(exporter)
        self.uses_encoder = use_encoder(exporter)
        """True if it sends an `EncodedSpan` as what it contains."""

    def _renew(self) -> None:
        self._exporting = threading.Lock()  # a thread of the parent may be at the exporter
        self._wait, self._rejected, self._why = 0.0, 0, ""
        """The last answer to the request that is being sent, as `watch_answers` gives it."""

    def _note(self, wait: float, rejected: int, why: str) -> None:
        self._wait, self._rejected, self._why = wait, rejected, why

    def __str__(self) -> str:
        endpoint = getattr(self.exporter, "_endpoint", None)
        return type(self.exporter).__name__ + (f" ({endpoint})" if endpoint else "")

    def send(
        self, spans: Sequence[ReadableSpan], in_haste: Callable[[], bool], *, again: bool = False
    ) -> tuple[bool, float, int]:
        """Send one request.

        Returns whether the exporter reports success, the seconds after which the receiver wants to
        be asked again (0: it does not say), and how many of the spans it rejects, which is logged.

        in_haste: returns True while somebody waits for the spans.
        again: the last request has failed, too: that this one fails is not logged.
        """
        thread = threading.get_ident()
        level = logging.DEBUG if again else logging.ERROR
        with self._exporting, contained(_NOT_EXPORTED, self, len(spans), level=level):
            self._note(0.0, 0, "")
            try:
                if again:
                    _quiet.threads.add(thread)
                result = self.exporter.export(Paced(spans, in_haste))
            finally:
                _quiet.threads.discard(thread)
            has_arrived = result is not SpanExportResult.FAILURE
            if has_arrived and self._rejected:
                logger.error(
                    "%s rejected %d of %d spans: they are lost. It says: %s",
                    *(self, self._rejected, len(spans), self._why or "nothing"),
                )
            return has_arrived, self._wait, self._rejected
        return False, 0.0, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans for a batch processor, in requests that receivers take."""
        arrived = [self.send(each, lambda: False)[0] for each in in_requests(spans)]
        return SpanExportResult.SUCCESS if all(arrived) else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered here."""
        return True

    def shutdown(self) -> None:
        """Shut the exporter down, if no other processor uses it any more."""
        self._users -= 1
        if self._users == 0:
            self.exporter.shutdown()


def in_requests(spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    """The spans in requests of `REQUEST_BYTES`, or of one larger span."""
    request: list[ReadableSpan] = []
    total = 0
    for span in spans:
        size = size_of(span)
        if request and total + size > REQUEST_BYTES:
            yield request
            request, total = [], 0
        request.append(span)
        total += size
    if request:
        yield request


def size_of(span: ReadableSpan) -> int:
    """Bytes of a span in OTLP/protobuf, by its texts: rather more than there are."""
    size = _FIXED + len(span.name) + _texts(span.attributes)
    if span.status.description:
        size += _text(span.status.description)
    for event in span.events:
        size += _FIXED + _texts(event.attributes)
    return size


def _texts(attributes: Mapping[str, Any] | None) -> int:
    if not attributes:
        return 0
    size = 0
    for key, value in plain(attributes).items():
        size += _ROW + len(key)
        if type(value) is str:
            size += len(value) if value.isascii() else _text(value)
        elif type(value) not in _SCALARS:
            size += _text(repr(value))
    return size


_SCALARS = frozenset((bool, int, float))
"""Types of which a value has its place in `_ROW`."""


def _text(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


_Span = TypeVar("_Span")


class Paced(list[_Span]):
    """Spans that are taken one after the other, by an exporter: others run between them.

    in_haste: returns True while somebody waits for the spans; then there is no pause.
    """

    def __init__(self, spans: Iterable[_Span], in_haste: Callable[[], bool]) -> None:
        super().__init__(spans)
        self._in_haste = in_haste

    def __iter__(self) -> Iterator[_Span]:
        began = time.perf_counter()
        for span in super().__iter__():
            yield span
            if time.perf_counter() - began > _TURN_SECONDS and not self._in_haste():
                time.sleep(_BREAK_SECONDS)
                began = time.perf_counter()
