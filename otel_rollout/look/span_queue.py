"""The look lane's queue: spans on their way to one exporter; what it does not take is counted."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from otel_rollout.export import renew_after_fork
from otel_rollout.otlp import SplittingSpanExporter, size_of
from otel_rollout.record import contained, in_time

logger = logging.getLogger("otel_rollout")

QUEUE_SIZE = 1 << 16
"""Spans that may wait: those of some twenty rollouts of 1,000 calls, which may end at once."""
_BATCH_SIZE = 512
"""The SDK's number of spans in a batch."""
_LAST_SECONDS = 5.0
"""Time that an exporter has for its own shutdown, after its queue was worked off."""


class SpanQueue(BatchSpanProcessor):
    """A batch processor that holds the spans of the rollouts in flight, and counts what it loses.

    exporter: receives the spans, in batches of a size that receivers accept.
    max_bytes: int, bound on the text of the spans that wait.

    Without OTEL_BSP_MAX_QUEUE_SIZE up to `QUEUE_SIZE` spans wait; the other OTEL_BSP_* variables
    mean what they mean to the SDK. A span that finds the queue full is dropped, which is logged
    once. An exporter that raises or hangs costs its own spans and nothing else.
    """

    def __init__(self, exporter: SpanExporter, max_bytes: int = 4 << 30) -> None:
        self.exporter = exporter
        """The exporter that receives the spans."""
        self._out = _CountingExporter(exporter)
        self._max_bytes = max_bytes
        queue_size, batch_size = _sizes()
        super().__init__(self._out, queue_size, max_export_batch_size=batch_size)
        self._max_waiting = self._batch_processor._max_queue_size
        self._ended = False
        renew_after_fork(self, _renew)

    @property
    def lost(self) -> int:
        """Number of spans that the exporter has not exported; while it works, some still wait."""
        return self._out.taken - self._out.exported

    @property
    def has_exported_none(self) -> bool:
        """True if the exporter has exported no span at all."""
        return self._out.exported == 0

    def on_end(self, span: ReadableSpan) -> None:
        """Let the span wait for the exporter, if it is sampled and there is room."""
        if self._ended or not (span.context and span.context.trace_flags.sampled):
            return
        if self._out.take(size_of(span), self._max_waiting, self._max_bytes):
            super().on_end(span)

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        """Wait until every span was given to the exporter; False if that takes longer."""
        timeout_millis = 30_000 if timeout_millis is None else timeout_millis
        flush = partial(super().force_flush, timeout_millis)
        return not in_time([(self._out, flush)], timeout_millis / 1000)

    def shutdown(self, timeout_millis: int = 30_000) -> None:
        """Export what waits, and end; what has not arrived by then is counted and logged."""
        self.end(timeout_millis)

    def end(self, timeout_millis: int = 30_000) -> bool:
        """Do `shutdown`; False if the exporter did not end in its time."""
        if self._ended:
            return True
        self._ended = True
        shutdown = partial(self._batch_processor.shutdown, timeout_millis)
        late = in_time([(self._out, shutdown)], timeout_millis / 1000 + _LAST_SECONDS)
        if self.lost:
            logger.error("%d of %d spans did not reach %s", self.lost, self._out.taken, self._out)
        return not late


class _CountingExporter(SplittingSpanExporter):
    """Counts the spans that wait for an exporter, and those that it has exported."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        self.renew()

    def renew(self) -> None:
        """Count anew, in a forked child: what waits is the parent's."""
        self.taken = 0
        """Spans that ended."""
        self.exported = 0
        """Spans that the exporter has taken over."""
        self._waiting = 0
        self._bytes = 0
        self._dropped = 0
        self._lock = threading.RLock()  # a span may end while the garbage collector runs

    def __str__(self) -> str:
        return type(self._exporter).__name__

    def take(self, size: int, max_waiting: int, max_bytes: int) -> bool:
        """Count a span that ended; True if there is room for it."""
        with self._lock:
            self.taken += 1
            if self._waiting < max_waiting and self._bytes + size <= max_bytes:
                self._waiting += 1
                self._bytes += size
                return True
            self._dropped += 1
            is_first = self._dropped == 1
        if is_first:
            logger.warning(
                "%d spans wait for %s already: further ones are dropped from traces, not from "
                "trajectories. Raise OTEL_BSP_MAX_QUEUE_SIZE, or see why it takes so long",
                self._waiting,
                self,
            )
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send every batch. FAILURE if any of them failed."""
        with self._lock:
            self._waiting -= len(spans)
        failed = False
        for batch in self._batches(spans):
            result = SpanExportResult.FAILURE
            with contained("%s did not export %d spans", self, len(batch)):
                result = self._exporter.export(batch)
            failed = failed or result is SpanExportResult.FAILURE
            with self._lock:
                self._bytes -= sum(map(size_of, batch))
                if result is not SpanExportResult.FAILURE:
                    self.exported += len(batch)
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS


def _renew(queue: SpanQueue) -> None:
    queue._out.renew()


def _sizes() -> tuple[int | None, int | None]:
    """Size of the queue and of a batch, where the variables do not say them: None is the SDK's."""
    queue = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip()
    batch = os.environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "").strip()
    if not queue:
        return max(QUEUE_SIZE, int(batch) if batch.isdecimal() else 0), None
    if not batch and queue.isdecimal() and 0 < int(queue) < _BATCH_SIZE:
        return None, int(queue)
    return None, None
