"""Sources of trajectories: files, folders, stdin and addresses of backends; and their order.

The content of a file decides: trajectories, one a line, documents of other programs, or spans to
rebuild them from.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from otel_rollout import semconv as sc
from otel_rollout.compressed import joined
from otel_rollout.errors import RolloutError, SpanFormatError
from otel_rollout.export import (
    Facts,
    StartedRecords,
    UnfinishedLineError,
    begun_file,
    is_of_started,
    item_of,
    key_of,
    layout_of,
    lines_of,
    lines_of_documents,
    reconstruct_by_rollout,
)
from otel_rollout.otlp import files_of, inode_of, parts_of, read, rotated_beside
from otel_rollout.rebuild import dialects, documents
from otel_rollout.spans import SpanRecord
from otel_rollout.terminal import note, number_of
from otel_rollout.trajectory import UNREADABLE, Trajectory
from otel_rollout.view.jobs import pieces_of, read_lines, read_pieces
from otel_rollout.wire import dumps

Keeps = Callable[[Trajectory], bool]
OnError = Callable[[SpanFormatError], None]
_Spans = Iterator[SpanRecord]
_Files = Iterator[tuple[Iterator[bytes | None], str]]
"""Lines of files of trajectories, and the source of each file."""
_Found = TypeVar("_Found")

ERRORS_SHOWN = 10
"""Errors that are printed; the others are counted."""


def is_address(source: str) -> bool:
    """True for the address of a backend; any other source is a file, a folder or stdin."""
    return source.startswith(("http://", "https://"))


class Sources:
    """Reads sources in order, and counts what was read and what could not be.

    prints_lines: the verb prints while it reads: on a terminal no bar is among them.
    report: called with each place that cannot be read, a source as a whole included. None: the
    first ones are printed, and a source that cannot be read as a whole raises.
    check: called before each span; what it raises ends the reading.
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        prints_lines: bool = False,
        report: OnError | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.spans = 0
        """Spans that were read."""
        self.foreign = 0
        """Spans among them that other libraries wrote."""
        self._scopes = Counter[str]()
        """Those by what wrote them, up to the first that is a model call of a dialect."""
        self._is_in_dialect = False
        self.errors = 0
        """Places that could not be read."""
        self.started = StartedRecords()
        """The rollouts that the spans say started, and those that ended."""
        self._sources = [each for source in sources for each in files_of(source)]
        for source in self._sources if report is None else ():
            if not is_address(source) and source != "-":
                open(source, "rb").close()  # fails now, not after hours of reading others
        self._on_error = report
        self._check = check
        self._documents = documents.Documents()
        self._opened = set[tuple[int, int]]()
        """The files that were opened, by `inode_of`."""
        is_shown = report is None and not (prints_lines and sys.stdout.isatty())
        total = _size_of(self._sources)
        self._bar = ProgressBar(total, "B", is_shown=is_shown, unit_scale=True, delay=1)

    def records(self, *, of_trajectories: str | None = None) -> Iterator[SpanRecord]:
        """The spans of all sources.

        of_trajectories: what is wrong with a file of trajectories. None: what `rebuild` prints.
        """
        for source in self._sources:
            if is_address(source):
                yield from self._counted(source, read(source))
                continue
            with self._open(source) as opened:
                head, _, file = begun_file(opened, source)
                if layout_of(head) is None and not documents.may_be_document(head):
                    yield from self._counted(source, self._spans(file, source))
                else:
                    why = of_trajectories or _TRAJECTORIES.format(source)
                    self.report(SpanFormatError(f"{source}: {why}"))
        self._bar.close()

    def trajectories(
        self,
        of: Callable[[Trajectory], _Found | None],
        *,
        infer_rollouts: bool,
        jobs: int = 1,
        path: Path | None = None,
        in_order: bool = True,
        reads_replies: bool = False,
    ) -> Iterator[_Found]:
        """What a function returns for each trajectory of all sources, but None.

        First those of files, then those rebuilt from spans. One is reported instead if the function
        finds it damaged: what was exchanged is read when somebody asks.
        jobs: processes that read files of trajectories.
        path: of the file for spans meanwhile. None: in a temporary folder.
        in_order: those that are rebuilt come in order of their start. False: in any.
        reads_replies: True if the function asks for the replies of nearly all: it costs less.
        """
        with ExitStack() as opened:
            spans: list[_Spans] = []
            files = self._of_trajectories(opened, spans)
            each = self._read(of, files, jobs, reads_replies=reads_replies)
            yield from (found for _, found in each)
            if spans:
                if path is None:
                    made = tempfile.TemporaryDirectory(prefix="otel-rollout-")
                    path = Path(opened.enter_context(made)) / "spans"
                records = itertools.chain.from_iterable(spans)
                found = reconstruct_by_rollout(records, path, infer_rollouts=infer_rollouts)
                yield from self.each(of, _in_order(found) if in_order else found)
            self._bar.close()

    def found_or_records(self, of: Callable[[Trajectory], _Found]) -> Iterator[_Found | SpanRecord]:
        """What a function returns for each trajectory of files, then the spans of the others."""
        with ExitStack() as opened:
            spans: list[_Spans] = []
            files = self._of_trajectories(opened, spans)
            yield from (found for _, found in self._read(of, files, 1))
            yield from itertools.chain.from_iterable(spans)
            self._bar.close()

    def items(
        self,
        keeps: Keeps,
        left_out: Callable[[Facts], object],
        path: Path,
        *,
        infer_rollouts: bool,
        jobs: int = 1,
    ) -> Iterator[tuple[str, bytes]]:
        """The same as keys and items, of those that are kept; spans are at the path meanwhile.

        left_out: called with what is known of each of the others without reading its calls.
        """
        with ExitStack() as opened:
            spans: list[_Spans] = []
            files = self._of_trajectories(opened, spans)
            key_of_one: Callable[[Trajectory], str | Facts] = partial(_key_if, keeps)
            read = self._read(key_of_one, files, jobs)
            records = itertools.chain.from_iterable(spans)
            made = reconstruct_by_rollout(records, path, infer_rollouts=infer_rollouts)
            rebuilt = self.each(partial(_item_if, keeps), made)
            for line, found in itertools.chain(read, rebuilt):
                if isinstance(found, Facts):
                    left_out(found)
                elif isinstance(found, str):
                    yield found, line
            self._bar.close()

    def each(
        self, of: Callable[[Trajectory], _Found | None], trajectories: Iterable[Trajectory]
    ) -> Iterator[_Found]:
        """What a function returns for each, but None; a damaged one is reported instead."""
        for trajectory in trajectories:
            try:
                found = of(trajectory)
            except UNREADABLE as error:
                where = f"trajectory {trajectory.id!r}"
                self.report(SpanFormatError(f"{where}: damaged ({error!r:.200})"))
                continue
            if found is not None:
                yield found

    def _of_trajectories(self, opened: ExitStack, spans: list[_Spans]) -> _Files:
        """The lines of sources that hold trajectories; those of the others are added to `spans`."""
        for source in self._sources:
            with self._failing(source):
                if is_address(source):
                    spans.append(self._counted(source, read(source)))
                    continue
                file = opened.enter_context(self._open(source))
                head, _, file = begun_file(file, source)
                if is_of_started(head):
                    raise SpanFormatError(f"{source}: {_STARTED}")
                if layout_of(head) is not None:
                    yield lines_of(file, source), source
                elif documents.may_be_document(head):
                    made = lines_of_documents(file, source, self._documents, self.report)
                    yield made, source
                else:
                    spans.append(self._counted(source, self._spans(file, source)))

    def _spans(self, file: BinaryIO, source: str) -> _Spans:
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

    def _read(
        self,
        of: Callable[[Trajectory], _Found | None],
        files: _Files,
        jobs: int,
        *,
        reads_replies: bool = False,
    ) -> Iterator[tuple[bytes, _Found]]:
        """The line of each trajectory in files, and what the function returns for it, but None."""
        if jobs > 1:
            pieces = (piece for lines, source in files for piece in pieces_of(lines, source))
            yield from read_pieces(of, pieces, self.report, jobs, reads_replies=reads_replies)
            return
        for lines, source in files:
            yield from read_lines(of, lines, source, self.report, reads_replies=reads_replies)

    @contextmanager
    def _open(self, source: str) -> Iterator[BinaryIO]:
        if source == "-":
            yield joined(b"", sys.stdin.buffer, "stdin")
            return
        with open(source, "rb", buffering=0) as file:
            self._opened.add(inode_of(file))
            yield joined(b"", file, source, self._bar.update)

    def _counted(self, source: str, records: _Spans) -> _Spans:
        with self._failing(source):
            for record in records:
                self._check()
                self.spans += 1
                is_ours = record.scope == sc.SCOPE or sc.ROLLOUT_ID in record.attributes
                self.foreign += not is_ours
                if is_ours:
                    self.started.see(record)
                elif not self._is_in_dialect:
                    self._scopes[record.scope] += 1
                    self._is_in_dialect = dialects.dialect_of(record) is not None
                yield record

    @contextmanager
    def _failing(self, source: str) -> Iterator[None]:
        """Report that a source cannot be read as a whole, if reading is to go on then."""
        try:
            yield
        except (OSError, LookupError, RolloutError) as error:
            if self._on_error is None:
                raise
            self.report(SpanFormatError(f"{source}: {error}"))

    def note_foreign(self, *, are_read: bool) -> int:
        """Print why spans of other libraries alone gave no trajectory; the exit status.

        are_read: True if rollouts are inferred from them.
        """
        if not self.spans or self.foreign < self.spans:
            return 0
        if self._is_in_dialect:
            if not are_read:
                note("  spans of other instrumentations alone: try --infer-rollouts")
            return 0
        most = self._scopes.most_common(3)
        scopes = ", ".join(f"{number_of(count, 'span')} of {scope!r}" for scope, count in most)
        note(f"  none is a model call in a dialect that is read ({scopes}): see docs/dialects.md")
        return 1

    def report(self, error: SpanFormatError) -> None:
        """Report a place that cannot be read; reading goes on."""
        if isinstance(error, UnfinishedLineError):  # it may be whole soon
            if self._on_error is None:
                note_above(f"{error}: its writer is still writing it, or was stopped")
                self.errors += error.is_all
            return
        self.errors += 1
        if self._on_error is not None:
            self._on_error(error)
        elif self.errors <= ERRORS_SHOWN:
            note_above(str(error))


