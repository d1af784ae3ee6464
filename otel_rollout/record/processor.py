"""The train lane: a span processor that turns the spans of a rollout into its trajectory.

It keeps the exchange spans of running rollouts, by the rollout id that is written on them. When a
rollout's span ends it rebuilds the trajectory, hands it to the exporters and forgets the spans. It
sees every recorded span, sampled or not; nothing that trains passes through a batch processor.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from opentelemetry.context import Context, get_current
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TrajectoryExporter
from otel_rollout.rebuild import Assembly
from otel_rollout.record.boundary import contained, guarded
from otel_rollout.record.context import CAPTURE_OFF
from otel_rollout.record.current import rollout_of
from otel_rollout.record.delivery import Delivery, in_time
from otel_rollout.record.other_spans import note_tool
from otel_rollout.record.running import ActiveRollout, Key
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.uncaptured import note_uncaptured
from otel_rollout.spans import SpanRecord, as_record, unchecked_record
from otel_rollout.trajectory import Conversations, Trajectory, sentences

logger = logging.getLogger("otel_rollout")

_LAST_SECONDS = 5.0
"""Time that an exporter has for its own shutdown, whatever the flush before it took."""


@dataclass(slots=True)
class _Buffer:
    """The spans of one running rollout."""

    active: ActiveRollout
    span: ReadableSpan
    assembly: Assembly
    """The part of the rollout that is rebuilt already."""
    ended: list[SpanRecord] = field(default_factory=list)
    """Exchange spans that the assembly has not taken in yet."""
    open: dict[str, ReadableSpan] = field(default_factory=dict)
    """Exchange spans that have not ended, by span id."""
    size: int = 0
    """Bytes of span text that it holds."""
    refused: int = 0
    """Exchange spans that were not kept, because `max_bytes` was reached."""
    cut_off: bool = False
    """Its trajectory is not exported (any more), and takes in no further calls."""


class TrajectorySpanProcessor(SpanProcessor):
    """Rebuilds the trajectory of each rollout and hands it to the exporters.

        provider.add_span_processor(TrajectorySpanProcessor(InMemoryTrajectoryExporter()))

    exporters: objects with the methods of `TrajectoryExporter`.
    max_bytes: int, bound on the span text that all running rollouts hold together. A call beyond
        it is not kept, and the trajectory has a warning. The same bound holds for the finished
        trajectories that wait for an exporter which blocks.
    max_queue_size: int, bound on the number of those that wait. One beyond either bound is not
        exported: it is counted in `dropped`, and logged.

    `on_start` and `on_end` do no I/O and never raise. ConfigurationError for what is no exporter,
    and for a bound below 1.
    """

    def __init__(
        self, *exporters: TrajectoryExporter, max_bytes: int = 4 << 30, max_queue_size: int = 10_000
    ) -> None:
        for exporter in exporters:
            check_exporter(exporter)
        for name, value in (("max_bytes", max_bytes), ("max_queue_size", max_queue_size)):
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"TrajectorySpanProcessor({name}=...): expected a number from 1 on, "
                    f"got {value!r}"
                )
        self.exporters = list(exporters)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._buffers: dict[Key, _Buffer] = {}
        self._rollouts: dict[str, Key] = {}
        """The rollout of each open rollout span, by span id: a limit may drop its attributes."""
        self._others: dict[int, ActiveRollout] = {}
        """The rollout of each open span that is neither a rollout's own nor one of its calls."""
        self._lock = threading.RLock()
        self._max_queue_size = max_queue_size
        self._sizes: dict[str, int] = {}
        """Bytes of span text of trajectories that are about to be handed over, by id."""
        self._delivery_of: dict[int, Delivery] = {}
        """The way to each exporter, by the exporter's `id()`."""
        self._closed = False
        if hasattr(os, "register_at_fork"):
            itself = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forget_parent(itself()))

    # --- spans

    @guarded("a span was not recorded for its trajectory")
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Begin to collect for a rollout span; remember an exchange span until it ends."""
        scope = span.instrumentation_scope
        is_ours = scope is not None and scope.name == sc.SCOPE
        if self._closed or not (is_ours or self._buffers):
            return
        active = rollout_of(parent_context)
        if active is None or span.context is None:
            return
        if not is_ours:
            self._other_began(active, span, parent_context)
        elif not active.begun:  # its own span
            trajectory = active.trajectory
            assembly = Assembly(active.id, trajectory.trainable, trajectory.all_rewards)
            active.recorder = active.recorder or self
            with self._lock:
                self._buffers[active.key] = _Buffer(active, span, assembly)
                self._rollouts[f"{span.context.span_id:016x}"] = active.key
            for exporter in self.exporters:
                if hasattr(exporter, "on_start"):
                    self.announce(active)
                    break
        elif sc.EXCHANGE_VERSION in (span.attributes or {}):
            buffer = self._buffers.get(active.key)
            if buffer is not None:
                buffer.open[f"{span.context.span_id:016x}"] = span
        else:
            self._other_began(active, span, parent_context)

    def _other_began(
        self, active: ActiveRollout, span: Span, parent_context: Context | None
    ) -> None:
        """Follow a span inside a rollout that is neither its own nor one of its calls."""
        context = get_current() if parent_context is None else parent_context
        if active.recorder is self and span.context is not None and not context.get(CAPTURE_OFF):
            active.others.began(span)
            self._others[span.context.span_id] = active
            note_tool(active, span, has_ended=False)

    def _other_ended(self, span: ReadableSpan, *, is_ours: bool) -> None:
        active = self._others.pop(span.context.span_id, None) if span.context else None
        if active is None or not active.running:
            return
        missed = active.others.ended(span)
        if is_ours:
            return
        if missed is not None:
            note_uncaptured(active, *missed, spanned=True)
        note_tool(active, span, has_ended=True)

    @guarded("a span was not recorded for its trajectory")
    def on_end(self, span: ReadableSpan) -> None:
        """Keep an exchange span; complete the trajectory of a rollout span."""
        scope = span.instrumentation_scope
        is_ours = scope is not None and scope.name == sc.SCOPE
        if self._others:
            self._other_ended(span, is_ours=is_ours)
        if not is_ours:
            return
        record = unchecked_record(span)  # truncation is looked for when the record is read
        key = self._rollouts.pop(record.span_id, None)
        if key is not None:
            self._finish(key, record)
        elif sc.EXCHANGE_VERSION in record.attributes:
            written = record.attributes
            key = str(written.get(sc.ROLLOUT_ID)), str(written.get(sc.EXCHANGE_PROCESS))
            self._keep(key, record)

    def _keep(self, key: Key, record: SpanRecord) -> None:
        size = _size(record)
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                return  # it came after the rollout's end, and the trajectory has a warning
            buffer.open.pop(record.span_id, None)
            if buffer.cut_off:
                return
            if record.attributes == buffer.active.ending:  # no limit cut it
                record.is_checked = True  # nobody else has it yet
            if self._bytes + size > self._max_bytes:
                buffer.refused += 1
                return
            buffer.ended.append(record)
            buffer.size += size
            self._bytes += size
            if buffer.active.is_part:
                buffer.active.records.append(record)

    def withhold(self, rollout_id: str) -> None:
        """Export no trajectory of this running rollout, and keep none of its further calls."""
        with self._lock:
            for key, buffer in self._buffers.items():
                if rollout_id in key:
                    buffer.cut_off = True
        self._tell("on_left_out", rollout_id)

    def conversations(self, key: Key) -> Conversations:
        """The completions of a running rollout, linked; none for one that is not known."""
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                return Conversations()
            _take_in(buffer)
            return buffer.assembly.conversations()

    def add_spans(self, key: Key, records: Sequence[SpanRecord]) -> None:
        """Take in spans that other processes recorded of a running rollout."""
        for record in records:
            if sc.EXCHANGE_VERSION in record.attributes:
                self._keep(key, record)
                continue
            with self._lock:
                buffer = self._buffers.get(key)
                if buffer is not None:
                    buffer.assembly.add(record)

    def _finish(self, key: Key, record: SpanRecord) -> None:
        buffer = self._buffers.get(key)
        if buffer is None:
            return
        written = buffer.active.written
        if sc.LENGTHS not in written or record.attributes != written:  # such as by a limit
            record = as_record(record)
        # Hold the lock, so that readers see either the buffer or the filled trajectory.
        with self._lock:
            trajectory = self._trajectory(buffer, record)
            del self._buffers[key]
            self._bytes -= buffer.size
        if self._others:
            for span_id in buffer.active.others.open:
                self._others.pop(span_id, None)
        whole = record
        if kept_back := buffer.active.kept_back:
            whole = replace(record, attributes={**record.attributes, **kept_back})
        if buffer.active.is_part:
            buffer.active.records.append(whole)
        elif not buffer.cut_off:
            if not process_state.warned_without_calls:
                _warn_without_calls(buffer.assembly, trajectory)
            handed = [claim[0] for claim in buffer.active.claims] if buffer.active.claims else []
            is_workflow = buffer.active.operation == sc.OPERATION_INVOKE_WORKFLOW
            if not (is_workflow and buffer.assembly.is_empty_workflow):
                handed.append(trajectory)
            else:
                self._tell("on_left_out", trajectory.id)
            size = buffer.size + _size(whole)
            for each in handed:
                self._sizes[each.id] = size // len(handed)
                self._hand_over(each)

    def _trajectory(self, buffer: _Buffer, record: SpanRecord) -> Trajectory:
        active, trajectory = buffer.active, buffer.active.trajectory
        if sc.ROLLOUT_SCHEMA_VERSION not in record.attributes and not active.is_part:
            buffer.assembly.lost_calls.append(sentences.LIMITED())
        if active.recorded:  # another processor was there first
            return trajectory
        if buffer.refused:
            buffer.assembly.refused = buffer.refused
            buffer.assembly.lost_calls.append(
                sentences.REFUSED(count=buffer.refused, size=self._max_bytes)
            )
        if buffer.ended:
            _take_in(buffer)
        if buffer.open:  # no part of the trajectory, but they may carry what others refer to
            buffer.assembly.add_later(map(as_record, buffer.open.values()))
        buffer.assembly.add(record)
        for claiming, span_ids in active.claims:
            source = buffer.assembly.claim(
                span_ids, claiming.all_rewards, trainable=claiming.trainable
            )
            claiming.settle(source, claiming.end_time_ns)
        trajectory.settle(buffer.assembly, record.end_time_ns)
        buffer.assembly.join_parts(trajectory)
        active.recorded = True
        return trajectory

    # --- exporters

    @property
    def dropped(self) -> int:
        """Number of trajectories that did not reach an exporter."""
        return sum(delivery.dropped for delivery in self._deliveries())

    def _deliveries(self) -> list[Delivery]:
        """The ways to the exporters; one may have been added to the list since the last time."""
        with self._lock:
            for exporter in self.exporters:
                if id(exporter) not in self._delivery_of:
                    self._delivery_of[id(exporter)] = Delivery(
                        exporter, self._max_queue_size, self._max_bytes
                    )
            return list(self._delivery_of.values())

    def _hand_over(self, trajectory: Trajectory) -> None:
        _hand_over(self._deliveries(), trajectory, self._sizes.pop(trajectory.id, 0))

    def announce(self, active: ActiveRollout) -> None:
        """Have exporters note that a rollout has begun, or has other options than it began with."""
        if process_state.settings.announce and not active.is_part:
            self._tell("on_start", active.trajectory)

    def export_episode(self, episode: object) -> None:
        """Hand an episode that has ended to the exporters that take episodes."""
        self._tell("export_episode", episode)

    def _tell(self, method: str, what: object) -> None:
        """Call a method of the exporters that have it."""
        for exporter in self.exporters:
            call = getattr(exporter, method, None)
            if call is not None:
                with contained("%s failed", exporter):
                    call(what)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until every finished trajectory is exported; False if that takes longer."""
        process_state.do_waiting()
        calls = [(d.exporter, partial(d.flush, timeout_millis)) for d in self._deliveries()]
        return not in_time(calls, timeout_millis / 1000)

    def shutdown(self, timeout_millis: int = 30_000) -> None:
        """Export the finished trajectories, and the running ones as far as they have come.

        Nothing is recorded afterwards. Trajectories that are not exported in time are counted in
        `dropped`, and logged. An exporter that does not end is left behind.
        """
        self.end(timeout_millis)

    def end(self, timeout_millis: int = 30_000) -> bool:
        """Do `shutdown`; False if an exporter did not end in its time."""
        if self._closed:
            return True
        self._closed = True
        with self._lock:
            running = list(self._buffers.values())
        for buffer in running:
            for stream in tuple(buffer.active.streams):
                stream.leave()
            buffer.assembly.lost_calls.append(sentences.SHUT_DOWN())
            buffer.cut_off = True
            if buffer.active.is_part:
                continue
            with guarded("a running rollout was not exported at shutdown"):
                _take_in(buffer)
                buffer.assembly.add(as_record(buffer.span))
                self._sizes[buffer.active.id] = buffer.size
                self._hand_over(buffer.assembly.trajectory())
        deadline = time.monotonic() + timeout_millis / 1000
        self.force_flush(timeout_millis)
        deliveries = self._deliveries()
        for delivery in deliveries:
            delivery.close()
        left = max(deadline - time.monotonic(), min(_LAST_SECONDS, timeout_millis / 1000))
        late = in_time([(d.exporter, d.exporter.shutdown) for d in deliveries], left)
        for exporter in late:
            logger.error("%s was not shut down", exporter)
        return not late


