"""The train lane: a span processor that turns the spans of a rollout into its trajectory.

It keeps the exchange spans of running rollouts, by the rollout id that is written on them. When a
rollout's span ends it rebuilds the trajectory, hands it to the exporters and forgets the spans. It
sees every recorded span, sampled or not; nothing that trains passes through a batch processor.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TrajectoryExporter
from otel_rollout.rebuild import Assembly
from otel_rollout.record.boundary import guarded
from otel_rollout.record.current import rollout_of
from otel_rollout.record.deferred import settle
from otel_rollout.record.running import ActiveRollout, Key
from otel_rollout.spans import SpanRecord, as_record, unchecked_record
from otel_rollout.trajectory import Conversations, Trajectory

logger = logging.getLogger("otel_rollout")


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
    """Characters of span text that it holds."""
    refused: int = 0
    """Exchange spans that were not kept, because `max_bytes` was reached."""
    cut_off: bool = False
    """Its trajectory is not exported (any more), and takes in no further calls."""


class TrajectorySpanProcessor(SpanProcessor):
    """Rebuilds the trajectory of each rollout and hands it to the exporters.

        provider.add_span_processor(TrajectorySpanProcessor(InMemoryTrajectoryExporter()))

    exporters: objects with the methods of `TrajectoryExporter`.
    max_bytes: int, bound on the span text that all running rollouts hold together. A call beyond
        it is not kept, and the trajectory has a warning.
    max_queue_size: int, bound on finished trajectories that wait for exporters which block. One
        beyond it is not exported: it is counted in `dropped`, and logged.

    `on_start` and `on_end` do no I/O and never raise. ConfigurationError for what is no exporter,
    and for a bound below 1.
    """

    def __init__(
        self,
        *exporters: TrajectoryExporter,
        max_bytes: int = 4 << 30,
        max_queue_size: int = 10_000,
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
        self.dropped = 0
        """Number of trajectories that did not reach the exporters."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._buffers: dict[Key, _Buffer] = {}
        self._rollouts: dict[str, Key] = {}
        """The rollout of each open rollout span, by span id: a limit may drop its attributes."""
        self._lock = threading.RLock()
        self._exporting = threading.RLock()
        """Held during `export` of an exporter that does not block: calls never overlap."""
        self._max_queue_size = max_queue_size
        self._queue: queue.Queue[Trajectory | None] = queue.Queue(max_queue_size)
        self._worker: threading.Thread | None = None
        self._closed = False
        if hasattr(os, "register_at_fork"):
            itself = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forget_parent(itself()))

    # --- spans

    @guarded("a span was not recorded for its trajectory")
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Begin to collect for a rollout span; remember an exchange span until it ends."""
        scope = span.instrumentation_scope
        if scope is None or scope.name != sc.SCOPE or self._closed:
            return
        active = rollout_of(parent_context)
        if active is None or span.context is None:
            return
        if not active.begun:  # its own span
            assembly = Assembly(active.id)
            assembly.trainable = active.trajectory.trainable
            assembly.rewards = active.trajectory.all_rewards
            active.recorder = active.recorder or self
            with self._lock:
                self._buffers[active.key] = _Buffer(active, span, assembly)
                self._rollouts[f"{span.context.span_id:016x}"] = active.key
        elif sc.EXCHANGE_VERSION in (span.attributes or {}):
            buffer = self._buffers.get(active.key)
            if buffer is not None:
                buffer.open[f"{span.context.span_id:016x}"] = span

    @guarded("a span was not recorded for its trajectory")
    def on_end(self, span: ReadableSpan) -> None:
        """Keep an exchange span; complete the trajectory of a rollout span."""
        scope = span.instrumentation_scope
        if scope is None or scope.name != sc.SCOPE:
            return
        record = unchecked_record(span)  # truncation is looked for when the record is read
        key = self._rollouts.pop(record.span_id, None)
        if key is not None:
            self._finish(key, as_record(record))
        elif sc.EXCHANGE_VERSION in record.attributes:
            rollout_id, process = record.text(sc.ROLLOUT_ID), record.text(sc.EXCHANGE_PROCESS)
            self._keep((rollout_id or "", process or ""), record)

    def _keep(self, key: Key, record: SpanRecord) -> None:
        size = sum(len(value) for value in record.attributes.values() if isinstance(value, str))
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                return  # it came after the rollout's end, and the trajectory has a warning
            buffer.open.pop(record.span_id, None)
            if buffer.cut_off:
                return
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
        if sc.ROLLOUT_SCHEMA_VERSION not in record.attributes and not buffer.active.is_part:
            buffer.assembly.notes.append(
                "a limit on the number of attributes cut this rollout's spans: calls may be missing"
            )
        # Hold the lock, so that readers see either the buffer or the filled trajectory.
        with self._lock:
            trajectory = self._trajectory(buffer, record)
            del self._buffers[key]
            self._bytes -= buffer.size
        if buffer.active.is_part:
            buffer.active.records.append(record)
        elif not buffer.cut_off:
            for claiming, _ in buffer.active.claims:
                self._hand_over(claiming)
            if not buffer.assembly.is_empty_workflow:
                self._hand_over(trajectory)

    def _trajectory(self, buffer: _Buffer, record: SpanRecord) -> Trajectory:
        active = buffer.active
        if active.recorded:  # another processor was there first
            return active.trajectory
        if buffer.refused:
            buffer.assembly.refused = buffer.refused
            buffer.assembly.notes.append(
                f"{buffer.refused} model calls were not kept: the running rollouts held "
                f"{self._max_bytes} bytes (TrajectorySpanProcessor(max_bytes=...))"
            )
        _take_in(buffer)
        # A call still under way is no part of the trajectory, but may carry what others refer to.
        buffer.assembly.add_later(map(as_record, buffer.open.values()))
        buffer.assembly.add(record)
        for claiming, span_ids in active.claims:
            source = buffer.assembly.claim(
                span_ids, claiming.all_rewards, trainable=claiming.trainable
            )
            claiming.settle(source, claiming.end_time_ns)
        active.trajectory.settle(buffer.assembly, record.end_time_ns)
        buffer.assembly.join_parts(active.trajectory)
        active.recorded = True
        return active.trajectory

    # --- exporters

    def _hand_over(self, trajectory: Trajectory) -> None:
        for exporter in self.exporters:
            if not getattr(exporter, "blocking", True):
                with self._exporting:
                    self._export(exporter, trajectory)
        if not any(getattr(exporter, "blocking", True) for exporter in self.exporters):
            return
        try:
            self._queue.put_nowait(trajectory)
        except queue.Full:
            self.dropped += 1
            logger.error(
                "trajectory %s was not exported: %d wait for exporters already "
                "(TrajectorySpanProcessor(max_queue_size=...))",
                trajectory.id,
                self._max_queue_size,
            )
            return
        if self._worker is None:
            with self._lock:
                if self._worker is None:
                    self._worker = threading.Thread(
                        target=self._work, name="otel-rollout-export", daemon=True
                    )
                    # It works for all rollouts, so the context of this one must not go with it.
                    token = otel_context.attach(Context())
                    try:
                        self._worker.start()
                    finally:
                        otel_context.detach(token)

    def export_episode(self, episode: object) -> None:
        """Hand an episode that has ended to the exporters that take episodes."""
        for exporter in self.exporters:
            export = getattr(exporter, "export_episode", None)
            if export is not None:
                _try(exporter, partial(export, episode))

    def _work(self) -> None:
        while True:
            trajectory = self._queue.get()
            try:
                if trajectory is None:
                    return
                for exporter in self.exporters:
                    if getattr(exporter, "blocking", True):
                        self._export(exporter, trajectory)
            finally:
                self._queue.task_done()

    def _export(self, exporter: TrajectoryExporter, trajectory: Trajectory) -> None:
        with guarded("%s did not export trajectory %s", exporter, trajectory.id):
            exporter.export([trajectory])
            return
        self.dropped += 1

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until every finished trajectory is exported; False if that takes longer."""
        settle()
        deadline = time.monotonic() + timeout_millis / 1000
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._queue.all_tasks_done.wait(remaining)
        done = True
        for exporter in self.exporters:
            left = max(0, int((deadline - time.monotonic()) * 1000))
            done = _try(exporter, partial(exporter.force_flush, left)) is not False and done
        return done

    def shutdown(self, timeout_millis: int = 30_000) -> None:
        """Export the finished trajectories, and the running ones as far as they have come.

        Nothing is recorded afterwards. Trajectories that are not exported in time are counted in
        `dropped`, and logged.
        """
        if self._closed:
            return
        self._closed = True
        with self._lock:
            running = list(self._buffers.values())
        for buffer in running:
            for stream in tuple(buffer.active.streams):
                stream.leave()
            buffer.assembly.notes.append(
                "the tracer provider was shut down while this rollout was running: what came "
                "afterwards is not part of it"
            )
            buffer.cut_off = True
            if buffer.active.is_part:
                continue
            with guarded("a running rollout was not exported at shutdown"):
                _take_in(buffer)
                buffer.assembly.add(as_record(buffer.span))
                self._hand_over(buffer.assembly.trajectory())
        if not self.force_flush(timeout_millis):
            self._drop_waiting()
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join(timeout=min(5, timeout_millis / 1000))
        for exporter in self.exporters:
            _try(exporter, exporter.shutdown)

    def _drop_waiting(self) -> None:
        """Empty the queue: an exporter is stuck, and the process must be able to end."""
        lost = 0
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
            self._queue.task_done()
            lost += 1
        if lost:
            self.dropped += lost
            logger.error("%d trajectories were not exported: the exporters were not done", lost)


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


def _take_in(buffer: _Buffer) -> None:
    """Rebuild from the exchange spans that have ended since the last time."""
    ended, buffer.ended = buffer.ended, []
    buffer.assembly.add_later(ended)


def _try(exporter: object, call: Callable[[], object]) -> object:
    """The result of this call of an exporter; False if it raised."""
    with guarded("%s failed", exporter):
        return call()
    return False


def _forget_parent(processor: TrajectorySpanProcessor | None) -> None:
    """Empty the processor in a forked child: rollouts and worker are the parent's."""
    if processor is not None:
        processor._lock = threading.RLock()
        processor._exporting = threading.RLock()
        processor._buffers = {}
        processor._rollouts = {}
        processor._bytes = 0
        processor._queue = queue.Queue(processor._max_queue_size)
        processor._worker = None
