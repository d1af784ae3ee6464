"""Where what is rebuilt goes: a file of trajectories or of rows, or an exporter.

Rebuilding reads the journal, so that a process of its own can do it.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec import MsgspecError, Struct
from msgspec.json import Decoder

from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.evidence import rollout_of
from otel_rollout.export import (
    JsonRows,
    RowExporter,
    Tally,
    TrajectoryExporter,
    key_of,
    row_exporter_from_texts,
    rows_of,
)
from otel_rollout.journal import Place, read_record
from otel_rollout.lines import append_lines, bounded_lines, check_appendable
from otel_rollout.rebuild import reconstruct
from otel_rollout.receive.intake import parsed
from otel_rollout.trajectory import UNREADABLE, Trajectory


class RowFormat(NamedTuple):
    """The rows of an installed exporter, as `export --to` names it."""

    to: str
    options: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """ConfigurationError unless there is such an exporter, and its rows are lines of JSON."""
        finish = getattr(_exporter(self).finish, "__func__", None)
        if finish is not JsonRows.finish:
            raise ConfigurationError(
                f"receiver, to={self.to!r}: its file is no JSON lines: receive trajectories, and "
                f"use `otel-rollout export`"
            )


@cache
def _exporter(rows: RowFormat) -> RowExporter:
    return row_exporter_from_texts(rows.to, dict(rows.options))


class Output(Protocol):
    """Where lines go."""

    def place(self) -> int:
        """A number from which `there` looks later."""

    def there(self, place: int) -> Counter[str] | None:
        """The keys of the lines that came since; None: nobody knows."""

    def write(self, lines: Sequence[bytes]) -> None:
        """Take lines over, those of a unit one after the other, and keep them."""


class FileOutput:
    """A file of lines; what was written is on the disk.

    is_rows: the lines are rows; else they are trajectories.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_rows: bool) -> None:
        check_appendable(path, "receiver")
        self._path, self._is_rows = Path(os.path.abspath(path)), is_rows

    def place(self) -> int:
        """The end of the file."""
        return self._path.stat().st_size if self._path.exists() else 0

    def there(self, place: int) -> Counter[str] | None:
        """The keys of the whole lines after this place."""
        found = Counter[str]()
        if not self._path.exists():
            return found
        with open(self._path, "rb") as file:
            file.seek(place)
            for line, _ in bounded_lines(file):
                try:
                    key = key_of_row if self._is_rows else _id_of
                    found[key((line or b"").strip())] += 1
                except MsgspecError:
                    continue  # half a line, of the process that was killed
        return found

    def write(self, lines: Sequence[bytes]) -> None:
        """Append the lines, all or none."""
        if lines:
            append_lines(self._path, b"\n".join([*lines, b""]), fsync=True)


class ExporterOutput:
    """Any exporter of trajectories; it keeps what `export` took."""

    def __init__(self, exporter: TrajectoryExporter) -> None:
        self._exporter = exporter

    def place(self) -> int:
        """Always 0."""
        return 0

    def there(self, place: int) -> Counter[str] | None:
        """Not known."""
        return None

    def write(self, lines: Sequence[bytes]) -> None:
        """Export the trajectories."""
        self._exporter.export([Trajectory.from_json(line) for line in lines])


class _Line(Struct):
    id: str


_line_of = Decoder(_Line).decode


def _id_of(line: bytes) -> str:
    return _line_of(line).id


def key_of_row(row: bytes) -> str:
    """What names a row: its content."""
    return blake2b(row, digest_size=16).hexdigest()


class Rebuilt(NamedTuple):
    """What was made of a unit."""

    lines: list[tuple[str, bytes]]
    """Each with its key."""
    problems: list[str]
    """Sentences about what is not in them."""


def rebuilt(
    folder: str,
    places: Sequence[Place],
    reads: frozenset[str],
    ids: frozenset[str],
    rows: RowFormat | None,
) -> Rebuilt:
    """The trajectories with these ids, in order of their start, or the rows that are made of them.

    places: records of the journal in the folder. reads: the rollouts whose spans are read there.
    """
    records, problems = list[Any](), list[str]()
    for place in places if ids else ():
        try:
            body = read_record(Path(folder), place)
            records += parsed(body, body[:1] == b"{")[0]
        except (OSError, SpanFormatError) as error:
            problems.append(f"{error}: spans that were acknowledged are lost")
    every = reconstruct(r for r in records if rollout_of(r) in reads)
    wanted = [trajectory for trajectory in every if trajectory.id in ids]
    if rows is not None:
        return _rows_of(wanted, _exporter(rows), problems)
    lines = list[tuple[str, bytes]]()
    for trajectory in wanted:
        try:
            lines.append((trajectory.id, trajectory.to_json().encode()))
        except UNREADABLE as error:
            problems.append(f"trajectory {trajectory.id}: damaged ({error!r:.200})")
    return Rebuilt(lines, problems)


def _rows_of(
    trajectories: Iterable[Trajectory], exporter: RowExporter, problems: list[str]
) -> Rebuilt:
    groups = defaultdict[str, list[Trajectory]](list)  # one inside a member of one is alone
    for each in trajectories:
        groups[key_of(each)].append(each)
    tally, made = Tally(), list[bytes]()
    for members in groups.values():
        made += rows_of(members, exporter, tally, problems.append, strict=False)
    for reasons in (tally.empty, tally.dropped, tally.refused):
        problems += (
            f"{count} x no row: {reason.replace(chr(10), '. ')}"
            for reason, count in reasons.items()
        )
    return Rebuilt([(key_of_row(row.strip()), row.strip()) for row in made], problems)
