"""Calls that no instrumentor draws get an LLM span of ours, which shows what is new in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import anthropic
import pytest
import requests
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.testing import Raw, Reply, ToolCall
from tests.kit.recording import Clients, Recording

LONG = "word " * 500
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d" * 400}}]


def llm(recording: Recording) -> list[ReadableSpan]:
    return recording.spans_named("chat")


def shown(span: ReadableSpan, name: str = "input") -> list[tuple[str, str]]:
    """Role and text of each message on a span."""
    rows = json.loads(str(attributes(span).get(f"gen_ai.{name}.messages", "[]")))
    return [(row["role"], row["parts"][0]["content"]) for row in rows]


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def post(url: str, **body: Any) -> Any:
    with requests.Session() as session:
        return session.post(f"{url}/chat/completions", json={"model": "m", **body}, timeout=60)


def test_a_call_over_plain_http_is_drawn(recording: Recording, clients: Clients):
    """Its span has the model's name, what was asked and said, and holds the recording."""
    server = clients.serve("hello")
    with rollout("agent"):
        post(server.base_url, messages=[{"role": "user", "content": "hi"}])
    (span,) = llm(recording)
    (recorded,) = recording.spans_named("recording")
    assert span.name == "chat m"
    assert span.kind is SpanKind.CLIENT
    assert recorded.parent is not None
    assert span.context is not None
    assert recorded.parent.span_id == span.context.span_id
    assert shown(span) == [("user", "hi")]
    assert shown(span, "output") == [("assistant", "hello")]
    own = attributes(span)
    assert own["rollout.has_exchange"] is True
    assert own["rollout.turn"] == 1
    assert own["gen_ai.response.finish_reasons"] == ("stop",)
    assert own["gen_ai.usage.output_tokens"] > 0
    assert own["gen_ai.response.id"] == recording.trajectory.completions[0].id
    assert recording.trajectory.warnings == []


def test_each_span_shows_what_is_new(recording: Recording, clients: Clients):
    """The past, the tools and the replies that come back were shown before: they are counted."""
    server = clients.serve("done")
    messages: list[Any] = [{"role": "system", "content": LONG}, {"role": "user", "content": "go"}]
    with rollout("agent"):
        for turn in range(4):
            reply = post(server.base_url, messages=messages, tools=TOOLS).json()
            messages += [reply["choices"][0]["message"], {"role": "user", "content": f"{turn}"}]
    first, *later = llm(recording)
    assert shown(first) == [("system", LONG), ("user", "go")]
    assert json.loads(str(attributes(first)["gen_ai.tool.definitions"])) == TOOLS
    for turn, span in enumerate(later):
        count = 3 + 2 * turn
        assert attributes(span)["rollout.elided_messages"] == count
        assert attributes(span)["rollout.elided_tools"] == 1
        assert attributes(span)["rollout.turn"] == turn + 2
        before, new = shown(span)
        assert before[0] == "system"
        assert before[1].startswith(f"({count} earlier messages are not repeated")
        assert new == ("user", str(turn))
        assert "gen_ai.tool.definitions" not in attributes(span)


def test_a_reply_that_comes_back_changed_is_shown(recording: Recording, clients: Clients):
    """An edit is new, and its call knows its turn."""
    server = clients.serve("done")
    messages: list[Any] = [{"role": "user", "content": LONG}]
    with rollout("agent"):
        post(server.base_url, messages=messages)
        edited = {"role": "assistant", "content": "edited"}
        post(server.base_url, messages=[*messages, edited, {"role": "user", "content": "on"}])
        messages += [edited, {"role": "user", "content": "another"}]
        post(server.base_url, messages=messages)
    _, second, third = llm(recording)
    assert shown(second)[1:] == [("assistant", "edited"), ("user", "on")]
    assert attributes(second)["rollout.turn"] == 2
    assert shown(third)[1:] == [("user", "another")]
    assert attributes(third)["rollout.turn"] == 2


