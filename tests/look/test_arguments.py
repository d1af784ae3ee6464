"""Instrumentors leave what the caller passed, and the client's errors, as they are."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import rollout
from otel_rollout.look import instrumentors
from otel_rollout.testing import Raw
from tests.kit.recording import Clients, Recording
from tests.look.llm_spans import CHOICES, CUSTOM, IMAGE, TOOL, USER, inputs, llm, recording_with


def test_headers_of_the_caller_stay_as_they_are(any_recording: Recording, clients: Clients):
    """The caller's `extra_headers` are sent and not written to; the trace context is sent too."""
    server = clients.serve()
    client = clients.sync(server)
    headers = {"X-Mine": "1", "TraceParent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    before = dict(headers)
    with rollout("x"):
        client.chat.completions.create(model="m", messages=USER, extra_headers=headers)
        client.embeddings.create(model="m", input="p", extra_headers=headers)
        client.chat.completions.create(model="m", messages=USER, extra_headers=None)
    assert headers == before
    sent = [exchange.request_headers for exchange in server.exchanges]
    assert [h.get("x-mine") for h in sent] == ["1", "1", None]
    assert sent[0]["traceparent"] == sent[1]["traceparent"] == before["TraceParent"]
    spans = {span.name: span for span in llm(any_recording)}
    scopes = {span.instrumentation_scope.name for span in spans.values()}  # type: ignore[union-attr]
    if any(scope.startswith("opentelemetry.instrumentation.openai") for scope in scopes):
        span = spans["chat m"]
        assert span.context is not None
        assert sent[2]["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"
        assert "gen_ai.input.messages" in (span.attributes or {})
        assert all("gen_ai.headers" not in (s.attributes or {}) for s in spans.values())


@pytest.mark.parametrize("headers", [[("X-Mine", "1")], "X-Mine: 1", 7])
def test_headers_that_are_wrong_are_the_clients_to_refuse(headers: Any, clients: Clients):
    """Arguments of the wrong type fail as they do without us."""
    client = clients.sync(clients.serve())
    errors = list[str]()
    for instrumentor in ("nobody", *CHOICES):
        if instrumentor != "nobody":
            otel_rollout.configure("x", instrumentor=instrumentor)
        with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
            client.chat.completions.create(model="m", messages=USER, extra_headers=headers)
        errors.append(repr(caught.value))
        otel_rollout.shutdown()
    assert len(set(errors)) == 1


def test_input_of_the_caller_stays_as_it_is(any_recording: Recording, clients: Clients):
    """Messages, tools and items are not written to, whatever is asked."""
    server = clients.serve()
    client = clients.sync(server)
    messages: Any = [*USER, {"role": "assistant", "content": None, "tool_calls": [CUSTOM]}]
    messages += [{"role": "tool", "tool_call_id": "c", "content": "done"}]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    mine = copy.deepcopy([messages, items, tools])
    with rollout("x"):
        for _ in range(2):
            client.chat.completions.create(model="m", messages=messages)
            client.responses.create(model="m", input=items, tools=tools)
    assert [messages, items, tools] == mine
    first, second, third, fourth = (exchange.request for exchange in server.exchanges)
    assert (first, second) == (third, fourth)


def test_messages_from_an_iterator(any_recording: Recording, clients: Clients):
    """Messages may come from a generator: it is read once, and they are sent."""
    server = clients.serve()
    client = clients.sync(server)
    with rollout("x"):
        client.chat.completions.create(model="m", messages=iter(USER), tools=iter([TOOL]))
    assert json.loads(server.exchanges[0].request)["messages"] == USER
    if llm(any_recording):
        assert inputs(any_recording)[0]["content"] == "hi"


def test_a_generator_that_fails_is_the_callers_error(any_recording: Recording, clients: Clients):
    """What a generator of messages raises reaches the caller, and nothing is sent."""
    server = clients.serve()
    client = clients.sync(server)

    def messages() -> Iterator[Any]:
        yield USER[0]
        raise LookupError("no more")

    with rollout("x"), pytest.raises(LookupError, match="no more"):
        client.chat.completions.create(model="m", messages=messages())
    assert server.exchanges == []


def test_the_callers_exceptions_are_the_clients_own(any_recording: Recording, clients: Clients):
    """An error is raised as the client made it: its class, its cause and its context."""
    client = clients.sync(clients.serve(Raw(400, b'{"error": {"message": "no"}}')))
    with rollout("x"), pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=USER)
    assert type(caught.value) is openai.BadRequestError
    assert caught.value.body == {"message": "no"}
    gone = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)
    try:
        raise KeyError("before")
    except KeyError:
        with rollout("y"), pytest.raises(openai.APIConnectionError) as other:
            gone.chat.completions.create(model="m", messages=USER)
    gone.close()
    assert "ConnectError" in type(other.value.__cause__).__name__
    assert other.value.__context__ is other.value.__cause__


def test_the_threads_event_loop_is_left(any_recording: Recording, clients: Clients):
    """A sync call does not take the event loop away that its thread has."""
    client = clients.sync(clients.serve())
    loop, kept = asyncio.new_event_loop(), list[Any]()

    def work() -> None:
        asyncio.set_event_loop(loop)
        client.chat.completions.create(model="m", messages=USER)
        kept.append(asyncio.get_event_loop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    loop.close()
    assert kept == [loop]


async def test_an_image_callback_of_the_users_is_awaited(clients: Clients):
    """A user's own `upload_base64_image` that really waits is waited for, in a sync call too."""

    async def upload(*_: str) -> str:
        await asyncio.sleep(0)
        return "https://images/1"

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    theirs = OpenAIInstrumentor(upload_base64_image=upload)
    theirs.instrument(tracer_provider=provider)
    try:
        recording = recording_with("openai")
        client = clients.sync(clients.serve())
        client.chat.completions.create(model="m", messages=IMAGE)
        (span,) = spans.get_finished_spans()
        assert "https://images/1" in str((span.attributes or {})["gen_ai.input.messages"])
        assert llm(recording) == []
    finally:
        otel_rollout.shutdown()
        theirs.uninstrument()
        instrumentors.unwrap()
        OpenAIInstrumentor()
