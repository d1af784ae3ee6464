"""Instrumentors are put in once and taken out whole, and nobody notices when one fails."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import openai._base_client
import pytest
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import ConfigurationError, Trajectory, rollout
from otel_rollout.look import instrumentors
from otel_rollout.testing import Raw, Reply, ToolCall
from tests.kit.recording import Clients, Recording
from tests.look.llm_spans import (
    CHOICES,
    EARLY,
    GENAI,
    IMAGE,
    TOOL,
    USER,
    attribute,
    inputs,
    kept_responses,
    llm,
    outputs,
    recording_with,
    theirs,
)

needs_genai = pytest.mark.skipif(not GENAI, reason="needs the extra genai")
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Take out what a test's user put in."""
    yield
    otel_rollout.shutdown()
    OpenAIInstrumentor().uninstrument()
    instrumentors.unwrap()
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
    ask(clients)
    assert llm(recording) == []
    with rollout("x"):
        ask(clients)
    assert [span.name for span in llm(recording)] == ["chat m"] * 2  # ours
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
        assert len(recording.spans_named("recording")) == 6
        otel_rollout.shutdown()
    assert all(trajectory == found[0] for trajectory in found)
    expected: dict[Any, list[str]] = {
        "openai": [
            *("chat m", "chat m", "text_completion m"),
            *("chat m", "chat m", "embeddings m"),
        ],
        None: [],
    }
    expected["genai"] = expected["openai"]
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
    with pytest.raises(ConfigurationError, match=r"dist 'otel-rollout\[genai\]' --pre"):
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
