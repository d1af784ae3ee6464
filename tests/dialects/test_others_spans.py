"""Spans of writers that were never recorded: what they leave out is damage, or lost by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import Completion, InMemoryTrajectoryExporter, Trajectory, reconstruct
from otel_rollout.rebuild.dialects.call import Fact
from otel_rollout.spans.record import SpanRecord, as_record
from otel_rollout.testing import Reply, ToolCall
from tests.kit.conversations import user
from tests.kit.recording import Clients

ASKED = [{"role": "user", "parts": [{"type": "text", "content": "hm?"}]}]
SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "So."}]}]
MESSAGES = {"gen_ai.input.messages": ASKED, "gen_ai.output.messages": SAID}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai"}
ANTHROPIC = "com.anthropic.sdk.python"


def span(attributes: Mapping[str, Any], scope: str = "", *, plain: bool = False) -> SpanRecord:
    """The span with these attributes; lists and objects as JSON texts unless `plain`."""
    texts = {
        k: json.dumps(v) if isinstance(v, list | dict) and not plain else v
        for k, v in attributes.items()
    }
    return SpanRecord("chat m", "1" * 32, "2" * 16, None, 1, 2, {**texts}, scope)


def read(*spans: SpanRecord) -> Trajectory:
    (trajectory,) = reconstruct(spans, infer_rollouts=True)
    assert json.dumps(trajectory.to_dict())
    return trajectory


def one(attributes: Mapping[str, Any], scope: str = "", *, plain: bool = False) -> Completion:
    (completion,) = read(span({**CHAT, **MESSAGES, **attributes}, scope, plain=plain)).completions
    return completion


WITHOUT_CONTENT: list[dict[str, Any]] = [
    {"type": "text"},
    {"type": "text", "content": None},
    {"type": "text", "content": {"a": 1}},
    {"type": "tool_call", "id": "c", "name": "f"},
    {"type": "tool_call", "id": "c", "name": "f", "arguments": None},
]


@pytest.mark.parametrize("scope", ["", ANTHROPIC])
@pytest.mark.parametrize("part", WITHOUT_CONTENT)
def test_parts_without_their_content(part: dict[str, Any], scope: str):
    """So they are written where content is switched off; none of it is `null`, and none trains."""
    for attributes in (
        {"gen_ai.input.messages": [{"role": "assistant", "parts": [part]}, *ASKED]},
        {"gen_ai.output.messages": [{"role": "assistant", "parts": [part]}]},
    ):
        completion = one(attributes, scope)
        assert not completion.trainable
        assert completion.exchange.damage
        assert '"null"' not in json.dumps([completion.message, *completion.request_messages])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "blob", "modality": "image", "mime_type": "image/png"},
        {"type": "uri", "modality": "image"},
        {"type": "tool_call_response", "id": "c"},
    ],
)
def test_parts_of_a_request_without_their_content(part: dict[str, Any]):
    """An image without data and a result without content are damage."""
    completion = one({"gen_ai.input.messages": [{"role": "user", "parts": [part]}, *ASKED]})
    assert not completion.trainable
    assert "None" not in json.dumps(completion.request_messages)


@pytest.mark.parametrize("scope", ["", ANTHROPIC])
def test_a_reply_is_what_a_model_sampled(scope: str):
    """Some write the whole conversation as the reply: what a user said is never trained."""
    said = [{"role": "user", "parts": ASKED[0]["parts"]}]
    assert not one({"gen_ai.output.messages": said}, scope).trainable
    result = {"type": "tool_call_response", "id": "c", "response": "3"}
    of_parts = [{"role": "assistant", "parts": [result, *SAID[0]["parts"]]}]
    if not scope:
        assert not one({"gen_ai.output.messages": of_parts}).trainable
    else:
        assert not one({"gen_ai.output.messages": [*SAID, *SAID]}, scope).trainable


def test_a_request_has_messages_with_roles():
    """An empty list of messages, or one without a role, is not what was sent."""
    for scope in ("", ANTHROPIC):
        assert not one({"gen_ai.input.messages": []}, scope).trainable
        completion = one({"gen_ai.input.messages": [{"parts": ASKED[0]["parts"]}]}, scope)
        assert not completion.trainable


def test_parts_stay_in_their_order():
    """A text before a tool's result is a message before it."""
    result = {"type": "tool_call_response", "id": "c", "response": "3"}
    parts = [{"type": "text", "content": "a"}, result, {"type": "text", "content": "b"}]
    completion = one({"gen_ai.input.messages": [{"role": "user", "parts": parts}]})
    assert [m["content"] for m in completion.request_messages] == ["a", "3", "b"]
    assert [m["role"] for m in completion.request_messages] == ["user", "tool", "user"]


