"""Trajectories in a file, one JSON object a line."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from otel_rollout.compressed import BUFFER, UNPACKING_ERRORS, UTF_16, begun, content_of, is_utf_16
from otel_rollout.errors import SpanFormatError
from otel_rollout.export.started import started_beside
from otel_rollout.first_use import loaded_on_first_call
from otel_rollout.lines import (
    HALF_A_LINE,
    STARTED,
    append_lines,
    bounded_lines,
    check_appendable,
    is_half,
    too_long,
    whole_objects,
)
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import loads

logger = logging.getLogger("otel_rollout")

OnError = Callable[[SpanFormatError], None]
_Parsed = TypeVar("_Parsed")


class JsonlTrajectoryExporter:
    """Appends finished trajectories to a file, one JSON object a line; `read` gives them back.

    A line is in the file as a whole or not at all: what a full disk does not take is taken back,
    and `export` raises. Several processes may write to one file. A process that is killed in the
    middle of a write costs that line only; what comes after it begins on a new one. `fsync=True`
    also survives the loss of power, at the cost of a disk flush for each line.

    Beside it, in `FILE.started`, is a line for each rollout that began, and one for each process
    that ended as it should: `otel-rollout check --started` finds what never ended.
    """

    blocking = True
    """It writes to a file, so it is called on the processor's thread."""

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = Path(path)
        """The file. It is created with the exporter, if it does not exist."""
        self._fsync = fsync
        self._appended = Path(os.path.abspath(path))
        """The file, also after the process has gone to another folder."""
        check_appendable(path, type(self).__name__)
        self._started = started_beside(str(self._appended))
        self._has_failed = False
        """True if the log has said that `FILE.started` cannot be written."""

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        """Append the trajectories, one after the other. OSError if one cannot be written."""
        for trajectory in trajectories:
            line = trajectory.to_json().encode() + b"\n"
            append_lines(self._appended, line, fsync=self._fsync)
            if self._started is not None:
                self._started.end(trajectory)

    def on_start(self, trajectory: Trajectory) -> None:
        """Note that a rollout begins, in a file that survives the process."""
        if self._started is not None:
            self._note(partial(self._started.begin, trajectory))

    def on_left_out(self, trajectory_id: str) -> None:
        """Note that no trajectory comes of a rollout that began."""
        if self._started is not None:
            self._note(partial(self._started.leave_out, trajectory_id))

    def _note(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s%s: not all that begins is noted: %s", self.path, STARTED, error)
            self._has_failed = True

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered."""
        return True

    def shutdown(self) -> None:
        """Write the receipt of this process; nothing else is held."""
        if self._started is not None:
            self._note(self._started.close)

    @staticmethod
    def read(
        path: str | os.PathLike[str], *, on_error: OnError | None = None
    ) -> Iterator[Trajectory]:
        """The trajectories of a file, which may be gzipped, or an archive, one at a time.

        A line that a stopped writer left unfinished is left out: without a word if it is the last
        one, else with a warning in the log; a whole trajectory after it on the same line is read.
        SpanFormatError, with the line's number, for any other line that is not a trajectory.
        With `on_error`, it is called with each such error, and each such warning as an error,
        instead, and reading continues.
        """
        fail, warn, name = on_error or _raise, on_error or _log, str(path)
        with open(path, "rb", BUFFER) as file:
            lines = lines_of(file, name)
            for _, found, where in parsed_lines(lines, name, fail, warn, trajectory_or_error):
                if isinstance(found, SpanFormatError):
                    fail(SpanFormatError(f"{where}: {found}"))
                else:
                    yield found


LINE_PREFIX = b'{"schema_version":'
"""Prefix of every line that is written."""
_PARQUET = b"PAR1"
_lines_of_parquet = loaded_on_first_call("otel_rollout.export.parquet", "lines_of_parquet")
_HEAD = 64
_LONG_HEADS = (1 << 21, 1 << 24)
"""Bytes in which the first line that is something begins: before it may be the end of one."""
_ZEROS = b"\0 \t\r"
"""What a loss of power leaves of a line, and white space."""
Layout = Literal["lines", "indented", "list", "parquet"]
# "appended" is the first key where keys were sorted.
_is_no_text = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f]").search
# Documents of other programs have a text for their version, or are of a rollout_id.
_begins = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(\[\s*)?"
    rb'\{(\s*)"(schema_version|appended)"\s*:(?!\s*("|\d+\s*,\s*"rollout_id"))'
).match
_UNREAD = {"indented": "`jq -c . FILE`", "list": "`jq -c '.[]' FILE`"}


def begun_file(file: BinaryIO, name: str) -> tuple[bytes, bool, BinaryIO]:
    """The head of a file for `layout_of`, whether the file is gzipped, and the file as it was.

    Damaged lines at its beginning are passed over: the first that is something decides.
    """
    head, is_packed, whole = begun(file, name, _HEAD)
    if not head or layout_of(head):
        return head, is_packed, whole
    for length in _LONG_HEADS:
        long, is_packed, whole = begun(whole, name, length)
        head = _deciding(long)
        if head or len(long) < length:
            break
    return head or long[:_HEAD], is_packed, whole


def _deciding(head: bytes) -> bytes:
    """Where the first line begins that is JSON, or ends inside of it, or is no text; b"": none."""
    start = 0
    while start < len(head):
        end = head.find(b"\n", start) + 1 or len(head)
        line = head[start:end].strip(_ZEROS + b"\n")
        piece = head[start : end + _HEAD].lstrip(_ZEROS)[:_HEAD]
        is_open = line.startswith((b"{", b"[")) and line.endswith((b"{", b"[", b","))
        if layout_of(piece) or is_open or _is_no_text(line) or _parsed(line, loads):
            return piece
        start = end
    return b""


def layout_of(head: bytes) -> Layout | None:
    """The layout of a file of trajectories whose content begins so; None: it holds none.

    The exporter writes "lines". What other programs made of them may be an "indented" object each,
    or a "list"; these are not read. An archive is "parquet".
    """
    if head.startswith(_PARQUET):
        return "parquet"
    found = _begins(head)
    if found is None:
        return None
    return "list" if found[1] else "indented" if b"\n" in found[2] else "lines"


def lines_of(file: BinaryIO, name: str) -> Iterator[bytes | None]:
    """The lines of a file of trajectories, which may be gzipped; None for one that is too long.

    name: of an archive, its path.
    SpanFormatError for another layout than one line each, and where its content is damaged.
    """
    head, _, whole = begun_file(file, name)
    if is_utf_16(head):
        raise SpanFormatError(UTF_16)
    layout = layout_of(head)
    if (way := _UNREAD.get(layout or "")) is not None:
        raise SpanFormatError(f"its trajectories must be on one line each, as {way} writes them")
    yield from _lines_of_parquet(name) if layout == "parquet" else content_lines(whole, name)


def content_lines(file: BinaryIO, name: str) -> Iterator[bytes | None]:
    """The lines of a file, which may be gzipped; None for one that is too long.

    SpanFormatError where its content is damaged.
    """
    try:
        yield from (line for line, _ in bounded_lines(content_of(file, name)))
    except UNPACKING_ERRORS as error:
        raise SpanFormatError(f"its compressed content is damaged or cut ({error})") from None


def trajectory_or_error(
    line: bytes, *, reads_replies: bool = False
) -> Trajectory | SpanFormatError:
    """The trajectory of a line of JSON, or what is wrong with it. ValueError for no JSON."""
    try:
        return Trajectory.from_json(line, reads_replies=reads_replies)
    except SpanFormatError as error:
        loads(line)
        return error


class UnfinishedLineError(SpanFormatError):
    """The last line of a file, which may be whole soon."""

    is_all = False
    """True if it is the first line too: there is nothing in the file."""


def parsed_lines(
    lines: Iterable[bytes | None],
    name: str,
    fail: OnError,
    warn: OnError,
    parse: Callable[[bytes], _Parsed],
    first: int = 1,
    *,
    goes_on: bool = False,
    last: OnError = lambda _error: None,
) -> Iterator[tuple[bytes, _Parsed, str]]:
    """Each line of JSON, what it holds, and its place; of an unfinished line what is whole on it.

    parse: returns what a line holds; ValueError or RecursionError for one that is no JSON.
    warn: called for each unfinished line but the last one, which may still be written.
    fail: called for any other line that is not JSON, and for one that is too long.
    first: the number of the first line. goes_on: True if others, not all blank, follow these.
    last: called with an `UnfinishedLineError` for the last line where it is unfinished.
    """
    half: str | None = None
    for number, line in enumerate(_up_to_damage(lines, name, fail), first):
        if line is not None and line.isspace():
            continue
        _warn_of(half, warn)
        half = None
        where = f"{name}, line {number}"
        if line is None:
            fail(SpanFormatError(f"{where}: {too_long()}"))
            continue
        if (found := _parsed(line, parse)) is not None:
            yield line, found[0], where
            continue
        objects, is_all = whole_objects(line, LINE_PREFIX)
        for each in objects:
            if (found := _parsed(each, parse)) is not None:
                yield each, found[0], where
        if objects and not is_all:
            warn(SpanFormatError(f"{where}: {HALF_A_LINE}"))
        elif not objects and is_half(line, LINE_PREFIX):
            half = where
        elif not objects:
            fail(SpanFormatError(f"{where}: {_NO_TRAJECTORY}"))
    if goes_on:
        _warn_of(half, warn)
    elif half is not None:
        error = UnfinishedLineError(f"{half}, the last one, is not whole and was left out")
        error.is_all = half == f"{name}, line 1"
        last(error)


def _warn_of(half: str | None, warn: OnError) -> None:
    """Warn of the place of an unfinished line, if there is one."""
    if half is not None:
        warn(SpanFormatError(f"{half}: {HALF_A_LINE}"))


def _up_to_damage(
    lines: Iterable[bytes | None], name: str, fail: OnError
) -> Iterator[bytes | None]:
    try:
        yield from lines
    except SpanFormatError as error:
        fail(SpanFormatError(f"{name}: {error}"))


def _parsed(line: bytes, parse: Callable[[bytes], _Parsed]) -> tuple[_Parsed] | None:
    """What a line holds, alone in a tuple; None if it is no JSON."""
    try:
        return (parse(line),)
    except (ValueError, RecursionError):
        return None


def _raise(error: SpanFormatError) -> None:
    raise error


def _log(error: SpanFormatError) -> None:
    logger.warning("%s", error)


_NO_TRAJECTORY = "not a Trajectory: is this a file that JsonlTrajectoryExporter wrote?"
