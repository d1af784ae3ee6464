"""Token counts and texts of replies that are not parsed whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout.wire import (
    TokenCounts,
    api_of,
    reply_text,
    shown_message,
    shown_replies,
    token_counts,
)

CHAT = "/chat/completions"
PATHS = (CHAT, "/v1/messages", "/responses", "/completions", "/api/chat", "/v2/chat", "/converse")
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def counted(body: bytes, path: str, *, events: bool) -> TokenCounts | None:
    """The counts in a reply of the API at this path."""
    api = api_of(path)
    return None if api is None else token_counts(body, api, events=events)


def chat(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, **more}
    return json.dumps({"id": "x", "choices": [choice], "usage": USAGE}).encode()


def events(*chunks: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def delta(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}}], **more}


@given(st.text(), JSON)
def test_a_count_is_found_behind_anything(text: str, other: Any):
    """Whatever the reply says, `"usage"` in it included."""
    body = chat(text + '"usage": {"prompt_tokens": 1}', logprobs=other)
    assert counted(body, CHAT, events=False) == (7, 3, None)


@given(st.text(), st.booleans())
def test_a_text_is_that_of_the_reply(text: str, large: bool):
    """Small replies are parsed whole, of large ones the message alone."""
    body = chat(text, logprobs={"content": ["word"] * 4000} if large else None)
    said = reply_text(body, CHAT, events=False)
    assert said == (text or shown_message({"role": "assistant", "content": text}))


@given(st.lists(st.text(), max_size=9))
def test_a_streamed_text_is_that_of_its_deltas(texts: list[str]):
    """Escapes and all; a stream without a text has none."""
    stream = events(*map(delta, texts), {"choices": [], "usage": USAGE})
    joined = "".join(texts)
    if joined:
        assert reply_text(stream, CHAT, events=True) == joined
    assert counted(stream, CHAT, events=True) == (7, 3, None)


@settings(max_examples=200)
@given(st.binary(), st.sampled_from(PATHS), st.booleans(), JSON)
def test_a_glance_never_fails(body: bytes, path: str, stream: bool, value: Any):
    """Of bytes that are no reply nothing is known; so it is with a count of another shape."""
    odd = b'{"usage":' + json.dumps(value).encode() + body
    for each in (body, odd, events({"usage": value}) + body):
        counted(each, path, events=stream)
        reply_text(each, path, events=stream)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        [1],
        {"prompt_tokens": 7},
        {"completion_tokens": 3},
        {"prompt_tokens": None, "completion_tokens": 3},
        {"prompt_tokens": -1, "completion_tokens": 3},
        {"prompt_tokens": True, "completion_tokens": 3},
        {"prompt_tokens": 7.0, "completion_tokens": 3},
    ],
)
def test_half_a_count_is_none(usage: Any):
    """Unknown is not 0."""
    body = json.dumps({"choices": [], "usage": usage}).encode()
    assert counted(body, CHAT, events=False) is None
    assert counted(events({"choices": [], "usage": usage}), CHAT, events=True) is None


@pytest.mark.parametrize(
    ("path", "reply", "counts"),
    [
        (
            "/v1/messages",
            {
                "usage": {
                    "input_tokens": 5,
                    "cache_read_input_tokens": 90,
                    "cache_creation_input_tokens": 10,
                    "output_tokens": 4,
                }
            },
            (105, 4, 90),
        ),
        (
            "/responses",
            {
                "usage": {
                    "input_tokens": 9,
                    "input_tokens_details": {"cached_tokens": 6},
                    "output_tokens": 2,
                }
            },
            (9, 2, 6),
        ),
        (
            "/models/g:generateContent",
            {"usageMetadata": {"promptTokenCount": 8, "candidatesTokenCount": 2}},
            (8, 2, None),
        ),
        ("/model/a/converse", {"usage": {"inputTokens": 3, "outputTokens": 4}}, (3, 4, None)),
        ("/v2/chat", {"usage": {"tokens": {"input_tokens": 3, "output_tokens": 4}}}, (3, 4, None)),
        ("/api/chat", {"prompt_eval_count": 6, "eval_count": 5}, (6, 5, None)),
        ("/completion", {"tokens_predicted": 5, "tokens_evaluated": 6}, (6, 5, None)),
        ("/embeddings", {"usage": USAGE}, None),
    ],
)
def test_each_api_counts_in_its_own_words(path: str, reply: Any, counts: Any):
    """Tokens from a cache are among those of the prompt, also where they are counted apart."""
    body = json.dumps({"content": "x", **reply}).encode()
    assert counted(body, path, events=False) == counts


def test_a_stream_that_counts_at_both_ends():
    """Anthropic counts the prompt in the first event, and the reply in the last."""
    stream = events(
        {"type": "message_start", "message": {"usage": {"input_tokens": 25, "output_tokens": 1}}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": t}}
            for t in "ab"
        ),
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 15}},
    )
    assert counted(stream, "/v1/messages", events=True) == (25, 15, None)
    assert reply_text(stream, "/v1/messages", events=True) == "ab"


def test_of_several_choices_the_first_is_shown():
    """Their deltas take turns."""
    stream = events(delta("a"), delta("x", 1), delta("b"), delta("y", 1)) + b"data: [DONE]\n\n"
    assert reply_text(stream, CHAT, events=True) == "ab"


def test_a_stream_is_read_no_further_than_it_is_shown():
    """A long reply costs what is shown of it."""
    stream = events(*(delta("word ") for _ in range(20_000)))
    assert len(reply_text(stream, CHAT, events=True) or "") < 70_000


def test_reasoning_is_shown_where_nothing_else_is_said():
    """And a message that says something is shown without."""
    thought = {"role": "assistant", "reasoning_content": "hm"}
    assert shown_message(thought, reasoning=False) == "(hm)"
    assert shown_message({**thought, "content": "4"}, reasoning=False) == "4"
    assert shown_message({**thought, "content": "4"}) == "(hm) 4"


def test_a_long_stream_with_calls_is_read_whole():
    """What it asks for is shown after its text."""
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chunks = [delta("word "), {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}]
    stream = events(*chunks, {"choices": [], "padding": "x" * 20_000})
    assert reply_text(stream, CHAT, events=True) == "word  → f({})"


def test_a_long_reply_that_is_no_chat_is_read_whole():
    """Its thoughts are not its text, and why it ended is known."""
    content = {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "four"}]}
    reply = {"candidates": [{"content": content, "finishReason": "STOP"}], "padding": "x" * 20_000}
    body, path = json.dumps(reply).encode(), "/models/g:generateContent"
    (shown,) = shown_replies(body, path, events=False)
    assert (shown.text, shown.finish_reason) == ("(hm) four", "STOP")
    assert reply_text(body, path, events=False) == "four"
