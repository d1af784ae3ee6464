"""The look lane's queue: spans on their way to one exporter; what it does not take is counted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial

from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from otel_rollout.export import renew_after_fork
from otel_rollout.look.elided import Elided
from otel_rollout.otlp import SplittingSpanExporter, size_of
from otel_rollout.record import contained, in_time, rollout_metrics, start_thread

logger = logging.getLogger("otel_rollout")

QUEUE_SIZE = 1 << 16
"""Spans that may wait: those of some twenty rollouts of 1,000 calls, which may end at once."""
_BATCH_SIZE = 512
"""The SDK's number of spans in a batch."""
_LAST_SECONDS = 5.0
"""Time that an exporter has for its own shutdown, after its queue was worked off."""
_PAUSE_SECONDS = 5.0
"""Time between two tries to send to a receiver that is away."""
_PATIENCE_SECONDS = 300.0
"""Time for which spans wait for a receiver that is away, as in a collector."""


class SpanQueue(BatchSpanProcessor):
    """A batch processor that holds the spans of the rollouts in flight, and counts what it loses.

    exporter: receives the spans, in requests that receivers take. A `SplittingSpanExporter` gives
        the queue its `max_bytes`.
    max_bytes: int, bound on the text of the spans that wait.

    Without OTEL_BSP_MAX_QUEUE_SIZE up to `QUEUE_SIZE` spans wait; the other OTEL_BSP_* variables
    mean what they mean to the SDK. A span that finds the queue full is dropped, which is logged
    once. What an exporter fails to export waits too, and is sent again every few seconds for up to
    five minutes: a collector may restart. An exporter that raises or hangs costs its own spans and
    nothing else.
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
        """Wait until every span was given to the exporter; False if that takes longer.

        What it does not take waits on.
        """
        timeout_millis = 30_000 if timeout_millis is None else timeout_millis

        def flush() -> bool:
            self._out.hurry()
            flushed = super(SpanQueue, self).force_flush(timeout_millis)
            self._out.send()
            return flushed

        return not in_time([(self._out, flush)], timeout_millis / 1000)

    def shutdown(self, timeout_millis: int = 30_000) -> None:
        """Export what waits, and end; what has not arrived by then is counted and logged."""
        self.end(timeout_millis)

    def end(self, timeout_millis: int = 30_000) -> bool:
        """Do `shutdown`; False if the exporter did not end in its time."""
        if self._ended:
            return True
        self._ended = True
        self._out.hurry(but_not_within=1.0)
        shutdown = partial(self._batch_processor.shutdown, timeout_millis)
        late = in_time([(self._out, shutdown)], timeout_millis / 1000 + _LAST_SECONDS)
        self._out.say_cut()
        if self.lost:
            logger.error("%d of %d spans did not reach %s", self.lost, self._out.taken, self._out)
        return not late


class _CountingExporter(SplittingSpanExporter):
    """Counts the spans that wait for an exporter, those that it has exported, and what is lost.

    Spans that it did not take are kept, and sent again.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        if type(exporter) is SplittingSpanExporter:
            super().__init__(exporter._exporter, exporter._given_bytes)
        else:
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
        self._cut = self._refused = 0
        self._lock = threading.RLock()  # a span may end while the garbage collector runs
        self._kept: list[ReadableSpan] = []
        """Spans that the exporter is to take next, or did not take so far."""
        self._sending = threading.Lock()
        """Held while spans are sent: by the queue's thread, by a flush, or to try again."""
        self._elided = Elided()
        self._tried = 0.0
        """When the exporter last did not take spans."""
        self._next_try = 0.0
        self._away_since: float | None = None
        """When the exporter first did not take spans. None: it took the last."""
        self._end = threading.Event()
        self._gave_up = False
        """True if spans were dropped since the exporter took the last."""
        self._tries_again = False
        """True while a thread waits to send again."""

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
        rollout_metrics().dropped(self._exporter, 1, "span")
        if is_first:
            logger.warning(
                "%d spans wait for %s already: further ones are dropped from traces, not from "
                "trajectories. Raise OTEL_BSP_MAX_QUEUE_SIZE, or see why it takes so long",
                self._waiting,
                self,
            )
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans, after those that are kept. FAILURE if some are kept now."""
        taken = sum(map(size_of, spans))
        spans = [self._elided(span) for span in spans]
        with self._sending:
            self._kept += spans
            with self._lock:  # a span may be kept in a shorter form than it was taken in
                self._bytes += sum(map(size_of, spans)) - taken
        return SpanExportResult.SUCCESS if self.send() else SpanExportResult.FAILURE

    def hurry(self, but_not_within: float = 0.0) -> None:
        """Let the next `send` try, unless the last one failed within these seconds."""
        if time.monotonic() - self._tried >= but_not_within:
            self._next_try = 0.0

    def send(self) -> bool:
        """Send what is kept, unless it is too early to try again; True if nothing is kept then."""
        with self._sending:
            while self._kept and time.monotonic() >= self._next_try:
                batch = next(self._batches(self._kept))
                refused, away = self._refused, list[ReadableSpan]()
                is_done = False
                with contained("%s did not export %d spans", self, len(batch)):
                    away = self._send(batch)
                    is_done = True
                self._kept[: len(batch)] = away
                lost = self._refused - refused if is_done else len(batch)
                self._count(batch, away, lost)
                if away:
                    self._wait()
                elif is_done:
                    self._away_since, self._gave_up = None, False
            return not self._kept

    def _count(
        self, batch: Sequence[ReadableSpan], away: Sequence[ReadableSpan], lost: int
    ) -> None:
        """Count a batch that was sent: some are away and kept, some lost, the rest has arrived."""
        with self._lock:
            self._waiting -= len(batch) - len(away)
            self._bytes -= sum(map(size_of, batch)) - sum(map(size_of, away))
            self.exported += len(batch) - len(away) - lost
        rollout_metrics().dropped(self._exporter, lost, "span")

    def _wait(self) -> None:
        """Keep what is kept for the next try, or give it up after long enough."""
        self._tried = time.monotonic()
        self._next_try = self._tried + _PAUSE_SECONDS
        if self._away_since is None:
            self._away_since = self._tried
        if self._tried - self._away_since > _PATIENCE_SECONDS:
            self._give_up()
        elif not self._tries_again and not self._end.is_set():
            self._tries_again = start_thread(self._try_again, "otel-rollout-spans") is not None

    def _give_up(self) -> None:
        """Drop what is kept; the first time is logged, and `end` counts all."""
        if not self._gave_up:
            self._gave_up = True
            logger.error(
                "%s has taken no span for %d seconds: %d are dropped from traces, not from "
                "trajectories, and further ones until it takes some again",
                self,
                _PATIENCE_SECONDS,
                len(self._kept),
            )
        self._count(self._kept, (), len(self._kept))
        self._kept.clear()

    def _try_again(self) -> None:
        """Send what is kept until nothing is: perhaps no further span ends."""
        with suppress_instrumentation():
            while not self._end.wait(max(0.0, self._next_try - time.monotonic())):
                self.send()
                with self._sending:
                    self._tries_again = bool(self._kept)
                    if not self._tries_again:
                        return

    def say_cut(self) -> None:
        """Log how many spans were cut, if not only the one that was logged."""
        if self._cut > 1:
            logger.warning("%d spans were cut for %s", self._cut, self)

    def shutdown(self) -> None:
        """Send what is kept a last time, and shut the exporter down."""
        self._end.set()
        if self._sending.acquire(timeout=_LAST_SECONDS / 2):  # else the exporter hangs
            self._sending.release()
            self.send()
        self._exporter.shutdown()


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
