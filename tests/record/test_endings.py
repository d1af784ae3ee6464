"""However a call ends: one exchange, with the right status, and the user sees what they would."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import os
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    TrajectorySpanProcessor,
    get_current_trajectory,
    rollout,
)
from otel_rollout.record.capture import _Call, _Received
from otel_rollout.record.running import ActiveRollout
from otel_rollout.testing import ModelServer, Reply
from tests.conftest import Clients, Recording
from tests.test_capture import (
    ASK,
    BOTH,
    STREAMED,
    Caller,
    Configure,
    attribute,
    chat,
    done,
    exchange_spans,
    outcome,
    read,
    replayed,
)
from tests.test_lifecycle import SLOW, TEXT, collect_garbage, ended, open_stream, said

WAIT = 30.0
"""Seconds for what takes none, on a machine that has other things to do."""


@pytest.fixture
def configure(request: pytest.FixtureRequest) -> Configure:
    """Configure the library when called, not before."""
    return lambda: request.getfixturevalue("recording")


@pytest.fixture(autouse=True)
async def nothing_is_left(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """After each test no call is open, no span is buffered, and nobody has logged an error."""
    yield
    otel_rollout.shutdown()
    await collect_garbage()
    objects = gc.get_objects()
    assert [o for o in objects if type(o) is _Call and not o.finished] == []
    assert [o for o in objects if type(o) is _Received and o._chunks] == []
    assert [o for o in objects if type(o) is ActiveRollout and o.streams] == []
    processors = [o for o in objects if type(o) is TrajectorySpanProcessor]
    assert [(o._buffers, o._rollouts, o._bytes) for o in processors if o._rollouts] == []
    for source in ("otel_rollout", "opentelemetry"):
        errors = [
            r for r in caplog.get_records("call") if r.name.startswith(source) and r.levelno > 30
        ]
        assert [r.getMessage() for r in errors] == []


# --- a server that breaks off wherever it is told to


Step = bytes | threading.Event
"""Bytes to send, or an event to wait for."""


class BreakingServer:
    """Answers every request with the same steps, then closes or resets the connection."""

    def __init__(self, steps: Sequence[Step], *, reset: bool = False) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                length = 0
                while (line := self.rfile.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.rfile.read(length)
                with contextlib.suppress(OSError):
                    for step in steps:
                        if isinstance(step, bytes):
                            self.wfile.write(step)
                        else:
                            step.wait(WAIT)
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exc_info()[1], OSError | ValueError):
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def breaking() -> Iterator[Callable[..., Any]]:
    """Start servers that break off; they stop with the test."""
    servers: list[BreakingServer] = []

    def start(*steps: Step, reset: bool = False) -> BreakingServer:
        servers.append(BreakingServer(steps, reset=reset))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def event(delta: str, finish_reason: str | None = None) -> bytes:
    reason = "null" if finish_reason is None else f'"{finish_reason}"'
    return (
        '{"id":"cut-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        f'[{{"index":0,"delta":{{"content":"{delta}"}},"finish_reason":{reason}}}]}}'
    ).encode()


def framed(data: bytes) -> bytes:
    """A server-sent event as a chunk of a chunked body."""
    data = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = (
    b'{"id":"cut-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"Paris"},"finish_reason":"stop"}]}'
)
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
PLAIN = JSON_HEAD % len(BODY)
BROKEN: dict[str, tuple[bool, bytes, str]] = {
    "before headers": (True, b"", ""),
    "inside headers": (True, HEAD[:30], ""),
    "before the first event": (True, HEAD, ""),
    "between events": (True, HEAD + framed(event("Par")), "Par"),
    "inside an event": (True, HEAD + framed(event("Par")) + framed(event("is"))[:40], "Par"),
    "plain, before headers": (False, b"", ""),
    "plain, before the body": (False, PLAIN, ""),
    "plain, inside the body": (False, PLAIN + BODY[:60], ""),
}


@BOTH
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("where", BROKEN)
async def test_a_connection_that_breaks(
    configure: Configure,
    clients: Clients,
    caller: Caller,
    breaking: Callable[..., Any],
    where: str,
    reset: bool,
) -> None:
    """Wherever it breaks: the client's own exception and chunks, and one exchange, an error."""
    stream, sent, text = BROKEN[where]
    request: Any = {"model": "m", "messages": ASK, "stream": stream}
    server = breaking(sent, reset=reset)

    async def script(client: Any) -> list[Any]:
        seen: list[Any] = []
        try:
            result = await done(client.chat.completions.create(**request))
            while stream:
                seen += await read(result, 1)
                if len(seen) > 5:
                    break
        except Exception as error:
            seen += [type(error), str(error), type(error.__cause__)]
        return seen

    async def in_rollout(client: Any) -> list[Any]:
        with rollout("agent"):
            return await script(client)

    bare = await caller.run(script(caller.client(clients, server)))
    recording = configure()
    seen = await caller.run(in_rollout(caller.client(clients, server)))
    if not reset:  # what a reset overtakes is a matter of luck
        assert [str(s) for s in seen] == [str(s) for s in bare]
    assert issubclass(seen[-3], Exception)
    _, completion = ended(recording, "error")
    assert (said(completion) == text) or (reset and text.startswith(said(completion)))
    assert completion.error is not None
    # The client of some versions wraps what the connection raised.
    assert completion.error["type"] in (seen[-3].__qualname__, seen[-1].__qualname__)
    assert completion.request_messages == ASK
    assert completion.finish_reason is None


