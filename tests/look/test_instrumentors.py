"""LLM spans: what users see of the instrumentors, and that they see nothing of their faults."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import json
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import openai
import openai._base_client
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import otel_rollout
from otel_rollout import ConfigurationError, InMemoryTrajectoryExporter, Trajectory, rollout
from otel_rollout.look import instrumentors
from otel_rollout.record.capture import secrets_in
from otel_rollout.testing import Raw, Reply, ToolCall

if TYPE_CHECKING:
    from tests.conftest import Clients, Recording

try:
    import_module("opentelemetry.instrumentation.genai.openai")
except ImportError:
    GENAI = False
else:
    GENAI = True
CHOICES: list[Any] = ["openai", *(["genai"] if GENAI else []), None]
DRAWS_RESPONSES = "service_tier" in openai.types.responses.Response.model_fields
"""With an older client the default instrumentor draws them only if they are streamed."""
needs_genai = pytest.mark.skipif(not GENAI, reason="needs the extra genai")
USER: list[Any] = [{"role": "user", "content": "hi"}]
PIXEL = "data:image/png;base64,iVBORw0KGgo="
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def kept_responses() -> Any:
    """What the instrumentor keeps of responses; its module cannot be imported without a warning."""
    return sys.modules["opentelemetry.instrumentation.openai.v1.responses_wrappers"]


def recording_with(instrumentor: Any) -> Recording:
    from tests.conftest import Recording

    exporter, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure("tests", [exporter], instrumentor=instrumentor)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Recording(provider, exporter, spans)


@pytest.fixture(params=CHOICES, ids=str)
def any_recording(request: pytest.FixtureRequest) -> Recording:
    """The library, configured with each instrumentor in turn."""
    return recording_with(request.param)


@pytest.fixture
def swallowed() -> Iterator[list[str]]:
    """What the guard kept from the user, as it is logged."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("otel_rollout"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(before)


def sse(*events: Any, done: bool = True, typed: bool = False) -> Raw:
    """A reply of these events."""
    texts = [
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
        if typed
        else f"data: {json.dumps(event)}\n\n"
        for event in events
    ]
    texts += ["data: [DONE]\n\n"] if done else []
    return Raw(200, content_type="text/event-stream", chunks=[text.encode() for text in texts])


def chunk(*choices: Any, **fields: Any) -> dict[str, Any]:
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": list(choices),
        **fields,
    }


def says(index: int, text: str | None, reason: str | None = None, **delta: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"index": index, "delta": {**content, **delta}, "finish_reason": reason}


def chat_body(message: Any, **fields: Any) -> Raw:
    body = {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        **fields,
    }
    return Raw(200, json.dumps(body).encode())


def llm(recording: Recording) -> list[ReadableSpan]:
    """The spans that are not ours."""
    return [
        span
        for span in recording.spans
        if not span.name.startswith(("exchange", "invoke_agent", "execute_tool"))
    ]


def attribute(recording: Recording, name: str) -> Any:
    (span,) = llm(recording)
    assert span.attributes is not None
    return span.attributes.get(name)


def parts(recording: Recording, name: str) -> list[Any]:
    """The parts of all messages that the only LLM span shows."""
    messages = json.loads(attribute(recording, name) or "[]")
    return [part for message in messages for part in message["parts"]]


def inputs(recording: Recording) -> list[Any]:
    return parts(recording, "gen_ai.input.messages")


def outputs(recording: Recording) -> list[Any]:
    return parts(recording, "gen_ai.output.messages")


# --- streams


EARLY = sse(
    chunk(says(1, "b1", role="assistant")),
    chunk(says(0, "a1", role="assistant")),
    chunk(says(1, "b2", "stop")),
    chunk(says(0, "a2", "stop")),
)


def test_a_stream_whose_second_choice_comes_first(any_recording: Recording, clients: Clients):
    """A stream with n=2 reaches the agent and the span whole, whichever choice begins."""
    client = clients.sync(clients.serve(EARLY))
    with rollout("x"):
        stream = client.chat.completions.create(model="m", n=2, messages=USER, stream=True)
        said = [(c.index, c.delta.content) for item in stream for c in item.choices]
    assert said == [(1, "b1"), (0, "a1"), (1, "b2"), (0, "a2")]
    assert len(any_recording.trajectory.completions) == 2
    if llm(any_recording):
        assert sorted(part["content"] for part in outputs(any_recording)) == ["a1a2", "b1b2"]


async def test_an_async_stream_whose_second_choice_comes_first(
    any_recording: Recording, clients: Clients
):
    """The same for an async client."""
    client = clients.asynchronous(clients.serve(EARLY))
    with rollout("x"):
        stream = await client.chat.completions.create(model="m", n=2, messages=USER, stream=True)
        said = [(c.index, c.delta.content) async for item in stream for c in item.choices]
    assert said == [(1, "b1"), (0, "a1"), (1, "b2"), (0, "a2")]
    if llm(any_recording):
        assert sorted(part["content"] for part in outputs(any_recording)) == ["a1a2", "b1b2"]


