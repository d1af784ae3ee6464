"""The main conversation: that of the agent itself, for whoever shows, judges or trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from otel_rollout import (
    ConfigurationError,
    Trajectory,
    TrajectorySealedError,
    get_current_trajectory,
    rollout,
)
from otel_rollout.view.overview import Overview
from tests.kit.comparing import replayed
from tests.kit.conversations import ask, system, user
from tests.kit.recording import Clients, Recording

AGENT, HELPER = system("You are the agent."), system("You help.")


def end(trajectory: Trajectory) -> Any:
    """The text of main's last message; everything that says main is the same, read again too."""
    read = Trajectory.from_json(trajectory.to_json())
    for each in (trajectory, read):
        assert each.main == each.histories[0]
        assert each.main is not None
        assert each.messages() == each.main.messages()
        overview = Overview.of(each)
        assert overview.answer == each.main.completions[-1].message["content"]  # type: ignore[index]
        assert overview.question in [m.get("content") for m in each.messages()]
    return trajectory.messages()[-1]["content"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_first_asks_others(
    recording: Recording, clients: Clients, streamed: bool
):
    """Sub-agents that are not decorated are not the agent, though they begin."""
    client = clients.asynchronous(clients.serve(["sub 1", "sub 2", "plan", "end"]))
    async with rollout("agent"):
        await ask(client, HELPER, user("a"), stream=streamed)
        await ask(client, HELPER, user("b"), user("and long"), user("longer"), stream=streamed)
        messages = [AGENT, user("task")]
        messages += [await ask(client, *messages, stream=streamed), user("go on")]
        await ask(client, *messages, stream=streamed)
    trajectory = replayed(recording)
    assert end(trajectory) == "end"
    assert Overview.of(trajectory).question == "task"


async def test_what_was_abandoned_is_not_main(recording: Recording, clients: Clients):
    """After a fork, and after a compaction, the conversation that went on is."""
    client = clients.asynchronous(clients.serve(["r", "left", "kept", "summary", "last"]))
    async with rollout("fork"):
        first = await ask(client, user("u"))
        await ask(client, user("u"), first, user("x"))
        await ask(client, user("u"), first, user("y"))
    async with rollout("compaction"):
        first = await ask(client, AGENT, user("u"))
        await ask(client, AGENT, user("what it was"), user("go on"))
    fork, compaction = recording.trajectories
    assert (end(fork), end(compaction)) == ("kept", "last")
    assert [item.trainable for item in fork.histories[0].items] == [False, True, False, True]


async def test_calls_at_the_same_time(recording: Recording, clients: Clients):
    """Of two choices the first; of two conversations that end together the longer one."""
    client = clients.asynchronous(clients.serve(["a", "b", "c"]))
    async with rollout("choices"):
        await ask(client, user("u"), n=2)
    (trajectory,) = recording.trajectories
    first, _ = trajectory.completions
    assert trajectory.main is not None
    assert trajectory.main.completions == [first]


@pytest.mark.parametrize("returned", ["the answer", "  the answer\n"])
async def test_what_a_rollout_returns_decides(
    recording: Recording, clients: Clients, returned: str
):
    """Where it is one history's last reply: calls that came later were a judge's."""
    client = clients.asynchronous(clients.serve(["the answer", "good"]))

    @rollout
    async def agent() -> Any:
        await ask(client, AGENT, user("task"))
        await ask(client, HELPER, user("judge it"))
        return returned

    await agent()
    assert end(replayed(recording)) == "the answer"


async def test_what_several_replies_say_decides_nothing(recording: Recording, clients: Clients):
    """Then it is the last call's, as where what is returned is no reply."""
    client = clients.asynchronous(clients.serve(["yes", "yes"]))

    @rollout
    async def agent() -> Any:
        await ask(client, HELPER, user("a"))
        await ask(client, AGENT, user("b"))
        return "yes"

    await agent()
    assert replayed(recording).messages()[:2] == [AGENT, user("b")]


CHOICES: dict[str, Callable[[Trajectory], Any]] = {
    "history": lambda t: next(h for h in t.histories if h.completions[0] is t.completions[0]),
    "completion": lambda t: t.completions[0],
    "id": lambda t: t.completions[0].id,
}


@pytest.mark.parametrize("way", CHOICES)
@pytest.mark.parametrize("inside", [False, True])
async def test_a_user_names_it(recording: Recording, clients: Clients, way: str, inside: bool):
    """By an option or while it runs; it is recorded, and goes on with its conversation."""
    client, choose = (
        clients.asynchronous(clients.serve(["named", "other", "more", "last"])),
        CHOICES[way],
    )

    @rollout(main=None if inside else choose)
    async def agent() -> Any:
        first = await ask(client, AGENT, user("a"))
        if inside:
            get_current_trajectory().main = choose(get_current_trajectory())
        await ask(client, HELPER, user("b"))
        await ask(client, AGENT, user("a"), first, user("more"))
        await ask(client, HELPER, user("c"))
        return "last"

    await agent()
    trajectory = replayed(recording)
    assert end(trajectory) == "more"
    assert trajectory.main_call is not None
    with pytest.raises(TrajectorySealedError, match="name it while it runs"):
        trajectory.main = None


async def test_a_wrong_choice(recording: Recording, clients: Clients):
    """An option of another kind is refused; one that fails decides nothing."""
    with pytest.raises(ConfigurationError, match=r"rollout\(main=...\): expected a function"):
        rollout(main="system prompt")  # type: ignore[call-overload]
    client = clients.asynchronous(clients.serve(["a"]))
    async with rollout("x", main=lambda _: 1 / 0):
        await ask(client, user("u"))
    with pytest.raises(ValueError, match="expected a history"):
        async with rollout("x") as trajectory:
            trajectory.main = 5  # type: ignore[assignment]
    assert end(recording.trajectories[0]) == "a"


async def test_nothing_was_said(recording: Recording):
    """There is no main history without a reply."""
    async with rollout("x"):
        pass
    (trajectory,) = recording.trajectories
    assert (trajectory.main, trajectory.messages(), trajectory.main_start) == (None, [], None)
