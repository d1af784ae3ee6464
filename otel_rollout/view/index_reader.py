"""Sources read into an index: lines of trajectories in their files, all else converted first.

A file of trajectories is known by its inode, its size and the bytes before the place that it was
read to: one that only grew is read on from there, any other is read anew. What cannot be read at
its place, spans and gzipped files, is written to a file of trajectories first ("rebuilt").
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from otel_rollout.compressed import BUFFER
from otel_rollout.errors import ConfigurationError, RolloutError, SpanFormatError
from otel_rollout.export import (
    LINE_PREFIX,
    Layout,
    begun_file,
    layout_of,
    parsed_lines,
    trajectory_or_error,
)
from otel_rollout.lines import bounded_lines, private_file
from otel_rollout.otlp import files_of, rotated_beside
from otel_rollout.trajectory import UNREADABLE, Trajectory
from otel_rollout.view.overview import examine
from otel_rollout.view.search import searched_text
from otel_rollout.view.sources import Sources, is_address
from otel_rollout.view.table import FileState, WritableTable
from otel_rollout.wire import dumps, loads

_PATIENCE = 5
"""Spans that grow are rebuilt no sooner than after so many times what the last time took."""
_BATCH = 0.5
"""Seconds after which what was read is seen by others."""
_TAIL = 4096
"""Bytes before the place that was read to, by which a file is known again."""
_OF_REBUILDING = 0
"""The number of the file that errors of spans and gzipped files belong to."""
_DAMAGED = (*UNREADABLE, sqlite3.DataError)
"""What a trajectory raises whose JSON is not as it was written."""


def check_source(source: str) -> None:
    """ConfigurationError or OSError for a source that cannot be read again and again."""
    if source == "-":
        raise ConfigurationError(
            "view reads trajectories again and again, which stdin cannot: write it to a file"
        )
    if not is_address(source):
        for file in files_of(source):
            open(file, "rb").close()


class Reader:
    """Reads sources into the table of an index; each `read` adds what is new.

    rebuilt: the file for the trajectories of spans and of gzipped files.
    stopped: called from time to time; once it returns True, reading ends.
    """

    def __init__(
        self,
        sources: Sequence[str],
        table: WritableTable,
        rebuilt: Path,
        *,
        infer_rollouts: bool,
        stopped: Callable[[], bool],
    ) -> None:
        self._sources = sources
        self._table = table
        self._rebuilt = rebuilt
        self._infer_rollouts = infer_rollouts
        self._stopped = stopped
        self._asked = False
        """True once the addresses were read: they are not followed."""
        self._rebuild_after = 0.0
        """Spans are not rebuilt before, by the monotonic clock."""

    def read(self) -> None:
        """Read what is new since the last time."""
        others: list[str] = []
        for path in self._paths():
            try:
                if is_address(path) or _kind_of(path) != ("lines", False):
                    others.append(path)
                else:
                    self._read_lines(path)
            except OSError as error:
                self._fail_rebuilding(SpanFormatError(f"{path}: {error}"))
        if others and not self._stopped():
            with suppress(_StoppedError):
                self._rebuild(others)
            if self._rebuilt.exists():
                private_file(self._rebuilt).close()  # OSError for what somebody else wrote
                self._read_lines(str(self._rebuilt), "what was rebuilt")
        self._table.connection.commit()

    def _paths(self) -> Iterator[str]:
        """The addresses, and the files of the other sources."""
        for source in self._sources:
            try:
                yield from files_of(source)
            except (OSError, SpanFormatError) as error:
                self._fail_rebuilding(SpanFormatError(f"{source}: {error}"))

    # --- files of trajectories

    def _read_lines(self, path: str, name: str | None = None) -> None:
        """Read what is new in a file. name: what errors call it; None: its path."""
        with open(path, "rb", BUFFER) as file:
            known = self._table.file(os.path.realpath(path))
            state = os.fstat(file.fileno())
            now = FileState(
                number=known.number if known else 0,
                path=os.path.realpath(path),
                inode=f"{state.st_dev}:{state.st_ino}",
                size=state.st_size,
                modified=state.st_mtime_ns,
                read_to=0,
                tail=b"",
            )
            if known is None:
                now = replace(now, number=self._table.put_file(now.unfinished()))
            elif known.is_like(now):
                return
            elif (
                known.inode == now.inode
                and now.size > known.size
                and known.tail == _tail(file, known.read_to)
            ):
                now = replace(now, read_to=known.read_to)
            else:
                self._table.remove_file(known.number)
            self._read_on(file, now, name or now.path)

    def _read_on(self, file: BinaryIO, state: FileState, name: str) -> None:
        lines = _Lines(file, state.read_to)
        name = name if not state.read_to else f"{name}, from byte {state.read_to}"
        seen = time.monotonic() + _BATCH

        def fail(error: SpanFormatError) -> None:
            self._fail(state.number, error)

        parse = partial(trajectory_or_error, reads_replies=True)
        for line, found, where in parsed_lines(lines, name, fail, fail, parse):
            self._add(found, where, state.number, *lines.place(line))
            if time.monotonic() > seen:
                self._save(file, state.unfinished(), lines.start)
                if self._stopped():
                    return
                seen = time.monotonic() + _BATCH
        self._save(file, state, lines.end)

    def _save(self, file: BinaryIO, state: FileState, read_to: int) -> None:
        self._table.put_file(replace(state, read_to=read_to, tail=_tail(file, read_to)))
        self._table.connection.commit()

    def _add(
        self, found: Trajectory | SpanFormatError, where: str, file: int, start: int, size: int
    ) -> None:
        try:
            if isinstance(found, SpanFormatError):
                raise found
            trajectory = found
            if not trajectory.id:
                raise SpanFormatError("expected an id, got ''")
            overview, findings, *_ = examine(trajectory)
            before = self._table.add(
                overview, findings, searched_text(trajectory), file=file, start=start, size=size
            )
        except RolloutError as error:
            self._fail(file, SpanFormatError(f"{where}: {error}"))
        except _DAMAGED as error:
            self._fail(file, SpanFormatError(f"{where}: damaged ({error!r:.200})"))
        else:
            if before not in (None, (file, start)):
                again = f"{where}: trajectory {overview.id!r} was there before; this one counts"
                self._fail(file, SpanFormatError(again))

    def _fail(self, file: int, error: SpanFormatError) -> None:
        self._table.add_error(file, str(error))

    # --- spans, and files that are packed

    def _rebuild(self, sources: Sequence[str]) -> None:
        """Write the trajectories of the sources to a file, if they are others than before."""
        files = (file for source in sources for file in (*rotated_beside(source), source))
        states = [[file, *_state_of(file)] for file in files]
        now, asks = dumps(states), not self._asked and any(map(is_address, sources))
        is_known = self._table.note("spans") == now and self._rebuilt.exists()
        if (is_known and not asks) or time.monotonic() < self._rebuild_after:
            return
        began = time.monotonic()
        self._table.connection.execute("DELETE FROM errors WHERE file = ?", (_OF_REBUILDING,))
        part, spans = (Path(f"{self._rebuilt}.{name}") for name in ("part", "spans"))
        reader = Sources(sources, report=self._fail_rebuilding, check=self._check_stopped)
        lines = reader.trajectories(
            Trajectory.to_json, infer_rollouts=self._infer_rollouts, path=spans, in_order=False
        )
        with private_file(part, empty=True) as file:
            for line in lines:
                file.write(line.encode() + b"\n")
                self._check_stopped()
        os.replace(part, self._rebuilt)
        self._table.put_note("spans", now)
        self._asked = True
        self._rebuild_after = time.monotonic() + _PATIENCE * (time.monotonic() - began)

    def _check_stopped(self) -> None:
        if self._stopped():
            raise _StoppedError

    def _fail_rebuilding(self, error: SpanFormatError) -> None:
        self._fail(_OF_REBUILDING, error)


class _StoppedError(Exception):
    """The index is being closed: reading ends unfinished."""


class _Lines:
    """The whole lines of a file from an offset on, and the place of the last one."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self.start = self.end = start
        """Where the line begins, and where the next one does."""
        self._file = file
        self._line = b""
        self._within = 0
        """Where the rest of the line begins after the objects that were found on it."""

    def __iter__(self) -> Iterator[bytes | None]:
        self._file.seek(self.end)
        for line, length in bounded_lines(self._file):
            if line is not None and not line.endswith(b"\n") and not _is_json(line):
                return  # it is being written
            self.start, self._line, self._within = self.end, line or b"", 0
            self.end += length
            yield line

    def place(self, part: bytes) -> tuple[int, int]:
        """Offset and size of an object of the last line."""
        if part is self._line:
            return self.start, len(part)
        at = self._line.find(part, self._within)
        self._within = at + len(part)
        return self.start + at, len(part)


def _kind_of(path: str) -> tuple[Layout | None, bool]:
    """The layout of a file, "lines" for an empty one, and True if it is gzipped."""
    with open(path, "rb") as file:
        head, is_packed, _ = begun_file(file, path)
    return "lines" if LINE_PREFIX.startswith(head) else layout_of(head), is_packed


def _is_json(line: bytes) -> bool:
    try:
        loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _tail(file: BinaryIO, end: int) -> bytes:
    """A digest of the bytes before this place; the position in the file stays."""
    place = file.tell()
    file.seek(max(0, end - _TAIL))
    digest = blake2b(file.read(min(end, _TAIL)), digest_size=16).digest()
    file.seek(place)
    return digest


def _state_of(file: str) -> list[int]:
    """Inode, size and time of a file; nothing of an address, and of a file that is gone."""
    if not os.path.exists(file):
        return []
    state = os.stat(file)
    return [state.st_ino, state.st_size, state.st_mtime_ns]
