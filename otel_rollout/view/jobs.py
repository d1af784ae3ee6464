"""Work of a verb, done by this process or by several (`--jobs`), with the same results.

Worker processes get items in turn, and what they return comes in the order of the items. A file of
trajectories is given to them in pieces of some lines; reports of damaged lines keep their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, islice
from typing import Any, TypeVar

from otel_rollout.errors import RolloutError, SpanFormatError
from otel_rollout.export import parsed_lines, trajectory_or_error
from otel_rollout.trajectory import UNREADABLE, Trajectory

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
Report = Callable[[SpanFormatError], None]

_PIECE = 1 << 20
"""Bytes of lines that a process gets at once, or one longer line."""
_FAILURES = (OSError, LookupError, RolloutError)
"""Errors that end a verb with a sentence."""


def in_order(
    of: Callable[[_Item], _Found], items: Iterable[_Item], jobs: int
) -> Iterator[tuple[_Item, _Found]]:
    """Each item with what the function returns for it; memory holds `jobs` items and one.

    jobs: worker processes; this process does the work of 1, and a single item. Else the function,
    items and results are pickled. What the iterable raises comes after the results of the items
    before it.
    ChildProcessError if a worker is killed.
    """
    failures: list[Exception] = []
    items = _until_failure(items, failures)
    first = list(islice(items, 2))
    items = chain(first, items)
    if jobs > 1 and len(first) > 1:
        yield from _by_workers(of, items, jobs)
    else:
        yield from ((item, of(item)) for item in items)
    if failures:
        raise failures[0]


def _by_workers(
    of: Callable[[_Item], _Found], items: Iterable[_Item], jobs: int
) -> Iterator[tuple[_Item, _Found]]:
    """The same by so many processes."""
    futures = import_module("concurrent.futures")
    pool = import_module("otel_rollout.worker_processes").pool_of(jobs)
    waiting = deque[tuple[_Item, Any]]()
    try:
        for item in items:
            waiting.append((item, pool.submit(of, item)))
            if len(waiting) > jobs:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except futures.BrokenExecutor as error:
        raise ChildProcessError(
            f"--jobs: a worker process ended before its work was done ({error}): was it killed "
            f"for its memory? Try a smaller number"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _until_failure(items: Iterable[_Item], failures: list[Exception]) -> Iterator[_Item]:
    """The items; the error that ends them is put into the list."""
    try:
        yield from items
    except _FAILURES as error:
        failures.append(error)


# --- lines


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines of a source."""

    lines: list[bytes | None]
    """Each line; None for one that is too long."""
    name: str
    """The source, for errors."""
    first: int
    """The number of the first line, from 1."""
    goes_on: bool = False
    """True if another line follows that is not blank."""
    damage: str | None = None
    """Why nothing can be read after these lines; None: it can, or nothing is there."""

    def each_line(self) -> Iterator[bytes | None]:
        """The lines. SpanFormatError after them if the source is damaged there."""
        yield from self.lines
        if self.damage is not None:
            raise SpanFormatError(self.damage)


def pieces_of(lines: Iterable[bytes | None], name: str) -> Iterator[Piece]:
    """The lines of a source in pieces, one at a time."""
    held: list[bytes | None] = []
    first, size, damage = 1, 0, None
    try:
        for line in lines:
            if size >= _PIECE and (line is None or not line.isspace()):
                yield Piece(held, name, first, goes_on=True)
                first, size, held = first + len(held), 0, []
            held.append(line)
            size += len(line or b"")
    except SpanFormatError as error:
        damage = str(error)
    yield Piece(held, name, first, damage=damage)


def read_lines(
    of: Callable[[Trajectory], _Found | None],
    lines: Iterable[bytes | None],
    name: str,
    report: Report,
    *,
    reads_replies: bool = False,
    **place: Any,
) -> Iterator[tuple[bytes, _Found]]:
    """The line of each trajectory, and what the function returns for it, unless that is None.

    A damaged line is reported instead. Its exchanges are read when somebody asks: the function may
    be the first to find that they are damaged. reads_replies: see `Trajectory.from_json`.
    place: `first` and `goes_on` of `parsed_lines`.
    """
    parse = partial(trajectory_or_error, reads_replies=reads_replies)
    found = parsed_lines(lines, name, report, report, parse, last=report, **place)
    for line, trajectory, where in found:
        if isinstance(trajectory, SpanFormatError):
            report(SpanFormatError(f"{where}: {trajectory}"))
            continue
        try:
            result = of(trajectory)
        except UNREADABLE as error:
            report(SpanFormatError(f"{where}: damaged ({error!r:.200})"))
            continue
        if result is not None:
            yield line, result


_Event = SpanFormatError | tuple[int | bytes, _Found]
"""A report; or the index of a line, or a part of one, and what was found in it."""


def _events_of(
    of: Callable[[Trajectory], _Found | None], reads_replies: bool, piece: Piece
) -> list[_Event[_Found]]:
    """All that `read_lines` reports and yields of a piece, in order."""
    events: list[_Event[_Found]] = []
    numbers = {id(line): number for number, line in enumerate(piece.lines)}
    place = {"first": piece.first, "goes_on": piece.goes_on}
    lines, name = piece.each_line(), piece.name
    found = read_lines(of, lines, name, events.append, reads_replies=reads_replies, **place)
    for line, result in found:
        events.append((numbers.get(id(line), line), result))
    return events


def read_pieces(
    of: Callable[[Trajectory], _Found | None],
    pieces: Iterable[Piece],
    report: Report,
    jobs: int,
    *,
    reads_replies: bool = False,
) -> Iterator[tuple[bytes, _Found]]:
    """The same as `read_lines` of all pieces, by so many processes."""
    for piece, events in in_order(partial(_events_of, of, reads_replies), pieces, jobs):
        for event in events:
            if isinstance(event, SpanFormatError):
                report(event)
                continue
            place, result = event
            line = piece.lines[place] if isinstance(place, int) else place
            assert line is not None
            yield line, result
