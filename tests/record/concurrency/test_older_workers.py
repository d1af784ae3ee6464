"""Workers that are older than the rollouts they serve: threads with a queue, actors, tasks.

The message that gives them work carries the rollout, `propagate()`; without it the rollout says
that calls were made outside.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio.from_thread
import openai
import pytest

from otel_rollout import Trajectory, continue_rollout, no_capture, propagate, rollout
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Clients, Recording

Carrier = dict[str, str]
HANDED = pytest.mark.parametrize("handed", [True, False], ids=["handed on", "alone"])


def ask(client: openai.OpenAI, text: str) -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


async def ask_async(client: openai.AsyncOpenAI, text: str) -> None:
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def texts(trajectory: Trajectory) -> list[str]:
    return [c.request_messages[-1]["content"] for c in trajectory.completions]


def judged(recording: Recording, handed: bool, place: str) -> None:
    """Both rollouts have their own call, or say in which place one was made outside."""
    assert len(recording.trajectories) == 2
    for trajectory in recording.trajectories:
        assert texts(trajectory) == ([trajectory.name] if handed else [])
        assert trajectory.warnings == (
            []
            if handed
            else [
                f"1 model call was made outside any rollout while it ran, in {place}: if they are "
                f"its own, hand the rollout on to there (propagate, continue_rollout)",
                NO_CALL.words,
            ]
        )


@contextmanager
def worker(serve: Callable[[Any], None]) -> Iterator[queue.Queue[Any]]:
    """A thread that serves one message after the other."""
    inbox: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        while (message := inbox.get()) is not None:
            serve(message)
            inbox.task_done()

    thread = threading.Thread(target=run, name="worker-0")
    thread.start()
    try:
        yield inbox
    finally:
        inbox.put(None)
        thread.join()


@HANDED
def test_a_thread_with_a_queue(recording: Recording, clients: Clients, handed: bool):
    """Each message brings its rollout along."""
    client = clients.sync(clients.serve("hello"))

    def serve(message: tuple[str, Carrier]) -> None:
        text, carrier = message
        with continue_rollout(carrier):
            ask(client, text)

    with worker(serve) as inbox:
        for name in ("one", "two"):
            with rollout(name):
                inbox.put((name, propagate() if handed else {}))
                inbox.join()
    judged(recording, handed, "thread 'worker-0'")


def test_a_thread_that_runs_in_the_senders_context(recording: Recording, clients: Clients):
    """A copy of the sender's context is as good within one process."""
    client = clients.sync(clients.serve("hello"))

    def serve(message: tuple[contextvars.Context, str]) -> None:
        context, text = message
        context.run(ask, client, text)

    with worker(serve) as inbox:
        for name in ("one", "two"):
            with rollout(name):
                inbox.put((contextvars.copy_context(), name))
                inbox.join()
    judged(recording, True, "")


class Actor:
    """An actor: a mailbox, a task that reads it, an answer for each message."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.client = client
        self.mailbox: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            text, carrier, answer = await self.mailbox.get()
            async with continue_rollout(carrier):
                await ask_async(self.client, text)
            answer.set_result(text)

    async def tell(self, text: str, carrier: Carrier) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self.mailbox.put((text, carrier, answer))
        return await answer


@HANDED
async def test_an_actor(recording: Recording, clients: Clients, handed: bool):
    """A task that is older than the rollouts, on their own event loop."""
    actor = Actor(clients.asynchronous(clients.serve("hello")))
    for name in ("one", "two"):
        async with rollout(name):
            assert await actor.tell(name, propagate() if handed else {}) == name
    actor.task.cancel()
    judged(recording, handed, "thread 'MainThread', task of Actor.run()")


async def test_rollouts_at_once_through_one_actor(recording: Recording, clients: Clients):
    """Messages of many rollouts in one mailbox: each call is in the rollout that sent it."""
    actor = Actor(clients.asynchronous(clients.serve("hello")))

    @rollout
    async def agent(name: str) -> None:
        for turn in range(3):
            await actor.tell(f"{name} {turn}", propagate())

    await asyncio.gather(*(agent(f"agent {number}") for number in range(8)))
    actor.task.cancel()
    assert len(recording.trajectories) == 8
    for trajectory in recording.trajectories:
        assert trajectory.warnings == []
        assert len({text.rsplit(" ", 1)[0] for text in texts(trajectory)}) == 1
        assert len(texts(trajectory)) == 3


@HANDED
def test_a_portal_with_memory_streams(recording: Recording, clients: Clients, handed: bool):
    """anyio: an event loop in a thread of its own, with a task that reads a memory stream."""
    client = clients.asynchronous(clients.serve("hello"))

    async def serve(inbox: Any, answers: Any) -> None:
        async with inbox, answers:
            async for text, carrier in inbox:
                with continue_rollout(carrier):
                    await ask_async(client, text)
                await answers.send(text)

    with anyio.from_thread.start_blocking_portal() as portal:
        send, inbox = portal.call(anyio.create_memory_object_stream[Any], 1)
        answers, answered = portal.call(anyio.create_memory_object_stream[Any], 1)
        task = portal.start_task_soon(serve, inbox, answers)
        for name in ("one", "two"):
            with rollout(name):
                portal.call(send.send, (name, propagate() if handed else {}))
                assert portal.call(answered.receive) == name
        portal.call(send.aclose)
        task.result()
        portal.call(answered.aclose)
        portal.call(client.close)
    judged(recording, handed, "thread 'asyncio-portal-*', task of TaskHandle._run_coro()")


@HANDED
async def test_tasks_with_a_queue(recording: Recording, clients: Clients, handed: bool):
    """Several tasks that share a queue."""
    client = clients.asynchronous(clients.serve("hello"))
    inbox: asyncio.Queue[Any] = asyncio.Queue()

    async def serve() -> None:
        while True:
            text, carrier = await inbox.get()
            async with continue_rollout(carrier):
                await ask_async(client, text)
            inbox.task_done()

    tasks = [asyncio.create_task(serve()) for _ in range(3)]
    for name in ("one", "two"):
        async with rollout(name):
            await inbox.put((name, propagate() if handed else {}))
            await inbox.join()
    for task in tasks:
        task.cancel()
    judged(
        recording,
        handed,
        "thread 'MainThread', task of test_tasks_with_a_queue.<locals>.serve()",
    )


def test_what_is_not_to_be_captured_is_not_outside(recording: Recording, clients: Clients):
    """A call under `no_capture()` is meant to be in no rollout."""
    client = clients.sync(clients.serve("hello"))
    with rollout("agent"), no_capture():
        ask(client, "a judge")
    assert recording.trajectory.warnings == [NO_CALL.words]
