"""`gather_trajectory` and the others with functions: agents that are not async have a way, too."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from typing import Any

import openai
import pytest

from otel_rollout import (
    ConfigurationError,
    NotARolloutError,
    gather_group,
    gather_trajectories,
    gather_trajectory,
    get_current_trajectory,
    rollout,
)
from tests.kit.recording import Clients, Recording


@rollout
def agent(client: openai.OpenAI, text: str = "hi", **_: Any) -> str:
    message: Any = {"role": "user", "content": text}
    completion = client.chat.completions.create(model="m", messages=[message])
    return completion.choices[0].message.content or ""


async def test_a_function_runs_with_its_arguments(recording: Recording, clients: Clients) -> None:
    """Its trajectory comes back whole, with the options of this run; the loop is free meanwhile."""
    client = clients.sync(clients.serve())
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    trajectory = await gather_trajectory(agent, client, "one", task_id="t1")
    ticking.cancel()
    assert ticks > 1
    assert trajectory is recording.trajectory
    assert (trajectory.name, trajectory.task_id) == ("agent", "t1")
    assert trajectory.output == "You said: one"
    assert len(trajectory.completions) == 1


def test_a_program_without_an_event_loop(recording: Recording, clients: Clients) -> None:
    """`asyncio.run` is all that it takes."""
    client = clients.sync(clients.serve())
    assert asyncio.run(gather_trajectory(agent, client)).output == "You said: hi"


async def test_every_kind_of_function(recording: Recording, clients: Clients) -> None:
    """Partials, lambdas, methods, async functions, and what returns a coroutine can be given."""
    client = clients.sync(clients.serve())

    @rollout
    async def asynchronous(text: str) -> str:
        return text

    class Agent:
        @rollout
        def method(self) -> str:
            return "method"

        @rollout
        async def __call__(self) -> str:
            return "object"

    ways: list[Any] = [
        (functools.partial(agent, client, text="partial"), "You said: partial"),
        (lambda: agent(client, "lambda"), "You said: lambda"),
        (Agent().method, "method"),
        (Agent(), "object"),
        (functools.partial(asynchronous, "later"), "later"),
        (lambda: asynchronous("made"), "made"),
    ]
    for function, output in ways:
        assert (await gather_trajectory(function)).output == output
    assert (await gather_trajectory(asynchronous, "arguments")).output == "arguments"


async def test_an_exception_is_raised_or_kept(recording: Recording) -> None:
    """As with a coroutine: it propagates, or is the trajectory's error."""

    @rollout
    def fails() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await gather_trajectory(fails)
    kept = await gather_trajectory(fails, raise_errors=False)
    assert (kept.status, (kept.error or {})["type"]) == ("error", "LookupError")
    wrong: Any = agent
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        await gather_trajectory(wrong)


async def test_functions_run_beside_each_other(recording: Recording) -> None:
    """Each has a thread of its own, however few the loop's executor has; order is kept."""
    together = threading.Barrier(40)

    @rollout
    def waits(number: int) -> int:
        together.wait(60)
        return number

    found = await gather_trajectories(functools.partial(waits, n) for n in range(40))
    assert [trajectory.output for trajectory in found] == list(range(40))


async def test_a_group_of_functions(recording: Recording, clients: Clients) -> None:
    """Samples are numbered, share a group, and see their own trajectory."""
    seen: list[Any] = []
    client = clients.sync(clients.serve())

    @rollout
    def sample() -> None:
        seen.append(get_current_trajectory().id)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])

    group = await gather_group([sample] * 3, group_id="g")
    assert [t.sample_index for t in group] == [0, 1, 2]
    assert sorted(seen) == sorted(t.id for t in group)
    assert [len(t.completions) for t in group] == [1, 1, 1]


async def test_the_value_of_a_function_is_refused_with_the_way(
    recording: Recording, clients: Clients
) -> None:
    """Whoever calls an agent that is not async passes its value: the error says what to write."""
    value: Any = agent(clients.sync(clients.serve("Paris")))
    with pytest.raises(NotARolloutError, match=r"got 'Paris'.*gather_trajectory\(agent, client"):
        await gather_trajectory(value)
    with pytest.raises(NotARolloutError, match="expected a function before its arguments"):
        await gather_trajectory(value, "more")


async def test_a_function_in_which_no_rollout_began_is_refused(recording: Recording) -> None:
    """The error names it, and what to decorate."""

    def plain() -> int:
        return 1

    with pytest.raises(NotARolloutError, match=r"plain.* ran, and no rollout began in it"):
        await gather_trajectory(plain)


@pytest.mark.parametrize(
    ("gathering", "options", "text"),
    [
        (gather_group, {"max_concurency": 3}, "group_id, max_concurrency, .*'max_concurrency'"),
        (gather_trajectories, {"on_trajctory": 3}, "max_concurrency, .*'on_trajectory'"),
        (gather_trajectory, {"nme": "x"}, "raise_errors, name, .*'name'"),
        (gather_group, {"zzz": 3}, "got zzz$"),
        (gather_trajectories, {"task_id": [3]}, "expected str or int"),
    ],
)
@pytest.mark.filterwarnings("error")
async def test_a_misspelt_option_is_that_of_the_function_that_was_called(
    gathering: Any, options: dict[str, Any], text: str
):
    """With the options that it has; no coroutine is left that was never awaited."""

    @rollout
    async def agent() -> None:
        pass

    runs = agent() if gathering is gather_trajectory else [agent(), agent()]
    with pytest.raises(ConfigurationError, match=rf"^{gathering.__name__}\(.*{text}"):
        await gathering(runs, **options)
    gc.collect()
