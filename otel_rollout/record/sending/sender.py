"""Sends spans of ours to one exporter until it has taken them; none is cut.

None is dropped while there is room: in memory, and beyond that in a folder, if there is one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.environment_variables import OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.export import renew_after_fork
from otel_rollout.otlp import plain
from otel_rollout.record.boundary import contained, guarded
from otel_rollout.record.delivery import in_time, start_thread
from otel_rollout.record.rollout_span import is_start, started
from otel_rollout.record.sending.backlog import Backlog, Waiting
from otel_rollout.record.sending.requests import Outlet, Paced, size_of
from otel_rollout.record.state import process_state
from otel_rollout.terminal import number_of

if TYPE_CHECKING:
    from otel_rollout.record.sending.spool import Spool

logger = logging.getLogger("otel_rollout")

_GRPC_BYTES = 4 << 20
"""Bytes of a request that gRPC servers take by default."""
_DELAY_SECONDS = 5.0
"""The SDK's time after which a request is sent that is not full."""
_STARTS_SECONDS = 0.25
"""Least time between two requests for the start of a rollout: a request for each would cost more
than the rollout."""
_AWAY_SECONDS = 1.0
"""Pause between two tries from which on it is logged that an exporter takes nothing."""
_KEEPING_SECONDS = 1.0
"""Time that the start of a rollout waits until another span is in the folder."""
_LAST_SECONDS = 5.0
"""Time that an exporter has for its own shutdown, after what waits was sent."""


def is_ours(span: ReadableSpan) -> bool:
    """True for a span from which rollouts are rebuilt: of a rollout, a call, a reward, a start."""
    scope = span.instrumentation_scope
    if scope is None or scope.name != sc.SCOPE:
        return False
    there = plain(span.attributes or {})
    return there.get(sc.GEN_AI_OPERATION_NAME) != sc.OPERATION_EXECUTE_TOOL


