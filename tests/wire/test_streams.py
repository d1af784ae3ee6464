"""Streams: packed without loss, and merged to what the server would have sent at once."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire.apis import merge
from otel_rollout.wire.sse import pack_events, split_events, unpack_events

texts = st.text(max_size=6)


def sse(chunks: list[Any], *, done: bool = True, separator: str = "\n\n") -> str:
    data = [f"data: {json.dumps(chunk)}" for chunk in chunks] + (["data: [DONE]"] if done else [])
    return "".join(event + separator for event in data)


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": more.pop("index", 0), "delta": delta, "finish_reason": finish, **more}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def only_choice(events: str) -> dict[str, Any]:
    body = merge(events).body
    assert isinstance(body, dict)
    (choice,) = body["choices"]
    assert isinstance(choice, dict)
    return choice


def repacked(text: str) -> str:
    events = unpack_events(pack_events(text.encode()).decode())
    assert events == split_events(text)  # so that a reply is merged of either
    return "\n\n".join(events)


@given(st.lists(st.text(st.characters(exclude_characters="\r", codec="utf-8"), max_size=8)))
def test_any_events_survive_packing(lines: list[str]) -> None:
    """Whatever text comes, packing and unpacking it gives it back."""
    text = "\n\n".join(lines)
    assert repacked(text) == text


@given(st.lists(st.text("ab\n", max_size=4), min_size=5, max_size=9))
def test_events_of_several_lines_survive_packing(lines: list[str]) -> None:
    """Also where what most of them share ends, or begins, at a line break."""
    for text in ("\n\n".join(lines), "\n\n".join(["x", *(f"a\n{line}a" for line in lines)])):
        assert repacked(text) == text


@given(st.lists(st.text("äà¤", min_size=1, max_size=2), min_size=5, max_size=9))
def test_no_character_is_cut(lines: list[str]) -> None:
    """Characters that differ may begin, or end, with the same bytes: these are not shared."""
    text = "\n\n".join(["x", *lines])
    assert repacked(text) == text


def test_an_event_in_which_what_is_common_overlaps_survives_packing() -> None:
    """It begins and ends as the others, and is shorter than both together."""
    text = "\n\n".join(["x", *(f"ab{letter}ba" for letter in "cdefgh"), "aba"])
    assert repacked(text) == text


@pytest.mark.parametrize(
    ("end", "is_malformed"),
    [("", False), ("\n", False), ("\n\n", True), ("\n\n\n", True), ("\r\n\r\n", True)],
)
def test_an_event_that_is_cut_is_left_out(end: str, is_malformed: bool) -> None:
    """A stream may break off anywhere; an event that ended and is no JSON is something else."""
    text = sse([chunk({"content": "a"})], done=False) + 'data: {"id": "c1", "cho' + end
    merged = merge(text)
    assert (merged.malformed, merged.body is None) == (is_malformed, is_malformed)


def test_packing_writes_what_is_common_once() -> None:
    """A stream of small deltas takes a fraction of its events' size."""
    deltas = [chunk({"content": f" word{i}"}) for i in range(15)]
    events = sse([chunk({"role": "assistant"}), *deltas])
    packed = pack_events(events.encode()).decode()
    assert "\n\n".join(unpack_events(packed)) == events
    assert len(packed) < len(events) / 3


@pytest.mark.parametrize("length", range(9))
def test_line_breaks_anywhere(length: int) -> None:
    """Empty lines, events of several lines, and texts that end in the middle of one."""
    for characters in itertools.product("a\n", repeat=length):
        text = "".join(characters)
        assert repacked(text) == text


@pytest.mark.parametrize("text", ["", "x", "a\n\nb", "a\n\nb\n\nc"])
def test_what_was_not_packed_is_refused(text: str) -> None:
    """Text that pack_events did not write is a ValueError."""
    with pytest.raises(ValueError, match="pack_events"):
        unpack_events(text)


@given(st.lists(texts), st.sampled_from(["\n\n", "\r\n\r\n", "\n\n: keep-alive\n\n"]))
def test_texts_are_joined(pieces: list[str], separator: str) -> None:
    """Deltas of content and reasoning are joined in order, whatever the line ends and comments."""
    events = sse(
        [chunk({"role": "assistant"})]
        + [chunk({"content": piece, "reasoning_content": piece + "."}) for piece in pieces]
        + [chunk({}, "stop")],
        separator=separator,
    )
    choice = only_choice(events)
    assert choice["finish_reason"] == "stop"
    assert (choice["message"]["content"] or "") == "".join(pieces)
    if pieces:
        assert choice["message"]["reasoning_content"] == "".join(p + "." for p in pieces)


