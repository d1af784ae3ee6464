"""The sources of a command: files, stdin and addresses, read as spans or as trajectories."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from otel_rollout import semconv as sc
from otel_rollout.compressed import begun, joined
from otel_rollout.errors import SpanFormatError
from otel_rollout.export import (
    HEAD,
    item_of,
    item_of_trajectory,
    layout_of,
    lines_of,
    parsed_lines,
    read_lines,
    reconstruct_by_rollout,
)
from otel_rollout.otlp import files_of, inode_of, parts_of, read, rotated_beside
from otel_rollout.spans import SpanRecord
from otel_rollout.terminal import number_of, say
from otel_rollout.trajectory import Trajectory
from otel_rollout.view.reading import is_address
from otel_rollout.view.verbs.choosing import lines_in_order
from otel_rollout.wire import loads

Keeps = Callable[[Trajectory], bool]

ERRORS_SHOWN = 10
"""Errors that are printed; the others are counted."""


class Sources:
    """The sources of one command: reads them, and counts what was read and what could not be."""

    def __init__(self, sources: Sequence[str], *, prints_lines: bool = False) -> None:
        """`prints_lines`: the verb prints while it reads: on a terminal no bar is among them."""
        self.spans = 0
        """Spans that were read."""
        self.foreign = 0
        """Spans among them that other libraries wrote."""
        self.errors = 0
        """Places that could not be read."""
        self._sources = [each for source in sources for each in _files(source)]
        for source in self._sources:
            if not is_address(source) and source != "-":
                open(source, "rb").close()  # fails now, not after hours of reading others
        files = [source for source in self._sources if os.path.isfile(source)]
        every = {each for file in files for each in (file, *rotated_beside(file))}
        self.size = sum(map(_size, every)) if len(files) == len(self._sources) else None
        """Bytes of all sources; None where that is not known."""
        self._opened = set[tuple[int, int]]()
        """The files that were opened, by `inode_of`."""
        self._bar = tqdm(
            total=self.size,
            unit="B",
            unit_scale=True,
            disable=True if prints_lines and sys.stdout.isatty() else None,
            delay=1,
            leave=False,
        )

    def records(self) -> Iterator[SpanRecord]:
        """The spans of all sources."""
        for source in self._sources:
            if is_address(source):
                yield from self._counted(read(source))
            else:
                with self._open(source) as file:
                    yield from self._counted(self._spans(file, source))
        self._bar.close()

    def trajectories(self, *, infer_rollouts: bool) -> Iterator[Trajectory]:
        """The trajectories of all sources: first those of files, then those rebuilt from spans."""
        with ExitStack() as opened:
            spans: list[Iterator[SpanRecord]] = []
            for file, source in self._of_trajectories(opened, spans):
                yield from read_lines(file, source, on_error=self.report)
            if spans:
                yield from self._rebuilt(spans, infer_rollouts=infer_rollouts)
            self._bar.close()

    def _rebuilt(
        self, spans: Iterable[Iterator[SpanRecord]], *, infer_rollouts: bool
    ) -> Iterator[Trajectory]:
        """The trajectories of spans, in order of their start; memory holds one at a time."""
        records = self._counted(itertools.chain.from_iterable(spans))
        with tempfile.TemporaryDirectory(prefix="otel-rollout-") as name:
            found = reconstruct_by_rollout(
                records, Path(name) / "spans", infer_rollouts=infer_rollouts
            )
            for line in lines_in_order(found, lambda each: (each.start_time_ns, each.id)):
                self._bar.close()
                yield Trajectory.from_dict(loads(line))

    def items(
        self, path: Path, *, infer_rollouts: bool, keeps: Keeps | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """The trajectories of all sources as `item_of` has them; their spans are at the path.

        keeps: true for a trajectory that is wanted. None: all are.
        """
        with ExitStack() as opened:
            spans: list[Iterator[SpanRecord]] = []
            for file, source in self._of_trajectories(opened, spans):
                yield from self._lines(file, source, keeps)
            records = self._counted(itertools.chain.from_iterable(spans))
            found = reconstruct_by_rollout(records, path, infer_rollouts=infer_rollouts)
            yield from map(item_of_trajectory, filter(keeps, found) if keeps else found)
            self._bar.close()

    def _of_trajectories(
        self, opened: ExitStack, spans: list[Iterator[SpanRecord]]
    ) -> Iterator[tuple[Iterator[bytes], str]]:
        """The lines of sources that hold trajectories; those of the others are added to `spans`."""
        for source in self._sources:
            if is_address(source):
                spans.append(read(source))
                continue
            file = opened.enter_context(self._open(source))
            head, _, file = begun(file, source, HEAD)
            if layout_of(head) is None:
                spans.append(self._spans(file, source))
            else:
                yield lines_of(file, source), source

    def _spans(self, file: BinaryIO, source: str) -> Iterator[SpanRecord]:
        """The spans of a file, then of those it was rotated to; without any it is an error."""
        errors, spans = self.errors, 0
        for part in itertools.chain((file,), self._rotated(source)):
            for record in read(part, on_error=self.report):
                spans += 1
                yield record
        if not spans and errors == self.errors:
            self.report(SpanFormatError(f"{source}: there is no span in it"))

    def _rotated(self, source: str) -> Iterator[BinaryIO]:
        """The files beside a source to which a collector has rotated it."""
        if os.path.isfile(source):
            for name, file in parts_of(source, self._opened):
                yield joined(b"", file, name, self._bar.update)

    def _lines(
        self, file: Iterable[bytes], source: str, keeps: Keeps | None
    ) -> Iterator[tuple[str, bytes]]:
        for line, data, where in parsed_lines(file, source, self.report, self.report):
            try:
                item = item_of(line, data, where)
                is_kept = keeps is None or keeps(Trajectory.from_dict(data))
            except SpanFormatError as error:
                self.report(error)
            else:
                if is_kept:
                    yield item

    def report(self, error: SpanFormatError) -> None:
        """Say what could not be read; reading goes on."""
        self.errors += 1
        if self.errors <= ERRORS_SHOWN:
            say_above(str(error))

    @contextmanager
    def _open(self, source: str) -> Iterator[BinaryIO]:
        if source == "-":
            yield joined(b"", sys.stdin.buffer, "stdin")
            return
        with open(source, "rb", buffering=0) as file:
            self._opened.add(inode_of(file))
            yield joined(b"", file, source, self._bar.update)

    def _counted(self, records: Iterable[SpanRecord]) -> Iterator[SpanRecord]:
        for record in records:
            self.spans += 1
            is_ours = record.scope == sc.SCOPE or sc.ROLLOUT_ID in record.attributes
            self.foreign += not is_ours
            yield record


def _files(source: str) -> list[str]:
    """The files of a folder; any other source itself."""
    return files_of(source) if os.path.isdir(source) else [source]


def _size(file: str) -> int:
    """Bytes of a file; 0 if it is gone."""
    return os.path.getsize(file) if os.path.exists(file) else 0


def say_above(text: str) -> None:
    """Print to stderr, above the progress bar."""
    with tqdm.external_write_mode(file=sys.stderr):
        say(text)


def say_unreadable(places: int) -> int:
    """Say how many places could not be read; the exit status."""
    if places:
        were = "was" if places == 1 else "were"
        say(f"{number_of(places, 'place')} could not be read and {were} left out")
    return int(places > 0)
