"""Workflows: an episode whatever happens, on the trace, equal when it is rebuilt."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    Episode,
    SpanFormatError,
    Step,
    TerminationEvent,
    TerminationReason,
    TooManyExceptionsError,
    Trajectory,
    Workflow,
    get_current_trajectory,
    reconstruct,
    record_reward,
    rollout,
)
from otel_rollout.testing import Reply
from otel_rollout.workflows import Action, reconstruct_episodes, run_workflows
from tests.kit.recording import Clients, Recording
from tests.kit.workflows import ERROR, Agent, Environment, MultiTurn, ask, ending, rebuilt


async def test_a_workflow_of_an_agent_and_an_environment(recording: Recording, clients: Clients):
    """Steps built by hand are tied to the calls; nothing is there twice."""
    server = clients.serve([Reply("1"), Reply("2"), Reply("3")])
    workflow = MultiTurn(clients.asynchronous(server))
    episode = await workflow.run_with_termination_handling({"q": 1}, "t:0")
    assert (episode.id, episode.task) == ("t:0", {"q": 1})
    assert episode.termination_reason is TerminationReason.ENV_DONE
    (trajectory,) = episode.trajectories
    assert trajectory.name == "guesser"
    assert [step.reward for step in trajectory.steps] == [0.1, 0.2, 1.0]
    assert trajectory.reward == pytest.approx(1.3)
    assert episode.is_correct
    assert episode.metrics == {"guesser_acc": pytest.approx(1.3)}
    completions = trajectory.completions
    assert [c.message and c.message["content"] for c in completions] == ["1", "2", "3"]
    assert [step.completion and step.completion.id for step in trajectory.steps] == [
        c.id for c in completions
    ]
    assert [c.reward for c in completions] == [0.1, 0.2, 1.0]
    (history,) = trajectory.histories
    assert len(history.items) == 7
    (row,) = trajectory.token_sequences()
    assert len(row.completion_ids) == 3
    assert trajectory.warnings == []
    assert [t.id for t in recording.trajectories] == [trajectory.id]
    assert [t.id for t in reconstruct(recording.spans)] == [trajectory.id]
    assert rebuilt(recording).trajectories[0].steps[1].info == {"got": 2}
    (span,) = recording.spans_named("invoke_workflow MultiTurn")
    (own,) = recording.spans_named("invoke_agent guesser")
    assert own.parent is not None
    assert span.context is not None
    assert own.parent.span_id == span.context.span_id


@pytest.mark.parametrize(
    ("gamma", "bonus", "rewards", "returns"),
    [
        (0.0, 0.0, [0.1, 0.2, 1.0], [0.0, 0.0, 0.0]),
        (0.5, 0.0, [0.1 + 0.5 * 0.7, 0.2 + 0.5 * 1.0, 1.0], [0.45, 0.7, 1.0]),
        (0.0, 2.0, [0.1, 0.2 + 2 * 0.1, 1.0 + 2 * 0.8], [0.0, 0.0, 0.0]),
        (1.0, 1.0, [2.2, 2.1, 1.8], [2.2, 2.1, 1.8]),
    ],
)
async def test_shaping(
    recording: Recording,
    clients: Clients,
    gamma: float,
    bonus: float,
    rewards: list[float],
    returns: list[float],
):
    """Bonus on the raw rewards, then discounting; the trajectory's reward is that of before."""
    client = clients.asynchronous(clients.serve([Reply("1"), Reply("2"), Reply("3")]))
    workflow = MultiTurn(client, gamma=gamma, reward_bonus_coeff=bonus)
    episode = await workflow.run_with_termination_handling({}, "t:0")
    (trajectory,) = episode.trajectories
    assert [step.reward for step in trajectory.steps] == pytest.approx(rewards)
    assert [step.mc_return for step in trajectory.steps] == pytest.approx(returns)
    assert [step.raw_reward for step in trajectory.steps] == pytest.approx([0.1, 0.2, 1.0])
    assert trajectory.reward == pytest.approx(1.3)
    rebuilt(recording)


async def test_a_single_step_is_not_shaped(recording: Recording, clients: Clients):
    """There is nothing to discount, and no step before it."""
    client = clients.asynchronous(clients.serve([Reply("3")]))
    workflow = MultiTurn(client, gamma=0.5, reward_bonus_coeff=1.0)
    episode = await workflow.run_with_termination_handling({}, "t:0")
    (step,) = episode.trajectories[0].steps
    assert (step.reward, step.mc_return, step.raw_reward) == (1.0, 0.0, 1.0)


