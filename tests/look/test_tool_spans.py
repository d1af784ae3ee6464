"""Tools that an agent runs without our `tool`: drawn from the requests that bring their results."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import reconstruct, rollout, tool
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.wire import normalised_content, tool_calls, tool_results
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def drawn(recording: Recording) -> list[tuple[Any, ...]]:
    """Name, call id, arguments and result of each tool span."""
    keys = ("name", "call.id", "call.arguments", "call.result")
    return [
        tuple((span.attributes or {}).get(f"gen_ai.tool.{key}") for key in keys)
        for span in recording.spans_named("execute_tool")
    ]


def answer(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def chat(client: Any, messages: list[Any], *, stream: bool = False) -> Any:
    """The message that is said, as a client replays it."""
    if not stream:
        reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        return reply.choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
        reply = events.get_final_completion()
    message = reply.choices[0].message.model_dump(exclude_none=True)
    message.pop("parsed", None)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return message


CALLS = [ToolCall("add", '{"a": 1}', id="call_1"), ToolCall("look_up", "{}", id="call_2")]


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls(recording: Recording, clients: Clients, stream: bool):
    """One span each, between the reply that asked and the request that answers."""
    client = clients.sync(clients.serve([Reply(tool_calls=CALLS), "done"]))
    with rollout("agent") as trajectory:
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages, stream=stream))
        messages += [answer("call_1", "3"), answer("call_2", [{"type": "text", "text": "x"}])]
        chat(client, messages, stream=stream)
    assert drawn(recording) == [
        ("add", "call_1", '{"a": 1}', "3"),
        ("look_up", "call_2", "{}", "x"),
    ]
    first, second = recording.spans_named("recording")
    (root,) = recording.spans_named("invoke_agent")
    for span in recording.spans_named("execute_tool"):
        assert span.start_time
        assert span.end_time
        assert root.context
        assert (first.end_time or 0) - 5e7 < span.start_time <= span.end_time
        assert span.end_time <= (second.start_time or 0) + 5e7
        assert span.parent
        assert span.parent.span_id == root.context.span_id
        assert span.attributes
        assert span.attributes["gen_ai.operation.name"] == "execute_tool"
        assert span.attributes["rollout.tool.inferred"] is True
        assert span.attributes["rollout.id"] == trajectory.id
        assert span.status.is_unset
    assert trajectory.warnings == []


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_share_an_id_have_no_span(recording: Recording, clients: Clients, stream: bool):
    """Nothing tells which result is of which; in a later turn an id may come again."""
    same = [
        ToolCall("add", '{"city": "Rome"}', id="x"),
        ToolCall("add", '{"city": "Oslo"}', id="x"),
    ]
    again = [ToolCall("add", "{}", id="x")]
    client = clients.sync(clients.serve([Reply(tool_calls=same), Reply(tool_calls=again), "done"]))
    with rollout("agent"):
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages, stream=stream))
        messages += [answer("x", "Rome's"), answer("x", "Oslo's")]
        messages.append(chat(client, messages, stream=stream))
        messages.append(answer("x", "3"))
        chat(client, messages, stream=stream)
    assert drawn(recording) == [("add", "x", "{}", "3")]


def test_a_tool_of_its_own_is_not_drawn_again(recording: Recording, clients: Clients):
    """By `tool` with the id of the call, or without it; or by a framework, with the id."""
    calls = [*CALLS, ToolCall("third", "{}", id="call_3"), ToolCall("fourth", "{}", id="call_4")]
    client = clients.sync(clients.serve([Reply(tool_calls=calls), "done"]))
    with rollout("agent"):
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages))
        with tool("anything", call_id="call_1"), tool("look_up"):
            pass
        tracer = trace.get_tracer("framework")
        with tracer.start_as_current_span("execute_tool third") as span:
            span.set_attribute("gen_ai.tool.call.id", "call_3")
        messages += [answer(f"call_{number}", "x") for number in (1, 2, 3, 4)]
        chat(client, messages)
    inferred = [
        span.name
        for span in recording.spans_named("execute_tool")
        if "rollout.tool.inferred" in (span.attributes or {})
    ]
    assert inferred == ["execute_tool fourth"]


@pytest.mark.parametrize(
    "attributes",
    [
        {"openinference.span.kind": "TOOL", "tool.id": "call_1", "tool.name": "x"},
        {"openinference.span.kind": "TOOL", "tool.name": "add"},
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"},
        {"gen_ai.tool.call.id": "call_1"},
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_other_instrumentations_tools(
    recording: Recording, clients: Clients, attributes: dict[str, Any], late: bool
):
    """Spans of tools in other conventions count, whenever their attributes are set."""
    client = clients.sync(clients.serve([Reply(tool_calls=CALLS[:1]), "done"]))
    tracer = recording.provider.get_tracer("framework")
    with rollout("agent"):
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages))
        with tracer.start_as_current_span("t", attributes={} if late else attributes) as span:
            span.set_attributes(attributes)
        chat(client, [*messages, answer("call_1", "3")])
    assert recording.spans_named("execute_tool") == []


def test_once_for_retries_and_forks(recording: Recording, clients: Clients):
    """The same results sent again, or others for the same call, are no further tool."""
    replies = [Reply(tool_calls=CALLS[:1]), "a", "b", "c"]
    client = clients.sync(clients.serve(replies))
    with rollout("agent"):
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages))
        for result in ("3", "3", "4"):
            chat(client, [*messages, answer("call_1", result)])
    assert drawn(recording) == [("add", "call_1", '{"a": 1}', "3")]


def test_what_was_not_sampled_here_is_no_tool(recording: Recording, clients: Clients):
    """Examples in a prompt have calls and results, too."""
    client = clients.sync(clients.serve("done"))
    asked = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function"}]}
    asked["tool_calls"][0]["function"] = {"name": "add", "arguments": "{}"}  # type: ignore[index]
    with rollout("agent"):
        chat(client, [user("example"), asked, answer("call_1", "3"), user("go")])
        chat(client, [user("example"), asked, answer("call_1", "4"), user("go")])
    assert drawn(recording) == []


def test_ids_that_are_used_again(recording: Recording, clients: Clients):
    """Some servers number the calls of each reply anew."""
    call = ToolCall("add", "{}", id="call_0")
    client = clients.sync(clients.serve([Reply(tool_calls=[call])] * 3 + ["done"]))
    with rollout("agent"):
        messages: list[Any] = [user("go")]
        for number in range(3):
            messages.append(chat(client, messages))
            messages.append(answer("call_0", str(number)))
        chat(client, messages)
    assert [row[3] for row in drawn(recording)] == ["0", "1", "2"]


@pytest.mark.parametrize("by_id", [False, True])
def test_responses(recording: Recording, clients: Clients, by_id: bool):
    """Also where the reply is only named, and the request has nothing but the result."""
    client = clients.sync(clients.serve([Reply(tool_calls=CALLS[:1]), "done"]))
    with rollout("agent"):
        first: Any = client.responses.create(model="m", input="go")
        output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
        if by_id:
            client.responses.create(
                model="m",
                input=[output],
                previous_response_id=first.id,
            )
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            said: list[Any] = [user("go"), *items, output]
            client.responses.create(model="m", input=said)
    assert drawn(recording) == [("add", "call_1", '{"a": 1}', "3")]


def test_it_can_be_switched_off(clients: Clients):
    """`configure(tool_spans=False)`."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(tool_spans=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    client = clients.sync(clients.serve([Reply(tool_calls=CALLS[:1]), "done"]))
    with rollout("agent"):
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages))
        chat(client, [*messages, answer("call_1", "3")])
    names = [span.name for span in spans.get_finished_spans()]
    assert not any(name.startswith("execute_tool") for name in names)
    with pytest.raises(otel_rollout.ConfigurationError, match=r"tool_spans=.*got 'no'"):
        otel_rollout.configure(tool_spans="no")  # type: ignore