def _key_if(keeps: Keeps, trajectory: Trajectory) -> str | Facts:
    return key_of(trajectory) if keeps(trajectory) else Facts.of_head(trajectory)


def _item_if(keeps: Keeps, trajectory: Trajectory) -> tuple[bytes, str | Facts]:
    key, item = item_of(trajectory) if keeps(trajectory) else (Facts.of_head(trajectory), b"")
    return item, key


_TRAJECTORIES = (
    "this is a file of trajectories, not spans, and there is nothing to rebuild: "
    "`otel-rollout list {0}`, `show` and `export` read it as it is"
)
_STARTED = (
    "this file has the rollouts that began, and no trajectory: give it to "
    "`otel-rollout check --started`"
)


def _in_order(found: Iterator[Trajectory]) -> Iterator[Trajectory]:
    """The trajectories in order of their start; memory holds one at a time."""
    for line in lines_in_order(((each.start_time_ns, each.id), each) for each in found):
        yield Trajectory.from_json(line)


def _size_of(sources: Sequence[str]) -> int | None:
    """Bytes of files with those they were rotated to; None if a source is no file."""
    if not all(map(os.path.isfile, sources)):
        return None
    files = {each for file in sources for each in (file, *rotated_beside(file))}
    return sum(os.path.getsize(file) for file in files if os.path.exists(file))


