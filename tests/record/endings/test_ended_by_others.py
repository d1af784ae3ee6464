"""Streams and rollouts that another task, the garbage collector or another context ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import threading
from collections.abc import Generator
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, get_current_trajectory, rollout
from tests.kit.calling import BOTH, Caller, done, read
from tests.kit.comparing import attribute, exchange_spans, replayed
from tests.kit.conversations import ASK, chat
from tests.kit.ending import SLOW, TEXT, collect_garbage, ended, open_stream, said
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow

# --- streams that somebody else ends


async def test_a_stream_that_another_task_closes(recording: Recording, clients: Clients) -> None:
    """A stream may be opened in one task, read in a second and closed in a third."""
    client = clients.asynchronous(clients.serve(SLOW))
    async with rollout("agent") as trajectory:
        stream = await asyncio.create_task(open_stream(client))
        await asyncio.create_task(read(stream, 3))
        await asyncio.create_task(stream.close())
        assert [c.status for c in trajectory.completions] == ["abandoned"]
    assert TEXT.startswith(said(ended(recording, "abandoned")[1]))


class Node:
    """Something that holds a stream and itself."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.itself = self


class Collecting(SpanProcessor):
    """Collects garbage where a span ends, as the interpreter may anywhere; it is not reentrant."""

    def __init__(self) -> None:
        self.inside = threading.Lock()
        self.reentered: list[str] = []

    def on_end(self, span: ReadableSpan) -> None:
        if not self.inside.acquire(blocking=False):
            self.reentered.append(span.name)
            return
        try:
            gc.collect()
        finally:
            self.inside.release()


@BOTH
@pytest.mark.parametrize("count", [0, 2], ids=["never read", "left"])
async def test_the_garbage_collector_ends_no_span_inside_another(
    recording: Recording, clients: Clients, caller: Caller, count: int
) -> None:
    """A stream in a reference cycle is collected anywhere, also under a lock of an exporter."""
    collecting = Collecting()
    recording.provider.add_span_processor(collecting)

    async def script(client: Any) -> None:
        with rollout("agent") as trajectory:
            stream = await open_stream(client)
            if count:
                await read(stream, count)
            Node(stream)
            del stream
            await chat(client)
            assert len(trajectory.completions) >= 1
            await chat(client)

    await caller.run(script(caller.client(clients, clients.serve(SLOW))))
    await collect_garbage()
    ours = [name for name in collecting.reentered if name.startswith(("recording", "invoke"))]
    assert ours == []
    trajectory = replayed(recording)
    assert [c.status for c in trajectory.completions] == ["abandoned", "complete", "complete"]
    assert [c.trainable for c in trajectory.completions] == [False, True, True]


