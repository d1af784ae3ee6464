"""Finished trajectories on their way to one exporter: what waits is bounded, what is lost counted.

Each exporter that blocks has a thread of its own, so one that is slow, hangs or raises costs the
others nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from opentelemetry.context import Context

from otel_rollout.export import TrajectoryExporter
from otel_rollout.record.boundary import contained
from otel_rollout.record.context import attached
from otel_rollout.record.state import process_state
from otel_rollout.trajectory import Trajectory

logger = logging.getLogger("otel_rollout")


class Delivery:
    """Hands trajectories to one exporter, one at a time: at once, or on a thread if it blocks."""

    def __init__(self, exporter: TrajectoryExporter, max_waiting: int, max_bytes: int) -> None:
        self.exporter = exporter
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self.renew()

    def renew(self) -> None:
        """Begin anew in a forked child: the thread and what waits for it are the parent's."""
        self.dropped = 0
        """Trajectories that did not reach the exporter, or that it failed to export."""
        self._waiting: deque[tuple[Trajectory, int]] = deque()
        self._bytes = 0
        """Span text of the trajectories that wait, and of the one that is being exported."""
        self._unfinished = 0
        """Number of those trajectories."""
        self._changed = threading.Condition()
        self._exporting = threading.RLock()
        """Held during `export` of an exporter that does not block: calls never overlap."""
        self._worker: threading.Thread | None = None
        self._closed = False

    def hand_over(self, trajectory: Trajectory, size: int) -> None:
        """Export the trajectory, now or soon; `size` is how much span text it holds."""
        if not getattr(self.exporter, "blocking", True):
            with self._exporting:
                self._export(trajectory)
            return
        with self._changed:
            full = self._is_full(size)
            if full is None:
                self._waiting.append((trajectory, size))
                self._bytes += size
                self._unfinished += 1
                self._changed.notify_all()
                self._start()
                process_state.observers.notify("waits", self.exporter, 1)
                return
            self._drop(1)
        logger.error("trajectory %s was not exported: %s", trajectory.id, full)

    def _is_full(self, size: int) -> str | None:
        """The reason why no further trajectory may wait; None if one may."""
        if self._closed:
            return f"{self.exporter} was shut down"
        if len(self._waiting) >= self._max_waiting:
            return (
                f"{len(self._waiting)} wait for {self.exporter} already "
                f"(TrajectorySpanProcessor(max_queue_size=...))"
            )
        if self._unfinished and self._bytes + size > self._max_bytes:
            return (
                f"those that wait for {self.exporter} hold {self._bytes} bytes already "
                f"(TrajectorySpanProcessor(max_bytes=...))"
            )
        return None

    def flush(self, timeout_millis: int) -> bool:
        """Wait until all that was handed over is exported; False if that takes longer."""
        deadline = time.monotonic() + timeout_millis / 1000
        with self._changed:
            if self._waiting and not self._start():
                return False
            if not self._changed.wait_for(lambda: not self._unfinished, timeout_millis / 1000):
                return False
        left = max(0, int((deadline - time.monotonic()) * 1000))
        return self.exporter.force_flush(left) is not False

    def close(self) -> None:
        """Take nothing more. What still waits is dropped: the process must be able to end."""
        with self._changed:
            lost = len(self._waiting)
            self._drop(lost)
            process_state.observers.notify("waits", self.exporter, -lost)
            self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
        if lost:
            logger.error("%d trajectories were not exported: %s was not done", lost, self.exporter)

    def _start(self) -> bool:
        """Start the thread, if there is none; False if the interpreter starts no more threads."""
        if self._worker is None:
            self._worker = start_thread(self._work, "otel-rollout-export")
        return self._worker is not None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                trajectory, size = self._waiting.popleft()
            process_state.observers.notify("waits", self.exporter, -1)
            self._export(trajectory)
            del trajectory  # not held while it waits for the next one
            with self._changed:
                self._bytes -= size
                self._unfinished -= 1
                self._changed.notify_all()

    def _export(self, trajectory: Trajectory) -> None:
        with contained("%s did not export trajectory %s", self.exporter, trajectory.id):
            self.exporter.export([trajectory])
            process_state.observers.notify("exported", self.exporter, trajectory)
            return
        with self._changed:
            self._drop(1)

    def _drop(self, count: int) -> None:
        self.dropped += count
        if count:
            process_state.observers.notify("dropped", self.exporter, count)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a thread that does not keep the process; None if the interpreter starts no more.

    It works for all rollouts, so the context of the current one does not go with it.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    with attached(Context()):
        try:
            thread.start()
        except RuntimeError:
            return None
    return thread


def in_time(calls: Sequence[tuple[object, Callable[[], object]]], seconds: float) -> list[object]:
    """Make all calls at once, each with its owner; the owners of those that did not succeed.

    That is: which raised (it is logged), gave False, or did not end in time. Each call is made on
    a thread of its own, which is left behind then.
    """
    deadline = time.monotonic() + seconds
    succeeded = set[int]()

    def make(number: int, owner: object, call: Callable[[], object]) -> None:
        with contained("%s failed", owner):
            if call() is not False:
                succeeded.add(number)

    for number, thread in [
        (number, start_thread(partial(make, number, *each), "otel-rollout-end"))
        for number, each in enumerate(calls)
    ]:
        if thread is None:
            make(number, *calls[number])
        else:
            thread.join(max(0, deadline - time.monotonic()))
    return [owner for number, (owner, _) in enumerate(calls) if number not in succeeded]