def test_thinking_is_reasoning():
    """Pydantic AI calls it so."""
    parts = [{"type": "thinking", "content": "hm"}, *SAID[0]["parts"]]
    completion = one({"gen_ai.output.messages": [{"role": "assistant", "parts": parts}]})
    said = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    assert completion.message == said


def test_a_part_that_chat_does_not_know_is_named():
    """It is kept, and is not what was on the wire."""
    for part in (
        {"type": "server_tool_call", "name": "web_search"},
        {"type": "uri", "modality": "audio", "uri": "http://x/a.wav"},
        {"type": "blob", "modality": "video", "content": "AAAA"},
    ):
        asked = [{"role": "user", "parts": [part, *ASKED[0]["parts"]]}]
        completion = one({"gen_ai.input.messages": asked})
        assert Fact.OTHER_PARTS.value in completion.lost
    image = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
    asked = [{"role": "user", "parts": [image]}]
    assert Fact.OTHER_PARTS.value not in one({"gen_ai.input.messages": asked}).lost


GENAI = "opentelemetry.instrumentation.genai.openai"
WHOLE = {
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.response.id": "r",
    "gen_ai.response.model": "m",
}


@pytest.mark.parametrize(
    ("attributes", "fact"),
    [
        ({"gen_ai.request.choice.count": 2}, Fact.CHOICES),
        ({"gen_ai.response.finish_reasons": ["stop", "stop"]}, Fact.CHOICES),
        ({"gen_ai.response.finish_reasons": None}, Fact.END),
        ({"gen_ai.response.id": None}, Fact.RESPONSE_ID),
        ({"gen_ai.response.model": None}, Fact.RESPONSE_MODEL),
    ],
)
def test_what_a_span_does_not_say_is_named(attributes: dict[str, Any], fact: Fact):
    """Fewer replies than were asked for, no reason, no id: `lost` says so."""
    assert fact.value not in one(WHOLE, GENAI).lost
    assert fact.value in one({**WHOLE, **attributes}, GENAI).lost


def test_a_writer_that_was_never_recorded_may_lose_more():
    """What only the recorded instrumentations are known to keep is not taken for kept."""
    may_be_lost = {Fact.TOOLS.value, Fact.NAMES.value, Fact.IMAGES.value, Fact.CHOICES.value}
    assert may_be_lost <= set(one(WHOLE, "my.own.writer").lost)
    assert not may_be_lost & set(one(WHOLE, GENAI).lost)


@pytest.mark.parametrize("key", ["gen_ai.output.messages", "gen_ai.tool.definitions"])
def test_values_that_are_no_json(key: str):
    """Bytes inside a structured attribute are damage of the call, and no exception."""
    part = {"type": "x", "content": b"\xff"}
    completion = one({key: [{"role": "assistant", "parts": [part]}]}, plain=True)
    assert not completion.trainable
    assert any(key in damage for damage in completion.exchange.damage)
    assert one({"app.hash": b"\xff"}).trainable


def test_structured_attributes_of_tuples():
    """The SDK keeps sequences as tuples: they are read as lists."""
    asked = ({"role": "user", "parts": ({"type": "text", "content": "hm?"},)},)
    completion = one({"gen_ai.input.messages": asked}, plain=True)
    assert completion.request_messages == [{"role": "user", "content": "hm?"}]
    assert completion.trainable


