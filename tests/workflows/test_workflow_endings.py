"""How an episode ends: the reason of the run, a timeout, an error, a cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from otel_rollout import Episode, Step, TerminationEvent, TerminationReason, Trajectory, Workflow
from otel_rollout.testing import Reply
from tests.kit.recording import Clients, Recording
from tests.kit.workflows import ERROR, TIMEOUT, MultiTurn, ask, ending, rebuilt


@pytest.mark.parametrize("reason", list(TerminationReason))
async def test_a_reason_that_the_run_gives(recording: Recording, reason: TerminationReason):
    """The reason of the event is that of the episode."""

    async def run() -> None:
        raise TerminationEvent(reason)

    assert (await ending(recording, run)).termination_reason is reason
    assert rebuilt(recording).info == {}


async def test_its_own_timeout(recording: Recording, clients: Clients):
    """What was done by then is kept, and the call that ran was cancelled."""
    client = clients.asynchronous(clients.serve([Reply("yes"), Reply("late", delay=60)]))

    async def run() -> None:
        for text in ("a", "b"):
            await ask(client, [{"role": "user", "content": text}])

    episode = await ending(recording, run, timeout=1.0)
    assert episode.termination_reason is TIMEOUT
    (own,) = episode.trajectories
    assert [c.status for c in own.completions] == ["complete", "cancelled"]
    assert (own.status, own.termination_reason) == ("error", "timeout")
    rebuilt(recording)


async def test_a_timeout_that_the_run_raises_is_an_error(recording: Recording):
    """Only the workflow's own clock makes a TIMEOUT."""

    async def run() -> None:
        raise TimeoutError("a tool took too long")

    episode = await ending(recording, run)
    assert episode.termination_reason is ERROR
    assert episode.info["error"]["error_type"] == "TimeoutError"
    assert episode.info["error"]["error_message"] == "a tool took too long"
    assert "in run" in episode.info["error"]["traceback"]
    rebuilt(recording)


async def test_a_run_that_does_not_let_itself_be_cancelled(recording: Recording):
    """What it says after its time is not asked for."""

    async def run() -> Episode:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Episode(id="mine")
        raise AssertionError

    episode = await ending(recording, run, timeout=0.05)
    assert (episode.id, episode.termination_reason) == ("t:0", TIMEOUT)


async def test_an_episode_that_the_run_returns(recording: Recording, clients: Clients):
    """It is returned as it is, and nothing is judged."""
    client = clients.asynchronous(clients.serve("yes"))
    mine = Episode(id="mine", task="own", is_correct=True, metrics={"x": 1.0})

    async def run() -> Episode:
        messages = [{"role": "user", "content": "hi"}]
        await ask(client, messages)
        reply = {"role": "assistant", "content": "yes"}
        steps = [Step(chat_completions=[*messages, reply], reward=0.5)]
        mine.trajectories.append(Trajectory(name="hand", steps=steps, reward=0.25))
        return mine

    episode = await ending(recording, run)
    assert episode is mine
    assert (mine.id, mine.task, mine.metrics) == ("mine", "own", {"x": 1.0})
    assert mine.trajectories[0].reward == 0.25
    assert len(mine.trajectories) == 1
    assert len(mine.trajectories[0].completions) == 1
    rebuilt(recording)


async def test_a_cancellation_propagates_and_the_episode_is_kept(
    recording: Recording, clients: Clients
):
    """The exporters get what had happened."""
    asked = asyncio.Event()
    client = clients.asynchronous(clients.serve("yes"))

    async def run() -> None:
        await ask(client, [{"role": "user", "content": "a"}])
        asked.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(ending(recording, run))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    episode = rebuilt(recording)
    assert [len(t.completions) for t in episode.trajectories] == [1]
    assert recording.trajectory.status == "cancelled"


async def test_a_hook_that_fails_is_an_error(recording: Recording):
    """An episode comes whatever happens."""

    class Fails(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            return None

        def collect_metrics(self, episode: Episode) -> None:
            raise ValueError("no metrics")

    episode = await Fails().run_with_termination_handling({}, "t:0")
    assert episode.termination_reason is ERROR
    assert episode.info["error"]["error_message"] == "no metrics"


async def test_hooks_may_be_coroutines(recording: Recording, clients: Clients):
    """Sync and async ones mixed, and each is given what it is to judge."""
    client = clients.asynchronous(clients.serve([Reply("1"), Reply("3")]))

    class Judged(MultiTurn):
        async def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
            await asyncio.sleep(0)
            trajectory.reward = 7.0

        def assign_episode_correctness(self, episode: Episode) -> None:
            episode.is_correct = False

        async def collect_metrics(self, episode: Episode) -> None:
            await asyncio.sleep(0)
            episode.metrics = {"seen": float(len(episode.trajectories))}

    episode = await Judged(client).run_with_termination_handling({}, "t:0")
    assert episode.trajectories[0].reward == 7.0
    assert not episode.is_correct
    assert episode.metrics == {"seen": 1.0}
    rebuilt(recording)
