"""A workflow with agent and environment as rLLM has them, and the episode rebuilt from spans."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import openai

from otel_rollout import Episode, Step, TerminationEvent, TerminationReason, Workflow
from otel_rollout.workflows import Action, RllmTrajectory, reconstruct_episodes
from tests.kit.recording import Recording

ERROR, TIMEOUT = TerminationReason.ERROR, TerminationReason.TIMEOUT


def rebuilt(recording: Recording) -> Episode:
    """The only episode of the spans, in any order and with duplicates; equal to the live one."""
    (live,) = recording.exporter.get_finished_episodes()
    spans = [*recording.spans, *recording.spans[::2]]
    for seed in range(3):
        random.Random(seed).shuffle(spans)
        (episode,) = reconstruct_episodes(spans)
        assert episode.to_dict() == live.to_dict()
        assert episode == live
    assert Episode.from_dict(live.to_dict()) == live
    return live


async def ask(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    completion = await client.chat.completions.create(model="m", messages=messages)
    return completion.choices[0].message.content or ""


class Environment:
    """Asks for a number; it is done when it is 3, or wrong for good at 13."""

    def __init__(self, safe: bool = True) -> None:
        self.resets: list[Any] = []
        self.safe = safe

    def reset(self, task: Any = None) -> tuple[str, dict[str, Any]]:
        self.resets.append(task)
        return "say a number", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        value = int(action.action)
        return f"{value} is not it", float(value == 3) or value / 10, value == 3, {"got": value}

    def is_multithread_safe(self) -> bool:
        return self.safe


class Agent:
    """Keeps its conversation, and a trajectory of steps that it builds by hand."""

    def __init__(self, system: str = "Guess.") -> None:
        self.system = system
        self.reset()

    @property
    def trajectory(self) -> RllmTrajectory:
        return self._trajectory

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self.messages

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]
        self._trajectory = RllmTrajectory(name="guesser", steps=[])

    def update_from_env(self, observation: Any, reward: float, done: bool, info: Any) -> None:
        if self._trajectory.steps:
            last = self._trajectory.steps[-1]
            last.reward, last.done, last.info = reward, done, info
        if not done:
            self.messages = [*self.messages, {"role": "user", "content": str(observation)}]
            self._trajectory.steps.append(Step(observation=observation))

    def update_from_model(self, response: str) -> Action:
        self.messages = [*self.messages, {"role": "assistant", "content": response}]
        step = self._trajectory.steps[-1]
        step.chat_completions = list(self.messages)
        step.model_response = response
        action = step.action = Action(response)
        return action


class MultiTurn(Workflow):
    """An agent in an environment, until that is done or the turns are."""

    def __init__(self, *args: Any, max_steps: int = 5, safe: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent = Agent()
        self.env = Environment(safe)
        self.max_steps = max_steps

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        observation, info = self.reset(task=task, uid=uid)
        self.agent.update_from_env(observation, 0, False, info)
        for _ in range(self.max_steps):
            response = await ask(self.rollout_engine, self.agent.chat_completions)
            action = self.agent.update_from_model(response)
            observation, reward, done, info = self.env.step(action)
            self.agent.update_from_env(observation, reward, done, info)
            if done:
                raise TerminationEvent(TerminationReason.ENV_DONE)
        raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)

    def reset(self, task: Any = None, uid: str | None = None) -> Any:
        super().reset(task, uid)
        return self.env.reset(task)


async def ending(recording: Recording, run: Callable[..., Any], **options: Any) -> Episode:
    class Ends(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> Any:
            return await run(**kwargs)

    return await Ends(**options).run_with_termination_handling({}, "t:0")
