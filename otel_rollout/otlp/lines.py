"""Bytes of a source in pieces that memory holds, however they were packed."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from otel_rollout.errors import SpanFormatError

LONGEST = 1 << 28
"""Bytes of one line, or of one message, at most: 256 MiB. A batch of spans has a few."""
UNPACKED = 1 << 36
"""Bytes of a compressed file once it is unpacked, at most: 64 GiB."""
_PIECE = 1 << 20


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """`(number, line)` of each line; None for one that is longer than `LONGEST`.

    Half a line at the end is read again: its writer may be writing.
    """
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        while not line.endswith(b"\n") and len(line) <= LONGEST:
            rest = file.readline(LONGEST + 1 - len(line))
            if not rest:
                yield number, line
                return
            line += rest
        if len(line) <= LONGEST:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_PIECE)
        yield number, None


def too_long(what: str) -> str:
    """The sentence about a line or message that is too long to be read."""
    return f"{what} is longer than {LONGEST} bytes: no sender of spans writes it so"


class Unpacked(io.RawIOBase):
    """The content of a gzipped file. SpanFormatError beyond `UNPACKED` bytes of it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = gzip.GzipFile(fileobj=file)
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read1(len(buffer))
        buffer[: len(data)] = data
        self._count += len(data)
        if self._count > UNPACKED:
            raise SpanFormatError(f"its compressed content is longer than {UNPACKED} bytes")
        return len(data)