ODD: list[Any] = [
    {"id": "c-1", "object": "chat.completion.chunk", "model": "m"},
    chunk(says(0, "x"), choices=None),
    chunk({"index": None, "delta": {"content": "x"}}),
    chunk({"delta": {"content": "x"}}),
    chunk({"index": 0, "delta": None}),
    chunk({"index": 0}),
    chunk({"index": "zero", "delta": {"content": "x"}}),
    chunk({"index": -1, "delta": {"content": "x"}}),
    chunk({"index": 10**12, "delta": {"content": "x"}}),
    chunk(None),
    chunk("text"),
    chunk({"index": 0, "delta": {"content": ["a", {"b": 1}]}}),
    chunk({"index": 0, "delta": {"content": 7, "role": 1, "tool_calls": "no"}}),
    chunk({"index": 0, "delta": {"tool_calls": [{"id": "t", "function": {"name": "f"}}]}}),
    chunk({"index": 0, "delta": {"tool_calls": [{"index": 5, "function": None}]}}),
    chunk({"index": 0, "delta": {"tool_calls": [{"index": 10**12}]}}),
    chunk({"index": 0, "delta": {"tool_calls": [None, {"index": "x"}, {}]}}),
    chunk({"index": 0, "delta": {"function_call": {"name": "f", "arguments": "{}"}}}),
    chunk(usage=None),
    chunk(usage="many", surprise={"a": [1]}),
    chunk(usage={"prompt_tokens": None, "completion_tokens": "x", "prompt_tokens_details": None}),
    {"choices": {"0": {}}, "id": 5, "model": ["m"]},
    {"object": "unknown"},
    {},
    [],
    [1, 2],
    "text",
    None,
    12,
]


def read(client: openai.OpenAI, call: Callable[[openai.OpenAI], Any]) -> list[str]:
    """What an agent sees of a stream: each item, then how it ended."""
    seen = list[str]()
    try:
        for item in call(client):
            seen.append(repr(item))
    except Exception as error:
        seen.append(f"{type(error).__name__}: {error}")
    return seen


STREAMS: dict[str, Callable[[openai.OpenAI], Any]] = {
    "chat": lambda c: c.chat.completions.create(model="m", messages=USER, stream=True),
    "completions": lambda c: c.completions.create(model="m", prompt="p", stream=True),
    "responses": lambda c: c.responses.create(model="m", input="p", stream=True),
}


@pytest.mark.parametrize("api", STREAMS)
@pytest.mark.parametrize("instrumentor", CHOICES[:-1])
def test_odd_chunks_reach_the_agent_as_without_us(instrumentor: Any, api: str, clients: Clients):
    """Whatever a server streams, the agent sees the same items and the same end as without us."""
    server = clients.serve()
    client = clients.sync(server)
    replies = [sse(chunk(says(0, "a")), odd, chunk(says(0, "b", "stop"))) for odd in ODD]
    seen = list[list[list[str]]]()
    for wired in (False, True):
        if wired:
            recording_with(instrumentor)
        server._reply = _each(replies)
        with rollout("x") if wired else contextlib.nullcontext():
            seen.append([read(client, STREAMS[api]) for _ in replies])
    assert seen[0] == seen[1]
    assert any(len(items) == 3 for items in seen[0])


def _each(replies: list[Raw]) -> Callable[[Any], Raw]:
    left = iter(replies)
    return lambda _: next(left)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.text(max_size=4)
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("choices", "index", "delta", "content", "tool_calls", "function", "usage"),
                    *("id", "model", "role", "name", "arguments", "response", "type", "output"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
SHAPED = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "type": st.sampled_from(
            ["response.created", "response.completed", "response.output_text.delta", "error"]
        )
        | JSON,
        "response": JSON,
        "delta": JSON,
        "usage": JSON,
        "choices": JSON
        | st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "index": st.integers(0, 3) | JSON,
                    "delta": st.fixed_dictionaries(
                        {},
                        optional={
                            "content": JSON,
                            "tool_calls": st.lists(
                                st.fixed_dictionaries(
                                    {}, optional={"index": JSON, "function": JSON}
                                )
                                | JSON,
                                max_size=2,
                            ),
                            "function_call": JSON,
                        },
                    )
                    | JSON,
                    "text": JSON,
                    "finish_reason": JSON,
                },
            ),
            max_size=3,
        ),
    },
)


@pytest.mark.parametrize("instrumentor", CHOICES[:-1])
def test_any_stream_reaches_the_agent_as_without_us(instrumentor: Any, clients: Clients):
    """Streams of random JSON: the same items and the same end, with an instrumentor or without."""
    server = clients.serve()
    client = clients.sync(server)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(sorted(STREAMS)), st.lists(SHAPED | JSON, max_size=4))
    def check(api: str, events: list[Any]) -> None:
        server._reply = lambda _: sse(*events)
        otel_rollout.shutdown()
        plain = read(client, STREAMS[api])
        otel_rollout.configure("x", instrumentor=instrumentor)
        assert read(client, STREAMS[api]) == plain

    check()


@pytest.mark.parametrize("api", STREAMS)
def test_the_stream_is_the_clients_own(api: str, any_recording: Recording, clients: Clients):
    """A stream is an `openai.Stream`: usable in `with`, closed at its end, with its response."""
    client = clients.sync(clients.serve("a long enough text to stream"))
    with rollout("x"):
        stream = STREAMS[api](client)
        assert type(stream) is openai.Stream
        with stream as entered:
            assert entered is stream
            next(stream)
        assert stream.response.is_closed
    assert len(any_recording.trajectory.completions) == 1


