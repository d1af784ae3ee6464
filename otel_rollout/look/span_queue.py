"""The look lane's queue: spans on their way to one exporter; what it does not take is counted.

`configure` makes one for each exporter of spans. It is not the SDK's batch processor, which drops
what an exporter does not take: spans are all that other processes rebuild rollouts from.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from opentelemetry.context import Context
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import SpanContext

from otel_rollout import semconv as sc
from otel_rollout.export import renew_after_fork
from otel_rollout.look.metrics import rollout_metrics
from otel_rollout.otlp import SplittingSpanExporter, size_of
from otel_rollout.record import contained, guarded, in_time, process_state, start_thread
from otel_rollout.spans import label

logger = logging.getLogger("otel_rollout")

STARTED_NAME = "rollout started"
QUEUE_SIZE = 1 << 16
"""Spans that may wait: those of some twenty rollouts of 1,000 calls, which may end at once."""
_BATCH_SIZE = 512
"""The SDK's number of spans in a batch."""
_DELAY_SECONDS = 5.0
"""The SDK's time after which a batch is sent that is not full."""
_STARTS_SECONDS = 0.25
"""Least time between two batches for the start of a rollout: a request for each would cost more
than the rollout."""
_LAST_SECONDS = 5.0
"""Time that an exporter has for its own shutdown, after its queue was worked off."""
_PAUSE_SECONDS = 5.0
"""Time between two tries to send to a receiver that is away."""
_PATIENCE_SECONDS = 300.0
"""Time for which spans wait for a receiver that is away, as in a collector."""
_TURN_SECONDS = 0.001
"""Time for which encoding keeps the interpreter; whoever waits for it takes it only after 5 ms."""
_BREAK_SECONDS = 0.0001
"""Time that encoding pauses then, long enough for a thread that waits to go on."""