# --- order


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


def lines_in_order(
    trajectories: Iterable[tuple[Any, Trajectory]],
    *,
    descending: bool = False,
    folder: Path | None = None,
) -> Iterator[bytes]:
    """Trajectories, each after its key, as lines in order of the keys; None is last.

    They are in a temporary file, in the folder if one is given; memory holds the keys.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        places: list[tuple[Any, int, int]] = []
        for key, trajectory in trajectories:
            line = trajectory.to_json().encode() + b"\n"
            places.append((key, file.tell(), len(line)))
            file.write(line)
        for _, start, size in ordered(places, lambda place: place[0], descending=descending):
            file.seek(start)
            yield file.read(size)


# --- what is printed


class ProgressBar:
    """A bar on stderr, where that is a terminal and it is to be shown; else nothing."""

    def __init__(self, total: int | None, unit: str, *, is_shown: bool = True, **more: Any) -> None:
        """more: further arguments of `tqdm`."""
        is_shown = is_shown and sys.stderr.isatty()
        tqdm = import_module("tqdm").tqdm if is_shown else None
        self._bar = tqdm and tqdm(total=total, unit=unit, leave=False, **more)

    def update(self, count: int) -> None:
        """Go on by so many units."""
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Remove it."""
        if self._bar is not None:
            self._bar.close()


def note_above(text: str) -> None:
    """Print to stderr, above the progress bar if there is one."""
    module = sys.modules.get("tqdm")
    with module.tqdm.external_write_mode(file=sys.stderr) if module else nullcontext():
        note(text)


def note_unreadable(places: int) -> int:
    """Print how many places could not be read; the exit status."""
    if places:
        were = "was" if places == 1 else "were"
        note(f"{number_of(places, 'place')} could not be read and {were} left out")
    return int(places > 0)