@BOTH
async def test_a_stream_of_a_late_call_ends_too(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """A stream that was opened after its rollout and dropped has ended when the lane is flushed."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            context = contextvars.copy_context()
        create = functools.partial(client.chat.completions.create, model="m", messages=ASK)
        if caller.sync:
            stream = context.run(create, stream=True)
        else:
            stream = await context.run(asyncio.ensure_future, create(stream=True))
        await read(stream, 1)
        await done(stream.close())

    await caller.run(script(caller.client(clients, clients.serve(SLOW))))
    await collect_garbage()
    assert recording.provider.force_flush()
    (span,) = exchange_spans(recording)
    assert attribute(span, "status") == "abandoned"
    assert attribute(span, "late")
    assert span.end_time is not None
    assert replayed(recording).completions == []


class Never:
    """What never comes."""

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self


class Drive:
    """Run a coroutine in a context of its own, as far as to where it waits for what never comes."""

    def __init__(self, coroutine: Any) -> None:
        self.coroutine = coroutine
        self.context = contextvars.copy_context()

    def __await__(self) -> Generator[Any, Any, Any]:
        while not isinstance(waits_for := self.context.run(self.coroutine.send, None), Never):
            yield waits_for


@pytest.mark.parametrize("dropped", [False, True], ids=["closed", "dropped"])
async def test_a_call_that_is_closed_in_another_context(clients: Clients, dropped: bool) -> None:
    """A coroutine that is closed from outside, as a loop at its end does, leaves its call."""
    exporter, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    # The instrumentor complains about the context by itself.
    provider = otel_rollout.configure(exporters=[exporter], instrumentor=None)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    recording = Recording(provider, exporter, spans)

    async def hang(_: Any) -> None:
        await Never()

    hooked = openai.DefaultAsyncHttpxClient(event_hooks={"request": [hang]})
    client = clients.asynchronous(clients.serve(), http_client=hooked)

    async def agent() -> None:
        async with rollout("agent"):
            await chat(client)

    coroutine = agent()
    await Drive(coroutine)
    if not dropped:
        coroutine.close()
    del coroutine
    await collect_garbage()
    trajectory, completion = ended(recording, "abandoned")
    assert trajectory.status == "cancelled"
    assert completion.request_messages == ASK


async def test_a_loop_that_ends_with_an_open_stream(recording: Recording, clients: Clients) -> None:
    """`asyncio.run` ends over a stream that was left: it is abandoned, and nothing complains."""
    server = clients.serve(SLOW)
    held: list[Any] = []

    async def agent() -> None:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k" * 20)
        with rollout("agent"):
            stream = await open_stream(client)
            await read(stream, 3)
        held.append(stream)
        await client.close()

    await asyncio.to_thread(asyncio.run, agent())
    held.clear()
    gc.collect()
    _, completion = ended(recording, "abandoned")
    assert len(said(completion)) >= 16


# --- rollouts that somebody else ends


async def test_a_scope_that_is_left_in_another_context(
    recording: Recording, clients: Clients
) -> None:
    """Frameworks enter and leave a scope in different tasks: it is one rollout all the same."""
    client = clients.asynchronous(clients.serve("Paris"))
    stack = contextlib.AsyncExitStack()
    closing: list[asyncio.Task[None]] = []

    async def enter() -> None:
        await stack.enter_async_context(rollout("agent"))
        await chat(client)
        closing.append(asyncio.create_task(stack.aclose()))

    await asyncio.create_task(enter())
    await closing[0]
    assert [said(c) for c in replayed(recording).completions] == ["Paris"]
    with pytest.raises(otel_rollout.NoActiveRolloutError):
        get_current_trajectory()


async def test_a_task_that_is_cancelled_before_it_begins(
    recording: Recording, clients: Clients
) -> None:
    """A rollout whose coroutine never ran a step leaves nothing behind, however it is decorated."""

    async def inner() -> None:
        raise AssertionError("it must not run")

    @rollout
    def outer() -> Any:
        return inner()

    for make in (rollout(inner), outer):
        task = asyncio.ensure_future(make())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
    gc.collect()
    assert {t.status for t in recording.trajectories} <= {"cancelled"}


async def test_a_call_inside_a_call_is_not_taken_for_a_retry(
    recording: Recording, clients: Clients
) -> None:
    """What a hook of the HTTP client asks under `no_capture` is nobody's, and changes nothing."""
    server = clients.serve(lambda body: f"reply to {body['model']}")
    judge = clients.sync(server)

    def ask_judge(_: Any) -> None:
        with otel_rollout.no_capture():
            judge.chat.completions.create(model="judge", messages=ASK)
            judge.models.list()
        judge.models.list()

    hooked = openai.DefaultHttpxClient(event_hooks={"request": [ask_judge]})
    client = clients.sync(server, http_client=hooked)
    with rollout("agent"):
        client.chat.completions.create(model="agent", messages=ASK)
    _, completion = ended(recording, "complete")
    assert completion.request_model == "agent"
    assert said(completion) == "reply to agent"
    assert completion.exchange.attempts == 1


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_stream_that_another_rollouts_thread_ends_meanwhile(
    recording: Recording, clients: Clients, seconds: float
) -> None:
    """A dropped stream, which any next call ends, is part of its rollout that ends just then."""
    inside, leave = threading.Event(), threading.Event()

    def version() -> int:
        if threading.current_thread().name == "other":  # at the end of the call, before its span's
            inside.set()
            assert leave.wait(30)
        return 1

    client = clients.sync(clients.serve(SLOW))

    def run_other() -> None:
        with rollout("other"):
            client.chat.completions.create(model="m", messages=ASK)

    other = threading.Thread(target=run_other, name="other")
    with rollout("agent", policy_version=version):
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        next(iter(stream))
        del stream
        gc.collect()
        other.start()
        assert inside.wait(30)
        threading.Timer(seconds, leave.set).start()
    other.join()
    (trajectory,) = (each for each in recording.trajectories if each.name == "agent")
    assert [each.status for each in trajectory.exchanges] == ["abandoned"]
    assert trajectory.warnings == []
