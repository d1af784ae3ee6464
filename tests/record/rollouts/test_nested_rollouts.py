"""Which rollout a call belongs to: nested, at once, in threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from otel_rollout import get_current_trajectory, no_capture, rollout
from otel_rollout.testing import Reply
from tests.kit.conversations import user
from tests.kit.played import ask, ask_async, assert_replays, contents
from tests.kit.recording import Clients, Recording


def test_nested_rollouts_have_their_own_trajectories(recording: Recording, clients: Clients):
    """A rollout inside another is a trajectory of its own; neither has the other's calls."""
    client = clients.sync(clients.serve())

    @rollout
    def inner() -> None:
        ask(client, user("inner"))

    @rollout
    def outer() -> None:
        ask(client, user("before"))
        inner()
        with rollout("scope"):
            ask(client, user("scope"))
        ask(client, user("after"))

    outer()
    by_name = {trajectory.name: trajectory for trajectory in recording.trajectories}
    assert [t.name for t in recording.trajectories] == ["inner", "scope", "outer"]
    assert contents(by_name["inner"]) == [["inner", "You said: inner"]]
    assert contents(by_name["scope"]) == [["scope", "You said: scope"]]
    assert contents(by_name["outer"]) == [
        ["after", "You said: after"],
        ["before", "You said: before"],
    ]
    assert by_name["outer"].parent_id is None
    assert by_name["inner"].parent_id == by_name["scope"].parent_id == by_name["outer"].id
    assert len({t.trace_id for t in recording.trajectories}) == 1
    assert all(t.warnings == [] for t in recording.trajectories)
    assert_replays(recording)


def test_calls_outside_of_a_rollout_are_nobodys(recording: Recording, clients: Clients):
    """A call before, after, or under `no_capture` is in no trajectory, but still on the trace."""
    client = clients.sync(clients.serve())
    ask(client, user("before"))
    with rollout("x") as trajectory:
        with no_capture():
            ask(client, user("judge"))
            assert get_current_trajectory() is trajectory
            with rollout("judge") as judged:
                ask(client, user("judge's own"))
        ask(client, user("in"))
    ask(client, user("after"))
    assert contents(trajectory) == [["in", "You said: in"]]
    assert contents(judged) == [["judge's own", "You said: judge's own"]]
    assert len(recording.spans_named("recording")) == 2
    assert len(recording.spans_named("chat ")) == 5
    assert trajectory.warnings == []


AGENTS = 200


def expected(text: str) -> list[list[str]]:
    turns = [f"{text}/{turn}" for turn in range(3)]
    return [[word for turn in turns for word in (turn, f"You said: {turn}")]]


def check_agents(recording: Recording, ids: dict[str, str]) -> None:
    assert len(recording.trajectories) == len(ids) == AGENTS
    for trajectory in recording.trajectories:
        text = trajectory.task_id or ""
        assert ids[text] == trajectory.id
        assert contents(trajectory) == expected(text)
        assert [len(c.token_ids or ()) for c in trajectory.completions] == [
            len(f"You said: {text}/{turn}") + 1 for turn in range(3)
        ]
        assert trajectory.warnings == []
    assert_replays(recording)


@pytest.mark.slow
async def test_many_rollouts_in_one_event_loop(recording: Recording, clients: Clients):
    """200 agents at once, three calls each, and each trajectory has exactly its own messages."""
    client = clients.asynchronous(clients.serve(), timeout=120)  # to connect, too
    ids: dict[str, str] = {}

    async def agent(text: str) -> None:
        async with rollout("agent", task_id=text) as trajectory:
            messages = list[Any]()
            for turn in range(3):
                messages.append(user(f"{text}/{turn}"))
                completion = await ask_async(client, *messages)
                messages.append(completion.choices[0].message.model_dump(exclude_none=True))
                assert get_current_trajectory() is trajectory
            ids[text] = trajectory.id

    await asyncio.gather(*(agent(f"agent-{number}") for number in range(AGENTS)))
    check_agents(recording, ids)


@pytest.mark.slow
def test_many_rollouts_in_a_thread_pool(recording: Recording, clients: Clients):
    """200 agents over 32 threads, half of them calling from threads of their own, never mix."""
    client = clients.sync(clients.serve())
    ids: dict[str, str] = {}

    def agent(number: int) -> None:
        text = f"agent-{number}"
        with rollout("agent", task_id=text) as trajectory:
            messages = list[Any]()
            for turn in range(3):
                messages.append(user(f"{text}/{turn}"))
                replies = list[Any]()

                def call(messages: Any = tuple(messages), replies: Any = replies) -> None:
                    replies.append(ask(client, *messages))

                if number % 2:
                    thread = threading.Thread(target=call)
                    thread.start()
                    thread.join()
                else:
                    call()
                messages.append(replies[0].choices[0].message.model_dump(exclude_none=True))
            ids[text] = trajectory.id

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(agent, range(AGENTS)))
    check_agents(recording, ids)


async def test_threads_keep_the_rollout(recording: Recording, clients: Clients):
    """`to_thread`, `run_in_executor`, a pool and a timer call within the rollout around them."""
    client = clients.sync(clients.serve())

    def call(text: str) -> None:
        ask(client, user(text))

    with ThreadPoolExecutor(2) as pool:  # started before any rollout
        pool.submit(str).result()
        async with rollout("agent") as trajectory:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(call, "to_thread")
            await loop.run_in_executor(None, call, "default executor")
            await loop.run_in_executor(pool, call, "executor")
            await asyncio.wrap_future(pool.submit(call, "submit"))
            timer = threading.Timer(0, call, ["timer"])
            timer.start()
            await asyncio.to_thread(timer.join)
        pool.submit(call, "outside").result()
    said = [texts[0] for texts in contents(trajectory)]
    assert said == ["timer", "to_thread", "default executor", "executor", "submit"]
    assert trajectory.warnings == []


async def test_a_task_that_outlives_its_rollout_is_said(recording: Recording, clients: Clients):
    """Calls that end or begin after the rollout are no part of it, and the trajectory says so."""
    client = clients.asynchronous(clients.serve(lambda _: Reply("late", delay=0.2)))

    async def background() -> None:
        await ask_async(client, user("still open"))
        await ask_async(client, user("begun after"))

    @rollout
    async def agent() -> asyncio.Task[None]:
        task = asyncio.ensure_future(background())
        await asyncio.sleep(0.05)
        return task

    await (await agent())
    assert recording.trajectory.completions == []
    assert recording.trajectory.warnings == [
        "1 model calls had not ended when the rollout did; they are not part of it",
        "1 model calls began after the rollout had ended; they are not part of it",
    ]
    assert_replays(recording)
