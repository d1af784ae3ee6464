"""Streams that are no server-sent events, read as such: frames, lines, and JSON arrays.

Pure. The bytes of a stream are turned into events once, when it has ended; a chunk that was
truncated stays an event that has not ended.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterator

from otel_rollout.wire.api import Framing
from otel_rollout.wire.events import ArrayCutter, Cutter, EventCutter, FrameCutter, LineCutter
from otel_rollout.wire.json import dumps, loads, try_loads

_HEAD = struct.Struct(">III")
"""Head of a frame: length of the frame, length of its headers, checksum of the two."""
_TEXT = 7
"""Type of a header's value: a text, after its length in two bytes."""
_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value by its type, where the type fixes it."""
_UNNAMED = ("", "chunk")
"""Event types that do not say what a payload is; an exception has none."""

_is_framed = re.compile(r"application/vnd\.amazon\.eventstream").match
_has_lines = re.compile(r"application/(?:x-)?(?:ndjson|jsonl|jsonlines|json-lines)\b").match

_CUTTERS: dict[Framing, type[Cutter]] = {
    "events": EventCutter,
    "frames": FrameCutter,
    "lines": LineCutter,
    "array": ArrayCutter,
}


def framing_said(content_type: str) -> Framing | None:
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


def as_events(body: bytes, framing: Framing, *, said: bool = True) -> bytes | None:
    """The server-sent events that a stream of this framing amounts to; None if it is no stream.

    said: the content type names the framing; else `body` may be a reply as well. ValueError for
    what should be frames and is not.
    """
    if framing == "frames":
        return events_of_frames(body)
    if framing == "lines" and (said or _is_lines(body)):
        return b"".join(map(_event, body.splitlines(keepends=True)))
    if framing == "array" and body.lstrip().startswith(b"["):
        return b"".join(map(_event, _elements(body)))
    return None


def _is_lines(body: bytes) -> bool:
    """True if there is more after a first line that is a JSON object."""
    first, _, rest = body.partition(b"\n")
    return bool(rest.strip()) and isinstance(try_loads(first.decode("utf-8", "replace")), dict)


def _event(text: bytes) -> bytes:
    """The event of one line or element; it has no end if the text was truncated."""
    data = text.strip()
    if not data:
        return b""
    ends = text.endswith((b"\n", b"\r")) or try_loads(data.decode("utf-8", "replace")) is not None
    lines = b"".join(b"data: %b\n" % line for line in data.splitlines())
    return lines + b"\n" if ends else lines


def _elements(body: bytes) -> Iterator[bytes]:
    """The elements of the array, the last one as far as it came."""
    cutter = ArrayCutter()
    pieces = [*cutter.cut(body.strip()), cutter.rest()]
    for number, piece in enumerate(pieces):
        text = piece.strip(b", \t\r\n")
        text = text.removeprefix(b"[").strip() if number == 0 else text
        if text != b"]":
            yield text


def events_of_frames(frames: bytes) -> bytes:
    """The server-sent events inside the frames that AWS (Bedrock) puts around them.

    The type of an event that stands in the frame's headers becomes the one member of an object
    around it, as boto3 gives it. A truncated last frame is left out. ValueError for bytes that are
    no such frames.
    """
    events: list[bytes] = []
    position = 0
    while position + _HEAD.size <= len(frames):
        length, size, checksum = _HEAD.unpack_from(frames, position)
        if zlib.crc32(frames[position : position + 8]) != checksum:
            raise ValueError(f"not a frame at byte {position}")
        headers, position = position + _HEAD.size, position + length
        if position > len(frames):
            break
        payload = loads(frames[headers + size : position - 4])  # a checksum follows the payload
        kinds = _headers(frames[headers : headers + size])
        if isinstance(payload.get("bytes"), str):
            event = base64.b64decode(payload["bytes"])
        elif kinds.get(":event-type", "") not in _UNNAMED:
            event = dumps({kinds[":event-type"]: payload}).encode()
        else:
            kind = kinds.get(":exception-type")
            error = {"type": kind, **payload} if kind else payload
            event = dumps({"type": "error", "error": error}).encode()
        events.append(b"data: %b\n\n" % event)
    return b"".join(events)


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
