"""Many rollouts at once, and the groups that trainers compare: nothing mixed, nothing lost."""

from __future__ import annotations

import asyncio
import gc
import io
import math
import sys
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest

from otel_rollout import (
    ConfigurationError,
    NotARolloutError,
    SpanFormatError,
    TooManyExceptionsError,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectories,
    get_current_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.testing import Reply
from tests.kit.recording import Clients, Recording


@rollout
async def solve(number: int, reward: float | None = None) -> int:
    """A task that says how it went, or fails."""
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(f"bad task {number}")
    if reward is not None:
        record_reward(reward)
    return number


# --- many


@pytest.mark.parametrize("max_concurrency", [None, 1, 3, 100])
async def test_results_are_in_the_order_of_the_coroutines(
    recording: Recording, max_concurrency: int | None
):
    """Whoever ends first, the result is in the order that was asked for."""

    @rollout
    async def late(number: int) -> int:
        for _ in range(10 - number):
            await asyncio.sleep(0)
        return number

    trajectories = await gather_trajectories(
        [late(i) for i in range(10)], max_concurrency=max_concurrency
    )
    assert [t.output for t in trajectories] == list(range(10))
    assert {t.id for t in trajectories} == {t.id for t in recording.trajectories}


async def test_no_more_run_at_once_than_is_allowed(recording: Recording):
    """The bound holds, and it is used."""
    running, most = 0, 0

    @rollout
    async def agent() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1

    await gather_trajectories([agent() for _ in range(20)], max_concurrency=4)
    assert most == 4


async def test_a_generator_is_taken_from_as_there_is_room(recording: Recording):
    """Of ten thousand tasks only those that run are held."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Task:
        pass

    @rollout
    async def agent(task: Task) -> None:
        await asyncio.sleep(0)

    def tasks() -> Iterator[Coroutine[Any, Any, None]]:
        for _ in range(100):
            task = Task()
            made.append(weakref.ref(task))
            yield agent(task)

    def ended(_: Trajectory) -> None:
        gc.collect(0)
        alive.append(sum(ref() is not None for ref in made))

    trajectories = await gather_trajectories(tasks(), max_concurrency=2, on_trajectory=ended)
    assert len(trajectories) == 100
    assert max(alive) <= 4


async def test_a_failed_rollout_is_a_trajectory_in_its_place(recording: Recording):
    """One bad task does not stop the others."""
    trajectories = await gather_trajectories([solve(1), solve(-2), solve(3)])
    assert [t.status for t in trajectories] == ["complete", "error", "complete"]
    assert trajectories[1].error is not None
    assert trajectories[1].error["message"] == "bad task -2"


async def test_more_failures_than_are_allowed_stop_the_rest(recording: Recording):
    """The exception has what ended by then; what ran is cancelled, the rest never begins."""
    begun: list[int] = []

    @rollout
    async def agent(number: int) -> None:
        begun.append(number)
        if number in (1, 2):
            raise ValueError(number)
        if number == 3:
            await asyncio.Event().wait()

    with pytest.raises(TooManyExceptionsError, match="1 may") as caught:
        await gather_trajectories(
            [agent(i) for i in (0, 1, 3, 2, 4)], max_concurrency=2, max_exceptions=1
        )
    assert [t.status for t in caught.value.results] == ["complete", "error", "error"]
    assert begun == [0, 1, 3, 2]
    assert [t.status for t in recording.trajectories][-1] == "cancelled"


async def test_as_many_failures_as_are_allowed_are_fine(recording: Recording):
    """The budget is what may fail, not what may not."""
    trajectories = await gather_trajectories([solve(-1), solve(-2), solve(3)], max_exceptions=2)
    assert len(trajectories) == 3


async def test_cancelling_cancels_what_runs_and_keeps_what_ended(recording: Recording):
    """What had ended is with the exporters, and nothing of the rest is left running."""
    waiting = asyncio.Event()

    @rollout
    async def agent(number: int) -> None:
        if number:
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(gather_trajectories([agent(i) for i in range(3)], max_concurrency=2))
    await waiting.wait()
    before = asyncio.all_tasks()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() < before
    assert sorted(t.status for t in recording.trajectories)[:2] == ["cancelled", "cancelled"]
    assert recording.trajectories[0].status == "complete"


async def test_each_call_is_in_its_own_trajectory(recording: Recording, clients: Clients):
    """Sixty-four agents at once, of several turns each, are not mixed."""
    server = clients.serve(lambda body: Reply(f"re {body['messages'][-1]['content']}"))
    client = clients.asynchronous(server)

    @rollout
    async def agent(number: int) -> None:
        messages: list[Any] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{number}-{turn}"})
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message)

    trajectories = await gather_trajectories([agent(i) for i in range(64)], max_concurrency=16)
    for number, trajectory in enumerate(trajectories):
        (history,) = trajectory.histories
        asked = [m["content"] for m in history.messages() if m["role"] == "user"]
        assert asked == [f"{number}-{turn}" for turn in range(3)]
        assert trajectory.warnings == []


async def test_options_are_those_of_each_rollout(recording: Recording):
    """What `rollout` takes can be said for all of them."""
    trajectories = await gather_trajectories([solve(1), solve(2)], task_id="t", policy_version=3)
    assert [(t.task_id, t.policy_version) for t in trajectories] == [("t", 3)] * 2


async def test_no_coroutines_are_no_trajectories(recording: Recording):
    """Nothing to do is done."""
    assert await gather_trajectories([]) == []
    assert await gather_trajectories(iter(()), max_concurrency=2) == []


@pytest.mark.parametrize(
    "options",
    [{"max_concurrency": 0}, {"max_concurrency": "2"}, {"max_exceptions": -1}],
)
async def test_wrong_bounds_are_named(recording: Recording, options: dict[str, Any]):
    """And no coroutine is left un-awaited, which would be a warning and so an error here."""
    with pytest.raises(ConfigurationError, match=f"gather\\({next(iter(options))}="):
        await gather_trajectories([solve(1)], **options)


async def test_what_is_no_list_of_rollouts_is_refused(recording: Recording):
    """A single coroutine, and a coroutine of another function."""
    wrong: Any = solve(1)
    with pytest.raises(ConfigurationError, match="there is gather_trajectory"):
        await gather_trajectories(wrong)
    with pytest.raises(NotARolloutError, match="not decorated"):
        await gather_trajectories([asyncio.sleep(0), solve(1)])


# --- a bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_bar_on_a_terminal_else_a_line(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, terminal: bool
):
    """It says how many there are, the mean reward, and what went wrong."""
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    await gather_trajectories([solve(1, 1.0), solve(2, 0.0), solve(-3)], progress="my agents")
    shown = stderr.getvalue()
    if not terminal:
        assert shown.count("\n") == 1
        assert shown.startswith("my agents: 3/3 rollouts in ")
        assert shown.endswith("/s, reward 0.5, error 1\n")
        return
    last = shown.rstrip().split("\r")[-1]
    assert "my agents: 100%" in last
    assert "3/3" in last
    assert "reward=0.5" in last
    assert "error=1" in last


# --- groups


async def test_a_group_is_samples_of_one_task(recording: Recording):
    """Each sample knows its group and its place; failures are not zeros."""
    group = await gather_group([solve(1, 1.0), solve(-1), solve(2, 0.0), solve(3)], task_id="t")
    assert [t.sample_index for t in group] == [0, 2, 3]
    assert {t.group_id for t in recording.trajectories} == {group.id}
    assert group.rewards == [1.0, 0.0, None]
    assert [t.sample_index for t in group.failures] == [1]
    assert group.advantages() == [0.5, -0.5, None]
    assert len(group) == 3
    assert group[0] is group.trajectories[0]


async def test_groups_that_are_made_in_a_loop(recording: Recording):
    """Each group has the task of its turn of the loop, though it is awaited after all of them."""
    made = [gather_group(solve(number) for _ in range(2)) for number in (1, 2)]
    groups = await asyncio.gather(*made)
    assert [[t.output for t in group] for group in groups] == [[1, 1], [2, 2]]


async def test_two_groups_have_ids_of_their_own(recording: Recording):
    """Unless one is given."""
    first = await gather_group([solve(1)])
    second = await gather_group([solve(1)])
    named = await gather_group([solve(1)], group_id=7)
    assert first.id != second.id
    assert named.id == named[0].group_id == "7"


async def test_a_failure_that_was_scored_is_a_trajectory(recording: Recording):
    """An agent that sets a reward before it fails said what that is worth."""

    @rollout
    async def agent() -> None:
        get_current_trajectory().reward = -1.0
        raise ValueError

    group = await gather_group([agent()])
    assert group.rewards == [-1.0]
    assert group.failures == []


@pytest.mark.parametrize(
    ("rewards", "plain", "scaled"),
    [
        ([1.0, 0.0], [0.5, -0.5], [1.0, -1.0]),
        ([1.0, 1.0], [0.0, 0.0], [0.0, 0.0]),
        ([None, 2.0], [None, None], [None, None]),
        ([0.0], [None], [None]),
        ([None, 2.0, 2.0], [None, 0.0, 0.0], [None, 0.0, 0.0]),
        ([None], [None], [None]),
        ([], [], []),
    ],
)
def test_advantages(
    rewards: list[float | None], plain: list[float | None], scaled: list[float | None]
):
    """Relative to the group; unknown, or compared with none, is not zero; equal rewards are."""
    group = scored(rewards)
    assert group.advantages() == plain
    assert group.advantages(scale=True, epsilon=0.0) == scaled
    for ddof in (0, 1):
        near = group.advantages(scale=True, ddof=ddof, epsilon=1e-9)
        assert [a and math.copysign(1.0, a) for a in near] == scaled


def scored(rewards: Sequence[float | None]) -> TrajectoryGroup:
    trajectories = [Trajectory(id=str(i)) for i in range(len(rewards))]
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        trajectory.reward = reward
    return TrajectoryGroup.of(trajectories)


def test_rewards_that_differ_by_rounding_alone_say_nothing():
    """0.1 + 0.2 and 0.3 are one reward: scaled advantages are not those of a better sample."""
    advantages = scored([0.1 + 0.2, 0.3, 0.3, 0.3]).advantages(scale=True)
    assert advantages == pytest.approx([0.0] * 4, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, 0.5 / (0.5 + 1e-6)),
        ({"epsilon": 1e-4}, 0.5 / (0.5 + 1e-4)),
        ({"ddof": 1, "epsilon": 1e-4}, 0.5 / (math.sqrt(1 / 3) + 1e-4)),
    ],
)
def test_the_divisor_of_advantages(options: Any, first: float):
    """The deviation over N or N - 1, plus epsilon, as trainers have it."""
    group = scored([1.0, 0.0, 1.0, 0.0])
    assert group.advantages(scale=True, **options)[0] == pytest.approx(first, rel=1e-12)
    assert group.advantages(**options)[0] == 0.5


@pytest.mark.parametrize("options", [{"ddof": 2}, {"epsilon": -1.0}, {"epsilon": math.nan}])
def test_wrong_options_of_advantages(options: Any):
    """A wrong option is refused by its name."""
    with pytest.raises(ValueError, match=next(iter(options))):
        scored([1.0]).advantages(scale=True, **options)


async def test_groups_of_an_exporter(recording: Recording):
    """Complete groups are taken out, in the order in which they became complete."""
    for number in (1, 2, -1):
        for name in ("a", "b"):
            if (name, number) != ("b", 2):
                await gather_trajectories([solve(number)], group_id=name)
    await gather_trajectories([solve(9)])
    (group,) = recording.exporter.groups(3)
    assert group.id == "a"
    assert (len(group), len(group.failures)) == (2, 1)
    assert recording.exporter.groups(3) == []
    await gather_trajectories([solve(2)], group_id="b")
    assert [group.id for group in recording.exporter.groups(3)] == ["b"]
    assert [t.output for t in recording.trajectories] == [9]
    with pytest.raises(ValueError, match="expected a number from 1 on"):
        recording.exporter.groups(0)


async def test_groups_of_an_exporter_have_their_children(recording: Recording):
    """What ran inside a member leaves with it, at any depth; what did not stays."""

    @rollout
    async def inner() -> None:
        pass

    @rollout
    async def helper() -> None:
        await inner()

    @rollout
    async def agent() -> None:
        await helper()

    await gather_trajectories([agent(), agent()], group_id="a")
    await gather_trajectories([agent()], group_id="b")
    await gather_trajectories([helper()])
    (group,) = recording.exporter.groups(2)
    assert [child.name for child in group.children] == ["helper", "inner"] * 2
    assert {(group.member_of(child) or child).id for child in group.children} == {
        member.id for member in group
    }
    names = ["inner", "helper", "agent", "inner", "helper"]
    assert [trajectory.name for trajectory in recording.trajectories] == names
    assert group.adopt(recording.trajectories) == []


def test_a_bound_and_groups(recording: Recording):
    """More than `size` of a group: the first are taken, the next group begins with the rest."""
    trajectories = [Trajectory(id=str(i), group_id="g") for i in range(5)]
    recording.exporter.export(trajectories)
    groups = recording.exporter.groups(2)
    assert [[t.id for t in group] for group in groups] == [["0", "1"], ["2", "3"]]
    assert [t.id for t in recording.trajectories] == ["4"]


def test_groups_by_id():
    """Trajectories in any order; one without a group is alone."""
    made = [("1", "a"), ("2", None), ("3", "b"), ("4", "a"), ("5", None)]
    trajectories = [Trajectory(id=id_, group_id=group) for id_, group in made]
    groups = TrajectoryGroup.by_id(trajectories)
    assert [[t.id for t in group] for group in groups] == [["1", "4"], ["2"], ["3"], ["5"]]
    assert [group.id for group in groups] == ["a", None, "b", None]
    with pytest.raises(ValueError, match="trajectories of one group"):
        TrajectoryGroup.of(trajectories)


async def test_a_group_as_data(recording: Recording):
    """`from_dict` of `to_dict` is equal, failures included."""
    group = await gather_group([solve(1, 1.0), solve(-1)])
    assert TrajectoryGroup.from_dict(group.to_dict()) == group
    with pytest.raises(SpanFormatError, match="expected what to_dict gave"):
        TrajectoryGroup.from_dict({"id": "x"})


def test_a_group_is_shown_in_one_short_line():
    """Counts and the mean reward, whatever its members are."""
    members = [Trajectory(name="a") for _ in range(200)]
    for number, member in enumerate(members[:100]):
        member.reward = number % 2
    group = TrajectoryGroup(members, members[:1], "g", members[:2])
    assert repr(group) == (
        "<TrajectoryGroup 'g': 200 trajectories, 1 failure, 2 inside them, mean reward 0.5 of 100>"
    )
    assert repr(TrajectoryGroup([])) == "<TrajectoryGroup None: 0 trajectories, no reward>"


def test_an_empty_group_id_is_an_id() -> None:
    """Its runs are groups of their own, as those of any other id."""
    members = [
        Trajectory(id=f"{n:032x}", group_id="", group_run=run) for n, run in enumerate("aabb", 1)
    ]
    assert [(each.key, len(each)) for each in TrajectoryGroup.by_id(members)] == [
        ("@a", 2),
        ("@b", 2),
    ]