@pytest.mark.not_replayed("content is kept off the spans")
def test_content_and_redaction(clients: Clients):
    """The same rules hold as for every other tool span."""
    for options in ({"content": "none"}, {"redact": lambda body: body.replace(b"secret", b"***")}):
        spans = InMemorySpanExporter()
        provider = otel_rollout.configure(**options)
        provider.add_span_processor(SimpleSpanProcessor(spans))
        call = ToolCall("add", '{"a": "secret"}', id="call_1")
        client = clients.sync(clients.serve([Reply(tool_calls=[call]), "done"]))
        with rollout("agent"):
            messages: list[Any] = [user("go")]
            messages.append(chat(client, messages))
            chat(client, [*messages, answer("call_1", "the secret")])
        (span,) = [s for s in spans.get_finished_spans() if s.name == "execute_tool add"]
        assert "secret" not in str(span.to_json())
        otel_rollout.shutdown()


def test_a_trajectory_is_unmoved(recording: Recording, clients: Clients):
    """The spans add nothing to what is rebuilt."""
    client = clients.sync(clients.serve([Reply(tool_calls=CALLS), "done"]))
    with rollout("agent") as trajectory:
        messages: list[Any] = [user("go")]
        messages.append(chat(client, messages))
        messages += [answer("call_1", "3"), answer("call_2", "x")]
        chat(client, messages)

    def is_tool(span: ReadableSpan) -> bool:
        return span.name.startswith("execute_tool")

    (rebuilt,) = reconstruct([span for span in recording.spans if not is_tool(span)])
    assert rebuilt == trajectory
    assert len(trajectory.histories) == 1
    tools = list(filter(is_tool, recording.spans))
    assert len(tools) == 2
    assert reconstruct(recording.spans, infer_rollouts=True) == [trajectory]


