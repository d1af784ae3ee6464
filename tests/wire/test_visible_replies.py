"""What a client adds to a reply when it sends it back, and what makes it another one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import normalised_key

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
    assert normalised_key(again) == normalised_key(reply)


@given(REPLIES, REPLIES, ADDED)
def test_another_content_is_another_message(one: Any, other: Any, added: Any):
    """Whatever was added to it."""
    if one["content"] != other["content"]:
        assert normalised_key({**other, **added}) != normalised_key(one)
        other = {**one, "content": other["content"]}
        assert normalised_key({**other, **added}) != normalised_key(one)


@given(TEXTS, st.sampled_from(("user", "tool", "system")), st.text(min_size=1, max_size=4))
def test_the_name_of_others_counts(text: str, role: str, name: str):
    """Chat templates may show the model who said it: a user, or a tool."""
    message = {"role": role, "content": text}
    assert normalised_key({**message, "name": name}) != normalised_key(message)


@given(TEXTS)
def test_parsed_items_of_the_responses_api(text: str):
    """What the client parsed of an output item is nothing to the model."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    assert normalised_key({**call, "parsed_arguments": {"a": text}}) == normalised_key(call)
    part = {"type": "output_text", "text": text}
    message = {"type": "message", "role": "assistant", "content": [part]}
    parsed = {**message, "content": [{**part, "parsed": {"a": 1}, "annotations": []}]}
    assert normalised_key(parsed) == normalised_key(message)
    assert normalised_key({**message, "content": [{**part, "text": text + "!"}]}) != normalised_key(
        parsed
    )


ITEMS: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
    {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "3"},
    {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c", "output": "3"},
    {"type": "web_search_call", "action": {"query": "x"}},
    {"type": "mcp_call", "name": "f", "server_label": "s", "arguments": "{}", "output": "3"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "message", "role": "developer", "content": "x"},
]


@given(
    st.sampled_from(ITEMS),
    st.sampled_from(["internal_chat_message_metadata_passthrough", "phase", "created_by", "id"]),
    TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=2),
)
def test_what_a_client_notes_on_an_item_makes_no_other_message(item: Any, name: str, note: Any):
    """Codex writes the turn and the time on each item that it replays."""
    assert normalised_key({**item, name: note}) == normalised_key(item)


@given(st.sampled_from(ITEMS), st.data())
def test_what_a_template_shows_of_an_item_counts(item: Any, data: st.DataObject):
    """Each member that an item of the Responses API has, but what only names it."""
    names = item.keys() - ({"type"} if "role" in item else set())
    name = data.draw(st.sampled_from(sorted(names)))
    other = {"role": "system"} if name == "role" else {name: "another"}
    assert normalised_key({**item, **other}) != normalised_key(item)
