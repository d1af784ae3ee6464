"""Which trajectories a verb is about (`--where`), and in which order they come (`--sort`)."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from otel_rollout.errors import ConfigurationError
from otel_rollout.trajectory import Overview, Trajectory
from otel_rollout.view import Field, Where
from otel_rollout.wire import dumps, loads


class Choice:
    """The filter and the order that a command line asks for; a wrong one ends the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.where: Where | None = None
        """None: every trajectory."""
        self.sorts: str | None = getattr(options, "sort", None)
        """A field, `-` before it for descending; None: as they come."""
        self._by: Field | None = None
        try:
            if options.where is not None:
                self.where = Where.parse(options.where)
            if self.sorts is not None:
                self._by = field_of("--sort", self.sorts.removeprefix("-"), not_of=("list",))
        except ConfigurationError as error:
            options.wrong(str(error))

    def keeps(self, overview: Overview) -> bool:
        """True for a trajectory that the filter keeps."""
        return self.where is None or self.where.matches(overview)

    def keeps_trajectory(self, trajectory: Trajectory) -> bool:
        """The same, for who needs no overview."""
        return self.where is None or self.where.matches(Overview.of(trajectory))

    def trajectories(self, found: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Those that are kept, in order; they are sorted in a temporary file."""
        kept = filter(self.keeps_trajectory, found)
        if self.sorts is None:
            yield from kept
            return
        with tempfile.TemporaryFile() as file:
            spool = Spool(file)
            for trajectory in kept:
                spool.add(trajectory, self.key(trajectory))
            for line in spool.lines(descending=self.descending):
                yield Trajectory.from_dict(loads(line))

    @property
    def descending(self) -> bool:
        """True if the greatest comes first."""
        return self.sorts is not None and self.sorts.startswith("-")

    def key(self, trajectory: Trajectory) -> Any:
        """What trajectories are sorted by; without `--sort` their start and id."""
        if self._by is None:
            return trajectory.start_time_ns, trajectory.id
        return self._by.of(Overview.of(trajectory))

    def in_order(self, overviews: Iterable[Overview]) -> Iterable[Overview]:
        """The overviews, as they come unless they are to be sorted."""
        if self._by is None:
            return overviews
        return ordered(overviews, self._by.of, descending=self.descending)


def ordered(items: Iterable[Any], key: Callable[[Any], Any], *, descending: bool) -> list[Any]:
    """The items in order of a key; those whose key is None, or no number, are last."""
    known: list[Any] = []
    unknown: list[Any] = []
    for item in items:
        value = key(item)
        (unknown if value is None or value != value else known).append(item)

    def by(item: Any) -> tuple[bool, Any]:
        value = key(item)  # a file may have a text for a number, and metadata anything
        value = dumps(value) if isinstance(value, list | dict) else value
        return isinstance(value, str), value

    return [*sorted(known, key=by, reverse=descending), *unknown]


def field_of(option: str, text: str, *, not_of: tuple[str, ...] = ()) -> Field:
    """The field of an overview that a text names.

    ConfigurationError for what is none, for all values by name, and for one of these kinds.
    """
    try:
        field = Field.parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None
    if field.kind in (*not_of, "object"):
        one = f', such as {text}["..."]' if field.kind == "object" else ""
        raise ConfigurationError(f"{option}: expected a single value{one}, got {text!r}")
    return field


class Spool:
    """Trajectories as lines of a temporary file; memory holds the key and the place of each."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: list[tuple[Any, int, int]] = []

    def add(self, trajectory: Trajectory, key: Any) -> None:
        """Write a trajectory that is to be read in order of this key."""
        line = dumps(trajectory.to_dict()).encode() + b"\n"
        self._places.append((key, self._file.seek(0, 2), len(line)))
        self._file.write(line)

    def lines(self, *, descending: bool = False) -> Iterator[bytes]:
        """The lines in order; those whose key is None are last."""
        for _, place, size in ordered(self._places, lambda at: at[0], descending=descending):
            self._file.seek(place)
            yield self._file.read(size)
