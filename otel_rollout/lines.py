"""Lines in files that several processes append to: written whole, and found again where one is not.

A line is in the file as a whole or not at all, and begins on a line of its own. A process that is
killed in the middle of a write still leaves half a line; a reader reports it, and reads whole
objects on the same line.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from otel_rollout.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HALF_A_LINE = (
    "its writer was stopped in the middle of this line; only the objects that are whole on it "
    "are read"
)
"""The error of a line that is not whole, after its place."""
STARTED = ".started"
"""Suffix of the file beside one of trajectories, which has a line for each rollout that began."""
NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
"""Flag with which a link is not opened, where the system has it."""
LONGEST = 1 << 28
"""Bytes of one line at most: 256 MiB."""
_PIECE = 1 << 20
_LOCK_SECONDS = 5.0
_MOST_TRIES = 64
"""Places of one line at which an object is looked for."""


def check_folder(path: str | os.PathLike[str], owner: str) -> None:
    """ConfigurationError, which begins with `owner`, if the file's folder does not exist."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigurationError(
            f"{owner}({str(path)!r}): the folder {folder!r} does not exist: create it first"
        )


def check_appendable(path: str | os.PathLike[str], owner: str) -> None:
    """Create the file if it does not exist. ConfigurationError unless lines can be appended."""
    check_folder(path, owner)
    if os.path.isdir(path):
        raise ConfigurationError(f"{owner}({str(path)!r}): this is a folder: name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        return  # a device; to open a named pipe would wait for its reader
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ConfigurationError(
            f"{owner}({str(path)!r}): the file cannot be written ({error.strerror}): name "
            f"another, or make it writable"
        ) from None


def append_lines(path: str | os.PathLike[str], *pieces: bytes, fsync: bool = False) -> None:
    """Append lines to a file, in pieces of whole lines: others may append between them.

    OSError if the disk does not take all. Then the part that was written is removed, unless another
    process that has the lock may have appended meanwhile. If another writer left half a line, these
    begin below.
    """
    with open(path, "a+b", buffering=0) as file, _alone(file) as is_alone:
        end = file.seek(0, os.SEEK_END) if file.seekable() else 0
        try:
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    write_whole(file, b"\n")
            for piece in pieces:
                write_whole(file, piece)
            if fsync:
                os.fsync(file.fileno())
        except BaseException:
            if is_alone:
                with suppress(OSError):  # a device: nothing can be taken back
                    file.truncate(end)
            raise


def append_at_once(path: str | os.PathLike[str], line: bytes) -> None:
    """Append a line in one write, without a lock: it must not wait for another process.

    OSError if it is not written whole.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        if (written := os.write(file, line)) < len(line):
            raise OSError(f"{written} of {len(line)} bytes were written to {path}")
    finally:
        os.close(file)


def write_whole(file: BinaryIO, content: bytes) -> None:
    """Write all bytes to a file without a buffer, whose `write` may take only some of them."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


@contextmanager
def _alone(file: BinaryIO) -> Iterator[bool]:
    """Keep other writers from appending meanwhile, where there are file locks; False if it failed.

    A lock that somebody holds for long is not waited for: a process that is stopped, or a child
    that was forked while its parent held it.
    """
    if fcntl is None:
        yield True
        return
    deadline = time.monotonic() + _LOCK_SECONDS
    while not (is_alone := lock(file)) and time.monotonic() < deadline:
        time.sleep(0.001)
    try:
        yield is_alone
    finally:
        with suppress(OSError):  # closing is not enough: a forked child may have the file open too
            fcntl.flock(file, fcntl.LOCK_UN)


def lock(file: BinaryIO | int) -> bool:
    """Lock a file until it is closed; False if another process has it.

    True also where files cannot be locked: then nothing keeps others from it.
    """
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def private_file(path: str | os.PathLike[str], *, empty: bool = False) -> BinaryIO:
    """A file for reading and writing that is this user's alone, created if it is not there.

    empty: True removes what it contains.
    OSError for a link, and for a file that another user owns or may read or write.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o600)
    opened = os.fdopen(file, "r+b")
    try:
        found = os.fstat(file)
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077):
            problem = "others own it, or may read or write it: remove it, or chmod 600"
            raise PermissionError(errno.EPERM, problem, str(path))
        if empty:
            opened.truncate()
    except BaseException:
        opened.close()
        raise
    return opened


def bounded_lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """Each line of a file, and its length in bytes; None for one that is longer than `LONGEST`.

    Half a line at the end is read again: its writer may be writing.
    """
    read = getattr(file, "read1", file.read)  # `readline` looks at byte after byte
    pieces: list[bytes] = []
    length, is_again = 0, False
    while (chunk := read(_PIECE)) or (length and not is_again):
        start, is_again = 0, not chunk
        while start < len(chunk):
            end = chunk.find(b"\n", start) + 1 or len(chunk)
            pieces.append(chunk[start:end])
            length += end - start
            if length > LONGEST:
                pieces.clear()
            if chunk.startswith(b"\n", end - 1):
                yield None if length > LONGEST else b"".join(pieces), length
                pieces.clear()
                length = 0
            start = end
    if length:
        yield None if length > LONGEST else b"".join(pieces), length


def too_long() -> str:
    """The sentence about a line that is longer than `LONGEST`."""
    return f"longer than {LONGEST / (1 << 20):g} MiB"


def whole_objects(line: bytes, prefix: bytes) -> tuple[list[bytes], bool]:
    """The whole JSON objects on a line that is not JSON; True if there is nothing else on it.

    An object begins with `prefix`, and the end of the line or another object follows it.
    """
    text = line.decode("utf-8", "surrogateescape").strip()
    start, found = prefix.decode(), list[str]()
    place = text.find(start)
    for _ in range(_MOST_TRIES):
        if place < 0:
            break
        end = _end_of_object(text, place)
        if end == len(text) or (end is not None and text.startswith(start, end)):
            found.append(text[place:end])
            place = text.find(start, end)
        else:
            place = text.find(start, place + 1)
    return [each.encode() for each in found], bool(found) and "".join(found) == text


def _end_of_object(text: str, place: int) -> int | None:
    """Where the JSON value that begins at this place ends; None if it is not whole."""
    try:
        _, end = _decoder.raw_decode(text, place)
        text[place:end].encode()  # a character that is not whole
    except (ValueError, RecursionError):
        return None
    return end


_decoder = json.JSONDecoder()


def is_half(line: bytes, prefix: bytes) -> bool:
    """True if the line, which is not JSON, is what a stopped writer leaves of an object."""
    start = line.strip(b"\0 \r\n\t")  # after a loss of power the rest may be zeros
    return start.startswith(prefix) or prefix.startswith(start)


def no_links(path: str, flags: int) -> int:
    """An `opener` for files beside an output: a link is not followed (OSError)."""
    return os.open(path, flags | NO_LINKS, 0o666)


class SpilledLines:
    """Lines in order. Where they are many, all but the last are in a file meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clear()

    def clear(self) -> None:
        """Forget all lines."""
        self._held: list[bytes] = []
        self._size, self._is_spilled = 0, False

    def append(self, line: bytes) -> None:
        """Add a line."""
        self._held.append(line)
        self._size += len(line)
        if self._size > _HELD:
            with open(self._path, "ab" if self._is_spilled else "wb", opener=no_links) as file:
                file.writelines(self._held)
            self._held, self._size, self._is_spilled = [], 0, True

    def pieces(self) -> Iterator[bytes]:
        """All bytes, in order, in pieces; the file is removed."""
        if self._is_spilled:
            with open(self._path, "rb", opener=no_links) as file:
                yield from iter(lambda: file.read(_HELD), b"")
            self._path.unlink()
        yield b"".join(self._held)


_HELD = 1 << 24
"""Bytes of lines that are kept in memory, but for the longest line."""