class SpanQueue(SpanProcessor):
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
        self._exporter = (
            exporter
            if isinstance(exporter, SplittingSpanExporter)
            else SplittingSpanExporter(exporter)
        )
        self._max_bytes = max_bytes
        self._max_queue_size, self._batch_size = _sizes()
        self._delay = _seconds(OTEL_BSP_SCHEDULE_DELAY, _DELAY_SECONDS)
        self._ended = False
        self._renew()
        renew_after_fork(self, SpanQueue._renew)

    def _renew(self) -> None:
        """Begin anew, in a forked child too: what waits is the parent's."""
        self._changed = threading.Condition()  # reentrant: a span may end in a garbage collection
        self._waiting: deque[tuple[ReadableSpan, int]] = deque()
        """Spans with their sizes."""
        self._bytes = 0
        """Size of the spans that wait, with those that are being sent."""
        self.taken = self._exported = self._done = self._dropped = 0
        """Spans that ended, that arrived, that are not waiting any more, that found no room."""
        self._failures = 0
        """Requests that the exporter did not take."""
        self._away_since: float | None = None
        """When the exporter first did not take spans. None: it took the last."""
        self._gave_up = False
        """True if spans were dropped since the exporter took the last."""
        self._hurry = False
        """True while nothing is to be waited for."""
        self._due = math.inf
        """When the starts of rollouts that wait are to be sent, by the monotonic clock."""
        self._began_last = 0.0
        """When the last batch was taken."""
        self._worker: threading.Thread | None = None

    @property
    def lost(self) -> int:
        """Number of spans that the exporter has not exported; while it works, some still wait."""
        return self.taken - self._exported

    @property
    def has_exported_none(self) -> bool:
        """True if the exporter has exported no span at all."""
        return self._exported == 0

    @guarded("the start of a rollout was not exported")
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Export at once that a rollout starts: its own span is sent when it ends, or never."""
        written = span.attributes or {}
        is_rollout = sc.ROLLOUT_SCHEMA_VERSION in written and sc.LENGTHS not in written
        if not (is_rollout and process_state.settings.announce and not self._ended):
            return
        started = _started(span)
        export_at_once = getattr(self.exporter, "export_at_once", None)
        if export_at_once is None:
            self.on_end(started)
            with self._changed:
                self._due = min(self._due, self._began_last + _STARTS_SECONDS)
                self._changed.notify_all()
        elif started.context and started.context.trace_flags.sampled:
            export_at_once(started)

    def on_end(self, span: ReadableSpan) -> None:
        """Let the span wait for the exporter, if it is sampled and there is room."""
        if self._ended or not (span.context and span.context.trace_flags.sampled):
            return
        size = size_of(span)
        with self._changed:
            self.taken += 1
            waiting = self.taken - self._done
            if waiting <= self._max_queue_size and self._bytes + size <= self._max_bytes:
                self._waiting.append((span, size))
                self._bytes += size
                if self._worker is None:
                    self._worker = start_thread(self._work, "otel-rollout-spans")
                if len(self._waiting) == self._batch_size:
                    self._changed.notify_all()
                return
            self._done += 1
            self._dropped += 1
            is_first = self._dropped == 1
        rollout_metrics().dropped(self._exporter.exporter, 1, "span")
        if is_first:
            logger.warning(
                "%d spans wait for %s already: further ones are dropped from traces, not from "
                "trajectories. Raise OTEL_BSP_MAX_QUEUE_SIZE, or see why it takes so long",
                waiting - 1,
                self._exporter,
            )

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        """Wait until every span was given to the exporter; False if that takes longer.

        What it does not take waits on.
        """
        seconds = 30.0 if timeout_millis is None else timeout_millis / 1000
        with self._changed:
            until, failures = self.taken, self._failures
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: self._done >= until or self._failures > failures, seconds
            )

    def shutdown(self, timeout_millis: int = 30_000) -> None:
        """Export what waits, and end; what has not arrived by then is counted and logged."""
        self.end(timeout_millis)

    def end(self, timeout_millis: int = 30_000) -> bool:
        """Do `shutdown`; False if the exporter did not end in its time."""
        if self._ended:
            return True
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        finish = partial(self._finish, timeout_millis / 1000)
        late = in_time([(self._exporter, finish)], timeout_millis / 1000 + _LAST_SECONDS)
        if self.lost:
            logger.error("%d of %d spans did not reach %s", self.lost, self.taken, self._exporter)
        return not late

    def _finish(self, seconds: float) -> None:
        if self._worker is None:  # the interpreter starts no more threads
            self._work()
        else:
            self._worker.join(seconds)
        self._exporter.shutdown()

    def _work(self) -> None:
        """Send what waits, until the end; on a thread of the queue's own."""
        with suppress_instrumentation():
            while not self._ended or self._waiting:
                with self._changed:
                    self._wait()
                    count = min(len(self._waiting), self._batch_size)
                    batch = [self._waiting.popleft() for _ in range(count)]
                    self._hurry = self._hurry and bool(batch)
                if batch:
                    self._send([span for span, _ in batch])
                    with self._changed:
                        self._bytes -= sum(size for _, size in batch)

    def _wait(self) -> None:
        """Wait until it is time for a batch. Hold the condition."""
        last = time.monotonic() + self._delay
        while not self._is_time() and (left := min(last, self._due) - time.monotonic()) > 0:
            self._changed.wait(left)
        self._due, self._began_last = math.inf, time.monotonic()

    def _is_time(self) -> bool:
        return self._ended or self._hurry or len(self._waiting) >= self._batch_size

    def _send(self, spans: list[ReadableSpan]) -> None:
        """Send spans until none waits any more: they have arrived, or were given up."""
        while spans:
            request: list[ReadableSpan] = _Paced(next(self._exporter.batches(spans)), self._is_time)
            refused, away = self._exporter.refused, list[ReadableSpan]()
            is_done = False
            with contained("%s did not export %d spans", self._exporter, len(request)):
                away = self._exporter.send(request)
                is_done = True
            lost = self._exporter.refused - refused if is_done else len(request)
            spans = [*away, *spans[len(request) :]]
            self._count(len(request) - len(away), lost)
            if away:
                if not self._may_try_again():
                    self._give_up(spans)
                    return
            elif is_done:
                self._away_since, self._gave_up = None, False

    def _count(self, done: int, lost: int) -> None:
        """Count spans that wait no more; some of them are lost, the others have arrived."""
        with self._changed:
            self._done += done
            self._exported += done - lost
            self._changed.notify_all()
        rollout_metrics().dropped(self._exporter.exporter, lost, "span")

    def _may_try_again(self) -> bool:
        """Wait for the time to send again; False if there is none."""
        now = time.monotonic()
        with self._changed:
            is_last = self._ended
            self._failures += 1
            self._hurry = False
            self._changed.notify_all()
            if self._away_since is None:
                self._away_since = now
            if is_last or now - self._away_since > _PATIENCE_SECONDS:
                return False
            self._changed.wait_for(lambda: self._ended or self._hurry, _PAUSE_SECONDS)
        return True

    def _give_up(self, spans: Sequence[ReadableSpan]) -> None:
        """Drop these spans and all that wait; the first time is logged, and `end` counts all."""
        with self._changed:
            count = len(spans) + len(self._waiting)
            self._bytes -= sum(size for _, size in self._waiting)
            self._waiting.clear()
        if not (self._gave_up or self._ended):
            self._gave_up = True
            logger.error(
                "%s has taken no span for %d seconds: %d are dropped from traces, not from "
                "trajectories, and further ones until it takes some again",
                self._exporter,
                _PATIENCE_SECONDS,
                count,
            )
        self._count(count, count)


