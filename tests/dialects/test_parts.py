"""Messages of the conventions as many writers write them: nothing in them is dropped unseen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Completion, reconstruct
from otel_rollout.rebuild.dialects.call import Fact
from otel_rollout.spans.record import SpanRecord

ASKED = [{"role": "user", "parts": [{"type": "text", "content": "hm?"}]}]
SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "So."}]}]


def span(attributes: dict[str, Any], **fields: Any) -> SpanRecord:
    texts = {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in attributes.items()}
    return SpanRecord(
        trace_id="1" * 32,
        span_id="2" * 16,
        parent_span_id=None,
        name="chat m",
        start_time_ns=1,
        end_time_ns=2,
        attributes={"gen_ai.operation.name": "chat", **texts},
        **fields,
    )


def read(asked: Any = ASKED, said: Any = SAID, **attributes: Any) -> list[Completion]:
    """The completions of one span of an instrumentation that follows the conventions."""
    messages = {"gen_ai.input.messages": asked, "gen_ai.output.messages": said}
    (trajectory,) = reconstruct([span({**messages, **attributes})], infer_rollouts=True)
    return trajectory.completions


def of_parts(*parts: Any, role: str = "user") -> Completion:
    (completion,) = read([{"role": role, "parts": list(parts)}, *ASKED])
    return completion


def test_finish_reasons_beside_the_messages_count():
    """Where a message has no reason, that of the attribute with the same place has."""
    said = [SAID[0], {**SAID[0], "finish_reason": "length"}]
    reasons = {"gen_ai.response.finish_reasons": ["tool_call", "stop"]}
    assert [c.finish_reason for c in read(said=said, **reasons)] == ["tool_calls", "length"]
    short = {"gen_ai.response.finish_reasons": ["stop"]}
    assert [c.finish_reason for c in read(said=said, **short)] == [None, "length"]


def test_a_generic_part_is_what_it_says():
    """As the type of a part was written before, and with what its own type means."""
    quoted = {"type": "quote", "quote": {"text": "x"}}
    generic = {**quoted, "type": "generic", "generic_type": "quote"}
    for part in (quoted, generic):
        (message, _) = of_parts(part).request_messages
        assert message["content"] == [quoted]
    known = of_parts({"type": "generic", "generic_type": "text", "content": "x"})
    assert known.request_messages[0]["content"] == "x"
    unnamed = {"type": "generic", "data": 1}
    assert of_parts(unnamed).request_messages[0]["content"] == [unnamed]


@pytest.mark.parametrize("written", ["cache_write", "cache_creation"])
def test_usage_has_its_details(written: str):
    """Tokens of the cache and of reasoning, by their present and former names."""
    (completion,) = read(
        **{
            "gen_ai.usage.input_tokens": 20,
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.usage.cache_read.input_tokens": 16,
            f"gen_ai.usage.{written}.input_tokens": 3,
            "gen_ai.usage.reasoning.output_tokens": 2,
        }
    )
    assert completion.usage == {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("3.50", "3.50"),
        (None, ""),
        ({"sum": 3.5}, '{"sum":3.5}'),
        ([1, 2], "[1,2]"),
        ([{"type": "text", "text": "3."}], [{"type": "text", "text": "3."}]),
        ([{"type": "text", "content": "3."}], [{"type": "text", "text": "3."}]),
    ],
)
def test_a_tool_result_is_a_text_or_parts(response: Any, content: Any):
    """Parts stay parts; another JSON value is its text."""
    part = {"type": "tool_call_response", "id": "c", "response": response}
    message = of_parts(part, role="tool").request_messages[0]
    assert message == {"role": "tool", "tool_call_id": "c", "content": content}


def test_what_stands_beside_a_tool_result_is_kept():
    """A message of a result and a text is two messages, and no part is lost."""
    result = {"type": "tool_call_response", "id": "c", "response": "3"}
    messages = of_parts(result, {"type": "text", "content": "go on"}).request_messages
    assert [m["role"] for m in messages] == ["tool", "user", "user"]
    assert messages[1]["content"] == "go on"


def test_several_parts_of_reasoning_are_all_there():
    """Reasoning in several parts is one reasoning."""
    parts = [{"type": "reasoning", "content": text} for text in ("a", "b")]
    said = [{"role": "assistant", "parts": [*parts, {"type": "text", "content": "c"}]}]
    (completion,) = read(said=said)
    assert completion.message == {"role": "assistant", "content": "c", "reasoning_content": "ab"}


def test_parts_that_are_texts_are_texts():
    """Some writers have texts for parts, one text for all, or `content` beside no parts."""
    for row in (
        {"role": "user", "parts": ["a"]},
        {"role": "user", "parts": "a"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ):
        (completion,) = read([row])
        assert completion.request_messages == [{"role": "user", "content": "a"}]
        assert completion.trainable


@pytest.mark.parametrize(
    "part", [1, None, [], {"type": "tool_call", "id": "c"}, {"type": "tool_call", "name": ""}]
)
def test_a_part_that_cannot_be_read_is_damage(part: Any):
    """What is no part, and a tool call without a name, are never left out unseen."""
    completion = of_parts({"type": "text", "content": "a"}, part, role="assistant")
    assert completion.exchange.damage
    assert not completion.trainable


def test_a_call_of_a_custom_tool_is_one_where_the_definition_says_so():
    """A tool that the request defines as custom is called with a text, not with arguments."""
    part = {"type": "tool_call", "id": "c", "name": "shell", "arguments": "ls"}
    said = [{"role": "assistant", "parts": [part]}]
    tools = {"gen_ai.tool.definitions": [{"type": "custom", "name": "shell"}]}
    (completion,) = read(said=said, **tools)
    custom = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    assert completion.message is not None
    assert completion.message["tool_calls"] == [custom]
    assert Fact.CUSTOM_TOOLS.value in completion.lost


def test_items_of_one_answer_are_one_completion():
    """Several messages of the Responses API are one reply, and so they are when sent back."""
    calls = [
        {"role": "assistant", "parts": [{"type": "tool_call", "id": i, "name": "f"}]} for i in "ab"
    ]
    (completion,) = read([*ASKED, *calls], [*SAID, *calls], **{"openai.api.type": "responses"})
    assert completion.message is not None
    assert completion.message["content"] == "So."
    assert [call["id"] for call in completion.message["tool_calls"]] == ["a", "b"]
    assert len(completion.request_messages) == 2


def test_dropped_attributes_are_damage():
    """A limit on the number of attributes drops any of them, such as the tools."""
    messages = {"gen_ai.input.messages": ASKED, "gen_ai.output.messages": SAID}
    (trajectory,) = reconstruct([span(messages, dropped_attributes=2)], infer_rollouts=True)
    (completion,) = trajectory.completions
    assert not completion.trainable
    assert "2 attributes" in completion.exchange.damage[0]


@pytest.mark.parametrize("key", ["gen_ai.provider.name", "gen_ai.system"])
def test_a_call_of_another_api_says_that_its_shape_is_lost(key: str):
    """Spans of Anthropic's or Google's calls are read as chat, in other words than were sent."""
    facts = {Fact.SHAPE.value, Fact.FINISH_REASON.value, Fact.USAGE.value}
    for provider in ("anthropic", "Anthropic", "gcp.gemini", "aws.bedrock"):
        assert facts <= set(read(**{key: provider})[0].lost)
    for same in ("openai", "azure.ai.openai", None):
        assert not facts & set(read(**{key: same})[0].lost)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "content", "text", "id", "name", "arguments", "response"])
            | st.text(max_size=3),
            inner
            | st.sampled_from(["text", "tool_call", "tool_call_response", "reasoning", "blob"]),
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(parts=st.lists(json_values, max_size=4), scope=st.sampled_from(["", "com.anthropic.sdk"]))
def test_parts_of_any_shape_are_read(parts: list[Any], scope: str):
    """Whatever the parts are, reading them gives a completion and no exception."""
    for asked, said in (
        ([{"role": "user", "parts": parts}], SAID),
        (ASKED, [{"role": "assistant", "parts": parts}]),
    ):
        messages = {"gen_ai.input.messages": asked, "gen_ai.output.messages": said}
        (trajectory,) = reconstruct([span(messages, scope=scope)], infer_rollouts=True)
        (completion,) = trajectory.completions
        assert json.dumps(trajectory.to_dict())
        assert not completion.exact