@BOTH
async def test_a_stream_that_breaks_when_all_is_said(
    configure: Configure, clients: Clients, caller: Caller, breaking: Callable[..., Any]
) -> None:
    """Between the finish reason and `[DONE]` nothing is sampled: the completion is whole."""
    sent = HEAD + framed(event("Par")) + framed(event("is", "stop"))

    async def script(client: Any) -> Any:
        return await chat(client, stream=True)

    async def in_rollout(client: Any) -> Any:
        with rollout("agent"):
            return await script(client)

    server = breaking(sent)
    bare = await outcome(caller.run(script(caller.client(clients, server))))
    recording = configure()
    seen = await outcome(caller.run(in_rollout(caller.client(clients, server))))
    assert seen == bare
    assert seen[0] == "raised"
    trajectory, completion = ended(recording, "complete")
    assert said(completion) == "Paris"
    assert trajectory.status == "error"


@BOTH
@pytest.mark.parametrize("whole", [False, True], ids=["in the middle", "behind the finish reason"])
async def test_a_body_that_the_closed_connection_ends(
    recording: Recording,
    clients: Clients,
    caller: Caller,
    breaking: Callable[..., Any],
    whole: bool,
) -> None:
    """Without a length the client takes any end for the end; only a finished reply is complete."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    data = [event("Par"), event("is", "stop" if whole else None)]
    server = breaking(head + b"".join(b"data: %b\n\n" % d for d in data))

    async def script(client: Any) -> Any:
        with rollout("agent"):
            return await chat(client, stream=True)

    chunks = await caller.run(script(caller.client(clients, server)))
    assert [c.choices[0].delta.content for c in chunks] == ["Par", "is"]
    _, completion = ended(recording, "complete" if whole else "error")
    assert said(completion) == "Paris"


@BOTH
async def test_a_connect_timeout(recording: Recording, clients: Clients, caller: Caller) -> None:
    """A server that does not accept in time is an error without a reply."""
    with socket.socket() as listening, contextlib.ExitStack() as opened:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):  # fill the backlog: the kernel answers no further connection
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        server: Any = types.SimpleNamespace()
        server.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        client = caller.client(clients, server, timeout=0.3)

        async def script() -> None:
            with rollout("agent"):
                await chat(client)

        with pytest.raises(openai.APITimeoutError):
            await caller.run(script())
    trajectory, completion = ended(recording, "error")
    assert completion.error == {"type": "APITimeoutError", "message": "Request timed out."}
    assert completion.request_messages == ASK
    assert trajectory.termination_reason == "timeout"


@BOTH
async def test_a_pool_timeout(
    recording: Recording, clients: Clients, caller: Caller, breaking: Callable[..., Any]
) -> None:
    """A call that finds no free connection is an error; the one that holds it is not harmed."""
    go_on = threading.Event()
    end = framed(event("is", "stop")) + framed(b"[DONE]") + b"0\r\n\r\n"
    server = breaking(HEAD + framed(event("Par")), go_on, end)
    make = openai.DefaultHttpxClient if caller.sync else openai.DefaultAsyncHttpxClient
    httpx: Any = sys.modules[make.__mro__[1].__module__.split(".")[0]]
    options = {
        "limits": httpx.Limits(max_connections=1),
        "timeout": httpx.Timeout(WAIT, pool=0.2),
    }

    async def script(client: Any) -> None:
        with rollout("agent"):
            stream = await open_stream(client)
            with pytest.raises(openai.APITimeoutError):
                await chat(client)
            go_on.set()
            await read(stream)

    client = caller.client(clients, server, http_client=make(**options))
    await caller.run(script(client))
    trajectory = replayed(recording)
    assert [(c.status, said(c)) for c in trajectory.completions] == [
        ("complete", "Paris"),
        ("error", ""),
    ]
    assert trajectory.warnings == []


# --- given up


async def _cancel(step: Any, ready: asyncio.Event) -> None:
    task = asyncio.ensure_future(step)
    await ready.wait()
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task


async def _anyio_scope(step: Any, ready: asyncio.Event) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: step)
            await ready.wait()
            scope.cancel()
    assert scope.cancelled_caught


async def _sibling_fails(step: Any, ready: asyncio.Event) -> None:
    async def sibling() -> None:
        await ready.wait()
        raise LookupError("a sibling failed")

    if hasattr(asyncio, "TaskGroup"):
        with contextlib.suppress(Exception):
            async with asyncio.TaskGroup() as group:
                group.create_task(step)
                group.create_task(sibling())
    else:
        task = asyncio.ensure_future(step)
        with pytest.raises(LookupError):
            await asyncio.gather(sibling(), return_exceptions=False)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("inside", [False, True], ids=["around the rollout", "in the rollout"])
@pytest.mark.parametrize("how", [_cancel, _anyio_scope, _sibling_fails])
@STREAMED
async def test_a_call_that_is_given_up(
    recording: Recording,
    clients: Clients,
    breaking: Callable[..., Any],
    how: Any,
    stream: bool,
    inside: bool,
) -> None:
    """However a task is cancelled: the call says so, has what had come, and the rest goes on."""
    asked, go_on, ready = threading.Event(), threading.Event(), asyncio.Event()

    def reply(body: Any) -> str:
        if body["model"] == "slow":
            asked.set()
            go_on.wait(WAIT)
        return "afterwards"

    server = clients.serve(reply)
    client = clients.asynchronous(server)
    slow = breaking(HEAD + framed(event("Par")), go_on) if stream else server
    slow_client = clients.asynchronous(slow)

    async def call() -> None:
        if stream:
            async for _ in await open_stream(slow_client):
                ready.set()
        else:
            asyncio.ensure_future(asyncio.to_thread(asked.wait, WAIT)).add_done_callback(
                lambda _: ready.set()
            )
            await chat(slow_client, model="slow")

    async def agent() -> None:
        async with rollout("agent"):
            await call()

    try:
        if inside:
            async with rollout("agent"):
                await how(call(), ready)
                await chat(client)
        else:
            await how(agent(), ready)
    finally:
        go_on.set()
    trajectory = replayed(recording)
    first = trajectory.completions[0]
    assert first.status == "cancelled"
    assert said(first) == ("Par" if stream else "")
    assert not first.trainable
    assert trajectory.status == ("complete" if inside else "cancelled")
    assert [said(c) for c in trajectory.completions[1:]] == (["afterwards"] if inside else [])
    assert sum(item.trainable for h in trajectory.histories for item in h.items) == inside
    assert trajectory.warnings == []


class GiveUp(BaseException):
    """No error and no cancellation of asyncio's: what trio and others cancel with."""