def _started(span: Span) -> ReadableSpan:
    """The span `rollout started` of a rollout whose own span has started; it has ended."""
    own, written = span.context, span.attributes or {}
    attributes: dict[str, Any] = {name: written[name] for name in _IDENTITY if name in written}
    attributes[sc.ROLLOUT_STARTED] = written[sc.ROLLOUT_ID]
    attributes |= {sc.HOST_NAME: _host(), sc.PROCESS_PID: os.getpid()}
    span_id = int.from_bytes(os.urandom(8), "big") or 1
    return ReadableSpan(
        STARTED_NAME,
        context=own and SpanContext(own.trace_id, span_id, False, own.trace_flags),
        parent=own,
        resource=span.resource,
        attributes=attributes,
        instrumentation_scope=span.instrumentation_scope,
        start_time=span.start_time,
        end_time=span.start_time,
    )


_IDENTITY = (
    *(sc.GEN_AI_AGENT_NAME, sc.ROLLOUT_TASK_ID, sc.ROLLOUT_GROUP_ID, sc.ROLLOUT_GROUP_SIZE),
    *(sc.ROLLOUT_SAMPLE_INDEX, *label(sc.ROLLOUT_POLICY_VERSION, 0)),
)
"""Attributes of a rollout's own span that are on the one of its start, too."""
_host = cache(socket.gethostname)


class _Paced(list[ReadableSpan]):
    """Spans of which an exporter takes one after the other: others run between them.

    in_haste: returns True while somebody waits for the spans; then there is no pause.
    """

    def __init__(self, spans: Iterable[ReadableSpan], in_haste: Callable[[], bool]) -> None:
        super().__init__(spans)
        self._in_haste = in_haste

    def __iter__(self) -> Iterator[ReadableSpan]:
        began = time.perf_counter()
        for span in super().__iter__():
            yield span
            if time.perf_counter() - began > _TURN_SECONDS and not self._in_haste():
                time.sleep(_BREAK_SECONDS)
                began = time.perf_counter()


def _seconds(variable: str, default: float) -> float:
    """The time in a variable, which has milliseconds."""
    text = os.environ.get(variable, "").strip()
    return int(text) / 1000 if text.isdecimal() and int(text) else default


def _sizes() -> tuple[int, int]:
    """Size of the queue and of a batch; the one that no variable has follows from the other."""
    queue = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip()
    batch = os.environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "").strip()
    batch_size = max(1, int(batch)) if batch.isdecimal() else _BATCH_SIZE
    if queue.isdecimal() and int(queue):
        return int(queue), min(batch_size, int(queue))
    return max(QUEUE_SIZE, batch_size), batch_size
