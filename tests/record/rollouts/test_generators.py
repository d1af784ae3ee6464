"""Rollouts in generators: what their readers do between two items is the readers' own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
from opentelemetry import trace

from otel_rollout import gather_trajectory, get_current_trajectory, rollout
from otel_rollout.errors import NoActiveRolloutError
from otel_rollout.testing import ModelServer
from tests.kit.recording import Clients, Recording


@pytest.fixture
def server(clients: Clients) -> ModelServer:
    return clients.serve(lambda body: "re: " + body["messages"][-1]["content"])


@pytest.fixture
def ask(clients: Clients, server: ModelServer) -> Callable[[str], str]:
    client = clients.sync(server)

    def ask(text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        reply = client.chat.completions.create(model="m", messages=messages)
        return reply.choices[0].message.content or ""

    return ask


@pytest.fixture
def ask_async(clients: Clients, server: ModelServer) -> Callable[[str], Any]:
    client = clients.asynchronous(server)

    async def ask(text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="m", messages=messages)
        return reply.choices[0].message.content or ""

    return ask


def asked(recording: Recording) -> dict[str, list[str]]:
    """What each rollout asked, by its name."""
    return {
        each.name: [call.request_messages[-1]["content"] for call in each.completions]
        for each in recording.trajectories
    }


@contextmanager
def helper(name: str) -> Iterator[Any]:
    with rollout(name) as trajectory:
        yield trajectory


@asynccontextmanager
async def async_helper(name: str) -> AsyncIterator[Any]:
    async with rollout(name) as trajectory:
        yield trajectory


@pytest.mark.parametrize("enter", [rollout, helper], ids=["with", "helper"])
@pytest.mark.parametrize("stack", [False, True], ids=["", "ExitStack"])
def test_who_reads_a_generator(
    recording: Recording, ask: Callable[[str], str], enter: Any, stack: bool
):
    """Its calls between two items are not the agent's, and its rollout is not current there."""

    def steps() -> Iterator[str]:
        yield ask("two")
        yield ask("three")

    def agent() -> Iterator[str]:
        with ExitStack() if stack else enter("agent") as entered:
            if stack:
                entered.enter_context(enter("agent"))
            yield ask("one")
            yield from steps()
            assert get_current_trajectory().name == "agent"
            ask("four")

    for item in agent():
        ask(f"judge {item}")
        with pytest.raises(NoActiveRolloutError):
            get_current_trajectory()
    assert asked(recording) == {"agent": ["one", "two", "three", "four"]}
    trajectory = recording.trajectory
    assert (trajectory.status, len(trajectory.token_sequences())) == ("complete", 4)


@pytest.mark.parametrize("enter", [rollout, async_helper], ids=["with", "helper"])
@pytest.mark.parametrize("stack", [False, True], ids=["", "ExitStack"])
async def test_who_reads_an_async_generator(
    recording: Recording, ask_async: Callable[[str], Any], enter: Any, stack: bool
):
    """Also in tasks and threads; those that the agent waits for are the agent's."""

    async def agent() -> AsyncIterator[str]:
        async with AsyncExitStack() if stack else enter("agent") as entered:
            if stack:
                await entered.enter_async_context(enter("agent"))
            yield await ask_async("one")
            yield "and " + ",".join(await asyncio.gather(ask_async("two"), ask_async("two")))
            await asyncio.create_task(ask_async("three"))

    async for item in agent():
        await ask_async(f"judge {item}")
        await asyncio.gather(ask_async("judge too"))
    assert asked(recording) == {"agent": ["one", "two", "two", "three"]}


async def test_a_reader_that_is_a_rollout(recording: Recording, ask_async: Callable[[str], Any]):
    """Its calls are its own, as are those of a rollout that it begins."""

    async def agent() -> AsyncIterator[str]:
        with rollout("agent"):
            for number in range(2):
                yield await ask_async(f"agent {number}")

    @rollout
    async def judge(item: str) -> None:
        await ask_async(f"judge {item[-1]}")

    @rollout
    async def reader() -> None:
        async for item in agent():
            await ask_async("reader")
            await judge(item)

    trajectory = await gather_trajectory(reader())
    found = asked(recording)
    assert found["agent"] == ["agent 0", "agent 1"]
    assert found["reader"] == ["reader", "reader"]
    judges = [each for each in recording.trajectories if each.name == "judge"]
    assert {each.parent_id for each in judges} == {trajectory.id}
    assert [len(each.completions) for each in judges] == [1, 1]


def test_two_generators_that_take_turns(recording: Recording, ask: Callable[[str], str]):
    """No call is in the rollout of the other one, and what is not recorded is said."""

    def agent(name: str) -> Iterator[str]:
        with rollout(name):
            yield ask(f"{name} 1")
            yield ask(f"{name} 2")

    for _ in zip(agent("a"), agent("b"), strict=True):
        ask("reader")
    for name, texts in asked(recording).items():
        assert all(text.startswith(name) for text in texts)
    assert sum(map(len, asked(recording).values())) < 4
    assert all("outside any rollout" in str(each.warnings) for each in recording.trajectories)
    assert not trace.get_current_span().get_span_context().is_valid
    with rollout("later") as later:  # they leave in the order in which they came
        ask("later")
    assert (later.parent_id, later.warnings, len(later.completions)) == (None, [], 1)


def test_a_generator_that_is_dropped(recording: Recording, ask: Callable[[str], str]):
    """Its rollout ends with it, and whoever read it goes on outside."""

    def agent() -> Generator[str, None, None]:
        with rollout("agent"):
            yield ask("one")
            yield ask("two")

    running = agent()
    next(running)
    running.close()
    ask("later")
    assert asked(recording) == {"agent": ["one"]}
    assert recording.trajectory.status == "cancelled"


def test_a_rollout_between_two_items(recording: Recording, ask: Callable[[str], str]):
    """A generator that yields outside its rollouts has all their calls."""

    def runs() -> Iterator[str]:
        for name in ("a", "b"):
            with rollout(name):
                text = ask(name)
            yield text

    assert list(runs()) == ["re: a", "re: b"]
    assert asked(recording) == {"a": ["a"], "b": ["b"]}


@pytest.fixture
def entered(recording: Recording) -> Iterator[Any]:
    with rollout("fixture") as trajectory:
        yield trajectory


def test_a_fixture(entered: Any, recording: Recording, ask: Callable[[str], str]):
    """A test inside a fixture's rollout is part of it, as is the body of a context manager."""
    ask("one")
    with helper("inside") as inside:
        ask("two")
        assert len(inside.completions) == 1
    assert [call.request_messages[-1]["content"] for call in entered.completions] == ["one"]
