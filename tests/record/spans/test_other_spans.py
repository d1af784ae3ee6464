"""LLM spans of frameworks in a rollout: one without a captured call under it is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import no_capture, rollout
from otel_rollout import semconv as sc
from otel_rollout.record.current import rollout_of
from otel_rollout.record.transports.uncaptured import note_uncaptured
from tests.kit.conversations import user
from tests.kit.played import ask
from tests.kit.recording import Clients, Recording

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gemini"}


def tracer(recording: Recording, name: str = "strands") -> trace.Tracer:
    return recording.provider.get_tracer(name)


def counted(count: int = 1, library: str = "strands", name: str = "chat gemini") -> str:
    requests, were = ("requests", "were") if count > 1 else ("request", "was")
    return f"{count} {requests} to {name} went through {library} and {were} not captured"


@pytest.mark.parametrize(
    "attributes",
    [
        CHAT,
        {"gen_ai.operation.name": "generate_content"},
        {"gen_ai.operation.name": "embeddings"},
        {"openinference.span.kind": "LLM"},
        {"llm.request.type": "chat"},
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_went_by_is_counted(recording: Recording, attributes: Any, late: bool):
    """The framework says that it called a model, and nothing of it was captured."""
    with rollout("agent") as trajectory:
        for _ in range(2):
            with tracer(recording).start_as_current_span("invoke_agent x"):
                given = {} if late else attributes
                with tracer(recording).start_as_current_span("chat gemini", attributes=given) as s:
                    s.set_attributes(attributes)
    assert trajectory.warnings == trajectory.missing_calls == [counted(2)]


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_a_captured_call_is_not(recording: Recording, clients: Clients, current: bool, deep: bool):
    """Whether the span is made current or not, and whatever lies between."""
    client = clients.sync(clients.serve(["a", "b"]))
    framework = tracer(recording)
    with rollout("agent") as trajectory:
        for _ in range(2):
            span = framework.start_span("chat gemini", attributes=CHAT)
            with trace.use_span(span if current else trace.get_current_span(), end_on_exit=False):
                if deep:
                    with framework.start_as_current_span("HTTP"):
                        ask(client, user("a"))
                else:
                    ask(client, user("a"))
            span.end()
    assert trajectory.warnings == []
    assert len(trajectory.completions) == 2


def test_one_of_each(recording: Recording, clients: Clients):
    """One call is captured, the next is not."""
    client = clients.sync(clients.serve("a"))
    framework = tracer(recording)
    with rollout("agent") as trajectory:
        with framework.start_as_current_span("chat gpt", attributes=CHAT):
            ask(client, user("a"))
        with framework.start_as_current_span("chat gemini", attributes=CHAT):
            pass
    assert trajectory.missing_calls == [counted()]


async def test_at_once(recording: Recording, clients: Clients):
    """Also where one framework makes both at the same time."""
    client = clients.asynchronous(clients.serve("a"))
    framework = tracer(recording)

    async def captured() -> None:
        with framework.start_as_current_span("chat gpt", attributes=CHAT):
            await client.chat.completions.create(model="m", messages=[user("a")])

    async def not_captured() -> None:
        with framework.start_as_current_span("chat gemini", attributes=CHAT):
            await asyncio.sleep(0.3)

    with rollout("agent") as trajectory:
        await asyncio.gather(captured(), not_captured())
    assert trajectory.missing_calls == [counted()]


def test_one_call_is_counted_once(recording: Recording):
    """Two libraries may draw it, or the request may have been seen under the span."""
    with rollout("agent") as trajectory:
        with (
            tracer(recording).start_as_current_span("chat gemini", attributes=CHAT),
            tracer(recording, "google").start_as_current_span("generate", attributes=CHAT),
        ):
            pass
        with tracer(recording).start_as_current_span("chat gemini", attributes=CHAT):
            active = rollout_of(None)
            assert active is not None
            note_uncaptured(active, "google-genai (httpx)", "/v1beta/models/gemini")
    assert trajectory.missing_calls == [
        counted(1, "google", "generate"),
        counted(1, "google-genai (httpx)", "/v1beta/models/gemini"),
    ]


def test_what_is_no_missing_call(recording: Recording, clients: Clients):
    """Outside a rollout, under no_capture, failed, a tool, an agent, a rollout's own calls."""
    client = clients.sync(clients.serve(["a", "b"]))
    framework = tracer(recording)
    with framework.start_as_current_span("chat gemini", attributes=CHAT):
        pass
    with rollout("agent") as trajectory:
        ask(client, user("a"))
        with no_capture(), framework.start_as_current_span("chat gemini", attributes=CHAT):
            pass
        with pytest.raises(OSError), framework.start_as_current_span("chat", attributes=CHAT):
            raise OSError
        with framework.start_as_current_span("x", attributes={"gen_ai.operation.name": "plan"}):
            pass
        with (
            framework.start_as_current_span("chat gemini", attributes=CHAT),
            rollout("inner") as inner,
        ):
            ask(client, user("a"))
        left_open = framework.start_span("chat gemini", attributes=CHAT)
    left_open.end()
    assert trajectory.warnings == inner.warnings == []