@pytest.mark.parametrize("api", STREAMS)
def test_streams_that_are_closed_early_have_a_span(
    api: str, recording: Recording, clients: Clients
):
    """The LLM span ends when the agent closes the stream, and shows what had come."""
    client = clients.sync(clients.serve("a long enough text to stream"))
    with rollout("x"):
        stream = STREAMS[api](client)
        while "a long" not in str(next(stream)):
            pass
        stream.close()
        assert len(llm(recording)) == 1
    if api != "responses":
        assert outputs(recording)[0]["content"] == "a long e"


@pytest.mark.parametrize("api", STREAMS)
def test_streams_that_are_dropped_have_a_span(api: str, recording: Recording, clients: Clients):
    """The LLM span of a stream that nobody reads or closes ends with the stream's life."""
    client = clients.sync(clients.serve("a long enough text to stream"))
    with rollout("x"):
        stream: Any = STREAMS[api](client)
        next(stream)
        stream.response.close()
        assert llm(recording) == []
        del stream
        gc.collect()
    assert len(llm(recording)) == 1


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_async_streams_that_are_closed_early_have_a_span(
    api: str, recording: Recording, clients: Clients
):
    """The LLM span ends where `async with` does."""
    client = clients.asynchronous(clients.serve("a long enough text to stream"))
    async with rollout("x"):
        if api == "chat":
            stream: Any = await client.chat.completions.create(
                model="m", messages=USER, stream=True
            )
        else:
            stream = await client.completions.create(model="m", prompt="p", stream=True)
        assert type(stream) is openai.AsyncStream
        async with stream:
            async for _ in stream:
                break
        assert len(llm(recording)) == 1
        assert stream.response.is_closed


@pytest.mark.parametrize("api", STREAMS)
def test_an_error_within_a_stream(api: str, any_recording: Recording, clients: Clients):
    """The agent gets the client's own error, and the span names it."""
    first: Any = {"type": "response.created", "response": {"id": "r"}} if api == "responses" else {}
    error = {"error": {"message": "out of memory", "type": "server_error"}}
    client = clients.sync(clients.serve(sse(first or chunk(says(0, "a")), error)))
    with rollout("x"), pytest.raises(openai.APIError, match="out of memory"):
        list(STREAMS[api](client))
    for span in llm(any_recording):
        told = [event.attributes for event in span.events if event.name == "exception"]
        assert any(t and t["exception.message"] == "out of memory" for t in told) or (
            span.status.status_code is StatusCode.ERROR
        )


