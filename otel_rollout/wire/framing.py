"""Streams as bytes: cut at the ends of their chunks, each of which is a server-sent event.

Pure. How the network cuts a stream is chance; cut at the ends of chunks it is always the same, so
a reader that takes one piece at a time has the same pieces whatever the network did. Streams that
are no server-sent events (frames, lines, JSON arrays) are turned into them when they have ended; a
chunk that was truncated is an event that has no end.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

from otel_rollout.wire.api import Framing
from otel_rollout.wire.json import dumps, loads, try_loads
from otel_rollout.wire.sse import data_of

_end = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}").search
"""The empty line after an event."""
_FEED, _RETURN = b"\n\r"
_outside_text = re.compile(rb'["\[\]{}]').search
_inside_text = re.compile(rb'["\\]').search
_has_no_choices = re.compile(rb'"choices"\s*:\s*\[\s*\]').search

_HEAD = struct.Struct(">III")
"""The head of a frame: length of the frame, length of its headers, checksum of the two."""
_LEAST = 16
"""Bytes of a frame without headers and payload; its first four are its length."""
_TEXT = 7
"""Type of a header's value: a text, after its length in two bytes."""
_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value by its type, where the type fixes it."""
_UNNAMED = ("", "chunk")
"""Event types that do not say what a payload is; an exception has none."""

_is_framed = re.compile(r"application/vnd\.amazon\.eventstream").match
_has_lines = re.compile(r"application/(?:x-)?(?:ndjson|jsonl|jsonlines|json-lines)\b").match


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

    def as_event(self, piece: bytes) -> bytes:
        """The event of one chunk, which has no end if it was truncated; b"" for no chunk."""
        data = piece.strip()
        if not data:
            return b""
        lines = b"".join(b"data: %b\n" % line for line in data.splitlines())
        is_whole = piece.endswith(b"\n") or try_loads(data.decode("utf-8", "replace")) is not None
        return lines + b"\n" if is_whole else lines


class EventCutter(Cutter):
    """Cuts a stream at the ends of its events."""

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The events that these bytes end, each with the empty line after it."""
        # Numbers and slices: methods of bytes that take positions parse their arguments, and `in`
        # raises inside where it is given bytes.
        ends = not self._bytes and chunk[-2:] == b"\n\n" and _RETURN not in chunk
        # One whole event, as nearly always; of one line, in most APIs.
        if ends and (_FEED not in chunk[:-2] or chunk.find(b"\n\n") == len(chunk) - 2):
            return (chunk,)
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

    def as_event(self, piece: bytes) -> bytes:
        """The event inside the frame that AWS (Bedrock) puts around it.

        The type of an event, in the frame's headers, becomes the one member of an object
        around it, as boto3 gives it. ValueError for bytes that are no such frame.
        """
        if len(piece) < _HEAD.size:
            return b""
        length, size, checksum = _HEAD.unpack_from(piece)
        if zlib.crc32(piece[:8]) != checksum:
            raise ValueError("not a frame")
        if len(piece) < length:
            return b""
        start = _HEAD.size + size
        payload = loads(piece[start:-4])  # a checksum follows the payload
        kinds = _headers(piece[_HEAD.size : start])
        if isinstance(payload.get("bytes"), str):
            event = base64.b64decode(payload["bytes"])
        elif kinds.get(":event-type", "") not in _UNNAMED:
            event = dumps({kinds[":event-type"]: payload}).encode()
        else:
            kind = kinds.get(":exception-type")
            error = {"type": kind, **payload} if kind else payload
            event = dumps({"type": "error", "error": error}).encode()
        return b"data: %b\n\n" % event


def _headers(data: bytes) -> dict[str, str]:
    """The texts among the headers of a frame, by their names."""
    found: dict[str, str] = {}
    position = 0
    while position < len(data):
        start = position + 1 + data[position]
        name, kind = data[position + 1 : start], data[start]
        position = start + 1
        size = _SIZES.get(kind)
        if size is None:
            size = int.from_bytes(data[position : position + 2], "big")
            position += 2
        if kind == _TEXT:
            found[name.decode("utf-8", "replace")] = data[position : position + size].decode(
                "utf-8", "replace"
            )
        position += size
    return found


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
        self._is_first = True

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

    def as_event(self, piece: bytes) -> bytes:
        text = piece.strip(b", \t\r\n")
        if self._is_first:
            text = text.removeprefix(b"[").strip()
        self._is_first = False
        return b"" if text == b"]" else super().as_event(text)


_CUTTERS: dict[Framing, type[Cutter]] = {
    "events": EventCutter,
    "frames": FrameCutter,
    "lines": LineCutter,
    "array": ArrayCutter,
}


def framing_by_type(content_type: str) -> Framing | None:
    """The framing that a content type names; None where it names none."""
    content_type = content_type.lower()
    if _is_framed(content_type):
        return "frames"
    if "event-stream" in content_type:
        return "events"
    return "lines" if _has_lines(content_type) else None


def cutter_of(framing: Framing) -> Cutter:
    """A cutter for one stream of this framing."""
    return _CUTTERS[framing]()


def as_events(body: bytes, framing: Framing, *, declared: bool = True) -> bytes | None:
    """The server-sent events that a stream of this framing amounts to; None if it is no stream.

    declared: the content type names the framing; else `body` may be a reply as well. ValueError
    for what should be frames and is not.
    """
    if (
        framing == "events"
        or (framing == "lines" and not declared and not _is_lines(body))
        or (framing == "array" and not body.lstrip().startswith(b"["))
    ):
        return None
    cutter = cutter_of(framing)
    return b"".join([*map(cutter.as_event, cutter.cut(body)), cutter.as_event(cutter.rest())])


def as_lines(events: bytes) -> bytes:
    """The lines of which `as_events` makes these events, if each has one JSON value and its end."""
    return b"".join(event[6:] + b"\n" for event in events.split(b"\n\n")[:-1])


def is_count(event: bytes) -> bool:
    """True for the chunk that `stream_options.include_usage` adds: no choices, but a usage."""
    if b'"usage"' not in event or _has_no_choices(event) is None:
        return False
    chunk = try_loads(data_of(event))
    is_empty = isinstance(chunk, dict) and chunk.get("choices") == []
    return is_empty and isinstance(chunk.get("usage"), dict)


def _is_lines(body: bytes) -> bool:
    """True if there is more after a first line that is a JSON object."""
    first, _, rest = body.partition(b"\n")
    return bool(rest.strip()) and isinstance(try_loads(first.decode("utf-8", "replace")), dict)