def test_copies_that_differ_are_not_believed():
    """Whoever sends a copy with another reply gets none of both trained."""
    whole = span({**CHAT, **MESSAGES})
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "No."}]}]
    other = span({**CHAT, **MESSAGES, "gen_ai.output.messages": said})
    for given in ([whole, other], [other, whole], [whole, other, whole]):
        (completion,) = read(*given).completions
        assert not completion.trainable
        assert "copies of its span differ" in completion.exchange.damage[0]
    (completion,) = read(whole, whole).completions
    assert completion.trainable


@pytest.mark.parametrize(
    "value", [0.7, "0.7", "warm", [0.2], True, pytest.param(10**400, id="huge"), math.nan]
)
def test_copies_that_differ_in_a_number(value: Any):
    """A number is compared, too, as whatever it is written."""
    name = "gen_ai.request.temperature"
    whole = span({**CHAT, **MESSAGES, name: 0.2})
    other = replace(whole, attributes={**whole.attributes, name: value})
    for given in ([whole, other], [other, whole]):
        (completion,) = read(*given).completions
        assert "copies of its span differ" in completion.exchange.damage[0]


SAME: list[tuple[Any, ...]] = [
    (("stop",), ["stop"], '["stop"]'),
    (1e-07, "1e-7"),
    (1.0, 1, "1"),
    (math.nan, float("nan"), "NaN"),
    (-0.0, "-0"),
]


@pytest.mark.parametrize("values", SAME)
def test_copies_from_several_stores_are_one(values: tuple[Any, ...]):
    """The same values as the SDK, a file and a store of texts keep them."""
    whole = span({**CHAT, **MESSAGES})
    name = "gen_ai.request.temperature" if isinstance(values[0], float) else "app.list"
    copies = [replace(whole, attributes={**whole.attributes, name: value}) for value in values]
    for given in (copies, copies[::-1]):
        (completion,) = read(*given).completions
        assert completion.trainable
        assert completion.exchange.damage == []


OI = {
    "openinference.span.kind": "LLM",
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "hm?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "So.",
}


@pytest.mark.parametrize("scope", ["openinference.instrumentation.langchain"])
def test_openinference_of_other_libraries(scope: str):
    """From fields alone neither the reason nor the API's own shape is known."""
    (completion,) = read(span(OI, scope)).completions
    assert completion.trainable
    assert {Fact.END.value, Fact.ARGUMENTS.value} <= set(completion.lost)
    for system in ("anthropic", "google"):
        (completion,) = read(span({**OI, "llm.system": system}, scope)).completions
        assert Fact.SHAPE.value in completion.lost
    (completion,) = read(span({**OI, "llm.system": "openai"}, scope)).completions
    assert Fact.SHAPE.value not in completion.lost


@pytest.mark.parametrize(
    "fields",
    [
        {"contents.0.message_content.type": "audio"},
        {"tool_calls.0.tool_call.id": "c", "tool_calls.0.tool_call.function.arguments": "{}"},
        {"tool_calls.0.tool_call.id": "c", "tool_calls.0.tool_call.function.name": "f"},
    ],
)
def test_openinferences_fields_without_their_content(fields: dict[str, Any]):
    """A sound, and a tool call without its name or arguments."""
    for place in ("llm.input_messages.0", "llm.output_messages.0"):
        more = {f"{place}.message.{key}": value for key, value in fields.items()}
        (completion,) = read(span({**OI, **more})).completions
        assert not completion.trainable


def test_a_call_that_is_told_as_two_apis_is_one():
    """A client's own span of Anthropic's API inside one that tells it as chat."""
    inner = span({**CHAT, **MESSAGES, "gen_ai.response.finish_reasons": ["end_turn"]}, ANTHROPIC)
    outer = replace(
        span({**CHAT, **MESSAGES, "gen_ai.provider.name": "anthropic"}), span_id="3" * 16
    )
    (completion,) = read(outer, replace(inner, parent_span_id=outer.span_id)).completions
    assert completion.trainable


