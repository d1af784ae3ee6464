"""From units that are ready to lines: rebuilt beside the intake, handed over, then marked as done.

A unit is handed over at least once. One that a killed process may have handed over is looked for in
the file first; where there is no file to look in, it is handed over again, and that is reported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec import MsgspecError, Struct
from msgspec.json import Decoder

from otel_rollout.errors import SpanFormatError
from otel_rollout.evidence import Head, OpenRollouts, Unit, rollout_of
from otel_rollout.export import TrajectoryExporter
from otel_rollout.journal import Journal, Place, read_record
from otel_rollout.lines import append_line, bounded_lines, check_appendable
from otel_rollout.rebuild import reconstruct
from otel_rollout.receive.heads import HeadFile
from otel_rollout.receive.intake import parsed
from otel_rollout.trajectory import UNREADABLE, Trajectory

logger = logging.getLogger("otel_rollout")

_TICK = 0.25
"""Seconds between two looks at what is out of time."""
_LONGEST_PAUSE = 10.0
"""Seconds between two tries to hand over, at most."""
Lines = list[tuple[str, bytes]]
"""The ids of trajectories, and their lines of JSON."""


class Output(Protocol):
    """Where trajectories go."""

    def place(self) -> int:
        """A number from which `there` looks later."""

    def there(self, place: int) -> set[str] | None:
        """The ids of the trajectories that came since; None: nobody knows."""

    def write(self, lines: Sequence[bytes]) -> None:
        """Take lines of trajectories over, those of a unit one after the other, and keep them."""


class FileOutput:
    """A file of trajectories, one a line; what was written is on the disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_appendable(path, "receiver")
        self._path = Path(os.path.abspath(path))

    def place(self) -> int:
        """The end of the file."""
        return self._path.stat().st_size

    def there(self, place: int) -> set[str] | None:
        """The ids on the whole lines after this place."""
        found = set[str]()
        with open(self._path, "rb") as file:
            file.seek(place)
            for line, _ in bounded_lines(file):
                try:
                    found.add(_line_of(line or b"").id)
                except MsgspecError:
                    continue  # half a line, of the process that was killed
        return found

    def write(self, lines: Sequence[bytes]) -> None:
        """Append the lines, all or none."""
        if lines:
            append_line(self._path, b"\n".join([*lines, b""]), fsync=True)


class ExporterOutput:
    """Any exporter of trajectories; it keeps what `export` took."""

    def __init__(self, exporter: TrajectoryExporter) -> None:
        self._exporter = exporter

    def place(self) -> int:
        """Always 0."""
        return 0

    def there(self, place: int) -> set[str] | None:
        """Not known."""
        return None

    def write(self, lines: Sequence[bytes]) -> None:
        """Export the trajectories."""
        self._exporter.export([Trajectory.from_json(line) for line in lines])


class _Line(Struct):
    id: str


_line_of = Decoder(_Line).decode


def rebuilt(
    folder: str, places: Sequence[Place], reads: frozenset[str], ids: Collection[str]
) -> tuple[Lines, list[str]]:
    """The lines of the trajectories with these ids, in order of their start, and what went wrong.

    places: records of the journal in the folder. reads: the rollouts whose spans are read there.
    """
    records, problems = list[Any](), list[str]()
    for place in places:
        try:
            body = read_record(Path(folder), place)
            records += parsed(body, body[:1] == b"{")[0]
        except (OSError, SpanFormatError) as error:
            problems.append(str(error))
    lines: Lines = []
    for trajectory in reconstruct(r for r in records if rollout_of(r) in reads):
        if trajectory.id in ids:
            try:
                lines.append((trajectory.id, trajectory.to_json().encode()))
            except UNREADABLE as error:
                problems.append(f"trajectory {trajectory.id}: damaged ({error!r:.200})")
    return lines, problems


@dataclass(eq=False)
class _Ready:
    """A unit that is being rebuilt."""

    unit: Unit[Place]
    lines: Future[tuple[Lines, list[str]]]