@BOTH
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GiveUp])
async def test_what_is_no_error_cancels_a_call(
    recording: Recording, clients: Clients, caller: Caller, kind: type[BaseException]
) -> None:
    """An interrupt in the middle of a call passes as it is, and the call was cancelled."""
    raised = kind("stop")

    def interrupt(_: Any) -> None:
        raise raised

    async def interrupt_async(_: Any) -> None:
        raise raised

    async def script() -> None:
        server = clients.serve()
        if caller.sync:
            hooked = openai.DefaultHttpxClient(event_hooks={"request": [interrupt]})
            with rollout("agent"):
                clients.sync(server, http_client=hooked).chat.completions.create(
                    model="m", messages=ASK
                )
        else:
            async_hooked = openai.DefaultAsyncHttpxClient(
                event_hooks={"request": [interrupt_async]}
            )
            async with openai.AsyncOpenAI(
                base_url=server.base_url, api_key="k" * 20, http_client=async_hooked
            ) as client:
                with rollout("agent"):
                    await chat(client)

    def run() -> BaseException | None:
        try:
            asyncio.run(script())  # asyncio ends its loop on an interrupt: not pytest's
        except BaseException as error:
            return error
        return None

    assert await asyncio.to_thread(run) is raised
    trajectory, completion = ended(recording, "cancelled")
    assert trajectory.status == "cancelled"
    assert completion.error == {"type": kind.__qualname__, "message": "stop"}


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
    ours = [name for name in collecting.reentered if name.startswith(("exchange", "invoke"))]
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


# --- nothing is left


def _finalizers() -> dict[Any, Any]:
    registry: dict[Any, Any] = vars(weakref.finalize)["_registry"]
    return registry


