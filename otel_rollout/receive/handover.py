"""From units that are ready to lines: rebuilt beside the intake, handed over, then marked as done.

A unit is handed over at least once. One that a killed process may have handed over is looked for in
the file first; where there is no file to look in, it is handed over again, and that is reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field
from typing import Any

from otel_rollout.evidence import Head, OpenRollouts, Unit
from otel_rollout.journal import Journal, Place
from otel_rollout.receive.heads import HeadFile
from otel_rollout.receive.outputs import Output, Rebuilt, RowFormat, rebuilt
from otel_rollout.trajectory import sentences

logger = logging.getLogger("otel_rollout")

_TICK = 0.25
"""Seconds between two looks at what is out of time."""
_SHARE = 20
"""Times as long as such a look takes, until the next one."""
_LONGEST_PAUSE = 10.0
"""Seconds between two tries to hand over, at most."""


@dataclass(eq=False)
class _Ready:
    """A unit that is being rebuilt."""

    unit: Unit[Place]
    made: Future[Rebuilt]


@dataclass
class HandOver:
    """Hands units over in a thread of its own, from `start` to `stop`.

    lock: held while the rollouts are changed. workers: makes what rebuilds trajectories, again
    where a process of it was killed. most: units that are rebuilt at a time. rows: what is made of
    trajectories. None: nothing.
    """

    journal: Journal
    heads: HeadFile
    rollouts: OpenRollouts[Place]
    output: Output
    lock: threading.RLock
    workers: Callable[[], Executor]
    most: int
    rows: RowFormat | None = None
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)
    """What was handed over, for metrics."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Rollouts that were not whole, by what was missing of them."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._is_changed = self._is_ended = False
        self._pause, self._failed_at, self._due_at = 0.0, 0.0, 0.0
        self._workers = self.workers()
        self._underway: list[_Ready] = []
        self._thread = threading.Thread(target=self._run, name="otel-rollout-handover", daemon=True)

    def start(self) -> None:
        """Hand over from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Hand over what is ready by now, and end."""
        self._is_ended = True
        self.wake()
        self._thread.join()
        self._workers.shutdown()

    @property
    def is_running(self) -> bool:
        """True while it hands over."""
        return self._thread.is_alive()

    def look(self) -> None:
        """Spans came: hand over what is ready, if something may be."""
        if self.rollouts.has_changed:
            self.wake()

    def wake(self, _: object = None) -> None:
        """Something may have become ready."""
        with self._changed:
            self._is_changed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_changed, _TICK)
                self._is_changed = False
            is_last = self._is_ended
            if time.monotonic() >= self._failed_at + self._pause:
                self._begin()
            ready = [each for each in self._underway if each.made.done() or is_last]
            if ready:
                self._underway = [each for each in self._underway if each not in ready]
                self._hand_over(ready)
                self.wake()
            elif is_last and not self._underway:
                return

    def _begin(self) -> None:
        """Let units be rebuilt that are ready, as many as there is room for."""
        most = 1 if self._pause else self.most  # one that fails must not keep others from it
        room = max(0, most - len(self._underway))
        with self.lock:
            units = self.rollouts.whole(room)
            if (began := self.clock()) >= self._due_at and not self._is_ended:
                units += self.rollouts.due(began, room - len(units))
                # It looks at all that is open, and others wait meanwhile.
                self._due_at = began + max(_TICK, _SHARE * (self.clock() - began))
        for unit in units:
            heads = () if unit.is_extra else unit.heads
            ids = frozenset(head.rollout for head in heads if head.came == "contents")
            read = str(self.journal.folder), unit.places, unit.reads, ids, self.rows
            try:
                made = self._workers.submit(rebuilt, *read)
            except BrokenExecutor:  # a process was killed
                self._workers = self.workers()
                made = self._workers.submit(rebuilt, *read)
            made.add_done_callback(self.wake)
            self._underway.append(_Ready(unit, made))

    def _hand_over(self, ready: Sequence[_Ready]) -> None:
        """Hand units over, and mark them; what fails comes again."""
        units = [each.unit for each in ready]
        try:
            self._deliver([each for each in ready if not each.unit.is_rewards])
            self._mark(units)
        except Exception as error:  # another's exporter, a disk, a worker that was killed
            self._failed_at = time.monotonic()
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause or 0.5)
            logger.error(
                "%d groups or rollouts could not be handed over (%r): they are again in %g seconds",
                *(len(units), error, self._pause),
            )
            self.counts["failed"] += 1
            with self.lock:
                for unit in units:
                    self.rollouts.failed(unit)
            return
        self._pause = 0.0
        for unit in units:
            self._report(unit)

    def _mark(self, units: Sequence[Unit[Place]]) -> None:
        """Mark units that were handed over, and let go of what is needed no longer."""
        with self.lock:
            late = [late for unit in units for late in self.rollouts.came_since(unit)]
            ids = [head.rollout for unit in units for head in unit.heads]
            alone = (unit.name for unit in units if unit.is_rewards)
            late += (reward for each in alone for reward in self.rollouts.rewards_of(each))
            spans = {each: [*self.rollouts.span_ids(each)] for each in ids}
        self.heads.done(units, spans, late)  # waits for the disk
        with self.lock:
            for unit in units:
                if more := set(self.rollouts.came_since(unit)).difference(late):
                    self.heads.late([*more])
                self.journal.release(self.rollouts.done(unit))

    def _deliver(self, ready: Sequence[_Ready]) -> None:
        """Give the lines to the output."""
        before = [None if e.unit.is_extra else self.heads.begun(e.unit) for e in ready]
        there = [Counter[str]() if p is None else self.output.there(p) for p in before]
        units = [(e.unit, t is None) for e, t in zip(ready, there, strict=True)]
        self.heads.begin([u for u in units if not u[0].is_extra], self.output.place())
        lines = list[bytes]()
        for each, known in zip(ready, there, strict=True):
            made = each.made.result()
            for problem in made.problems:
                logger.error("%s: %s", _named(each.unit), problem)
            if known is None:
                logger.warning("%s is handed over a second time", _named(each.unit))
            for key, line in made.lines:
                if known and known[key]:
                    known[key] -= 1
                else:
                    lines.append(line)
        self.output.write(lines)

    def _report(self, unit: Unit[Place]) -> None:
        """Log what is missing of a unit, and count it."""
        for head in unit.heads:
            if unit.is_rewards:
                self.counts["rewards_alone"] += len(head.rewards)
                text = "rollout %s: a reward came, and nothing else of it: %.200s"
                rewards = ", ".join(each or "damaged" for each in head.rewards)
                logger.warning(text, head.rollout, rewards)
                continue
            self.counts["extra" if unit.is_extra else _kind(head)] += 1
            if unit.is_extra:
                logger.warning(
                    "rollout %s came when its group %r had been handed over",
                    head.rollout,
                    head.group,
                )
            elif not head.is_whole:
                why = "; ".join(head.missing)
                for reason in {sentences.sentence_of(each)[0] for each in head.missing}:
                    self.reasons[sentences.name_of(reason)] += 1
                logger.warning("rollout %s was handed over, not whole: %s", head.rollout, why)
        if unit.short_by and not unit.is_extra:
            logger.warning(
                "%s was handed over with %d of %d samples", _named(unit), unit.whole, unit.size
            )


def _kind(head: Head) -> str:
    if head.is_whole:
        return "whole"
    return "incomplete" if head.ended else "never_ended"


def _named(unit: Unit[Any]) -> str:
    return f"rollout {unit.name}" if unit.group is None else f"group {unit.name!r}"