@dataclass
class HandOver:
    """Hands units over in a thread of its own, from `start` to `stop`.

    lock: held while the rollouts are changed. workers: makes what rebuilds trajectories, again
    where a process of it was killed. most: units that are rebuilt at a time.
    """

    journal: Journal
    heads: HeadFile
    rollouts: OpenRollouts[Place]
    output: Output
    lock: threading.RLock
    workers: Callable[[], Executor]
    most: int
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)
    """What was handed over, for metrics."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._is_changed = self._is_ended = False
        self._pause, self._failed_at = 0.0, 0.0
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
            ready = [each for each in self._underway if each.lines.done() or is_last]
            if ready:
                self._underway = [each for each in self._underway if each not in ready]
                self._hand_over(ready)
                self.wake()
            elif is_last and not self._underway:
                return

    def _begin(self) -> None:
        """Let units be rebuilt that are ready, as many as there is room for."""
        most = 1 if self._pause else self.most  # one that fails must not keep others from it
        room = most - len(self._underway)
        with self.lock:
            units = self.rollouts.whole(max(0, room))
            if not self._is_ended:
                units += self.rollouts.due(self.clock(), max(0, room - len(units)))
        for unit in units:
            ids = [] if unit.is_extra else [h.rollout for h in unit.heads if h.came == "contents"]
            read = str(self.journal.folder), unit.places, unit.reads, ids
            lines = self._workers.submit(rebuilt, *read)
            lines.add_done_callback(self.wake)
            self._underway.append(_Ready(unit, lines))

    def _hand_over(self, ready: Sequence[_Ready]) -> None:
        """Hand units over, and mark them; what fails comes again."""
        units = [each.unit for each in ready]
        try:
            self._deliver(ready)
            with self.lock:
                late = [late for unit in units for late in self.rollouts.came_since(unit)]
                ids = [head.rollout for unit in units for head in unit.heads]
                spans = {each: [*self.rollouts.span_ids(each)] for each in ids}
                self.heads.done(units, spans, late)
                for unit in units:
                    self.journal.release(self.rollouts.done(unit))
        except Exception as error:  # another's exporter, a disk, a worker that was killed
            self._failed_at = time.monotonic()
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause or 0.5)
            logger.error(
                "%d groups or rollouts could not be handed over (%r): they are again in %g seconds",
                *(len(units), error, self._pause),
            )
            self.counts["failed"] += 1
            if isinstance(error, BrokenExecutor):
                self._workers = self.workers()
            with self.lock:
                for unit in units:
                    self.rollouts.failed(unit)
            return
        self._pause = 0.0
        for unit in units:
            self._report(unit)

    def _deliver(self, ready: Sequence[_Ready]) -> None:
        """Give the lines to the output."""
        before = [None if e.unit.is_extra else self.heads.begun(e.unit) for e in ready]
        there = [set[str]() if p is None else self.output.there(p) for p in before]
        units = [(e.unit, t is None) for e, t in zip(ready, there, strict=True)]
        self.heads.begin([u for u in units if not u[0].is_extra], self.output.place())
        lines = list[bytes]()
        for each, known in zip(ready, there, strict=True):
            made, problems = each.lines.result()
            for problem in problems:
                logger.error("%s: spans of %s are lost", problem, _named(each.unit))
            if known is None:
                logger.warning("%s is handed over a second time", _named(each.unit))
            lines += [line for id_, line in made if id_ not in (known or ())]
        self.output.write(lines)

    def _report(self, unit: Unit[Place]) -> None:
        """Log what is missing of a unit, and count it."""
        for head in unit.heads:
            self.counts["extra" if unit.is_extra else _kind(head)] += 1
            if unit.is_extra:
                logger.warning(
                    "rollout %s came when its group %r had been handed over",
                    head.rollout,
                    head.group,
                )
            elif not head.is_whole:
                why = "; ".join(head.missing)
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