async def test_a_cancelled_call_has_a_span(recording: Recording, clients: Clients):
    """A call that is cancelled before its reply has an LLM span, which says so."""
    asked = threading.Event()

    def reply(_: Any) -> Reply:
        asked.set()
        return Reply("late", delay=60)

    client = clients.asynchronous(clients.serve(reply))
    async with rollout("x"):
        call: Any = client.chat.completions.create(model="m", messages=USER)
        task = asyncio.ensure_future(call)
        await asyncio.to_thread(asked.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (span,) = llm(recording)
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CancelledError"
    assert span.status.status_code is StatusCode.ERROR


def test_raw_streams_have_their_text(recording: Recording, clients: Clients):
    """`with_raw_response` of a stream: the LLM span lasts as long as it, and shows its text."""
    client = clients.sync(clients.serve("a long enough text to stream"))
    with rollout("x"):
        raw: Any = client.chat.completions.with_raw_response.create(
            model="m", messages=USER, stream=True
        )
        assert llm(recording) == []
        stream = raw.parse()
        assert raw.http_response.status_code == 200
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == "a long enough text to stream"
    assert outputs(recording) == [{"type": "text", "content": text}]


def test_streamed_bodies_are_not_read_ahead(any_recording: Recording, clients: Clients):
    """`with_streaming_response`: the body is the agent's to read, or not to."""
    client = clients.sync(clients.serve("text"))
    with (
        rollout("x"),
        client.chat.completions.with_streaming_response.create(model="m", messages=USER) as raw,
    ):
        assert not raw.http_response.is_stream_consumed
        assert json.loads(b"".join(raw.iter_bytes()))["choices"][0]["message"]["content"] == "text"


async def test_async_streamed_bodies_warn_of_nothing(any_recording: Recording, clients: Clients):
    """`with_streaming_response` of an async client leaves no coroutine that nobody awaits."""
    client = clients.asynchronous(clients.serve("text"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with (
            rollout("x"),
            client.chat.completions.with_streaming_response.create(model="m", messages=USER) as raw,
        ):
            assert not raw.http_response.is_stream_consumed
            body = b"".join([part async for part in raw.iter_bytes()])
        async with client.responses.with_streaming_response.create(model="m", input="p") as raw2:
            await raw2.read()
        gc.collect()
    assert json.loads(body)["choices"][0]["message"]["content"] == "text"
    assert [str(w.message) for w in caught if "never awaited" in str(w.message)] == []


# --- what the caller passed


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
    if "openai.chat" in spans:
        span = spans["openai.chat"]
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
        instrumentors._unwrap()
        OpenAIInstrumentor()


# --- secrets


KEY = "sk-proj-very-secret-0001"
SECRETS = [KEY, "tok-secret-0002", "cookie-secret-0003", "proxysecret0004", "urlsecret0005"]
SECRETS += ["custom-secret-0006"]
HEADERS = {
    "X-Api-Key": SECRETS[1],
    "Cookie": f"theme=dark; sid={SECRETS[2]}",
    "Proxy-Authorization": f"Basic {SECRETS[3]}",
    "X-Custom-Token": SECRETS[5],
    "X-Plain": "plain",
}


def assert_no_secret(spans: Any) -> None:
    assert spans
    for span in spans:
        text = span.to_json() + repr(span.events) + repr(span.status.description)
        assert [secret for secret in SECRETS if secret in text] == [], span.name


def echo(status: int) -> Raw:
    known = " ".join(set(SECRETS) - {SECRETS[4]})
    body = {"error": {"message": f"wrong {known}!", "type": "x", "code": KEY}}
    return Raw(status, json.dumps(body).encode())


ECHOES: dict[str, Raw] = {
    "plain": chat_body({"role": "assistant", "content": "ok"}),
    "401": echo(401),
    "500": echo(500),
    "200": echo(200),
    "not JSON": Raw(403, f"<html>{' '.join(SECRETS[:4])}</html>".encode(), "text/html"),
    "stream": sse(chunk(says(0, "a")), json.loads(echo(200).body)),
    "cut": Raw(200, b"", "text/event-stream", chunks=[b"data: {\n\n"]),
}


@pytest.mark.parametrize("case", ECHOES)
def test_no_secret_is_on_a_span(case: str, any_recording: Recording, clients: Clients):
    """No key, token or cookie of a request is on a span, though the server repeats them all."""
    server = clients.serve(ECHOES[case])
    address = server.base_url.replace("//", f"//user:{SECRETS[4]}@")
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    clients.closing.append(client)
    stream = case in ("stream", "cut")
    calls: list[Callable[[], Any]] = [
        lambda: client.chat.completions.create(
            model="m", messages=USER, extra_headers=HEADERS, stream=stream
        ),
        lambda: client.completions.create(
            model="m", prompt="p", extra_headers=HEADERS, stream=stream
        ),
        lambda: client.responses.create(model="m", input="p", extra_headers=HEADERS, stream=stream),
        lambda: client.embeddings.create(model="m", input="p", extra_headers=HEADERS),
        lambda: client.chat.completions.with_raw_response.create(
            model="m", messages=USER, extra_headers=HEADERS
        ),
    ]
    for call in calls:
        try:
            with rollout("x"):
                result = call()
                if stream and isinstance(result, openai.Stream):
                    list(result)
        except (openai.APIError, ValueError):
            assert case != "plain"
        gc.collect()  # openai 1.x leaves a stream that failed to the collector
    with rollout("x"), contextlib.suppress(openai.APIError):
        calls[0]()
    assert server.exchanges[0].request_headers["x-custom-token"] == SECRETS[5]
    assert_no_secret(any_recording.spans)


def test_a_key_that_cannot_be_sent_is_on_no_span(any_recording: Recording, clients: Clients):
    """A key with a line break, which the HTTP library repeats in its error, is not exported."""
    server = clients.serve()
    client = openai.OpenAI(base_url=server.base_url, api_key=KEY + "\n", max_retries=0)
    clients.closing.append(client)
    with pytest.raises(openai.APIConnectionError), rollout("x"):
        client.chat.completions.create(model="m", messages=USER)
    with pytest.raises(openai.APIConnectionError), rollout("x"):
        client.responses.create(model="m", input="p")
    assert_no_secret(any_recording.spans)


async def test_no_secret_is_on_a_span_of_async_calls(any_recording: Recording, clients: Clients):
    """The same for async calls and their streams."""
    server = clients.serve(lambda body: ECHOES["stream" if body.get("stream") else "401"])
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0)
    clients.closing.append(client)
    for stream in (False, True):
        with contextlib.suppress(openai.APIError), rollout("x"):
            result: Any = await client.chat.completions.create(
                model="m", messages=USER, extra_headers=HEADERS, stream=stream
            )
            async for _ in result:
                pass
        with contextlib.suppress(openai.APIError), rollout("x"):
            result = await client.responses.create(
                model="m", input="p", extra_headers=HEADERS, stream=stream
            )
            async for _ in result:
                pass
    assert_no_secret(any_recording.spans)


@pytest.mark.parametrize(
    ("headers", "secrets"),
    [
        ({"Authorization": f"Bearer {KEY}"}, {KEY}),
        ({"authorization": KEY}, {KEY}),
        ({"api-key": KEY, "X-Plain": "a-long-plain-value"}, {KEY}),
        ({"Cookie": "a=0123456789; b=x"}, {"a=0123456789", "0123456789"}),
        ({"X-Auth-Token": "short"}, set()),
        ({"X-Secret": None, "api-key": 7}, set()),
    ],
)
def test_what_of_headers_is_secret(headers: Any, secrets: set[str]):
    """Values of headers that sound secret, and their parts, unless too short to be told apart."""
    assert secrets_in(headers) == secrets


# --- messages


TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CUSTOM: Any = {"id": "c", "type": "custom", "custom": {"name": "code", "input": "print(1)"}}
IMAGE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": PIXEL}},
        ],
    }
]
REQUESTS: dict[str, tuple[list[Any], list[Any]]] = {
    "image": (
        IMAGE,
        [
            {"type": "text", "content": "look"},
            {
                "type": "blob",
                "modality": "image",
                "mime_type": "image/png",
                "content": PIXEL.split(",")[1],
            },
        ],
    ),
    "image without address": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": None}},
                    {"type": "image_url", "image_url": PIXEL},
                    {"type": "text", "text": "look"},
                ],
            }
        ],
        [{"type": "text", "content": "look"}],
    ),
    "custom tool": (
        [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [CUSTOM]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        [
            {"type": "text", "content": "hi"},
            {"type": "tool_call", "name": "code", "id": "c", "arguments": "print(1)"},
            {"type": "tool_call_response", "id": "c", "response": "1"},
        ],
    ),
    "tool call without parts": (
        [*USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}],
        [{"type": "text", "content": "hi"}],
    ),
    "functions": (
        [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}"},
            },
            {"role": "function", "name": "f", "content": "1"},
        ],
        [
            {"type": "text", "content": "hi"},
            {"type": "tool_call", "name": "f", "id": "f", "arguments": {}},
            {"type": "tool_call_response", "id": "f", "response": "1"},
        ],
    ),
    "refusal": (
        [*USER, {"role": "assistant", "content": None, "refusal": "never"}],
        [{"type": "text", "content": "hi"}, {"type": "refusal", "content": "never"}],
    ),
    "reasoning": (
        [*USER, {"role": "assistant", "content": "x", "reasoning_content": "because"}],
        [
            {"type": "text", "content": "hi"},
            {"type": "text", "content": "x"},
            {"type": "reasoning", "content": "because"},
        ],
    ),
    "tuples": (
        [{"role": "assistant", "content": ({"type": "text", "text": "a"},), "tool_calls": ()}],
        [{"type": "text", "content": "a"}],
    ),
    "audio": (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA=="}}]}],
        [{"type": "input_audio", "input_audio": {"data": "AA=="}}],
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_messages_of_every_shape_are_shown(
    case: str, recording: Recording, clients: Clients, swallowed: list[str]
):
    """No shape of a message costs the LLM span the conversation."""
    messages, expected = REQUESTS[case]
    with rollout("x"):
        client = clients.sync(clients.serve(ECHOES["plain"]))
        client.chat.completions.create(model="m", messages=messages)
    shown = inputs(recording)
    assert [part for part in expected if part not in shown] == []
    assert len(json.loads(attribute(recording, "gen_ai.input.messages"))) == len(messages)
    assert attribute(recording, "gen_ai.response.id") == "c-1"
    assert swallowed == []


REPLIES: dict[str, tuple[Any, list[Any]]] = {
    "custom tool": (
        {"role": "assistant", "content": None, "tool_calls": [CUSTOM]},
        [{"type": "tool_call", "name": "code", "id": "c", "arguments": "print(1)"}],
    ),
    "function": (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        [{"type": "tool_call", "name": "f", "id": "f", "arguments": {}}],
    ),
    "refusal": (
        {"role": "assistant", "content": None, "refusal": "never"},
        [{"type": "refusal", "content": "never"}],
    ),
    "audio": (
        {
            "role": "assistant",
            "content": None,
            "audio": {"id": "a", "data": "AA==", "expires_at": 1, "transcript": "hello"},
        },
        [{"type": "audio", "id": "a", "content": "hello"}],
    ),
    "reasoning": (
        {"role": "assistant", "content": "x", "reasoning": "because"},
        [{"type": "text", "content": "x"}, {"type": "reasoning", "content": "because"}],
    ),
    "nothing": ({"role": "assistant", "content": None}, []),
}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("case", REPLIES)
def test_replies_of_every_shape_are_shown(
    case: str, raw: bool, recording: Recording, clients: Clients, swallowed: list[str]
):
    """No shape of a reply costs the LLM span what was said, nor its usage."""
    message, expected = REPLIES[case]
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    usage |= {"prompt_tokens_details": None, "completion_tokens_details": None}
    client = clients.sync(clients.serve(chat_body(message, usage=usage, error=None)))
    chat: Any = client.chat.completions
    with rollout("x"):
        (chat.with_raw_response if raw else chat).create(model="m", messages=USER)
    assert outputs(recording) == expected
    assert attribute(recording, "gen_ai.usage.output_tokens") == 2
    assert llm(recording)[0].status.status_code is not StatusCode.ERROR
    assert swallowed == []


def test_streamed_replies_are_shown(recording: Recording, clients: Clients, swallowed: list[str]):
    """Tool calls of any kind and order, refusals and reasoning of a stream are shown."""
    calls = [
        {"index": 1, "id": "b", "type": "custom", "custom": {"name": "code", "input": "1"}},
        {"id": "c", "function": {"name": "g", "arguments": "{}"}},
        {"function": {"arguments": " "}},
    ]
    reply = sse(
        chunk(says(0, None, role="assistant", reasoning="because")),
        chunk(says(0, None, tool_calls=calls)),
        chunk(says(0, None, "stop", refusal="never")),
        {**chunk(usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}), "id": ""},
    )
    with rollout("x"):
        list(STREAMS["chat"](clients.sync(clients.serve(reply))))
    shown = outputs(recording)
    assert {"type": "text", "content": "never"} in shown
    assert {"type": "reasoning", "content": "because"} in shown
    named = [(part["id"], part["name"]) for part in shown if part["type"] == "tool_call"]
    assert named == [("", ""), ("b", "code"), ("c", "g")]
    assert attribute(recording, "gen_ai.response.id") == "c-1"
    assert attribute(recording, "gen_ai.usage.output_tokens") == 2
    assert swallowed == []