def check_exporter(exporter: object) -> None:
    """ConfigurationError unless this is a trajectory exporter."""
    missing = [
        name
        for name in ("export", "force_flush", "shutdown")
        if not callable(getattr(exporter, name, None))
    ]
    if isinstance(exporter, type) or missing:
        got = f"the class {exporter.__name__}" if isinstance(exporter, type) else repr(exporter)
        raise ConfigurationError(
            f"expected a TrajectoryExporter, got {got}"
            + ("; make an instance of it" if isinstance(exporter, type) else "")
            + (f", which has no {', '.join(missing)}()" if missing else "")
        )


def _size(record: SpanRecord) -> int:
    """Bytes of memory that the texts of a span take; what is short is passed over."""
    values = record.attributes.values()
    return sum([sys.getsizeof(text) for text in values if type(text) is str and len(text) > 64])


def _hand_over(deliveries: Sequence[Delivery], trajectory: Trajectory, size: int) -> None:
    for number, delivery in enumerate(deliveries):
        try:
            delivery.hand_over(trajectory, size)
        except BaseException:  # an interrupt in one of them does not keep it from the others
            _hand_over(deliveries[number + 1 :], trajectory, size)
            raise


def _take_in(buffer: _Buffer) -> None:
    """Rebuild from the exchange spans that have ended since the last time."""
    ended, buffer.ended = buffer.ended, []
    buffer.assembly.add_later(ended)


def _warn_without_calls(assembly: Assembly, trajectory: Trajectory) -> None:
    """Log, once in a process, that a rollout ended well and none of its calls was captured."""
    if process_state.warned_without_calls or trajectory.status != "complete":
        return
    if sentences := assembly.without_calls():
        process_state.warned_without_calls = True
        logger.warning(
            "rollout %r: %s. Its trajectory is empty; other rollouts like it are not logged.",
            trajectory.name,
            "; ".join(sentences),
        )


def _forget_parent(processor: TrajectorySpanProcessor | None) -> None:
    """Empty the processor in a forked child: rollouts and worker are the parent's."""
    if processor is not None:
        processor._lock = threading.RLock()
        processor._buffers = {}
        processor._rollouts = {}
        processor._others = {}
        processor._bytes = 0
        for delivery in processor._delivery_of.values():
            delivery.renew()
