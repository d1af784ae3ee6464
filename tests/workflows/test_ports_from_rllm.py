"""Workflows as they are written for rLLM: another import, and another engine to ask."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import Episode, Step, TerminationEvent, TerminationReason, Workflow
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.workflows import Action, reconstruct_episodes, rollout_idx
from otel_rollout.workflows import RllmTrajectory as Trajectory
from tests.kit.recording import Clients, Recording
from tests.kit.workflows import Agent, Environment, rebuilt

ENV_DONE, TURNS = TerminationReason.ENV_DONE, TerminationReason.MAX_TURNS_EXCEEDED
TOO_LONG = TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


@dataclass
class Output:
    text: str
    content: str
    reasoning: str | None
    finish_reason: str


class Engine:
    """What such a workflow calls its model with: it wraps the OpenAI client."""

    max_response_length = 30

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.client = client

    async def get_model_response(self, messages: list[Any], **kwargs: Any) -> Output:
        kwargs.pop("application_id", None)
        reply = await self.client.chat.completions.create(model="m", messages=messages, **kwargs)
        choice = reply.choices[0]
        text = choice.message.content or ""
        reasoning = getattr(choice.message, "reasoning_content", None)
        return Output(text, text, reasoning, choice.finish_reason)


class Timed:
    """A mixin before `Workflow`, with hooks that call `super()`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = 0.0

    async def timed_llm_call(self, messages: list[Any], **kwargs: Any) -> Output:
        start = time.perf_counter()
        output: Output = await self.rollout_engine.get_model_response(messages, **kwargs)  # type: ignore[attr-defined]
        self._seconds += time.perf_counter() - start
        return output

    async def timed_env_call(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.run_in_executor(fn, *args, **kwargs)  # type: ignore[attr-defined]

    def postprocess_episode(
        self, episode: Episode, termination_reason: Any = None, error: Any = None
    ) -> Episode:
        judged: Episode = super().postprocess_episode(episode, termination_reason, error)  # type: ignore[misc]
        judged.info["timing"] = {"llm_time": self._seconds}
        for trajectory in judged.trajectories:
            assert isinstance(trajectory, Trajectory)
            trajectory.info["num_steps"] = len(trajectory.steps)
            for step in trajectory.steps:
                step.info["timed"] = True
        return judged


class SingleTurn(Timed, Workflow):
    def __init__(self, agent_cls: Any, env_cls: Any, max_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.agent = agent_cls()
        self.env = env_cls()
        self.max_steps = max_steps

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        observation, info = await self.timed_env_call(self.reset, task=task, uid=uid)
        self.agent.update_from_env(observation, 0, False, info)
        for _ in range(self.max_steps):
            options = self.options(kwargs)
            output = await self.timed_llm_call(
                self.agent.chat_completions, application_id=uid, **options
            )
            action = self.agent.update_from_model(output.text)
            seen, reward, done, info = await self.timed_env_call(self.env.step, action)
            self.agent.update_from_env(seen, reward, done, info)
            if output.finish_reason == "length":
                raise TerminationEvent(TOO_LONG)
            if done:
                raise TerminationEvent(ENV_DONE)
        raise TerminationEvent(TURNS)

    def options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    def reset(self, task: Any = None, uid: str | None = None) -> Any:
        super().reset(task, uid)
        return self.env.reset(task)


class Cumulative(SingleTurn):
    """All turns share one budget of tokens."""

    def options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        said = sum(len(m["content"]) for m in self.agent.chat_completions[1:])
        left = self.rollout_engine.max_response_length - said
        if left <= 0:
            raise TerminationEvent(TOO_LONG)
        return {**kwargs, "max_tokens": left}


@pytest.mark.parametrize(
    ("kind", "steps", "replies", "reason", "rewards"),
    [
        (SingleTurn, 1, [Reply("3")], ENV_DONE, [1.0]),
        (SingleTurn, 1, [Reply("5")], TURNS, [0.5]),
        (SingleTurn, 1, [Reply("5", finish_reason="length")], TOO_LONG, [0.5]),
        (SingleTurn, 4, [Reply("5"), Reply("3")], ENV_DONE, [0.5, 1.0]),
        (Cumulative, 9, [Reply("5")], TOO_LONG, [0.5, 0.5]),
    ],
)
async def test_the_three_that_rllm_ships(
    recording: Recording,
    clients: Clients,
    kind: type[SingleTurn],
    steps: int,
    replies: list[Reply],
    reason: TerminationReason,
    rewards: list[float],
):
    """Single-turn, multi-turn and cumulative: endings, steps tied to calls, rewards, timing."""
    server = clients.serve(replies if len(replies) > 1 else replies[0])
    engine = Engine(clients.asynchronous(server))
    workflow = kind(Agent, Environment, rollout_engine=engine, executor=None, max_steps=steps)
    episode = await workflow.run_with_termination_handling({"q": 1}, "t:0", temperature=0.5)
    assert episode.termination_reason is reason
    assert (episode.task_id, rollout_idx(episode)) == ("t", "0")
    (trajectory,) = episode.trajectories
    assert isinstance(trajectory, Trajectory)
    assert trajectory.uid == trajectory.id
    assert [step.reward for step in trajectory.steps] == rewards
    assert [c.reward for c in trajectory.completions] == rewards
    assert [c.sampling["temperature"] for c in trajectory.completions] == [0.5] * len(rewards)
    assert trajectory.info["num_steps"] == len(rewards)
    assert all(step.info["timed"] for step in trajectory.steps)
    assert episode.info["timing"]["llm_time"] > 0
    rebuilt(recording)


class Solver:
    def __init__(self, engine: Engine) -> None:
        self.rollout_engine = engine

    async def solve(self, problem: str) -> Trajectory:
        messages = [{"role": "user", "content": problem}]
        output = await self.rollout_engine.get_model_response(messages)
        reply = {"role": "assistant", "content": output.content, "reasoning": output.reasoning}
        found = re.search(r"<answer>(.*?)</answer>", output.content)
        step = Step(
            chat_completions=[*messages, reply],
            thought=output.reasoning or "",
            action=found.group(1) if found else "none",
            model_output=output,
        )
        return Trajectory(name="solver", steps=[step])


class SolverJudge(Workflow):
    """Parallel solvers and a judge; the episode is built by hand."""

    def __init__(self, rollout_engine: Any, right: str, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.right = right
        self.solver = Solver(rollout_engine)

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode:
        self.reset(task, uid)
        solved = await asyncio.gather(*[self.solver.solve(task["question"]) for _ in range(2)])
        for trajectory in solved:
            trajectory.steps[0].reward = float(trajectory.steps[0].action == self.right)
            trajectory.reward = trajectory.steps[0].reward
        judge = await self.solver.solve("judge: " + solved[0].steps[0].action)
        judge.name, judge.reward = "judge", 1.0
        return Episode(
            id=uid,
            task=task,
            trajectories=[*solved, judge],
            is_correct=True,
            metrics={"judge_acc": 1},
        )


async def test_a_solver_and_a_judge(recording: Recording, clients: Clients):
    """Equal conversations side by side: each step has a call of its own, none is left over."""
    server = clients.serve(
        [
            Reply("a <answer>4</answer>", reasoning="hm"),
            Reply("b <answer>5</answer>"),
            Reply("<answer>1</answer>"),
        ]
    )
    workflow = SolverJudge(Engine(clients.asynchronous(server)), "4")
    episode = await workflow.run_with_termination_handling({"question": "2 + 2?"}, "q:1")
    assert [t.name for t in episode.trajectories] == ["solver", "solver", "judge"]
    assert sorted(t.reward or 0.0 for t in episode.trajectories) == [0.0, 1.0, 1.0]
    calls = [c.id for t in episode.trajectories for c in t.completions]
    assert len(set(calls)) == len(calls) == 3
    for trajectory in episode.trajectories:
        (step,), (call,) = trajectory.steps, trajectory.completions
        assert step.completion is call
        assert call.message is not None
        assert step.chat_completions[-1]["content"] == call.message["content"]
        assert call.reward == step.reward
    assert {t.id for t in recording.trajectories} == {t.id for t in episode.trajectories}
    rebuilt(recording)


async def test_a_side_call_beside_steps_that_claim_the_calls(
    recording: Recording, clients: Clients
):
    """What is left over in the run knows that the calls which were claimed have tools."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    title = {"role": "system", "content": "You are a title generator. You output ONLY a title."}

    class Titled(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            asked = [{"role": "user", "content": task}]
            engine: Any = self.rollout_engine
            await engine.get_model_response([title, *asked])
            output = await engine.get_model_response(asked, tools=[tool])
            said = [*asked, {"role": "assistant", "content": output.text}]
            solved = Trajectory(name="solver", steps=[Step(chat_completions=said)])
            solved.reward = 1.0
            return Episode(id=uid, task=task, trajectories=[solved], is_correct=True)

    workflow = Titled(Engine(clients.asynchronous(clients.serve())))
    await workflow.run_with_termination_handling("2 + 2?", "q:1")
    reasons = {
        trajectory.name: [completion.side_call for completion in trajectory.completions]
        for trajectory in recording.trajectories
    }
    assert reasons == {"Titled": ["it asks for a title"], "solver": [None]}
    rebuilt(recording)


class Bare:
    """An agent with a trajectory that is filled from outside, as rLLM's SimpleAgent."""

    def __init__(self) -> None:
        self._trajectory = Trajectory()

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def reset(self) -> None:
        self._trajectory = Trajectory()


async def test_an_agent_whose_steps_are_appended(recording: Recording, clients: Clients):
    """A `Trajectory()` keeps what is put into it, and takes information until the run ends."""

    class Simple(Workflow):
        agent = Bare()

        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            self.reset(task, uid)
            output = await self.rollout_engine.get_model_response([task])
            reply = {"role": "assistant", "content": output.content, "reasoning": "x"}
            trajectory = self.agent.trajectory
            trajectory.steps.append(
                Step(chat_completions=[task, reply], action=Action(output.text), reward=0.5)
            )
            trajectory.info["level"] = "hard"
            trajectory.metrics["turns"] = 1
            trajectory.log("one")
            self.commit(name="simple", agent=self.agent, reset=True)
            raise TerminationEvent(ENV_DONE)

    workflow = Simple(Engine(clients.asynchronous(clients.serve("yes"))))
    task = {"role": "user", "content": "go"}
    episode = await workflow.run_with_termination_handling(task, "t:0")
    (trajectory,) = episode.trajectories
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.name, trajectory.reward, trajectory.task) == ("simple", 0.5, task)
    assert (dict(trajectory.metadata), dict(trajectory.metrics)) == (
        {"level": "hard"},
        {"turns": 1},
    )
    assert trajectory.logs == ["one"]
    assert len(trajectory.completions) == 1
    assert Simple.agent.trajectory.steps == []
    rebuilt(recording)


def test_a_trajectory_by_hand_without_a_workflow():
    """It is data like any other: it can be filled, written and read."""
    trajectory = Trajectory(name="hand", task={"q": 1})
    trajectory.steps.append(Step(model_response="a", reward=1.0, info={"k": 1}))
    trajectory.metadata["a"] = 1
    read = Trajectory.from_dict(trajectory.to_dict())
    assert read == trajectory
    assert [step.model_response for step in read.steps] == ["a"]
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory


async def test_an_agent_that_goes_on_with_its_list(recording: Recording, clients: Clients):
    """A step is made with a conversation; what the agent adds later is not part of it."""

    class Growing(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode:
            messages: list[Any] = []
            trajectory = Trajectory(name="hand")
            for text in ("a", "b", "c"):
                messages.append({"role": "user", "content": text})
                output = await self.rollout_engine.get_model_response(messages)
                messages.append({"role": "assistant", "content": output.text})
                trajectory.steps.append(Step(chat_completions=messages))
            return Episode(trajectories=[trajectory])

    engine = Engine(clients.asynchronous(clients.serve("same")))
    episode = await Growing(engine).run_with_termination_handling({}, "t:0")
    (trajectory,) = episode.trajectories
    assert [len(step.chat_completions) for step in trajectory.steps] == [2, 4, 6]
    ids = [step.completion and step.completion.id for step in trajectory.steps]
    assert ids == [c.id for c in trajectory.completions]
    assert len(set(ids)) == 3
    rebuilt(recording)


async def test_an_agent_that_keeps_the_objects_of_the_client(
    recording: Recording, clients: Clients
):
    """Messages as the client gave them, tool calls and all, are the same conversation."""
    call = ToolCall("f", '{"a": 1}', id="call_1")
    client = clients.asynchronous(clients.serve([Reply(tool_calls=[call]), Reply("done")]))

    class Objects(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            trajectory = Trajectory(name="hand")
            for _ in range(2):
                reply = await client.chat.completions.create(model="m", messages=messages)
                message = reply.choices[0].message
                messages.append(message)
                trajectory.steps.append(Step(chat_completions=messages, reward=1.0))
                messages.append({"role": "tool", "tool_call_id": "call_1", "content": "2"})
            self.commit(trajectory=trajectory)

    episode = await Objects().run_with_termination_handling({}, "t:0")
    assert episode.info == {}
    (trajectory,) = episode.trajectories
    ids = [step.completion and step.completion.id for step in trajectory.steps]
    assert ids == [c.id for c in trajectory.completions]
    assert len(ids) == 2
    assert reconstruct_episodes(recording.spans)[0].metrics == {"hand_acc": 2.0}


async def test_copies_of_an_episode(recording: Recording, clients: Clients):
    """Pickled or copied, steps and all; its task stays the object that it is."""
    task = SimpleNamespace(question="go")

    class Own(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            await self.rollout_engine.get_model_response([{"role": "user", "content": "go"}])
            return None

        def compute_trajectory_reward(self, trajectory: Any) -> None:
            trajectory.steps[0].reward = 0.25
            super().compute_trajectory_reward(trajectory)

    engine = Engine(clients.asynchronous(clients.serve("yes")))
    episode = await Own(engine).run_with_termination_handling(task, "t:0")
    for other in (pickle.loads(pickle.dumps(episode)), copy.deepcopy(episode)):
        assert other == episode
        assert other.task == task
        assert other.trajectories[0].steps[0].raw_reward == 0.25
    (step,) = episode.trajectories[0].steps
    assert (step.reward, step.scored, episode.trajectories[0].reward) == (0.25, True, 0.25)
    assert [c.reward for c in episode.trajectories[0].completions] == [0.25]
    rebuilt(recording)


async def test_returns_reach_the_calls_before_the_reward(recording: Recording, clients: Clients):
    """Only the last call is scored: with `gamma` the earlier ones get its discounted reward."""

    class Own(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            for text in ("a", "b", "c", "d"):
                await self.rollout_engine.get_model_response([{"role": "user", "content": text}])
            return None

        def compute_trajectory_reward(self, trajectory: Any) -> None:
            trajectory.steps[2].reward = 1.0
            trajectory.reward = 1.0

    engine = Engine(clients.asynchronous(clients.serve("yes")))
    episode = await Own(engine, gamma=0.5).run_with_termination_handling({}, "t:0")
    (own,) = episode.trajectories
    assert [c.reward for c in own.completions] == [0.25, 0.5, 1.0, None]
    assert [step.mc_return for step in own.steps] == [0.25, 0.5, 1.0, 0.0]
    rebuilt(recording)


async def test_unknown_stays_unknown(recording: Recording, clients: Clients):
    """Shaping invents no reward where nobody gave one."""

    class Own(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
            for text in ("a", "b"):
                await self.rollout_engine.get_model_response([{"role": "user", "content": text}])
            return None

    engine = Engine(clients.asynchronous(clients.serve("yes")))
    workflow = Own(engine, gamma=0.5, reward_bonus_coeff=1.0)
    episode = await workflow.run_with_termination_handling({}, "t:0")
    (own,) = episode.trajectories
    assert own.reward is None
    assert [c.reward for c in own.completions] == [None, None]
    rebuilt(recording)


async def test_a_reward_after_the_episode(recording: Recording, clients: Clients):
    """It is on the trace, and the rebuilt episode has it, not that of before."""
    workflow = SolverJudge(Engine(clients.asynchronous(clients.serve("<answer>4</answer>"))), "4")
    episode = await workflow.run_with_termination_handling({"question": "?"}, "q:1")
    episode.trajectories[0].reward = 7.0
    (read,) = reconstruct_episodes(recording.spans)
    assert [t.reward for t in read.trajectories] == [7.0, 1.0, 1.0]
    rebuilt(recording)


@pytest.mark.parametrize("disabled", [False, True])
async def test_without_a_provider(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, disabled: bool
):
    """Nothing is recorded; the workflow runs, and what it built by hand is its episode."""
    if disabled:
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        otel_rollout.configure()
    engine = Engine(clients.asynchronous(clients.serve("<answer>4</answer>")))
    workflow = SolverJudge(engine, "4")
    episode = await workflow.run_with_termination_handling({"question": "?"}, "q:1")
    assert [t.reward for t in episode.trajectories] == [1.0, 1.0, 1.0]
    single = SingleTurn(Agent, Environment, rollout_engine=engine)
    failed = await single.run_with_termination_handling({}, "t:0")
    assert failed.info["error"]["error_type"] == "ValueError"
    engine = Engine(clients.asynchronous(clients.serve("3")))
    single = SingleTurn(Agent, Environment, rollout_engine=engine)
    episode = await single.run_with_termination_handling({}, "t:0")
    assert episode.termination_reason is ENV_DONE
    assert [step.reward for step in episode.trajectories[0].steps] == [1.0]
    assert Episode.from_dict(episode.to_dict()) == episode
