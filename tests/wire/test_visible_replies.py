"""What a client adds to a reply when it sends it back, and what makes it another one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import visible_key

TEXTS = st.text(max_size=8)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text(min_size=1, max_size=3),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS}),
        }
    ),
    max_size=2,
)
REPLIES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS, "tool_calls": CALLS}
)
ADDED = st.dictionaries(
    st.sampled_from(("name", "id", "parsed", "metadata", "annotations", "reasoning")),
    TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=2),
)


@given(REPLIES, ADDED, ADDED)
def test_what_is_added_makes_no_other_message(reply: Any, added: Any, to_calls: Any):
    """A name, an id, what was parsed: the reply is what the model said."""
    to_calls = {key: value for key, value in to_calls.items() if key != "id"}
    to_function = {"parsed_arguments": to_calls}
    again = {
        **reply,
        **added,
        "tool_calls": [
            {**call, **to_calls, "function": {**call["function"], **to_function}}
            for call in reply["tool_calls"]
        ],
    }
    assert visible_key(again) == visible_key(reply)


@given(REPLIES, REPLIES, ADDED)
def test_another_content_is_another_message(one: Any, other: Any, added: Any):
    """Whatever was added to it."""
    if one["content"] != other["content"]:
        assert visible_key({**other, **added}) != visible_key(one)
        other = {**one, "content": other["content"]}
        assert visible_key({**other, **added}) != visible_key(one)


@given(TEXTS, st.sampled_from(("user", "tool", "system")), st.text(min_size=1, max_size=4))
def test_the_name_of_others_counts(text: str, role: str, name: str):
    """Chat templates may show the model who said it: a user, or a tool."""
    message = {"role": role, "content": text}
    assert visible_key({**message, "name": name}) != visible_key(message)


@given(TEXTS)
def test_parsed_items_of_the_responses_api(text: str):
    """What the client parsed of an output item is nothing to the model."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    assert visible_key({**call, "parsed_arguments": {"a": text}}) == visible_key(call)
    part = {"type": "output_text", "text": text}
    message = {"type": "message", "role": "assistant", "content": [part]}
    parsed = {**message, "content": [{**part, "parsed": {"a": 1}, "annotations": []}]}
    assert visible_key(parsed) == visible_key(message)
    assert visible_key({**message, "content": [{**part, "text": text + "!"}]}) != visible_key(
        parsed
    )
