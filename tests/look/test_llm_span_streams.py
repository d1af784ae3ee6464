"""LLM spans of streams: the agent reads what it would without us; each stream has a span."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

import otel_rollout
from otel_rollout import rollout
from otel_rollout.testing import Raw, Reply
from tests.kit.recording import Clients, Recording
from tests.look.llm_spans import (
    CHOICES,
    EARLY,
    STREAMS,
    USER,
    chunk,
    llm,
    outputs,
    recording_with,
    says,
    sse,
)

pytestmark = pytest.mark.slow


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
        closed = time.time_ns()
    (span,) = llm(recording)
    assert (span.end_time or 0) <= closed
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
        assert stream.response.is_closed
        closed = time.time_ns()
    (span,) = llm(recording)
    assert (span.end_time or 0) <= closed


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