@pytest.mark.parametrize("operation", ["invoke_workflow", "handle_conversation_turn", "new_one"])
@pytest.mark.parametrize("name", ["gen_ai.agent.name", "gen_ai.workflow.name"])
def test_what_is_around_calls_may_be_any_operation(operation: str, name: str):
    """An agent, a workflow, a turn, or what no release names: its span is the rollout's."""
    turn = {"gen_ai.operation.name": operation, name: "solve"}
    around = replace(span(turn), name=f"{operation} solve", span_id="3" * 16)
    call = replace(span({**CHAT, **MESSAGES}), parent_span_id=around.span_id)
    fetched = {**CHAT, **MESSAGES, "gen_ai.operation.name": "fetch_response"}
    again = replace(span(fetched), parent_span_id=around.span_id, span_id="4" * 16)
    trajectory = read(around, call, again)
    assert (trajectory.name, trajectory.status) == (f"{operation} solve", "complete")
    assert [completion.span_id for completion in trajectory.completions] == [call.span_id]


FLAT = {
    "llm.request.type": "chat",
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "hm?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "So.",
    "gen_ai.completion.0.finish_reason": "stop",
}


@pytest.mark.parametrize(
    ("whole", "change"),
    [
        (FLAT, {"gen_ai.completion.0.role": "user"}),
        (FLAT, {"gen_ai.completion.0.content": 5}),
        (OI, {"llm.output_messages.0.message.role": "user"}),
        (OI, {"llm.input_messages.0.message.role": None}),
    ],
)
def test_roles_and_texts_of_fields(whole: dict[str, Any], change: dict[str, Any]):
    """Also where each field has an attribute, a reply is a model's, and a request has roles."""
    (completion,) = read(span(whole)).completions
    assert completion.trainable
    (completion,) = read(span({**whole, **change})).completions
    assert not completion.trainable
    assert completion.exchange.damage


@pytest.mark.parametrize("number", ["2", "1000000000", "1000000000000", "9" * 5000])
def test_a_message_far_behind_the_others(number: str):
    """Messages are missing before it, and their numbers are not gone through one by one."""
    far = {f"llm.input_messages.{number}.message.role": "user"}
    (completion,) = read(span({**OI, **far})).completions
    assert not completion.trainable


def test_a_flat_reply_without_a_reason_is_named():
    """Nothing says why it ended, and whether all choices that were asked for are there."""
    assert not {Fact.END.value, Fact.CHOICES.value} & set(read(span(FLAT)).completions[0].lost)
    short = {"gen_ai.completion.0.finish_reason": None, "gen_ai.request.choice.count": 2}
    (completion,) = read(span({**FLAT, **short})).completions
    assert {Fact.END.value, Fact.CHOICES.value} <= set(completion.lost)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("instrumentor", ["openai", "genai"])
def test_refusals(
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    instrumentor: Literal["openai", "genai"],
    stream: bool,
):
    """Of the instrumentations here: what a refusal said is read, or is missing by name."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    spans, exporters = InMemorySpanExporter(), [InMemoryTrajectoryExporter()]
    provider = otel_rollout.configure(exporters=exporters, instrumentor=instrumentor)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    said: list[Any] = [
        Reply(refusal="No way."),
        Reply("Partly.", refusal="No way."),
        Reply(refusal="No way.", tool_calls=[ToolCall("add", "{}")]),
        Reply(refusal="No way.", reasoning="Hm."),
    ]
    client: Any = clients.sync(clients.serve(said * 2))
    for api in (client.chat.completions, client.responses):
        asked = {"input": "u"} if api is client.responses else {"messages": [user("u")]}
        for _ in said:
            spans.clear()
            reply = api.create(model="m", stream=stream, **asked)
            if stream:
                list(reply)
            trajectory = read(*map(as_record, spans.get_finished_spans()))
            (completion,) = trajectory.completions
            message = json.dumps(completion.message)
            if "No way." not in message or "refusal" not in message:
                assert Fact.REPLY_REFUSAL.value in "".join(trajectory.warnings)
                assert Fact.REPLY_REFUSAL.value in completion.lost