@pytest.mark.not_replayed("it looks for what is left of the trajectories")
async def test_nothing_grows(recording: Recording, clients: Clients) -> None:
    """Rollouts whose calls end in every way leave no object, no thread and no buffer behind."""
    replies = {"plain": Reply("ok"), "cut": Reply(TEXT, cut_after=2), "left": Reply(TEXT)}
    server = clients.serve(lambda body: replies[body["model"]])
    client, sync = clients.asynchronous(server), clients.sync(server)

    async def one(status: str) -> None:
        with contextlib.suppress(openai.APIError, Exception), rollout("agent"):
            for chosen in (client, sync):
                create = chosen.chat.completions.create
                stream = await done(create(model=status, messages=ASK, stream=status != "plain"))
                if status != "plain":
                    await read(stream, 1 if status == "left" else None)

    async def every() -> set[int]:
        await asyncio.gather(*(one(status) for status in replies))
        references = [weakref.ref(t) for t in recording.trajectories]
        recording.exporter.clear()
        recording.span_exporter.clear()
        await collect_garbage()
        assert [r() for r in references if r() is not None] == []
        return {id(o) for o in gc.get_objects() if type(o) is ActiveRollout and o.streams}

    assert await every() == set()
    registered = len(_finalizers())
    threads = threading.active_count()
    for _ in range(5):
        assert await every() == set()
    assert len(_finalizers()) <= registered + 4
    assert threading.active_count() <= threads + 4  # the server's, one for each connection


async def test_shutdown_keeps_what_a_stream_had_brought(
    recording: Recording, clients: Clients
) -> None:
    """A shutdown in the middle of a stream hands over what had come of it, as abandoned."""
    client = clients.sync(clients.serve(SLOW))
    scope = rollout("agent")
    scope.__enter__()
    try:
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        await read(stream, 3)
        otel_rollout.shutdown()
        (trajectory,) = recording.trajectories
        assert [c.status for c in trajectory.completions] == ["abandoned"]
        assert len(said(trajectory.completions[0])) >= 16
        stream.close()
    finally:
        scope.__exit__(None, None, None)


# --- the process ends


PROGRAM = """
import os, signal, sys, threading, tempfile, openai, otel_rollout
from otel_rollout import rollout, JsonlTrajectoryExporter

tempfile.TemporaryDirectory()  # registers what it does at exit before the library does
otel_rollout.configure(exporters=[JsonlTrajectoryExporter(sys.argv[1])])
client = openai.OpenAI(base_url=sys.argv[2], api_key="k" * 20, max_retries=0)

def ask(**options):
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}], **options)

with rollout("before"):
    ask()

def agent():
    with rollout("agent"):
        ask()
        stream = ask(stream=True)
        for _ in range(3):
            next(iter(stream))
        END
"""
ENDS: dict[str, tuple[str, str, int]] = {
    "sys.exit": ("agent()", "sys.exit(3)", 3),
    "unhandled": ("agent()", "raise ValueError('unhandled')", 1),
    "os._exit": ("agent()", "os._exit(4)", 4),
    "interrupt": (
        # A shell's background job has it ignored, and so have its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler); agent()",
        "print('ready', flush=True); [None for _ in stream]",
        -signal.SIGINT,
    ),
    "SIGTERM": ("agent()", "print('ready', flush=True); [None for _ in stream]", -signal.SIGTERM),
    "SIGTERM handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); agent()",
        "print('ready', flush=True); [None for _ in stream]",
        5,
    ),
    "left in a thread": (
        "held = threading.Event(); threading.Thread(target=agent, daemon=True).start(); "
        "held.wait()",
        "held.set(); threading.Event().wait()",
        0,
    ),
}


@pytest.mark.parametrize("how", ENDS)
async def test_the_process_ends_in_a_stream(tmp_path: Path, how: str) -> None:
    """What was begun is in the exporter's file, but for ends at which Python runs nothing."""
    call, end, code = ENDS[how]

    def reply(body: Any) -> Reply:
        return Reply(TEXT, chunk_delay=0.0 if not body.get("stream") else 0.4)

    server = ModelServer(reply)
    program = PROGRAM.replace("END", end) + call + "\n"
    path = tmp_path / "trajectories.jsonl"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL", "OPENAI"))}
    with server:
        command = [sys.executable, "-c", textwrap.dedent(program), str(path), server.base_url]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )
        try:
            if "ready" in end:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
                process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)
            _, errors = await asyncio.to_thread(process.communicate, timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == code, errors
    assert "Exception ignored" not in errors
    assert "not captured" not in errors
    assert "not recorded" not in errors
    assert "closed cleanly" not in errors
    trajectories = list(JsonlTrajectoryExporter.read(path)) if path.exists() else []
    names = [t.name for t in trajectories]
    if how in ("os._exit", "SIGTERM"):
        assert "agent" not in names
        return
    assert names == ["before", "agent"]
    whole, partial = trajectories[1].completions
    assert (whole.status, said(whole)) == ("complete", TEXT)
    assert partial.status in ("abandoned", "cancelled")
    assert said(partial)
    assert TEXT.startswith(said(partial))
    assert not partial.trainable
    statuses = {"unhandled": "error", "left in a thread": "unknown"}
    assert trajectories[1].status == statuses.get(how, "cancelled")