async def test_a_span_that_ends_elsewhere(recording: Recording):
    """A stream's span ends where the stream does, maybe outside of the rollout's context."""
    framework = tracer(recording)
    with rollout("agent") as trajectory:
        span = framework.start_span("chat gemini", attributes=CHAT)

        def end() -> None:
            span.end()

        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, end)
    assert trajectory.missing_calls == [counted()]


def test_nothing_stays(recording: Recording):
    """Spans that never end leave nothing in the processor."""
    with rollout("agent"):
        tracer(recording).start_span("chat gemini", attributes=CHAT)
    from otel_rollout.record import TrajectorySpanProcessor

    (processor,) = [
        p
        for p in recording.provider._active_span_processor._span_processors
        if isinstance(p, TrajectorySpanProcessor)
    ]
    assert processor._others == {}


def test_several_libraries_draw_a_captured_call(recording: Recording, clients: Clients):
    """Two from callbacks, whose spans are not current, and the client itself, inside its call."""
    client = clients.sync(clients.serve("a"))
    with rollout("agent") as trajectory:
        spans = [
            tracer(recording, name).start_span("chat", attributes=CHAT) for name in ("one", "two")
        ]
        active = rollout_of(None)
        assert active is not None
        with client.chat.completions.with_streaming_response.create(
            model="m",
            messages=[user("a")],
        ) as reply:
            with tracer(recording, "client").start_as_current_span("create", attributes=CHAT):
                pass
            reply.read()
        for span in spans:
            span.end()
        with tracer(recording, "one").start_as_current_span("chat gemini", attributes=CHAT):
            pass
    assert trajectory.missing_calls == [counted(1, "one")]


def marked(recording: Recording) -> dict[str, bool]:
    """Whether each span says that an exchange span has its call, by name."""
    return {
        span.name: (span.attributes or {}).get(sc.HAS_EXCHANGE) is True for span in recording.spans
    }


@pytest.mark.parametrize("late", [False, True])
def test_a_span_of_a_captured_call_says_so(recording: Recording, clients: Clients, late: bool):
    """All that draw the call, whenever they say what they are; and no span of another kind."""
    client = clients.sync(clients.serve(["a", "b"]))
    framework = tracer(recording)
    given = {} if late else CHAT
    with rollout("agent"), framework.start_as_current_span("chain"):
        with framework.start_as_current_span("captured", attributes=given) as span:
            span.set_attributes(CHAT)
            ask(client, user("a"))
        with framework.start_as_current_span("not captured", attributes=given) as span:
            span.set_attributes(CHAT)
        ask(client, user("a"))  # drawn by the instrumentor
    spans = marked(recording)
    assert spans["captured"]
    assert not spans["not captured"]
    assert not spans["chain"]
    assert sum(spans.values()) == 2


def test_a_call_that_is_not_exported_is_not_marked(clients: Clients):
    """Without content no exchange span is exported: no other span has the call."""
    memory = InMemorySpanExporter()
    provider = otel_rollout.configure("tests", content="none")
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with rollout("agent"):
        ask(clients.sync(clients.serve("a")), user("a"))
    otel_rollout.shutdown()
    spans = memory.get_finished_spans()
    assert len(spans) == 2
    assert not any(sc.HAS_EXCHANGE in (span.attributes or {}) for span in spans)
