"""Calls in tasks, callbacks and workers of asyncio are in the right rollout, or in none."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import openai
import pytest
from opentelemetry import context as otel_context

from otel_rollout import rollout
from tests.kit.recording import Clients, Recording
from tests.record.concurrency.calls import OUTSIDE, WAIT, acall, by_name, call

pytestmark = pytest.mark.slow

# --- ways of asyncio

Work = Callable[[], Coroutine[Any, Any, None]]


async def _gather(work: Work) -> None:
    await asyncio.gather(work())


async def _task(work: Work) -> None:
    await asyncio.ensure_future(work())


async def _task_group(work: Work) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(work)


async def _wait_for(work: Work) -> None:
    await asyncio.wait_for(work(), WAIT)


async def _shield(work: Work) -> None:
    await asyncio.shield(work())


async def _callback(work: Work) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Future[None]] = []

    def start() -> None:
        tasks.append(asyncio.ensure_future(work()))
        tasks[0].add_done_callback(lambda _: done.set())

    loop.call_soon(lambda: loop.call_later(0, start))
    await done.wait()
    tasks[0].result()


async def _call_soon_threadsafe(work: Work) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(work(), loop).result(WAIT))


async def _anyio_thread_and_back(work: Work) -> None:
    await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(work))


async def _async_generator(work: Work) -> None:
    async def steps() -> AsyncIterator[int]:
        yield 1
        await work()
        yield 2

    assert [n async for n in steps()] == [1, 2]


async def _generator_closed_elsewhere(work: Work) -> None:
    async def steps() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await work()

    generator: Any = steps()
    await generator.asend(None)
    await asyncio.ensure_future(generator.aclose())


ASYNC_WAYS = [
    _gather,
    _task,
    _task_group,
    _wait_for,
    _shield,
    _callback,
    _call_soon_threadsafe,
    _anyio_thread_and_back,
    _async_generator,
    _generator_closed_elsewhere,
]


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_tasks(recording: Recording, clients: Clients, way: Any, stream: bool) -> None:
    """Rollouts that run at once over one client have the calls of their own tasks."""
    client = clients.asynchronous(clients.serve())
    begun: list[str] = []
    all_begun = asyncio.Event()

    async def agent(name: str) -> None:
        async with rollout(name):
            begun.append(name)
            if len(begun) == 3:
                all_begun.set()
            await all_begun.wait()
            await way(lambda: acall(client, f"{name} inside", stream=stream))
            async with rollout(f"{name} nested"):
                await way(lambda: acall(client, f"{name} in nested", stream=stream))
            await acall(client, f"{name} again", stream=stream)
        await way(lambda: acall(client, "nobody's", stream=stream))

    await asyncio.gather(*map(agent, "abc"))
    expected = {name: [f"{name} again", f"{name} inside"] for name in "abc"}
    expected |= {f"{name} nested": [f"{name} in nested"] for name in "abc"}
    assert by_name(recording) == expected


async def test_a_loop_in_the_background(recording: Recording, clients: Clients) -> None:
    """Sync agents that share a loop in a thread of its own: what they have it run is theirs."""
    server = clients.serve()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k" * 20)
    begun = threading.Barrier(3)

    def agent(name: str) -> None:
        with rollout(name):
            begun.wait(WAIT)
            for n in range(3):
                asyncio.run_coroutine_threadsafe(acall(client, f"{name} {n}"), loop).result(WAIT)

    try:
        await asyncio.gather(*(asyncio.to_thread(agent, name) for name in "abc"))
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(WAIT)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, WAIT)
        loop.close()
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


async def test_a_sync_client_in_a_running_loop(recording: Recording, clients: Clients) -> None:
    """A sync call that blocks the loop belongs to the task that makes it."""
    client = clients.sync(clients.serve())

    async def agent(name: str) -> None:
        with rollout(name):
            for n in range(3):
                call(client, f"{name} {n}")
                await asyncio.sleep(0)

    await asyncio.gather(*map(agent, "abc"))
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


# --- workers that are older than the rollouts they work for


async def test_a_worker_task_is_in_no_rollout_by_itself(
    recording: Recording, clients: Clients
) -> None:
    """A task that was there before has no rollout: its calls are nobody's, never another's."""
    client = clients.asynchronous(clients.serve())
    work: asyncio.Queue[tuple[str, asyncio.Future[None]] | None] = asyncio.Queue()

    async def worker() -> None:
        while (item := await work.get()) is not None:
            await acall(client, item[0])
            item[1].set_result(None)

    async def agent(name: str) -> None:
        async with rollout(name):
            done = asyncio.get_running_loop().create_future()
            await work.put((f"{name} by worker", done))
            await done
            await acall(client, f"{name} itself")

    workers = [asyncio.ensure_future(worker()) for _ in range(2)]
    await asyncio.gather(*map(agent, "abc"))
    for _ in workers:
        await work.put(None)
    await asyncio.gather(*workers)
    assert by_name(recording) == {name: [f"{name} itself"] for name in "abc"}
    for trajectory in recording.trajectories:
        (warning,) = trajectory.warnings
        assert OUTSIDE.search(warning)


@pytest.mark.parametrize("lazy", [False, True], ids=["before", "by the first rollout"])
async def test_a_worker_task_that_is_handed_the_context(
    recording: Recording, clients: Clients, lazy: bool
) -> None:
    """A worker that attaches the context that came with its work serves many rollouts rightly."""
    client = clients.asynchronous(clients.serve())
    work: asyncio.Queue[tuple[str, Any, asyncio.Future[None]] | None] = asyncio.Queue()
    workers: list[asyncio.Future[None]] = []

    async def worker() -> None:
        while (item := await work.get()) is not None:
            marker, context, done = item
            token = otel_context.attach(context)
            try:
                await acall(client, marker)
            finally:
                otel_context.detach(token)
            done.set_result(None)

    def start() -> None:
        if not workers:
            workers.extend(asyncio.ensure_future(worker()) for _ in range(2))

    async def agent(name: str) -> None:
        async with rollout(name):
            start()
            for n in range(3):
                done = asyncio.get_running_loop().create_future()
                await work.put((f"{name} {n}", otel_context.get_current(), done))
                await done

    if not lazy:
        start()
    await asyncio.gather(*map(agent, "abc"))
    for _ in workers:
        await work.put(None)
    await asyncio.gather(*workers)
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="create_task(context=) came with 3.11")
async def test_a_task_in_a_context_of_ones_choice(recording: Recording, clients: Clients) -> None:
    """`create_task(..., context=...)` is in the rollout of that context, wherever it is made."""
    client = clients.asynchronous(clients.serve())
    with rollout("outer"):
        outer = contextvars.copy_context()
        with rollout("inner"):
            make: Any = asyncio.get_running_loop().create_task
            await make(acall(client, "for outer"), context=outer)
            await acall(client, "for inner")
    assert by_name(recording) == {"outer": ["for outer"], "inner": ["for inner"]}
