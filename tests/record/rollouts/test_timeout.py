"""`timeout=`, and time limits of asyncio around a rollout: they end it with a reason of its own."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from typing import Any

import anyio
import pytest

from otel_rollout import (
    ConfigurationError,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectories,
    gather_trajectory,
    get_current_trajectory,
    record_reward,
    rollout,
    to_token_rows,
)
from tests.kit.conversations import ask, user
from tests.kit.recording import Clients, Recording


def ending(trajectory: Trajectory) -> tuple[str, str | None]:
    return trajectory.status, trajectory.termination_reason


TIMED_OUT = ("error", "timeout")


@rollout
async def agent(client: Any, seconds: float = 30.0, reward: float | None = 0.0) -> str:
    await ask(client, user("hi"))
    if reward is not None:
        record_reward(reward)
    await asyncio.sleep(seconds)
    return "done"


@pytest.fixture
def client(clients: Clients) -> Any:
    return clients.asynchronous(clients.serve())


async def test_a_gathered_rollout_that_takes_too_long(recording: Recording, client: Any):
    """It is a trajectory with its reward, compared like the others, and trains like them."""
    coroutines = [agent(client), agent(client, 0, 1.0)]
    group = await gather_group(coroutines, timeout=2)
    assert [ending(t) for t in group] == [TIMED_OUT, ("complete", None)]
    assert group[0].error is not None
    assert group[0].error["type"] == "RolloutTimeoutError"
    assert "2 seconds" in group[0].error["message"]
    rows = to_token_rows(group)
    assert [row["advantage"] for row in rows] == group.advantages() == [-0.5, 0.5]


async def test_the_caller_gets_a_timeout_error(recording: Recording, client: Any):
    """From a decorated function, from `async with` and from `gather_trajectory`."""

    @rollout(timeout=0.05)
    async def slow() -> None:
        await asyncio.sleep(30)

    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        await slow()
    with pytest.raises(TimeoutError):
        await gather_trajectory(slow())
    with pytest.raises(TimeoutError):
        async with rollout("x", timeout=0.05):
            await asyncio.sleep(30)
    (found,) = await gather_trajectories([slow()])
    assert [ending(t) for t in [*recording.trajectories, found]] == [TIMED_OUT] * 5
    async with rollout("x", timeout=5):
        await asyncio.sleep(0)
    assert ending(recording.trajectories[-1]) == ("complete", None)
    await asyncio.sleep(0.1)  # nothing is cancelled later


async def test_an_agent_that_does_not_let_itself_be_stopped(recording: Recording):
    """It was late all the same, whether it returns or raises something else."""

    @rollout(timeout=0.05)
    async def stubborn(error: Exception | None) -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return "late"

    for error in (None, ValueError("cleaning up")):
        (found,) = await gather_trajectories([stubborn(error)])
        assert (ending(found), found.output) == (TIMED_OUT, None)


async def test_a_cancellation_by_others_is_one(recording: Recording):
    """A limit that is not over makes no time-out of it."""

    @rollout(timeout=30)
    async def slow() -> None:
        await asyncio.sleep(30)

    task = asyncio.create_task(slow())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ending(recording.trajectories[-1]) == ("cancelled", "cancelled")


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "5", True])
def test_wrong_seconds(seconds: Any):
    """They are refused with what was given."""
    with pytest.raises(ConfigurationError, match=r"timeout=.*a number above 0, got"):
        rollout(timeout=seconds)


async def test_what_cannot_be_stopped(recording: Recording):
    """A function that is not async, and a `with`, are refused before they run."""
    ran = list[str]()

    @rollout
    def plain() -> None:
        ran.append("plain")

    with pytest.raises(ConfigurationError, match=r"'plain'.*Make it async"):
        rollout(timeout=1)(plain)
    with pytest.raises(ConfigurationError, match=r"'plain'.*cannot be stopped"):
        await gather_trajectories([functools.partial(plain)], timeout=1)
    with (
        pytest.raises(ConfigurationError, match="Write `async with`"),
        rollout("x", timeout=1),
    ):
        pass
    assert ran == []


async def around_by_wait_for(work: Any) -> None:
    await asyncio.wait_for(work, 2)


async def around_by_timeout(work: Any) -> None:
    limit: Any = getattr(asyncio, "timeout")  # noqa: B009 - from Python 3.11 on
    async with limit(2):
        await work


async def around_by_anyio(work: Any) -> None:
    with anyio.fail_after(2):
        await work


AROUND: list[Any] = [around_by_wait_for, around_by_anyio, around_by_timeout][
    : 3 if sys.version_info >= (3, 11) else 2
]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", ["awaited", "gathered", "in a block"])
async def test_a_limit_around_a_rollout(recording: Recording, client: Any, around: Any, way: str):
    """Asyncio only cancels it; it is a time-out where the limit of its own task was over."""

    async def block() -> None:
        with rollout("block"):
            record_reward(0.0)
            await ask(client, user("hi"))
            await asyncio.sleep(30)

    works: dict[str, Any] = {
        "awaited": agent,
        "gathered": lambda c: gather_trajectory(agent(c)),
    }
    with pytest.raises(asyncio.TimeoutError):
        await around(block() if way == "in a block" else works[way](client))
    (found,) = recording.trajectories
    assert ending(found) == TIMED_OUT
    assert found.error is not None
    assert found.error["message"]
    assert len(to_token_rows(found, on_failure="keep")) == 1


@pytest.mark.parametrize("around", AROUND)
async def test_a_limit_that_is_not_over(recording: Recording, around: Any):
    """Who is cancelled before it is over was cancelled."""
    task = asyncio.create_task(around(asyncio.sleep(0)))
    await task
    made: Any = rollout("x")

    async def waits() -> None:
        with made:
            await asyncio.sleep(30)

    task = asyncio.create_task(around(waits()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ending(recording.trajectories[-1]) == ("cancelled", "cancelled")


async def test_a_limit_inside_an_agent(recording: Recording):
    """An error like another, with the reason; where the agent goes on, it is none."""

    @rollout
    async def impatient(*, goes_on: bool) -> None:
        try:
            await asyncio.wait_for(asyncio.sleep(30), 0.02)
        except asyncio.TimeoutError:
            if not goes_on:
                raise

    found = await gather_trajectories([impatient(goes_on=goes_on) for goes_on in (False, True)])
    assert [ending(t) for t in found] == [TIMED_OUT, ("complete", None)]


async def test_what_was_scored_and_cancelled(recording: Recording, client: Any):
    """The mean of a group is of those that have rows: without it by default, with it on request."""

    @rollout
    async def one(reward: float | None, *, cancelled: bool) -> None:
        await ask(client, user("hi"))
        get_current_trajectory().reward = reward
        if cancelled:
            raise asyncio.CancelledError

    works = [one(1.0, cancelled=False), one(0.5, cancelled=False)]
    works += [one(0.0, cancelled=True), one(None, cancelled=True)]
    made = await gather_trajectories(works, group_id="g", group_size=4)
    for given in (TrajectoryGroup.of(made), made):
        rows = to_token_rows(given)
        assert [row["advantage"] for row in rows] == [0.25, -0.25]
        rows = to_token_rows(given, on_failure="keep")
        assert [row["advantage"] for row in rows] == [0.5, 0.0, -0.5]
    group = TrajectoryGroup.of(made)
    assert group.advantages() == [0.25, -0.25]
    assert len(group.failures) == 2
