"""Messages as people read them, in the shape of every API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_rollout.view.messages import message_row
from otel_rollout.wire import dumps
from tests.kit.model_apis import TALKS

PIXEL = "iVBORw0KGgo="
ADDRESS = f"data:image/png;base64,{PIXEL}"


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.name)
def test_every_api_has_calls_and_results(talk: Any):
    """The names of tools, and texts, are found."""
    _, second = talk.requests()
    messages = [message_row(each) for each in second[talk.conversation]]
    calls = [call for message in messages for call in message.calls]
    assert calls
    assert all(call.name for call in calls)
    assert any(message.text for message in messages)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": ADDRESS}},
        {"type": "input_image", "image_url": ADDRESS},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"inlineData": {"mimeType": "image/png", "data": PIXEL}},
        {"image": {"format": "png", "source": {"bytes": PIXEL}}},
    ],
)
def test_images_of_every_api_are_addresses(part: dict[str, Any]):
    """With the bytes in them; the part is named beside the text."""
    name = "parts" if "inlineData" in part else "content"
    found = message_row({"role": "user", name: [{"text": "look", "type": "text"}, part]})
    assert found.images == (ADDRESS,)
    assert found.text == "look"
    assert found.parts


@pytest.mark.parametrize(
    "address",
    [
        "https://example.org/a.png",
        "javascript:alert(1)",
        "data:text/html;base64,PHNjcmlwdD4=",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:image/png;base64," + "A" * 3_000_000,
    ],
)
def test_other_addresses_are_no_images(address: str):
    """They are named, cut, and nothing is fetched for them."""
    part = {"type": "image_url", "image_url": {"url": address}}
    found = message_row({"role": "user", "content": [part]})
    assert found.images == ()
    assert len(found.links[0]) <= 2_000


def test_calls_without_an_id_are_shown():
    """Those of older APIs, of Ollama and of Gemini."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    (call,) = message_row({"role": "assistant", "function_call": function}).calls
    assert (call.id, call.name, call.text) == (None, "add", '{"a": 1}')
    parts = [{"functionCall": {"name": "add", "args": {"a": 1}}}]
    (call,) = message_row({"role": "model", "parts": parts}).calls
    assert (call.id, call.name, call.text) == (None, "add", '{"a":1}')


def test_what_is_no_message_is_its_json():
    """A text, a list, an item of a kind that nobody knows."""
    assert message_row("hi").text == "hi"
    assert message_row([1]).text == "[1]"
    assert message_row({"type": "novelty", "x": 1}).text == '{"type":"novelty","x":1}'


def test_reasoning_is_apart_from_the_text():
    """Of messages, of blocks and of items of their own."""
    block = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]
    for message in (
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "assistant", "content": block},
    ):
        found = message_row(message)
        assert (found.text, found.reasoning) == ("yes", "hm")
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    row = message_row(item)
    assert (row.text, row.reasoning, row.role) == (
        "",
        "hm",
        "assistant",
    )


KEYS = st.sampled_from(
    [
        *("role", "type", "content", "parts", "tool_calls", "function", "function_call", "name"),
        *("arguments", "image_url", "source", "image", "images", "text", "output", "call_id"),
        *("inlineData", "functionCall", "functionResponse", "toolUse", "toolResult", "reasoning"),
        *("tool_call_id", "id", "summary", "thinking", "refusal", "url", "data", "fileData"),
    ]
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(max_size=3),
        st.sampled_from(["assistant", "tool", "function", "tool_use", "tool_result", "thinking"]),
        st.sampled_from(["function_call", "function_call_output", "image_url", "reasoning"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=20,
)


@settings(max_examples=400)
@example({"role": "assistant", "tool_calls": [{"type": [1]}]})
@given(st.dictionaries(KEYS, VALUES, max_size=5) | VALUES)
def test_any_json_can_be_shown(message: Any):
    """Whatever a client has sent is shown somehow, as JSON of plain texts."""
    found = message_row(message)
    assert isinstance(found.role, str)
    assert isinstance(found.text, str)
    assert all(isinstance(call.name + call.text, str) for call in found.calls)
    dumps([found.role, found.text, found.reasoning, found.call_id, found.links, found.parts])
