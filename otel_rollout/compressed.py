"""Files that may be gzipped, and whose first bytes were read to recognise their format."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from otel_rollout.errors import SpanFormatError

GZIP = b"\x1f\x8b"
"""The first bytes of a gzipped file."""
UNPACKED = 1 << 36
"""Bytes of a compressed file once it is unpacked, at most: 64 GiB."""
UNPACKING_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
"""What the content of a damaged file raises where it is read."""
_PACKED_HEAD = 4096
BUFFER = 1 << 18
"""Bytes that are read at once: each piece passes through Python."""


def joined(
    head: bytes, file: BinaryIO, name: str, progress: Callable[[int], object] = int
) -> io.BufferedReader:
    """A file that starts with `head`, read before; `progress` gets the size of each read."""
    return io.BufferedReader(_Joined(head, file, name, progress), BUFFER)


UTF_16 = (
    "it is UTF-16, as PowerShell's `>` writes it: write it as UTF-8, with "
    "`| Out-File -Encoding utf8`"
)
is_utf_16 = re.compile(rb"\xff\xfe|\xfe\xff|[\[{]\0[^\0]\0|\0[\[{]\0[^\0]\0").match
"""True of the first bytes of a text in UTF-16."""


def head_of(file: BinaryIO, name: str, length: int) -> tuple[bytes, BinaryIO]:
    """The first bytes of a file, and the file as it was."""
    if isinstance(file, io.BufferedReader) and len(seen := file.peek(length)) >= length:
        return seen[:length], file  # not wrapped: each wrapper copies all that is read
    head = file.read(length)
    return head, joined(head, file, name)


def begun(file: BinaryIO, name: str, length: int) -> tuple[bytes, bool, BinaryIO]:
    """The first bytes of the content of a file, whether it is gzipped, and the file as it was."""
    head, whole = head_of(file, name, length)
    if not head.startswith(GZIP):
        return head, False, whole
    head = whole.read(length + max(_PACKED_HEAD, length))
    try:
        content = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, length)
    except zlib.error:
        content = b""  # reading on raises the error
    return content, True, joined(head, whole, name)


def content_of(file: BinaryIO, name: str) -> BinaryIO:
    """The content of a file, unpacked if it is gzipped; what is damaged raises as it is read."""
    _, is_packed, whole = begun(file, name, len(GZIP))
    return io.BufferedReader(Unpacked(whole, name)) if is_packed else whole


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


class _Joined(io.RawIOBase):
    """A file of which the first bytes were read already: these bytes, then the rest."""

    def __init__(
        self, head: bytes, file: BinaryIO, name: str, progress: Callable[[int], object]
    ) -> None:
        self.name = name
        self._head = head
        self._file = file
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # What a pipe has by now is handed on: its writer may be waiting.
        if not self._head and isinstance(self._file, io.BufferedReader):
            count = self._file.readinto1(buffer)
        elif not self._head and isinstance(self._file, io.FileIO):
            count = self._file.readinto(buffer)
        else:
            read = getattr(self._file, "read1", self._file.read)
            data = self._head[: len(buffer)] or read(len(buffer))
            self._head, count = self._head[len(buffer) :], len(data)
            buffer[:count] = data
        self._progress(count)
        return count
