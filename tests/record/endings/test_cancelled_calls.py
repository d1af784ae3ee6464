"""Calls that the caller gives up: cancelled, and the caller sees what a bare client shows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import anyio
import openai
import pytest

from otel_rollout import rollout
from tests.kit.calling import BOTH, STREAMED, Caller
from tests.kit.comparing import replayed
from tests.kit.conversations import ASK, chat
from tests.kit.ending import ended, open_stream, said
from tests.kit.recording import Clients, Recording
from tests.record.endings.breaking import HEAD, WAIT, event, framed

pytestmark = pytest.mark.slow


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
