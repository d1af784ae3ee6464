"""Which calls are captured, and as children of which spans."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, no_capture, rollout
from otel_rollout.testing import Reply
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.calling import BOTH, STREAMED, Caller, Configure, done
from tests.kit.comparing import exchange_spans, received, replayed, replays
from tests.kit.conversations import ASK, chat
from tests.kit.recording import Clients, Recording


@BOTH
@STREAMED
async def test_nothing_is_captured_outside_rollouts(
    recording: Recording, clients: Clients, caller: Caller, stream: bool
) -> None:
    """A call outside of a rollout, or inside `no_capture()`, leaves no exchange."""
    server = clients.serve("Paris")
    options = {"stream": True} if stream else {}

    async def script(client: Any) -> None:
        await chat(client, **options)
        with rollout("agent"), no_capture():
            await chat(client, **options)
        await chat(client, **options)

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert (trajectory.exchanges, trajectory.warnings) == ([], [NO_CALL.words])
    assert exchange_spans(recording) == []
    assert len(recording.spans_named("chat ")) == 3


@BOTH
@STREAMED
async def test_parents(
    recording: Recording, clients: Clients, caller: Caller, stream: bool
) -> None:
    """The exchange span is a child of the LLM span, which is a child of the rollout's."""
    server = clients.serve("Paris")

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client, **({"stream": True} if stream else {}))

    await caller.run(script(caller.client(clients, server)))
    replayed(recording)
    (llm,) = recording.spans_named("chat ")
    (outer,) = recording.spans_named("invoke_agent agent")
    (exchange,) = exchange_spans(recording)
    assert exchange.name == "recording /chat/completions"
    assert exchange.parent is not None
    assert llm.parent is not None
    assert exchange.parent.span_id == llm.context.span_id
    assert llm.parent.span_id == outer.context.span_id
    assert outer.parent is None
    assert {s.context.trace_id for s in recording.spans} == {outer.context.trace_id}
    # The current span of the HTTP layer, so of its instrumentations and of `traceparent`.
    assert trace.get_current_span() is trace.INVALID_SPAN


@BOTH
async def test_parents_without_an_instrumentation(
    capture_only: Configure, clients: Clients, caller: Caller
) -> None:
    """With `instrumentor=None` the exchange span is a child of the rollout's."""
    recording = capture_only()
    server = clients.serve("Paris")

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client)

    await caller.run(script(caller.client(clients, server)))
    assert replayed(recording).warnings == []
    (outer,) = recording.spans_named("invoke_agent")
    (exchange,) = exchange_spans(recording)
    assert exchange.parent is not None
    assert exchange.parent.span_id == outer.context.span_id
    assert len(recording.spans) == 2


@BOTH
async def test_clients_made_before_and_after(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """It does not matter whether a client, or a bound method of it, is older than configure()."""
    server = clients.serve("Paris")
    old = caller.client(clients, server)
    create = old.chat.completions.create  # a method that was bound before
    recording = configure()
    new = caller.client(clients, server)

    async def script() -> None:
        with rollout("agent"):
            await done(create(model="old", messages=ASK))
            await chat(old, model="old")
            await chat(new, model="new")

    await caller.run(script())
    models = [completion.request_model for completion in replayed(recording).completions]
    assert models == ["old", "old", "new"]


@BOTH
async def test_a_provider_that_samples_nothing(clients: Clients, caller: Caller) -> None:
    """Training does not sample: what the user's sampler drops is captured all the same."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    exporter, span_exporter = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    otel_rollout.configure(tracer_provider=provider, exporters=[exporter])
    server = clients.serve("Paris")

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client)

    await caller.run(script(caller.client(clients, server)))
    (trajectory,) = exporter.get_finished_trajectories()
    (completion,) = trajectory.completions
    assert completion.response == received(server.exchanges[0])
    assert span_exporter.get_finished_spans() == ()


@pytest.mark.slow
async def test_concurrent_rollouts_do_not_mix(recording: Recording, clients: Clients) -> None:
    """Calls of rollouts that run at once, over one client, stay with the rollout that made them."""
    server = clients.serve(lambda body: Reply(body["model"], chunk_delay=0.002))
    client = clients.asynchronous(server)

    async def agent(name: str) -> None:
        async with rollout(name):
            calls = (chat(client, model=name, stream=bool(i % 2)) for i in range(4))
            await asyncio.gather(*calls)

    await asyncio.gather(*(agent(f"agent-{i}") for i in range(8)))
    trajectories = replays(recording)
    assert sorted(t.name for t in trajectories) == [f"agent-{i}" for i in range(8)]
    for trajectory in trajectories:
        assert trajectory.warnings == []
        said = [c.message["content"] for c in trajectory.completions if c.message]
        assert said == [trajectory.name] * 4