def test_token_ids_as_prompt_are_not_shown_one_by_one(recording: Recording, clients: Clients):
    """A prompt of token ids is one line for people."""
    with rollout("x"):
        client = clients.sync(clients.serve("ok"))
        client.completions.create(model="m", prompt=list(range(100)))
    assert inputs(recording) == [{"type": "text", "content": "(100 token ids)"}]


def test_unset_arguments_are_not_attributes(
    any_recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
):
    """What the client's own helpers leave unset is neither an attribute nor a warning."""
    client = clients.sync(clients.serve("ok"))
    with rollout("x"):
        chat = client.chat.completions
        chat = chat if hasattr(chat, "stream") else client.beta.chat.completions  # before 1.92
        with chat.stream(model="m", messages=USER) as stream:
            assert stream.get_final_completion().choices[0].message.content == "ok"
        client.responses.create(model="m", input="p", reasoning=None)
    assert [record.getMessage() for record in caplog.records] == []
    for span in llm(any_recording):
        assert None not in (span.attributes or {}).values()
    assert len(llm(any_recording)) in ((0, 2) if DRAWS_RESPONSES else (0, 1))


# --- the Responses API


@pytest.mark.skipif(not DRAWS_RESPONSES, reason="draws none of them")
def test_responses_are_not_kept(recording: Recording, clients: Clients):
    """The instrumentor keeps nothing of a response that is complete, and each has its span."""
    body = response_body(id="resp-same", status="completed")
    client = clients.sync(clients.serve(Raw(200, json.dumps(body).encode())))
    with rollout("x"):
        for text in ("a", "b", "c"):
            client.responses.create(model="m", input=text)
        list(client.responses.create(model="m", input="d", stream=True))
    assert kept_responses().responses == {}
    spans = [span for span in llm(recording) if "gen_ai.input.messages" in (span.attributes or {})]
    shown = [json.loads(str((span.attributes or {})["gen_ai.input.messages"])) for span in spans]
    assert [message[0]["parts"][0]["content"] for message in shown][:3] == ["a", "b", "c"]
    starts = [span.start_time or 0 for span in spans]
    assert len(set(starts)) == len(starts)


