"""A streamed reply cut at the ends of its chunks, and without the event that only counts.

Pure. How the network cuts a stream is chance; cut at the ends of chunks it is always the same, so
a reader that takes one piece at a time has the same pieces whatever the network did.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from otel_rollout.wire.json import Json
from otel_rollout.wire.sse import data_of, try_loads

_end = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}").search
"""The empty line after an event."""
_LEAST = 16
"""Bytes of a frame without headers and payload; its first four are its length."""
_outside_text = re.compile(rb'["\[\]{}]').search
_inside_text = re.compile(rb'["\\]').search
_has_no_choices = re.compile(rb'"choices"\s*:\s*\[\s*\]').search


class _Cutter:
    """Cuts the bytes of one stream; every byte comes out once."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        """What has not ended."""

    def rest(self) -> bytes:
        """The bytes of what has not ended."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        return rest


class EventCutter(_Cutter):
    """Cuts a stream at the ends of its events."""

    def __init__(self) -> None:
        super().__init__()
        self._searched = 0
        """How far the end of the unfinished event has been looked for."""

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The events that these bytes end, each with the empty line after it."""
        if not self._bytes and 0 <= chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            return (chunk,)  # one whole event, as nearly always
        return self._cut(chunk)

    def _cut(self, chunk: bytes) -> Iterator[bytes]:
        buffer = self._bytes
        buffer += chunk
        while end := self._find_end():
            event = bytes(buffer[:end])
            del buffer[:end]
            self._searched = 0
            yield event
        self._searched = max(0, len(buffer) - 3)

    def _find_end(self) -> int:
        """Where the first event ends; 0 if none has."""
        buffer, start = self._bytes, self._searched
        end = buffer.find(b"\n\n", start)
        if buffer.find(b"\r", start, len(buffer) if end < 0 else end) < 0:
            return 0 if end < 0 else end + 2  # nearly always, and faster than what follows
        found = _end(buffer, start)
        if found is None or (found.end() == len(buffer) and buffer.endswith(b"\r")):
            return 0  # a line break at the end may go on
        return found.end()


class FrameCutter(_Cutter):
    """Cuts a stream at the ends of AWS's frames."""

    def cut(self, chunk: bytes) -> Iterator[bytes]:
        """The frames that these bytes end; bytes that are no frame are left as they are."""
        buffer = self._bytes
        buffer += chunk
        while len(buffer) >= _LEAST:
            length = max(_LEAST, int.from_bytes(buffer[:4], "big"))
            if len(buffer) < length:
                return
            frame = bytes(buffer[:length])
            del buffer[:length]
            yield frame


class LineCutter:
    """Cuts the bytes of one stream at the ends of its lines; every byte comes out once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """The unfinished line as it came."""

    def cut(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that these bytes end, each with its line break."""
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            whole = b"".join((*self._parts, line, b"\n"))
            self._parts = []
            yield whole
        if rest:
            self._parts.append(rest)

    def rest(self) -> bytes:
        """The bytes of the line that has not ended."""
        rest, self._parts = b"".join(self._parts), []
        return rest


class ArrayCutter(_Cutter):
    """Cuts a JSON array at the ends of its elements, objects or lists.

    What is before an element, such as the comma, comes with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._searched = 0
        """How far brackets have been looked for."""
        self._depth = 0
        self._in_text = False

    def cut(self, chunk: bytes) -> Iterator[bytes]:
        """The elements that these bytes end; the closing bracket is a piece of its own."""
        self._bytes += chunk
        while end := self._find_end():
            piece = bytes(self._bytes[:end])
            del self._bytes[:end]
            self._searched = 0
            yield piece

    def _find_end(self) -> int:
        """Where the first element ends; 0 if none has."""
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
    return count_of(event) is not None


def count_of(event: bytes) -> dict[str, Json] | None:
    """The usage in the chunk that `stream_options.include_usage` adds. None: it is another one."""
    if b'"usage"' not in event or _has_no_choices(event) is None:
        return None
    chunk = try_loads(data_of(event))
    if not isinstance(chunk, dict) or chunk.get("choices") != []:
        return None
    usage = chunk.get("usage")
    return usage if isinstance(usage, dict) else None