def test_a_small_conversation_is_shown_whole(recording: Recording, clients: Clients):
    """As on the spans of instrumentors."""
    server = clients.serve("b")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with rollout("agent"):
        post(server.base_url, messages=messages[:1])
        post(server.base_url, messages=[*messages, {"role": "user", "content": "c"}])
    assert shown(llm(recording)[1]) == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert "rollout.elided_messages" not in attributes(llm(recording)[1])


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_is_drawn(recording: Recording, clients: Clients, stream: bool):
    """Instructions are shown once, tool calls as text, and the reply's end by its own word."""
    server = clients.serve(Reply(tool_calls=[ToolCall("look", '{"at": "x"}')]))
    address = server.base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    asked: Any = {"model": "claude", "max_tokens": 50, "system": "be brief"}
    asked["messages"] = [{"role": "user", "content": "hi"}]
    with rollout("agent"):
        for _ in range(2):
            if stream:
                with client.messages.stream(**asked) as events:
                    events.get_final_message()
            else:
                client.messages.create(**asked)
    client.close()
    first, second = llm(recording)
    assert first.name == "chat claude"
    assert attributes(first)["gen_ai.provider.name"] == "anthropic"
    assert "be brief" in str(attributes(first)["gen_ai.system_instructions"])
    assert "gen_ai.system_instructions" not in attributes(second)
    (reply,) = json.loads(str(attributes(first)["gen_ai.output.messages"]))
    assert reply["parts"][0]["name"] == "look"
    assert attributes(first)["gen_ai.response.finish_reasons"] == ("tool_use",)
    assert attributes(first).get("gen_ai.request.stream", False) is stream


def test_what_an_instrumentor_draws_is_not_drawn_again(recording: Recording, clients: Clients):
    """One span for each call of the OpenAI client, and it is the instrumentor's."""
    client = clients.sync(clients.serve("hello"))
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    (span,) = llm(recording)
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name != "otel_rollout"


@pytest.mark.parametrize(("llm_spans", "count"), [("outer", 0), ("both", 1)])
def test_what_a_framework_draws_is_drawn_again_if_asked(
    clients: Clients, llm_spans: Literal["outer", "both"], count: int
):
    """`configure(llm_spans=...)` holds for these spans too."""
    server, spans = clients.serve("hello"), InMemorySpanExporter()
    provider = otel_rollout.configure("tests", llm_spans=llm_spans)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = trace.get_tracer("framework")
    with (
        rollout("agent"),
        tracer.start_as_current_span("theirs", attributes={"gen_ai.operation.name": "chat"}),
    ):
        post(server.base_url, messages=[{"role": "user", "content": "hi"}])
    names = [span.name for span in spans.get_finished_spans()]
    assert names.count("theirs") == 1
    assert names.count("chat m") == count


def test_without_an_instrumentor_nothing_is_drawn(clients: Clients):
    """`configure(instrumentor=None)` is no LLM spans at all."""
    server, spans = clients.serve("hello"), InMemorySpanExporter()
    provider = otel_rollout.configure("tests", instrumentor=None)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with rollout("agent"):
        post(server.base_url, messages=[{"role": "user", "content": "hi"}])
    assert [s.name for s in spans.get_finished_spans() if s.name.startswith("chat")] == []


