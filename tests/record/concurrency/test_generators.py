"""Generators that make calls, closed or read in another context."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from otel_rollout import NoActiveRolloutError, get_current_trajectory, rollout
from tests.kit.recording import Clients, Recording
from tests.record.concurrency.calls import acall, by_name, call


async def test_an_async_generator_that_is_closed_in_another_context(
    recording: Recording, clients: Clients
) -> None:
    """A rollout inside an async generator that somebody else closes ends, once, and quietly."""
    client = clients.asynchronous(clients.serve())

    async def steps(name: str) -> AsyncIterator[int]:
        with rollout(name):
            await acall(client, f"{name} 1")
            yield 1
            await acall(client, f"{name} 2")
            yield 2

    async def begin(name: str) -> Any:
        generator: Any = steps(name)
        assert await generator.asend(None) == 1
        return generator

    generators = await asyncio.gather(*(begin(name) for name in "abc"))
    with pytest.raises(NoActiveRolloutError):
        get_current_trajectory()
    for generator in generators:
        await asyncio.ensure_future(generator.aclose())
    await acall(client, "nobody's")
    assert by_name(recording) == {name: [f"{name} 1"] for name in "abc"}


def test_a_generator_that_is_read_in_turns(recording: Recording, clients_now: Clients) -> None:
    """A generator of the agent makes its calls in the rollout of whoever asks for the next item."""
    client = clients_now.sync(clients_now.serve())

    def steps(name: str) -> Iterator[str]:
        for n in range(3):
            call(client, f"{name} {n}")
            yield name

    def agent(name: str) -> Iterator[None]:
        context = contextvars.copy_context()
        scope, items = rollout(name), steps(name)
        context.run(scope.__enter__)
        while context.run(next, items, None) is not None:
            yield
        context.run(scope.__exit__, None, None, None)

    agents = [agent(name) for name in "abc"]
    while [None for running in agents if next(running, "over") != "over"]:
        pass
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}
