"""A streamed reply cut at the ends of its events, and without the event that only counts.

Pure. How the network cuts a stream is chance; cut at the ends of events it is always the same, so
a reader that takes one piece at a time has the same pieces whatever the network did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from otel_rollout.wire.sse import data_of, try_loads

_end = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}").search
"""The empty line after an event."""
_LEAST = 16
"""Bytes of a frame without headers and payload; its first four are its length."""
_has_no_choices = re.compile(rb'"choices"\s*:\s*\[\s*\]').search


class EventCutter:
    """Cuts the bytes of one stream at the ends of its events; every byte comes out once."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._searched = 0
        """How far the end of the unfinished event has been looked for."""

    def cut(self, chunk: bytes) -> Iterator[bytes]:
        """The events that these bytes end, each with the empty line after it."""
        buffer = self._bytes
        if not buffer and 0 <= chunk.find(b"\n\n") == len(chunk) - 2 and b"\r" not in chunk:
            yield chunk  # one whole event, as nearly always
            return
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

    def rest(self) -> bytes:
        """The bytes of the event that has not ended."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        return rest


class FrameCutter:
    """Cuts the bytes of one stream at the ends of AWS's frames; every byte comes out once."""

    def __init__(self) -> None:
        self._bytes = bytearray()

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

    def rest(self) -> bytes:
        """The bytes of the frame that has not ended."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        return rest


def is_count(event: bytes) -> bool:
    """True for the chunk that `stream_options.include_usage` adds: no choices, but a usage."""
    if b'"usage"' not in event or _has_no_choices(event) is None:
        return False
    chunk = try_loads(data_of(event))
    return (
        isinstance(chunk, dict)
        and chunk.get("choices") == []
        and isinstance(chunk.get("usage"), dict)
    )
