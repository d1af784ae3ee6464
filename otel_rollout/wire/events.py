"""A streamed reply cut at the ends of its chunks, and without the event that only counts.

Pure. How the network cuts a stream is chance; cut at the ends of chunks it is always the same, so
a reader that takes one piece at a time has the same pieces whatever the network did.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

from otel_rollout.wire.json import try_loads
from otel_rollout.wire.sse import data_of

_end = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}").search
"""The empty line after an event."""
_LEAST = 16
"""Bytes of a frame without headers and payload; its first four are its length."""
_outside_text = re.compile(rb'["\[\]{}]').search
_inside_text = re.compile(rb'["\\]').search
_has_no_choices = re.compile(rb'"choices"\s*:\s*\[\s*\]').search


class Cutter(ABC):
    """Cuts the bytes of one stream at the ends of its chunks; every byte comes out once."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        """The unfinished chunk."""
        self._searched = 0
        """Number of its bytes that were searched for its end."""

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The chunks that these bytes end."""
        buffer = self._bytes
        buffer += chunk
        while end := self._find_end():
            piece = bytes(buffer[:end])
            del buffer[:end]
            self._searched = 0
            yield piece

    @abstractmethod
    def _find_end(self) -> int:
        """Where the first chunk ends; 0 if none has."""

    def rest(self) -> bytes:
        """The bytes of the unfinished chunk."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        return rest


class EventCutter(Cutter):
    """Cuts a stream at the ends of its events."""

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The events that these bytes end, each with the empty line after it."""
        if not self._bytes and 0 <= chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return (chunk,)  # one whole event, as nearly always
        return super().cut(chunk)

    def _find_end(self) -> int:
        buffer, start = self._bytes, self._searched
        self._searched = max(0, len(buffer) - 3)
        end = buffer.find(b"\n\n", start)
        if buffer.find(b"\r", start, len(buffer) if end < 0 else end) < 0:
            return 0 if end < 0 else end + 2  # nearly always, and faster than what follows
        found = _end(buffer, start)
        if found is None or (found.end() == len(buffer) and buffer.endswith(b"\r")):
            return 0  # a line break at the end may go on
        return found.end()


class FrameCutter(Cutter):
    """Cuts a stream at the ends of AWS's frames; bytes that are no frame are left as they are."""

    def _find_end(self) -> int:
        length = max(_LEAST, int.from_bytes(self._bytes[:4], "big"))
        return length if len(self._bytes) >= length else 0


class LineCutter(Cutter):
    """Cuts a stream at the ends of its lines."""

    def _find_end(self) -> int:
        start, self._searched = self._searched, len(self._bytes)
        return self._bytes.find(b"\n", start) + 1


class ArrayCutter(Cutter):
    """Cuts a JSON array at the ends of its elements, objects or lists.

    Whatever is before an element, such as the comma, comes with it; the closing bracket is a piece
    of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._in_text = False

    def _find_end(self) -> int:
        buffer = self._bytes
        while found := (_inside_text if self._in_text else _outside_text)(buffer, self._searched):
            mark, self._searched = found[0], found.end()
            if mark == b"\\":
                self._searched += 1  # the character after it, though it may not have come
            elif mark == b'"':
                self._in_text = not self._in_text
            elif mark in b"[{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 1:
                    return self._searched
        self._searched = max(self._searched, len(buffer))
        return 0


def is_count(event: bytes) -> bool:
    """True for the chunk that `stream_options.include_usage` adds: no choices, but a usage."""
    if b'"usage"' not in event or _has_no_choices(event) is None:
        return False
    chunk = try_loads(data_of(event))
    is_empty = isinstance(chunk, dict) and chunk.get("choices") == []
    return is_empty and isinstance(chunk.get("usage"), dict)