@pytest.mark.parametrize(
    "options", [{"content": "none"}, {"redact": lambda body: body}], ids=["none", "redact"]
)
def test_without_content_a_span_has_numbers_only(clients: Clients, options: Any):
    """No text of a message, of the instructions or of a tool."""
    server, spans = clients.serve("secretreply"), InMemorySpanExporter()
    exporter = InMemoryTrajectoryExporter()
    provider = otel_rollout.configure("tests", [exporter], **options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with rollout("agent"):
        secret = {"role": "user", "content": "secretquestion"}
        tool = {"type": "function", "function": {"name": "secrettool"}}
        post(server.base_url, messages=[secret], tools=[tool])
    (span,) = [s for s in spans.get_finished_spans() if s.name.startswith("chat")]
    assert "secret" not in str(attributes(span))
    assert attributes(span)["gen_ai.usage.output_tokens"] > 0
    (trajectory,) = exporter.get_finished_trajectories()
    assert str(trajectory.completions[0].message).count("secretreply") == 1


def test_all_of_it_on_each_span_if_asked(clients: Clients):
    """`configure(content="full")` repeats the conversation, the tools and the instructions."""
    server, spans = clients.serve("done"), InMemorySpanExporter()
    provider = otel_rollout.configure("tests", content="full")
    provider.add_span_processor(SimpleSpanProcessor(spans))
    messages: list[Any] = [{"role": "user", "content": LONG}]
    tools = [{"type": "function", "function": {"name": "small"}}]
    with rollout("agent"):
        for _ in range(3):
            post(server.base_url, messages=messages, tools=tools)
            messages = [*messages, {"role": "user", "content": "more"}]
        for _ in range(2):
            body = {"model": "m", "input": "go", "instructions": "be brief"}
            requests.post(f"{server.base_url}/responses", json=body, timeout=60)
    *_, earlier, later = [s for s in spans.get_finished_spans() if s.name == "chat m"]
    for span in (earlier, later):
        assert "be brief" in str(attributes(span)["gen_ai.system_instructions"])
    last = [s for s in spans.get_finished_spans() if s.name == "chat m"][2]
    assert shown(last) == [("user", LONG), ("user", "more"), ("user", "more")]
    assert "small" in str(attributes(last)["gen_ai.tool.definitions"])


def test_a_call_that_failed_says_so(recording: Recording, clients: Clients):
    """An error of the server is the status of the span."""
    server = clients.serve(Raw(500, b'{"error": {"message": "overloaded"}}'))
    with rollout("agent"):
        post(server.base_url, messages=[{"role": "user", "content": "hi"}])
    (span,) = llm(recording)
    assert span.status.status_code is StatusCode.ERROR
    assert "overloaded" in (span.status.description or "")
    assert attributes(span)["error.type"] == "ErrorResponse"


def test_a_long_stream_is_shown_by_a_glance(recording: Recording, clients: Clients):
    """Its text is found without parsing all of it, and why it ended; its calls of tools too."""
    text = "long " * 2000
    server = clients.serve(Reply(text), chunk_size=40)
    asked: Any = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with rollout("agent"):
        post(server.base_url, **asked)
    (span,) = llm(recording)
    assert shown(span, "output") == [("assistant", text)]
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_body_that_is_no_json_is_drawn_without_messages(recording: Recording, clients: Clients):
    """Nothing of it is guessed, and nothing raises."""
    server = clients.serve("hello")
    client = clients.sync(server)
    with rollout("agent"), requests.Session() as session:
        data = '{"model": "m", "messages": "none"}'
        session.post(f"{client.base_url}chat/completions", data=data, timeout=30)
    (span,) = llm(recording)
    assert span.name == "chat m"
    assert shown(span)[:1] in ([], [("user", "none")])


def test_an_edit_deep_in_the_past_has_its_turn_counted(recording: Recording, clients: Clients):
    """Such as a mark for a cache that moves: the turn is counted by the replies."""
    server = clients.serve("done")
    past: list[Any] = []
    with rollout("agent"):
        for turn in range(3):
            past = [*past, {"role": "user", "content": f"{turn} {LONG}"}]
            post(server.base_url, messages=past)
            past = [*past, {"role": "assistant", "content": "done"}]
        past[2] = {**past[2], "cache_control": {"type": "ephemeral"}}
        post(server.base_url, messages=[*past, {"role": "user", "content": "3"}])
    assert [attributes(span)["rollout.turn"] for span in llm(recording)] == [1, 2, 3, 4]


def test_the_last_message_is_always_shown(recording: Recording, clients: Clients):
    """Also of a call that is made again, whose turn is that of the first."""
    server = clients.serve("done")
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "go"}]
    with rollout("agent"):
        for _ in range(2):
            post(server.base_url, messages=messages)
    first, again = llm(recording)
    assert [attributes(span)["rollout.turn"] for span in (first, again)] == [1, 1]
    assert attributes(again)["rollout.elided_messages"] == 1
    assert shown(again)[1:] == [("user", "go")]
