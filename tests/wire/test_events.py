"""A stream cut at the ends of its events: the same events however the network cut it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import EventCutter, is_count
from otel_rollout.wire.framing import FrameCutter
from otel_rollout.wire.sse import is_events, is_json_object

BREAKS = ("\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\r\n\n")
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode()


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """The events of a stream that came in chunks which end at these places, and what is left."""
    ends = [0, *sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    cutter = EventCutter()
    pieces = [
        event for start, end in itertools.pairwise(ends) for event in cutter.cut(stream[start:end])
    ]
    return [*pieces, cutter.rest()]


@given(
    st.lists(st.tuples(st.text("ab:\u00e4 ", max_size=5), st.sampled_from(BREAKS)), max_size=6),
    st.binary(max_size=5),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_events_are_the_same_wherever_it_is_cut(
    events: list[tuple[str, str]], rest: bytes, places: list[int]
) -> None:
    """Every byte comes out once and in order, and chunks make no difference to the pieces."""
    stream = b"".join(f"data: {text}{end}".encode() for text, end in events) + rest
    pieces = cut(stream, places)
    assert b"".join(pieces) == stream
    assert pieces == cut(stream, [])
    assert pieces == cut(stream, list(range(len(stream))))


def test_an_event_is_there_when_it_ends() -> None:
    """Nothing waits for the next event; what has not ended is the rest."""
    cutter = EventCutter()
    assert list(cutter.cut(b"data: 1\n\ndata: 2\r\n\r\nda")) == [b"data: 1\n\n", b"data: 2\r\n\r\n"]
    assert list(cutter.cut(b"ta: 3\n")) == []
    assert list(cutter.cut(b"\n")) == [b"data: 3\n\n"]
    assert cutter.rest() == b""


@pytest.mark.parametrize(
    ("chunk", "counts"),
    [
        ({"choices": [], "usage": USAGE}, True),
        ({"id": "c", "usage": USAGE, "model": "m", "choices": []}, True),
        ({"choices": [], "usage": None}, False),
        ({"choices": [], "prompt_filter_results": []}, False),
        ({"choices": [{"index": 0, "delta": {}}], "usage": USAGE}, False),
        ({"choices": [{"delta": {"content": '"choices": []'}}], "usage": USAGE}, False),
        ({"choices": []}, False),
        (["usage", "choices"], False),
    ],
)
@pytest.mark.parametrize("end", BREAKS)
def test_the_chunk_that_counts(chunk: Any, counts: bool, end: str) -> None:
    """It has no choices and a usage; any other chunk is the agent's."""
    event = data(chunk) + end.encode()
    assert is_count(event) is counts
    assert is_count(b": ping\n" + event) is counts


@pytest.mark.parametrize("event", [b"", b"data: [DONE]\n\n", b'data: {"choices":[],"usage":', b"x"])
def test_what_is_no_chunk(event: bytes) -> None:
    """Is no chunk that counts either."""
    assert not is_count(event)


@pytest.mark.parametrize(
    ("body", "said", "events"),
    [
        (b'{"id": 1}', True, False),
        (b' \n{"id": 1}', True, False),
        (b"data: {}\n\n", False, True),
        (b"\xef\xbb\xbfdata: {}\n\n", False, True),
        (b": ping\n\n", False, True),
        (b"event: x\n\n", False, True),
        (b"\n" * 99 + b"{}", True, False),
        (b"<html>", False, False),
        (b"", True, True),
        (b"", False, False),
    ],
)
def test_what_a_body_is(body: bytes, said: bool, events: bool) -> None:
    """Its first bytes tell, else the content type does."""
    assert is_events(body, said) is events


@pytest.mark.parametrize(
    ("body", "is_object"),
    [
        (b"{}", True),
        (b' {"a": 1}\n', True),
        (b"[1]", False),
        (b'{"a"', False),
        (b"", False),
        (b"\n" * 99 + b"{}" + b"\n" * 99, True),
    ],
)
def test_an_object(body: bytes, is_object: bool) -> None:
    """It begins and ends as one."""
    assert is_json_object(body) is is_object


@given(st.lists(st.binary(max_size=9), max_size=5), st.binary(max_size=30), st.integers(1, 40))
def test_frames_are_the_same_wherever_they_are_cut(
    payloads: list[bytes], rest: bytes, size: int
) -> None:
    """Every byte comes out once and in order, also of what is no frame."""
    frames = [(len(p) + 16).to_bytes(4, "big") + bytes(8) + p + bytes(4) for p in payloads]
    for end in (b"", rest):
        stream = b"".join(frames) + end
        cutter = FrameCutter()
        pieces = [
            frame
            for start in range(0, len(stream), size)
            for frame in cutter.cut(stream[start : start + size])
        ]
        assert pieces[: len(frames)] == frames
        assert b"".join([*pieces, cutter.rest()]) == stream