CALL = st.text(min_size=1)


@given(CALL, CALL, st.text())
def test_every_shape_is_read(call_id: str, name: str, text: str):
    """The APIs write calls and results differently, and mean the same."""
    arguments = json.dumps({"a": text})
    calls: list[Any] = [
        {"tool_calls": [{"id": call_id, "function": {"name": name, "arguments": arguments}}]},
        {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments},
        {"content": [{"type": "tool_use", "id": call_id, "name": name, "input": arguments}]},
        {"content": [{"toolUse": {"toolUseId": call_id, "name": name, "input": arguments}}]},
    ]
    for message in calls:
        (call,) = tool_calls(message)
        assert (call.id, call.name, call.arguments) == (call_id, name, arguments)
        assert list(tool_results(message)) == []
    part = [{"type": "text", "text": text}]
    results: list[Any] = [
        answer(call_id, text),
        answer(call_id, part),
        {"type": "function_call_output", "call_id": call_id, "output": text},
        {"content": [{"type": "tool_result", "tool_use_id": call_id, "content": part}]},
    ]
    for message in results:
        ((name, result),) = tool_results(message)
        assert (name, normalised_content(result.content), result.failed) == (call_id, text, False)
        assert tool_calls(message) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("role", "type", "content", "tool_calls", "id", "function", "toolUse", "output")
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_shape_is_survived(message: Any):
    """What a client or server sends may be anything."""
    assert all(call.name for call in tool_calls(message))
    assert all(call_id for call_id, _ in tool_results(message))


@pytest.mark.parametrize("failed", [False, True])
def test_messages(recording: Recording, clients: Clients, failed: bool):
    """Anthropic's Messages API: a result may say that the tool failed."""
    server = clients.serve([Reply(tool_calls=CALLS[:1]), "done"])
    url = server.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client, rollout("agent"):
        messages: list[Any] = [user("go")]
        for _ in range(2):
            reply = client.messages.create(model="m", max_tokens=9, messages=messages)
            messages.append({"role": "assistant", "content": [b.to_dict() for b in reply.content]})
            result = {"type": "tool_result", "tool_use_id": "call_1", "content": "3"}
            messages.append(
                {"role": "user", "content": [{**result, **({"is_error": True} if failed else {})}]}
            )
    ((name, call_id, arguments, text),) = drawn(recording)
    assert (name, call_id, json.loads(arguments), text) == ("add", "call_1", {"a": 1}, "3")
    (span,) = recording.spans_named("execute_tool")
    assert span.status.is_unset is not failed
    assert ((span.attributes or {}).get("error.type") == "_OTHER") is failed