def response_body(**fields: Any) -> dict[str, Any]:
    text = {"type": "output_text", "text": "ok", "annotations": []}
    message = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed"}
    return {
        "id": "r-1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": [{**message, "content": [text]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
        **fields,
    }


def test_pending_responses_are_bounded(recording: Recording):
    """Responses that are queued are kept for whoever comes back, but not without end."""
    pending = kept_responses().responses
    for number in range(5000):
        pending[f"r-{number}"] = kept_responses().TracedData(
            start_time=1, response_id=f"r-{number}", input="x", response_status="queued"
        )
    assert len(pending) <= 1000
    assert "r-4999" in pending
    assert "r-0" not in pending


@pytest.mark.parametrize(
    "odd",
    [
        response_body(output=None),
        response_body(output=[{"type": "unknown"}], usage={"input_tokens": None}),
        response_body(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        {"id": None},
        {},
    ],
)
def test_odd_responses_reach_the_agent(odd: Any, any_recording: Recording, clients: Clients):
    """A response of an odd shape is the client's own result, not the instrumentor's error."""
    client = clients.sync(clients.serve(Raw(200, json.dumps(odd).encode())))
    with rollout("x"):
        tools: Any = [{"type": "function", "name": "f"}]
        response = client.responses.create(model="m", input="p", tools=tools)
    assert getattr(response, "id", None) == odd.get("id")
    assert len(any_recording.trajectories) == 1


# --- once, and undone


def theirs(provider: TracerProvider | None = None) -> InMemorySpanExporter:
    """A user's own use of the instrumentor."""
    spans = InMemorySpanExporter()
    provider = provider or TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    return spans


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Take out what a test's user put in."""
    yield
    otel_rollout.shutdown()
    OpenAIInstrumentor().uninstrument()
    instrumentors._unwrap()
    assert list(instrumentors._wrapped_methods()) == []


def ask(clients: Clients) -> None:
    client = clients.sync(clients.serve())
    client.chat.completions.create(model="m", messages=USER)
    list(client.chat.completions.create(model="m", messages=USER, stream=True))
    client.embeddings.create(model="m", input="p")


@pytest.mark.usefixtures("nothing_left")
def test_a_users_instrumentation_is_left(clients: Clients):
    """Who instrumented before us has one span for each call, before, during and after."""
    spans = theirs()
    method = vars(openai.resources.chat.completions.Completions)["create"]
    for _ in range(2):
        ask(clients)
        assert len(spans.get_finished_spans()) == 3
        spans.clear()
        recording = recording_with("openai")
        with rollout("x"):
            ask(clients)
        assert len(spans.get_finished_spans()) == 3
        assert llm(recording) == []
        spans.clear()
        otel_rollout.shutdown()
        assert vars(openai.resources.chat.completions.Completions)["create"] is method


@pytest.mark.usefixtures("nothing_left")
def test_a_user_who_instruments_after_us(clients: Clients, caplog: pytest.LogCaptureFixture):
    """Instrumenting again adds no second span, and images are still shown."""
    recording = recording_with("openai")
    OpenAIInstrumentor().instrument()
    with rollout("x"):
        ask(clients)
        clients.sync(clients.serve()).chat.completions.create(model="m", messages=IMAGE)
    assert len(llm(recording)) == 4
    shown = llm(recording)[-1].attributes or {}
    assert "blob" in str(shown.get("gen_ai.input.messages"))


@pytest.mark.usefixtures("nothing_left")
def test_a_user_who_takes_our_instrumentation_out(clients: Clients):
    """`uninstrument()` works, and what is instrumented then is theirs, guarded, and left."""
    recording = recording_with("openai")
    OpenAIInstrumentor().uninstrument()
    with rollout("x"):
        ask(clients)
    assert llm(recording) == []
    spans = theirs()
    headers = {"X-Mine": "1"}
    client = clients.sync(clients.serve(EARLY))
    with rollout("x"):
        list(
            client.chat.completions.create(
                model="m", messages=USER, stream=True, extra_headers=headers
            )
        )
    assert len(spans.get_finished_spans()) == 1
    assert headers == {"X-Mine": "1"}
    otel_rollout.shutdown()
    ask(clients)
    assert len(spans.get_finished_spans()) == 4


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("times", [1, 2])
def test_a_user_who_had_instrumented_and_stopped(times: int, clients: Clients):
    """Wrappers that the instrumentor's own `uninstrument` left in place draw no second span."""
    old = list[InMemorySpanExporter]()
    for _ in range(times):
        old.append(theirs())
        OpenAIInstrumentor().uninstrument()
    recording = recording_with("openai")
    with rollout("x"):
        ask(clients)
    assert len(llm(recording)) == 3
    assert [spans.get_finished_spans() for spans in old] == [()] * times


@pytest.mark.usefixtures("nothing_left")
def test_what_a_user_instrumented_twice_is_drawn_once(clients: Clients):
    """Two layers of a user's, of which one was meant to be gone, are one while we are there."""
    old = theirs()
    OpenAIInstrumentor().uninstrument()
    spans = theirs()
    recording_with("openai")
    with rollout("x"):
        ask(clients)
    assert (len(old.get_finished_spans()), len(spans.get_finished_spans())) == (0, 3)


@pytest.mark.parametrize("instrumentor", CHOICES)
def test_everything_is_undone(instrumentor: Any, clients: Clients):
    """After shutdown nothing is left in the client, the instrumentors or the environment."""
    chat = sys.modules["opentelemetry.instrumentation.openai.shared.chat_wrappers"]
    v1: Any = sys.modules["opentelemetry.instrumentation.openai.v1"].OpenAIV1Instrumentor

    def state() -> list[Any]:
        classes = [
            openai.resources.chat.completions.Completions,
            openai.resources.chat.completions.AsyncCompletions,
            openai.resources.completions.Completions,
            openai.resources.responses.Responses,
            openai.resources.embeddings.Embeddings,
        ]
        return [
            *(value for owner in classes for value in vars(owner).values()),
            *(vars(chat)["run_async"], vars(v1)["_instrument"], vars(v1)["_uninstrument"]),
            kept_responses().responses,
            os.environ.get(CONTENT),
        ]

    before = state()
    client = clients.sync(clients.serve())
    for _ in range(2):
        recording = recording_with(instrumentor)
        raw = client.chat.completions.with_raw_response
        raw.create(model="m", messages=USER)
        otel_rollout.shutdown()
        assert all(a is b for a, b in zip(before, state(), strict=True))
        count = len(recording.spans)
        raw.create(model="m", messages=USER)
        client.chat.completions.create(model="m", messages=USER)
        assert len(recording.spans) == count
    assert list(instrumentors._wrapped_methods()) == []


# --- the choice


def agent(client: openai.OpenAI) -> None:
    """A little of everything."""
    messages: list[Any] = [*USER]
    reply: Any = client.chat.completions.create(
        model="m", messages=messages, tools=[TOOL], extra_body={"top_k": 5}
    )
    messages.append(reply.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": "t", "content": "1"})
    list(client.chat.completions.create(model="m", messages=messages, stream=True))
    client.completions.create(model="m", prompt="p")
    client.responses.create(model="m", input="p")
    list(client.responses.create(model="m", input="p", stream=True))
    client.embeddings.create(model="m", input="p")


def comparable(trajectory: Trajectory) -> Any:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: without(item)
                for name, item in value.items()
                if not name.endswith(("time_ns", "span_id", "trace_id"))
                and not (name == "id" and item == trajectory.id)
                and name not in ("started", "ended", "process")
            }
        return [without(item) for item in value] if isinstance(value, list) else value

    return without(trajectory.to_dict())


def test_trajectories_do_not_depend_on_the_instrumentor(clients: Clients):
    """The same agent has equal trajectories under all three, and each its own LLM spans."""
    found, names = list[Any](), dict[Any, list[str]]()
    for instrumentor in CHOICES:
        replies = [Reply(tool_calls=[ToolCall("f", "{}", "t")]), *["fine"] * 4]
        client = clients.sync(clients.serve(replies))
        recording = recording_with(instrumentor)
        with rollout("x"):
            agent(client)
        found.append(comparable(recording.trajectory))
        names[instrumentor] = [span.name for span in llm(recording)]
        assert len(recording.spans_named("exchange")) == 6
        otel_rollout.shutdown()
    assert all(trajectory == found[0] for trajectory in found)
    expected: dict[Any, list[str]] = {
        "openai": [
            *("openai.chat", "openai.chat", "openai.completion"),
            *("openai.response", "openai.response", "openai.embeddings"),
        ],
        "genai": ["chat m", "chat m", "chat m", "chat m", "embeddings m"],
        None: [],
    }
    if not DRAWS_RESPONSES:
        expected["openai"].remove("openai.response")
    assert names == {name: expected[name] for name in CHOICES}


@needs_genai
def test_genai_shows_messages(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """With "genai" messages are on the LLM spans, unless the user's environment says otherwise."""
    client = clients.sync(clients.serve("fine"))
    recording = recording_with("genai")
    with rollout("x"):
        client.chat.completions.create(model="m", messages=USER)
    assert inputs(recording)[0]["content"] == "hi"
    assert outputs(recording)[0]["content"] == "fine"
    otel_rollout.shutdown()
    monkeypatch.setenv(CONTENT, "no_content")
    recording = recording_with("genai")
    with rollout("x"):
        client.chat.completions.create(model="m", messages=USER)
    assert attribute(recording, "gen_ai.input.messages") is None
    otel_rollout.shutdown()
    assert os.environ[CONTENT] == "no_content"


def test_genai_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, clients: Clients):
    """Without its package "genai" is refused, with what to install; nothing is half done."""
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.genai.openai", None)
    with pytest.raises(ConfigurationError, match=r"pip install --pre 'otel-rollout\[genai\]'"):
        otel_rollout.configure(instrumentor="genai")
    assert list(instrumentors._wrapped_methods()) == []
    assert not hasattr(openai._base_client.SyncAPIClient.request, "_self_wrapper")


@needs_genai
def test_no_second_instrumentor_is_added(clients: Clients):
    """Where a user's "genai" instruments already, the default adds nothing, and leaves it."""
    from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor as GenAI

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    GenAI().instrument(tracer_provider=provider)
    try:
        recording = recording_with("openai")
        with rollout("x"):
            ask(clients)
        assert llm(recording) == []
        otel_rollout.shutdown()
        ask(clients)
        assert len(spans.get_finished_spans()) == 6
    finally:
        GenAI().uninstrument()


# --- the guard itself


def test_a_broken_instrumentor_is_not_noticed(
    recording: Recording, clients: Clients, swallowed: list[str]
):
    """Whatever a wrapper raises, before the call or after it, the call is made once."""
    server = clients.serve("fine")
    client = clients.sync(server)
    guard = vars(openai.resources.chat.completions.Completions)["create"]._self_wrapper
    real = guard._wrapper
    for broken in (
        lambda *_: 1 / 0,
        lambda wrapped, _, args, kwargs: (wrapped(*args, **kwargs), 1 / 0),
        lambda *_: None,
        lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs) and None,
    ):
        guard._wrapper = broken
        server.clear()
        for stream in (False, True):
            reply: Any = client.chat.completions.create(model="m", messages=USER, stream=stream)
            assert (len(list(reply)) > 1) if stream else reply.choices
        assert len(server.exchanges) == 2
    guard._wrapper = real
    assert swallowed


def test_an_interrupt_within_the_instrumentor_is_the_users(recording: Recording, clients: Clients):
    """What is no fault of the instrumentor's, a key that is pressed, is not swallowed."""
    client = clients.sync(clients.serve("fine"))
    guard = vars(openai.resources.chat.completions.Completions)["create"]._self_wrapper
    real = guard._wrapper

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    guard._wrapper = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            client.chat.completions.create(model="m", messages=USER)
    finally:
        guard._wrapper = real


def test_nothing_is_kept_of_a_call(any_recording: Recording, clients: Clients):
    """A reply, an error and a stream are let go when the caller lets them go."""
    client = clients.sync(clients.serve("fine"))
    refused = clients.sync(clients.serve(Raw(400, b"{}")))

    class Marker(dict[str, Any]):
        pass

    marker = Marker(role="user", content="hi")
    alive = weakref.ref(marker)
    client.chat.completions.create(model="m", messages=[marker])  # type: ignore[list-item]
    list(client.chat.completions.create(model="m", messages=[marker], stream=True))  # type: ignore
    with pytest.raises(openai.BadRequestError):
        refused.chat.completions.create(model="m", messages=[marker])  # type: ignore[list-item]
    del marker
    gc.collect()
    assert alive() is None


def test_signatures_are_the_clients(any_recording: Recording):
    """`inspect` sees the client's own signatures."""
    create = openai.resources.chat.completions.Completions.create
    assert "messages" in inspect.signature(create).parameters