class Sender(SpanProcessor):
    """Sends each span of ours that ends, sampled or not, until the exporter has taken it.

    outlet: the exporter.
    max_bytes: int, bound on the size of the spans that wait in memory.
    folder: spans are here, too, from soon after they end until they have arrived, the start of a
        rollout from before its code runs. Those that former processes left here are sent first.
        None: spans wait in memory alone. ConfigurationError if it cannot be used.

    A span that finds no room is dropped and counted; the first is logged. That a rollout starts is
    sent at once. An exporter that raises or hangs costs nobody else anything.
    """

    def __init__(
        self, outlet: Outlet, max_bytes: int = 4 << 30, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.outlet = outlet
        self._max_bytes = max_bytes
        self._delay = delay_seconds()
        if folder is not None and not outlet.uses_encoder:
            raise ConfigurationError(
                f"configure(train_folder=...): expected an OTLP exporter of a version of "
                f"OpenTelemetry that is known, got {outlet.exporter!r}; leave train_folder out"
            )
        self._spool: Spool | None = None
        if folder is not None:
            from otel_rollout.record.sending.spool import Spool

            self._spool = Spool(folder)
        self._ended = False
        self._renew()
        renew_after_fork(self, Sender._renew_child)
        if self._spool is not None:
            with self._changed:  # what former processes left is sent, whatever happens here
                self._start()

    def _renew_child(self) -> None:
        if self._spool is not None:
            self._spool.renew()
        self._renew()

    def _renew(self) -> None:
        """Begin anew, in a forked child too: what waits is the parent's."""
        self._changed = threading.Condition()  # reentrant: a span may end in a garbage collection
        self._keeping = threading.Lock()
        """Held while a span is written to the disk."""
        self._keeping_fresh = threading.Lock()
        """Held from when fresh spans are taken until they are in the folder, or fresh again."""
        self._backlog = Backlog() if self._spool is None else Backlog(longest_pause=self._delay)
        self._fresh: list[Waiting] = []
        """Spans that are not in the folder yet."""
        self._bytes = 0
        """Size of the spans that are in memory."""
        self.taken = self.arrived = self.rejected = 0
        """Spans that ended, those that arrived, and those that the receiver rejected."""
        self._sent_last = 0.0
        self._until = math.inf
        """When to give up, once it has ended."""
        self._logged: set[str] = set()
        """What the log has."""
        self._is_away = False
        """True from when the log has that the exporter takes nothing until it takes something."""
        self._worker: threading.Thread | None = None
        self._keeper: threading.Thread | None = None

    @property
    def lost(self) -> int:
        """Number of spans that have not arrived; while it works, some of them still wait."""
        return self.taken - self.arrived

    @property
    def refuses_all(self) -> bool:
        """True if an earlier `shutdown` has ended the exporter, and it takes nothing any more."""
        failed = self.arrived == 0 and self._backlog.pause > 0
        return failed and self.outlet.exporter in process_state.ended_exporters

    @guarded("the start of a rollout was not exported")
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Send at once that a rollout starts: its own span is sent when it ends, or never."""
        if self._ended or not (is_start(span) and process_state.settings.announce):
            return
        export_at_once = getattr(self.outlet.exporter, "export_at_once", None)
        if export_at_once is not None:
            export_at_once(started(span))
        else:
            self._add(started(span), self._sent_last + _STARTS_SECONDS)

    def on_end(self, span: ReadableSpan) -> None:
        """Let a span of ours wait for the exporter, if there is room."""
        if self._ended or not is_ours(span):
            return
        if process_state.content.exported or sc.EXCHANGE_VERSION not in (span.attributes or {}):
            self._add(span)

    def _add(self, span: ReadableSpan, due: float | None = None) -> None:
        """Let a span wait. due: when it is to be sent. None: when the usual time is over."""
        size = size_of(span)
        with self._changed:
            self.taken += 1
            item = Waiting(self.taken, span.name, size, span, _group_of(span))
        # A process that is killed in its first call leaves the start of its rollouts.
        if due is not None:
            self._keep(item, timeout=_KEEPING_SECONDS)
        with self._changed:
            if has_room := item.span is None or self._bytes + size <= self._max_bytes:
                self._put(item, due)
        if has_room:
            return
        if self._keep(item, timeout=0):
            with self._changed:
                self._put(item, due)
            return
        process_state.observers.notify("dropped", self.outlet.exporter, 1, "span")
        self._log_once(
            "spans of %d bytes wait for %s, and no more may: further ones are dropped. See why it "
            "takes so long; configure(train_folder=...) lets them wait on the disk",
            self._bytes,
            self.outlet,
        )

    def _put(self, item: Waiting, due: float | None) -> None:
        """Let a span wait. Hold the condition."""
        usual = time.monotonic() + self._delay  # the thread wakes up before that by itself
        is_earlier = self._backlog.put(item, usual if due is None else due)
        if item.span is not None:
            self._bytes += item.size
            if self._spool is not None:
                self._fresh.append(item)
        if self._worker is None:
            self._start()
        elif self._fresh or (is_earlier and (due is not None or self._backlog.is_full)):
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the threads. Hold the condition."""
        self._worker = start_thread(self._work, "otel-rollout-spans")
        if self._spool is not None:
            self._keeper = start_thread(self._keep_all, "otel-rollout-folder")

    def _log_once(self, sentence: str, *arguments: object) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.warning(sentence, *arguments)

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        """Wait until each span that has ended has arrived; False if that takes longer.

        False, too, once a receiver has rejected spans; True if the exporter refuses all.
        """
        seconds = 30.0 if timeout_millis is None else timeout_millis / 1000
        with self._changed:
            backlog, until = self._backlog, self.taken
            backlog.hurry(time.monotonic() + seconds)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: backlog.has_arrived(until) or self.refuses_all or self._ended, seconds
            )
            backlog.hurried -= 1
            return (backlog.has_arrived(until) and not self.rejected) or self.refuses_all

    def shutdown(self, timeout_millis: int = 30_000) -> None:
        """Send what waits, for all of this time, and end; what has not arrived then is logged."""
        self.end(timeout_millis)

    def end(self, timeout_millis: int = 30_000) -> bool:
        """Do `shutdown`; False if the exporter did not end in its time."""
        if self._ended:
            return True
        seconds = timeout_millis / 1000
        with self._changed:
            self._ended = True
            self._until = time.monotonic() + seconds
            self._backlog.hurry(self._until)
            self._changed.notify_all()
            is_away, waiting = self._backlog.pause > 0, len(self._backlog)
        if is_away and waiting and seconds:
            logger.warning(
                "%s takes no spans now: %s wait for up to %.0f seconds more",
                self.outlet,
                number_of(waiting, "span"),
                seconds,
            )
        late = in_time([(self.outlet, partial(self._finish, seconds))], seconds + _LAST_SECONDS)
        if self.lost:
            with self._changed:
                kept = sum(item.kept is not None for item in self._backlog)
            text = "%d of %d spans did not reach %s"
            if self._spool is not None and kept:
                text += f"; {kept} of them are in {self._spool.folder}, and are sent by the next "
                text += "process that is configured with this folder"
            logger.error(text, self.lost, self.taken, self.outlet)
        return not late

    def _finish(self, seconds: float) -> None:
        if self._worker is None:  # the interpreter starts no more threads
            self._work()
        else:
            self._worker.join(seconds)
        if self._keeper is not None:
            self._keeper.join()
        self._keep_fresh()
        self.outlet.shutdown()
        if self._spool is not None:
            self._spool.close()

    # --- the folder

    def _keep_all(self) -> None:
        """Write spans to the folder when they end: the process may be killed during a request."""
        tried, has_ended = 0, False
        while not has_ended:
            with self._changed:
                while not self._ended and (not self._fresh or self.taken == tried):
                    self._changed.wait()
                tried, has_ended = self.taken, self._ended
            self._keep_fresh()

    def _keep_fresh(self) -> None:
        """Write the spans to the folder that are in memory alone. What it does not take waits."""
        with self._keeping_fresh:
            with self._changed:
                fresh, self._fresh = [item for item in self._fresh if item in self._backlog], []
            for number, item in enumerate(Paced(fresh, self._is_hurried)):
                with contained("a span waits in memory, not in the folder"):
                    if not self._keep(item):
                        with self._changed:
                            self._fresh = fresh[number:] + self._fresh
                        return

    def _keep(self, item: Waiting, *, timeout: float = -1) -> bool:
        """Move a span from memory to the folder; False if that cannot be.

        timeout: seconds after which it stays in memory if another span is being moved, perhaps by
            this thread, which a garbage collection or a signal has made to record something else.
            -1: none.
        """
        if self._spool is None or item.span is None:
            return False
        if not self._keeping.acquire(timeout=timeout):
            return True
        try:
            kept = self._spool.keep(item.span)
        except OSError as error:
            self._log_once("spans wait in memory, not in %s: %s", self._spool.folder, error)
            return False
        finally:
            self._keeping.release()
        with self._changed:
            self._bytes -= item.size if item in self._backlog else 0
            item.kept, item.span = kept, None
        return True

    @guarded("spans of former processes were not sent")
    def _take_over(self) -> None:
        """Let the spans wait that former processes left in the folder."""
        for kept in self._spool.left() if self._spool is not None else ():
            with self._changed:
                self.taken += 1
                name = "of a former process"
                size, number = kept.place.length, self.taken
                self._put(Waiting(number, name, size, None, group=number, kept=kept), 0.0)

    # --- on a thread of its own

    def _work(self) -> None:
        """Send what waits, until the end."""
        with suppress_instrumentation():
            self._take_over()
            while batch := self._next():
                self._keep_fresh()
                spans = [span for item in batch if (span := self._span_of(item)) is not None]
                if not spans:
                    continue
                again = self._backlog.pause > 0
                sent = self.outlet.send(spans, self._is_hurried, again=again)
                with self._changed:
                    batch = [item for item in batch if item in self._backlog]
                    self._note(batch, *sent)
                    self._changed.notify_all()
                if sent[0] and time.monotonic() < self._until:  # then the folder is closed
                    for item in batch:
                        if item.kept is not None:
                            item.kept.release()

    def _next(self) -> list[Waiting]:
        """The spans of the next request, when it is time for it; [] at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._ended and (now >= self._until or not self._backlog or self.refuses_all):
                    return []
                wait = min(self._backlog.time_of_next(), self._until) - now
                if wait <= 0:
                    self._sent_last = now
                    return self._backlog.take(now)
                self._changed.wait(min(wait, self._delay))

    def _is_hurried(self) -> bool:
        return self._backlog.hurried > 0 or self._backlog.is_full

    def _span_of(self, item: Waiting) -> ReadableSpan | None:
        """A span that is to be sent. None: it cannot be read from the disk any more."""
        span, kept = item.span, item.kept
        if item.size > _GRPC_BYTES:
            self._log_once(
                "the span %r has %d bytes, and gRPC servers take 4 MiB by default: raise the limit "
                "of the receiver. Further ones are not logged",
                item.name,
                item.size,
            )
        if kept is None:
            return span
        try:
            return kept.read()
        except (OSError, SpanFormatError) as error:
            logger.error("a span is lost: %s", error)
            with self._changed:
                self._backlog.discard(item)
            return None

    def _note(self, batch: list[Waiting], has_arrived: bool, wait: float, rejected: int) -> None:
        """Note how the request with these spans went, as `Outlet.send` gives it.

        Hold the condition.
        """
        if not has_arrived:
            aside = self._backlog.failed(batch, time.monotonic(), wait)
            pause = max(self._backlog.pause, wait / 2)  # one that is busy asks for a second
            if pause >= _AWAY_SECONDS and not self._is_away:
                self._is_away = True
                waiting = number_of(len(self._backlog), "span")
                logger.warning("%s takes no spans: %s wait until it does", self.outlet, waiting)
            if aside is not None:
                logger.warning(
                    "%s takes other spans, and not %r of %d bytes: it is sent again later. The "
                    "receiver may be full, or have a limit that is to be raised",
                    self.outlet,
                    aside.name,
                    aside.size,
                )
            return
        self._is_away = False
        self._backlog.arrived(batch)
        rejected = min(rejected, len(batch))
        self.arrived += len(batch) - rejected
        self.rejected += rejected
        self._bytes -= sum(item.size for item in batch if item.kept is None)


def _group_of(span: ReadableSpan) -> object:
    """The group that a span is sent with, or else its trace."""
    there = plain(span.attributes or {})
    group = there.get(sc.ROLLOUT_OUTER_GROUP_ID) or there.get(sc.ROLLOUT_GROUP_ID)
    return group or span.context.trace_id


def delay_seconds() -> float:
    """The time that a span waits for others, by OTEL_BSP_SCHEDULE_DELAY."""
    text = os.environ.get(OTEL_BSP_SCHEDULE_DELAY, "").strip()
    return int(text) / 1000 if text.isdecimal() and int(text) else _DELAY_SECONDS
