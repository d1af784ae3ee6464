"""Server-sent events as bytes: parsed, recognised among other replies, and packed for spans.

Pure. Parsing never fails: an event that is no JSON is None in the list of chunks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, AnyStr

from otel_rollout.wire.json import Json, loads, read_strict, try_loads

_FIRST = (b"data:", b"event:", b"id:", b"retry:", b":")
"""Beginnings of the first line of events."""
_RATIO = 150
"""Characters of events for each character of the packed ones, at most."""
_SMALL = 1 << 16
"""Characters of events that are never too many."""
_LONGEST_END = 256
"""Bytes of a suffix that is looked for."""

_begins_an_object = re.compile(rb"[ \t\r\n]*\{").match


def read_all(datas: Sequence[str]) -> list[Json] | None:
    """What the data of events say; None if one is no strict JSON, or nested too deep."""
    found: list[Json] | None = read_strict(f"[{','.join(datas)}]")
    return found


def parse_events(
    events: Sequence[str], read_chunks: Callable[[Sequence[str]], list[Json] | None] = read_all
) -> tuple[list[Json], bool, bool]:
    """The JSON of each event, None for one that is no JSON; True if `[DONE]` came; True if all of
    it is strict JSON.
    """
    datas: list[str] = []
    done = False
    for event in events:
        if event.startswith("data: {") and event.find("\n") < 0:  # nearly every event is like this
            datas.append(event[6:])
            continue
        data = _data_in(event)
        if data.startswith("[DONE]"):
            done = True
            break
        if data:
            datas.append(data)
    chunks = read_chunks(datas)
    if chunks is None:  # such as the last event of a truncated stream
        return list(map(try_loads, datas)), done, False
    return chunks, done, True


def ends_an_event(events: Sequence[str]) -> bool:
    """True if the last of the events in a text is not truncated: nothing follows its empty line."""
    return not events[-1].strip("\n")


def _data_in(event: str) -> str:
    """The data of an event; empty where it has none."""
    start = event.find("\n") + 1 if event.startswith("event:") else 0
    if event.startswith("data: {", start) and event.find("\n", start) < 0:
        return event[start + 6 :]
    lines = [line for line in event.split("\n") if line.startswith("data:")]
    return "\n".join(line[5:].removeprefix(" ") for line in lines)


def data_of(event: bytes) -> str:
    """The data of one event; empty where it has none."""
    datas = map(_data_in, split_events(event.decode("utf-8", "replace")))
    return next(filter(None, datas), "")


def is_events(body: bytes, declared: bool) -> bool:
    """True if these are server-sent events: by their first bytes, else by their content type."""
    start = body[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    return start.startswith(_FIRST) or (declared and _begins_an_object(body) is None)


def is_json_object(body: bytes) -> bool:
    """True if the body begins and ends as a JSON object does; what is inside is not looked at.

    Some servers send empty lines for as long as the model samples.
    """
    end = body[-64:].rstrip() or body.rstrip()
    return _begins_an_object(body) is not None and end.endswith(b"}")


def object_in(text: str | bytes) -> dict[str, Json] | None:
    """The JSON object that a text is; None for anything else."""
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def with_newlines(events: str) -> str:
    """The events with a line feed as the end of each line."""
    return events.replace("\r\n", "\n").replace("\r", "\n") if "\r" in events else events


def split_events(text: str) -> list[str]:
    """The events in a text, whatever ends its lines, without the empty line between them."""
    return _events_in(with_newlines(text), "\n")


def _events_in(text: AnyStr, line_end: AnyStr) -> list[AnyStr]:
    events: list[AnyStr] = []
    start, end = 0, -1
    while (end := text.find(line_end, end + 1)) >= 0:  # in C; `split` looks at each character
        if text[end + 1 : end + 2] == line_end:
            events.append(text[start:end])
            end += 1
            start = end + 1
    events.append(text[start:])
    return events


def pack_events(events: bytes) -> bytes:
    """The events in less space: the prefix and suffix that nearly all share are written once.

    The first two lines are that prefix and suffix; then `+` and the rest of an event, or `=` and
    a whole one. Lines are separated by an empty one, as events are.

    events: with line feeds alone. Bytes that are UTF-8 are packed as such.
    """
    lines = _events_in(events, b"\n")
    # The first event is often special; a few different ones after it show what is common.
    some = list(dict.fromkeys(lines[1:7]))
    begin = end = b""
    if len(some) > 1 and len(lines) > 4:
        # No character is cut; and an empty line in the prefix would come too early.
        begin = _common(some).decode("utf-8", "ignore").encode().rstrip(b"\n")
        ends = [line[len(begin) :][-_LONGEST_END:][::-1] for line in some]
        end = _common(ends)[::-1].decode("utf-8", "ignore").encode()
        cut = b"\n" + end
        if any(line.endswith(cut) for line in lines):  # so would that of such an event
            end = b""
    packed = _packed(lines, begin, end)
    # A reply that repeats one token for long has the same event again and again. What is shared is
    # no longer than all events, and a character has up to four bytes: mostly that is asked first,
    # since it costs nothing.
    if len(events) > _most(len(packed) // 4) and expands_too_far(packed.decode("utf-8", "replace")):
        return _packed(lines, b"", b"")
    return packed


def _packed(lines: list[bytes], begin: bytes, end: bytes) -> bytes:
    first, length = len(begin), len(end)
    least, last = first + length, -length or None
    rests = [
        b"+" + line[first:last]
        if len(line) >= least and line.startswith(begin) and line.endswith(end)
        else b"=" + line
        for line in lines
    ]
    return b"\n\n".join([begin, end, *rests])


def _common(texts: list[bytes]) -> bytes:
    """The longest prefix that all texts have: that of the first and the last in order."""
    first, last = min(texts), max(texts)
    length = bisect_right(
        range(1, len(first) + 1), False, key=lambda end: not last.startswith(first[:end])
    )
    return first[:length]


def expands_too_far(text: str) -> bool:
    """True for what `pack_events` never writes: a small text that would become many events."""
    begin, _, rest = text.partition("\n\n")
    end = rest.partition("\n\n")[0]
    length = rest.count("\n\n+") * (len(begin) + len(end))
    return length > _most(len(text))


def _most(packed: int) -> int:
    """Characters that the shared parts of so many of packed events may have together."""
    return _SMALL + _RATIO * packed


def unpack_events(text: str) -> list[str]:
    """The events, each without the empty line after it. ValueError for what nobody packed."""
    lines = _events_in(text, "\n")
    begin, end = (*lines, "")[:2]
    events: list[Any] = [
        f"{begin}{line[1:]}{end}"
        if line.startswith("+")
        else (line[1:] if line.startswith("=") else None)
        for line in lines[2:]
    ]
    if not events or None in events:
        raise ValueError("not events that pack_events wrote")
    return events


def events_of(text: str) -> list[str]:
    """The events of a packed stream; those in a text that nobody packed."""
    try:
        return unpack_events(text)
    except ValueError:
        return split_events(text)