def test_fields_of_chunks_survive() -> None:
    """Token ids and log-probabilities are chained, usage and unknown fields kept."""
    chunks: list[Any] = [
        {**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]},
        chunk({"content": "a"}, token_ids=[3], logprobs={"content": [{"logprob": -1.0}]}),
        chunk({"content": "b"}, "stop", token_ids=[4], logprobs={"content": [{"logprob": -2.0}]}),
        {"id": "c1", "choices": [], "usage": {"completion_tokens": 2}, "new": {"x": 1}},
    ]
    assert merge(sse(chunks)).body == {
        "id": "c1",
        "object": "chat.completion",
        "model": "m",
        "prompt_token_ids": [1, 2],
        "usage": {"completion_tokens": 2},
        "new": {"x": 1},
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "ab"},
                "token_ids": [3, 4],
                "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
            }
        ],
    }


def test_texts_beside_messages_are_not_joined() -> None:
    """What a server repeats on each chunk is there once: SGLang's version, Azure's filters."""
    meta = {"weight_version": "7", "output_token_logprobs": [[-0.5, 1, "a"]]}
    filters = {"hate": {"filtered": False, "severity": "safe"}}
    pieces = [
        chunk({"content": "x"}, meta_info=meta, content_filter_results=filters) for _ in range(3)
    ]
    merged = only_choice(sse([*pieces, chunk({}, "stop", meta_info={"id": "c1", "more": None})]))
    assert merged["message"]["content"] == "xxx"
    assert merged["meta_info"]["weight_version"] == "7"
    assert merged["meta_info"]["output_token_logprobs"] == [[-0.5, 1, "a"]] * 3
    assert merged["content_filter_results"] == filters


@pytest.mark.parametrize("repeats", [False, True])
def test_tool_calls_are_put_together(repeats: bool) -> None:
    """Arguments are joined verbatim per index, also where a server repeats id and name."""
    again: dict[str, Any] = {"id": "x", "type": "function"} if repeats else {}
    name = {"name": "f"} if repeats else {}
    calls: list[Any] = [
        {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 1, "id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        {"index": 0, **again, "function": {**name, "arguments": '{"a" : '}},
        {"index": 0, **again, "function": {**name, "arguments": "1.50}"}},
    ]
    events = sse([chunk({"tool_calls": [call]}) for call in calls])
    assert only_choice(events)["message"]["tool_calls"] == [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a" : 1.50}'}},
        {"id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_choices_may_come_in_any_order() -> None:
    """Of n=2 the second choice may begin first."""
    events = sse([chunk({"content": "b"}, index=1), chunk({"content": "a"}, index=0)])
    body = merge(events).body
    assert [c["message"]["content"] for c in body["choices"]] == ["a", "b"]
    assert [c["index"] for c in body["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("events", "choices", "complete"),
    [
        (sse([chunk({"content": "a"})], done=False), 1, False),
        (sse([chunk({"content": "a"})]), 1, True),
        (sse([chunk({"content": "a"}, "stop")], done=False), 1, True),
        (sse([chunk({"content": "a"}, "stop")], done=False), 2, False),
        (sse([chunk({"content": "a"})], done=False) + 'data: {"id": "c1", "cho', 1, False),
        ("", 1, False),
        (": comment\n\n", 1, False),
    ],
)
def test_complete_is_what_the_server_finished(events: str, choices: int, complete: bool) -> None:
    """Complete means a terminal marker, or a finish reason for each choice that was asked for."""
    assert merge(events, choices).complete is complete


def test_an_error_in_the_stream_is_found() -> None:
    """An error that the server reports within the stream is not a complete reply."""
    merged = merge(sse([chunk({"content": "a"}), {"error": {"message": "boom"}}]))
    assert merged.error == {"message": "boom"}
    assert not merged.complete
    assert merged.body["choices"][0]["message"]["content"] == "a"


def test_a_responses_stream_is_its_last_response() -> None:
    """Of the Responses API the terminal event holds the whole response."""
    events = sse(
        [
            {"type": "response.created", "response": {"id": "r", "output": []}},
            {"type": "response.completed", "response": {"id": "r", "output": [{"a": 1}]}},
        ],
        done=False,
    )
    merged = merge(events)
    assert merged.complete
    assert merged.body == {"id": "r", "output": [{"a": 1}]}


@pytest.mark.parametrize("events", ['data: {"x": 1}\n\n', 'data: {"choices": [1]}\n\n', "hello"])
def test_an_unknown_shape_is_not_merged(events: str) -> None:
    """What is not understood has no body; who reads it keeps the text."""
    assert merge(events).body is None


def test_a_call_without_arguments_has_an_empty_text() -> None:
    """As OpenAI's types promise: a stream may end after the name, or a tool may have none."""
    function = {"name": "now"}
    calls = [{"index": 0, "id": "a", "type": "function", "function": function}]
    message = only_choice(sse([chunk({"tool_calls": calls})], done=False))["message"]
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": ""}