async def test_a_step_whose_call_was_never_made_is_dropped(recording: Recording, clients: Clients):
    """An agent that was told of the environment and did not get to answer."""
    client = clients.asynchronous(clients.serve([Reply("1"), Reply("7")]))
    workflow = MultiTurn(client, max_steps=2)
    episode = await workflow.run_with_termination_handling({}, "t:0")
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert [step.model_response for step in episode.trajectories[0].steps] == ["1", "7"]
    assert len(workflow.agent.trajectory.steps) == 3  # the agent's own is left alone
    rebuilt(recording)


# --- rollouts inside, and calls outside of them


async def test_rollouts_inside_and_calls_of_its_own(recording: Recording, clients: Clients):
    """Each `@rollout` is a trajectory; the calls in `run` itself are the workflow's own."""
    client = clients.asynchronous(clients.serve("yes"))

    @rollout
    async def solver(number: int) -> str:
        answer = await ask(client, [{"role": "user", "content": f"solve {number}"}])
        record_reward(number / 2)
        return answer

    class SolverJudge(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await asyncio.gather(solver(1), solver(2))
            await ask(client, [{"role": "user", "content": "judge"}])
            return None

    episode = await SolverJudge().run_with_termination_handling({"q": 1}, "t:0")
    assert episode.termination_reason is TerminationReason.UNKNOWN
    assert [t.name for t in episode.trajectories] == ["solver", "solver", "SolverJudge"]
    assert [t.reward for t in episode.trajectories] == [0.5, 1.0, None]
    own = episode.trajectories[2]
    assert own.messages()[0]["content"] == "judge"
    assert {t.parent_id for t in episode.trajectories[:2]} == {own.id}
    assert episode.metrics == {"solver_acc": 0.75, "SolverJudge_acc": 0.0}
    assert episode.reward == 1.5
    assert len(recording.trajectories) == 3
    assert [t.warnings for t in recording.trajectories] == [[], [], []]
    assert len(reconstruct(recording.spans)) == 3
    rebuilt(recording)


async def test_step_rewards_of_completions_are_summed(recording: Recording, clients: Clients):
    """A captured trajectory has a step for each completion; rewards of steps make its own."""
    client = clients.asynchronous(clients.serve("yes"))

    class Own(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            for text in ("a", "b", "c"):
                await ask(client, [{"role": "user", "content": text}])
            for number, completion in enumerate(get_current_trajectory().completions[:2], 1):
                record_reward(number, completion_id=completion.id)
            return None

    episode = await Own(gamma=1.0).run_with_termination_handling({}, "t:0")
    (own,) = episode.trajectories
    assert own.reward == 3.0
    assert [step.raw_reward for step in own.steps] == [1.0, 2.0, None]
    assert [step.reward for step in own.steps] == [3.0, 2.0, 0.0]
    assert [step.chat_completions[-1]["content"] for step in own.steps] == ["yes"] * 3
    rebuilt(recording)


async def test_a_workflow_without_calls_is_no_trajectory(recording: Recording):
    """Nothing to train on is nothing; the episode is there all the same."""

    class Empty(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            return None

    episode = await Empty().run_with_termination_handling({"q": 1}, "t:0")
    assert episode.trajectories == []
    assert not episode.is_correct
    assert recording.trajectories == ()
    assert reconstruct(recording.spans) == []
    rebuilt(recording)


# --- commit


class Plain(Workflow):
    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        return None


def spoken(*rewards: float) -> Trajectory:
    steps = [Step(model_response=f"r{r}", reward=r) for r in rewards]
    return Trajectory(name="agent", steps=steps)


def test_what_is_committed_is_a_snapshot():
    """Later changes of the agent's trajectory do not reach it; an empty one is not taken."""
    workflow = Plain()
    workflow.reset({}, "t:0")
    agent = Agent()
    workflow.commit(agent=agent)
    agent.trajectory.steps.append(Step(model_response="a", reward=1.0, info={"k": [1]}))
    workflow.commit(name="first", agent=agent, reset=True)
    assert agent.trajectory.steps == []
    workflow.commit(trajectory=(kept := spoken(0.5)))
    kept.steps[0].reward = 9.0
    episode = workflow.collect_trajectories()
    assert [t.name for t in episode.trajectories] == ["first", "agent"]
    assert [t.steps[0].reward for t in episode.trajectories] == [1.0, 0.5]


@pytest.mark.parametrize("arguments", [{}, {"agent": Agent(), "trajectory": spoken(1.0)}])
def test_one_of_agent_and_trajectory(arguments: dict[str, Any]):
    """Both or none is a mistake that is named."""
    with pytest.raises(ConfigurationError, match="expected one of both"):
        Plain().commit(**arguments)


def test_agents_that_were_not_committed_are_collected_once():
    """By the id of their trajectory; private attributes and other objects are not looked at."""
    workflow = Plain()
    agents = [Agent() for _ in range(3)]
    workflow.first, workflow.again, workflow.second = agents[0], agents[0], agents[1]  # type: ignore[attr-defined]
    workflow._hidden = agents[2]  # type: ignore[attr-defined]
    workflow.reset({"q": 1}, "t:0")
    for agent in agents:
        agent.trajectory.steps.append(Step(model_response="a"))
        assert agent.trajectory.task == (None if agent is agents[2] else {"q": 1})
    workflow.commit(agent=agents[1])
    found = [t.id for t in workflow.collect_trajectories().trajectories]
    assert found == [agents[1].trajectory.id, agents[0].trajectory.id]


def test_an_agent_that_is_committed_twice():
    """One that keeps its trajectory object has two trajectories, with ids of their own."""
    workflow = Plain()
    trajectory = spoken(1.0)
    workflow.commit(trajectory=trajectory)
    workflow.commit(trajectory=trajectory)
    ids = [t.id for t in workflow.collect_trajectories().trajectories]
    assert len(set(ids)) == 2


def test_environments_are_reset_with_the_task():
    """And say whether threads may be used."""
    workflow = MultiTurn(safe=False)
    Workflow.reset(workflow, {"q": 1}, "t:0")
    assert workflow.env.resets == [{"q": 1}]
    assert not workflow.is_multithread_safe()
    assert Plain().is_multithread_safe()


# --- threads


@pytest.mark.parametrize("safe", [True, False])
async def test_a_run_that_is_no_coroutine(recording: Recording, clients: Clients, safe: bool):
    """It runs in a thread where that is safe, and its calls belong to it either way."""
    client = clients.sync(clients.serve("yes"))
    threads: list[int] = []

    class Sync(Workflow):
        env = Environment(safe)

        def run(self, task: Any, uid: str, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            message: Any = {"role": "user", "content": "hi"}
            client.chat.completions.create(model="m", messages=[message])
            raise TerminationEvent(TerminationReason.ENV_DONE)

    episode = await Sync().run_with_termination_handling({}, "t:0")
    assert episode.termination_reason is TerminationReason.ENV_DONE
    assert (threads[0] == threading.get_ident()) is not safe
    assert [len(t.completions) for t in episode.trajectories] == [1]
    rebuilt(recording)


async def test_a_function_in_the_executor(recording: Recording, clients: Clients):
    """Its calls are the workflow's, its arguments and result its own."""
    client = clients.sync(clients.serve("yes"))

    def blocking(text: str, *, loud: bool) -> str:
        message: Any = {"role": "user", "content": text.upper() if loud else text}
        return client.chat.completions.create(model="m", messages=[message]).id

    class InThread(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            assert await self.run_in_executor(blocking, "hi", loud=True)
            return None

    with ThreadPoolExecutor(1) as executor:
        workflow = InThread(executor=executor)
        episode = await workflow.run_with_termination_handling({}, "t:0")
    assert episode.trajectories[0].messages()[0]["content"] == "HI"


# --- many


class Echo(Workflow):
    """Asks what the task says; fails or waits where the task wants it."""

    made = 0

    def __init__(self, client: Any = None) -> None:
        super().__init__(client)
        type(self).made += 1
        self.attempts: dict[str, int] = {}

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        self.attempts[uid] = self.attempts.get(uid, 0) + 1
        if self.rollout_engine is not None:
            await ask(self.rollout_engine, [{"role": "user", "content": f"{task} {uid}"}])
        if task == "fail" or (task == "flaky" and self.attempts[uid] < 3):
            raise ValueError(f"attempt {self.attempts[uid]}")
        return None


@pytest.mark.slow
async def test_many_workflows_are_not_mixed(clients: Clients):
    """Hundreds of runs, fifty at once: each has its own call, in the order of the tasks."""
    otel_rollout.configure(instrumentor=None)
    server = clients.serve(lambda body: Reply(f"re {body['messages'][0]['content']}"))
    client = clients.asynchronous(server)
    tasks = [f"task {number}" for number in range(75)]
    Echo.made = 0
    episodes = await run_workflows(lambda: Echo(client), tasks, n_samples=4, n_parallel=50)
    assert Echo.made <= 50
    assert len(episodes) == 300
    for number, episode in enumerate(episodes):
        uid = f"{number // 4}:{number % 4}"
        assert (episode.id, episode.task) == (uid, tasks[number // 4])
        (own,) = episode.trajectories
        assert own.messages()[1]["content"] == f"re {episode.task} {uid}"
        assert (own.group_id, own.sample_index) == (str(number // 4), number % 4)
        assert own.warnings == []


async def test_retries_start_clean_and_stay_on_the_trace(recording: Recording, clients: Clients):
    """The episode is that of the last attempt, the failed ones are spans like any other."""
    client = clients.asynchronous(clients.serve("yes"))
    (episode,) = await run_workflows(lambda: Echo(client), ["flaky"], retry_limit=4)
    assert episode.termination_reason is TerminationReason.UNKNOWN
    assert [len(t.completions) for t in episode.trajectories] == [1]
    live = recording.exporter.get_finished_episodes()
    assert [e.termination_reason for e in live] == [ERROR, ERROR, TerminationReason.UNKNOWN]
    assert reconstruct_episodes(recording.spans) == list(live)
    assert [t.metadata["attempt"] for t in recording.trajectories] == [1, 2, 3]
    (given_up,) = await run_workflows(lambda: Echo(client), ["fail"], retry_limit=2)
    assert given_up.info["error"]["error_message"] == "attempt 2"


async def test_one_bad_task_does_not_stop_the_others(recording: Recording):
    """Unless more fail than may."""
    tasks = ["a", "fail", "b", "fail", "c"]
    episodes = await run_workflows(Echo, tasks)
    assert [e.termination_reason is ERROR for e in episodes] == [False, True, False, True, False]
    with pytest.raises(TooManyExceptionsError, match="2 of 4 runs failed, 1 may") as caught:
        await run_workflows(Echo, tasks, max_exceptions=1, n_parallel=1)
    assert [e.id for e in caught.value.results] == ["0:0", "1:0", "2:0", "3:0"]


async def test_episodes_as_they_end(recording: Recording):
    """A callback gets each; the list is left empty where nobody wants it."""
    seen: list[str] = []
    episodes = await run_workflows(
        Echo,
        ({"id": f"q{n}"} for n in range(5)),
        n_parallel=2,
        keep_episodes=False,
        on_episode=lambda episode: seen.append(episode.id),
    )
    assert episodes == []
    assert sorted(seen) == [f"q{n}:0" for n in range(5)]


@pytest.mark.parametrize("options", [{"n_parallel": 0}, {"n_samples": 0}, {"retry_limit": "1"}])
async def test_wrong_numbers_are_named(recording: Recording, options: dict[str, Any]):
    """What was expected is said."""
    with pytest.raises(ConfigurationError, match=f"run_workflows\\({next(iter(options))}="):
        await run_workflows(Echo, [], **options)


# --- data


def test_an_episode_that_is_none():
    """What was expected is said."""
    with pytest.raises(SpanFormatError, match="expected what to_dict gave"):
        Episode.from_dict({"id": "x"})


class Strange:
    def __repr__(self) -> str:
        return "<strange>"


async def test_actions_and_observations_of_any_kind(recording: Recording):
    """What is no JSON is recorded as its text, and the live step keeps the object."""
    strange = Strange()

    async def run() -> Episode:
        step = Step(
            model_response="a",
            action=Action(strange),
            observation={1: (2, {3})},
            info={"o": [strange]},
        )
        return Episode(trajectories=[Trajectory(name="hand", steps=[step])])

    episode = await ending(recording, run)
    assert episode.trajectories[0].steps[0].action.action is strange
    (read,) = reconstruct_episodes(recording.spans)
    (step,) = read.trajectories[0].steps
    assert step.action == "<strange>"
    assert step.observation == {"1": [2, [3]]}
    assert step.info == {"o": ["<strange>"]}
