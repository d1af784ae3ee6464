"""Workflows: run a task and get an `Episode`, however the run ends.

Subclass `Workflow` and write `run`. The run is a span `invoke_workflow {name}`. Collected are the
trajectories that were committed, those of agents, those of `@rollout` calls, and the model calls
outside of all these. Names and meaning are those of rLLM's `Workflow`, so a workflow that was
written for it is ported by changing its imports.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.record import Options, Secrets, begin, end, guarded, message_of
from otel_rollout.trajectory import (
    Episode,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    task_of,
)
from otel_rollout.workflows.enclosing import WorkflowRun
from otel_rollout.workflows.matching import tie
from otel_rollout.workflows.rllm import RllmTrajectory, reward_completions, snapshot

logger = logging.getLogger("otel_rollout")
T = TypeVar("T")


@dataclass(slots=True)
class _Ending:
    """How a run ended."""

    episode: Episode
    reason: TerminationReason = TerminationReason.UNKNOWN
    failure: BaseException | None = None
    """The exception that its rollout is recorded with. None: it did not fail."""


class Workflow(ABC):
    """A way to work on a task with one or more agents.

        class Solve(Workflow):
            async def run(self, task, uid, **kwargs):
                answer = await solve(self.rollout_engine, task)          # a @rollout function
                raise TerminationEvent(TerminationReason.ENV_DONE)

        episode = await Solve(client).run_with_termination_handling(task, "task-1:0")

    rollout_engine: the object that `run` calls the model with, such as a client.
    executor: for `run_in_executor`. None: the loop's default executor.
    timeout: seconds that a run may take.
    gamma, reward_bonus_coeff: see `adjust_step_rewards`; 0.0 is off.
    store: any object for `run` to use; the library does not use it.

    One instance runs one task at a time. `compute_trajectory_reward`, `adjust_step_rewards`,
    `assign_episode_correctness` and `collect_metrics` may be overridden, also by coroutine
    functions. Attributes are agents if they have a `trajectory` and `reset()`, environments if
    they have `reset(task=...)` and `is_multithread_safe()`.
    """

    def __init__(
        self,
        rollout_engine: Any = None,
        executor: Executor | None = None,
        timeout: float = 1e6,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        store: Any = None,
        **kwargs: Any,
    ) -> None:
        self.rollout_engine = rollout_engine
        self.executor = executor
        self.timeout = timeout
        self.gamma = gamma
        self.reward_bonus_coeff = reward_bonus_coeff
        self.store = store
        self.uid: str | None = None
        """Id of the present or last run. None: nothing ran yet."""
        self.task: Any = None
        """Task of the present or last run. None: nothing ran yet."""
        self._committed: list[Trajectory] = []
        self._run: WorkflowRun | None = None
        """The present run. None: between runs."""
        self._is_due = False
        """True if it must be reset before it runs, because it may have run another task."""

    @abstractmethod
    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        """Work on one task.

        Return None to have the trajectories collected and scored, or an `Episode`, which becomes
        the result unchanged. Raise `TerminationEvent` to end with a reason.
        """

    async def run_with_termination_handling(
        self, task: Any, uid: str, *, options: dict[str, Any] | None = None, **kwargs: Any
    ) -> Episode:
        """Run the task and return its episode, however it ended.

        An exception of `run` is in `episode.info["error"]`; only a cancellation from outside
        propagates, and the incomplete episode still reaches the exporters. `timeout=` (seconds)
        overrides the workflow's; `options` are those of `rollout`. Without a `group_id` the run's
        group is its task: the `task_id`, else the part of `uid` before the last colon.
        """
        timeout = kwargs.pop("timeout", (options or {}).get("timeout") or self.timeout)
        self.uid, self.task, self._committed = uid, task, []
        own = self._run = WorkflowRun()
        run = begin(self._options(uid, options or {}), sc.OPERATION_INVOKE_WORKFLOW, own)
        own.active = run.active if run is not None else None
        recorder = run.active.recorder if run is not None else None
        ending = _Ending(Episode(id=uid, task=task))
        try:
            await self._end_of_run(ending, self._within(timeout, task, uid, **kwargs))
            return ending.episode
        except BaseException as error:
            ending.failure = error
            if not ending.episode.trajectories:
                ending.episode = Workflow.collect_trajectories(self)
            ending.episode.id, ending.episode.task = uid, task
            ending.episode.termination_reason = ending.episode.termination_reason or ending.reason
            raise
        finally:
            self._run = None
            episode, summary = ending.episode, None
            with guarded("the episode %s cannot be put on its trace", episode.id):
                summary = episode.summary()
            with guarded("trajectories of the episode %s were not recorded", episode.id):
                own.record(summary)
            end(run, error=ending.failure)
            if recorder is not None:
                recorder.export_episode(episode)

    async def _end_of_run(self, ending: _Ending, running: Awaitable[Episode | None]) -> None:
        """Await `run`, and put its episode and how it ended into `ending`."""
        returned = details = None
        try:
            returned = await running
        except WorkflowTimeoutError as error:
            ending.failure, ending.reason = error, TerminationReason.TIMEOUT
        except TerminationEvent as event:
            ending.reason = event.reason
            active = self._run.active if self._run is not None else None
            if active is not None and event.reason in _EARLY:
                active.ended_early = TerminationReason.of(event.reason).value
        except Exception as error:
            ending.failure, ending.reason = error, TerminationReason.ERROR
            details = self._details(error)
        if isinstance(returned, Episode):
            ending.episode = returned
            try:
                self._tie(returned)
                for trajectory in returned.trajectories:
                    reward_completions(trajectory)
            except Exception:  # the user's episode may hold anything
                logger.exception("the episode %s cannot be tied to its calls", returned.id)
            return
        try:
            ending.episode = self.collect_trajectories()
            judged = await _done(self.postprocess_episode(ending.episode, ending.reason, details))
            ending.episode = judged if isinstance(judged, Episode) else ending.episode
        except Exception as error:  # a hook of the user's
            ending.failure = error
            ending.episode.info["error"] = details or self._details(error)
            ending.episode.termination_reason = TerminationReason.ERROR

    def _options(self, uid: str, options: Mapping[str, Any]) -> Options:
        """The options of the run; its group is the task where no group is given."""
        group = options.get("group_id")
        if group is None:
            group = options.get("task_id")
        if group is None:
            group = task_of(str(uid))
        name = type(self).__name__
        return Options.of({"name": name, "task_id": uid, **options, "group_id": group})

    async def _within(self, timeout: float, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        """Call `run`; a timeout raises `WorkflowTimeoutError`, which `run` itself never raises."""
        call = functools.partial(self.run, task, uid, **kwargs)
        is_async = inspect.iscoroutinefunction(self.run)

        async def working() -> Any:
            if self._is_due:
                self._is_due = False
                await _done(self.reset(task, uid))
            if is_async or not self.is_multithread_safe():
                return await _done(call())
            return await _done(await self.run_in_executor(call))

        work = asyncio.ensure_future(working())
        try:
            done, _ = await asyncio.wait({work}, timeout=timeout)
        finally:
            if not work.done():
                await _cancel(work)
        if not done:
            raise WorkflowTimeoutError(f"the run took longer than {timeout} s")
        returned: Episode | None = work.result()
        return returned

    def _details(self, error: BaseException) -> dict[str, str]:
        active = self._run.active if self._run is not None else None
        scrub = active.scrub if active is not None else Secrets().scrub
        return {
            "error_message": scrub(message_of(error)),
            "error_type": type(error).__name__,
            "traceback": scrub("".join(traceback.format_exception(error))),
        }

    # --- collecting

    def commit(
        self,
        name: str | None = None,
        agent: Any = None,
        trajectory: Trajectory | None = None,
        reset: bool = False,
    ) -> None:
        """Add the present state of an agent's trajectory, or of this one, to the episode.

        `name` becomes its name, `reset` resets the agent. A trajectory without steps is not added.
        ConfigurationError unless exactly one of `agent` and `trajectory` is given.
        """
        if (agent is None) is (trajectory is None):
            raise ConfigurationError(
                f"commit(agent=..., trajectory=...): expected one of both, got "
                f"{'both' if agent is not None else 'none'}"
            )
        found: Any = trajectory if agent is None else agent.trajectory
        if name:
            found.name = name
        if found.steps:
            taken = snapshot(found)
            if any(taken.id == other.id for other in self._committed):
                taken.id = uuid.uuid4().hex  # the agent's reset did not start a new one
            self._committed.append(taken)
        if agent is not None and reset:
            agent.reset()

    def collect_trajectories(self) -> Episode:
        """The episode so far: committed trajectories, then those of agents and rollouts.

        Each is in it once, by id. The last is the workflow's own trajectory, if it has calls that
        belong to no other, or a reward.
        """
        episode = Episode(id=self.uid or "", task=self.task)
        episode.trajectories += self._committed
        known = {trajectory.id for trajectory in self._committed}
        inside = list(self._run.trajectories) if self._run is not None else []
        of_agents = [agent.trajectory for agent in self._agents()]
        for trajectory in [*of_agents, *inside]:
            if isinstance(trajectory, Trajectory) and trajectory.id not in known:
                known.add(trajectory.id)
                if trajectory.steps:
                    episode.trajectories.append(snapshot(trajectory))
        if (own := self._tie(episode)) is not None:
            episode.trajectories.append(own)
        return episode

    def _tie(self, episode: Episode) -> Trajectory | None:
        """Give steps that were built by hand their captured calls.

        Returns the workflow's own trajectory if it has a reward, or calls that belong to no other.
        """
        run = self._run
        if run is None or run.active is None:
            return None
        own = run.active.trajectory
        built = [t for t in episode.trajectories if isinstance(t, Trajectory) and t.built_by_hand]
        tie([step for trajectory in built for step in trajectory.steps], own.completions)
        for trajectory in built:
            run.adopt(trajectory)
            for step in trajectory.steps:
                if step.completion is not None:
                    own.claimed.add((step.completion.span_id, step.completion.choice_index))
        left = [c for c in own.completions if (c.span_id, c.choice_index) not in own.claimed]
        return own if left or own.all_rewards.has_own else None

    # --- scoring

    def compute_trajectory_reward(self, trajectory: Trajectory) -> Any:
        """Set the reward of a trajectory: the sum of its steps' rewards, if any step has one."""
        rewards = [step.reward for step in trajectory.steps if step.scored]
        if rewards:
            trajectory.reward = float(sum(rewards))

    def adjust_step_rewards(self, trajectory: Trajectory) -> Any:
        """Shape and discount the rewards of steps; called for more than one step.

        With `reward_bonus_coeff` b each reward but the first gets `b * (raw[i] - raw[i-1])`, then
        with `gamma` above 0 each becomes the Monte Carlo return `G = r + gamma * G` from the end.
        A step without a reward gets no bonus, and a return only if a later step has a reward.
        """
        steps = trajectory.steps
        raw = [step.reward for step in steps]
        if self.reward_bonus_coeff > 0.0:
            for position in range(1, len(steps)):
                if not (steps[position - 1].scored and steps[position].scored):
                    continue
                steps[position].reward += self.reward_bonus_coeff * (
                    raw[position] - raw[position - 1]
                )
        if self.gamma > 0.0:
            future: float | None = None
            for step in reversed(steps):
                if future is None and not step.scored:
                    continue  # nothing is known from here on
                future = step.reward + self.gamma * (future or 0.0)
                step.reward = step.mc_return = future

    def assign_episode_correctness(self, episode: Episode) -> Any:
        """Set `is_correct`: true if the rewards of the trajectories sum to more than 0."""
        episode.is_correct = sum(t.reward or 0.0 for t in episode.trajectories) > 0

    def collect_metrics(self, episode: Episode) -> Any:
        """Set `metrics`: `{name}_acc`, the mean reward of the trajectories of each name."""
        rewards: dict[str, list[float]] = {}
        for trajectory in episode.trajectories:
            rewards.setdefault(trajectory.name, []).append(float(trajectory.reward or 0.0))
        episode.metrics = {f"{name}_acc": fmean(values) for name, values in rewards.items()}

    def postprocess_episode(
        self,
        episode: Episode,
        termination_reason: TerminationReason | None = None,
        error: dict[str, Any] | None = None,
    ) -> Any:
        """Score the episode and return it; returns a coroutine if a hook is a coroutine function.

        A last step whose model call was never made is dropped. The reward of a trajectory is
        computed from the raw rewards of its steps, which are kept in `raw_reward`.
        """
        judging = self._judge(episode, termination_reason, error)
        for hook in judging:
            if isinstance(hook, Awaitable):
                return _judged_async(episode, hook, judging)
        return episode

    def _judge(
        self,
        episode: Episode,
        termination_reason: TerminationReason | None,
        error: dict[str, Any] | None,
    ) -> Iterator[Any]:
        """Score the episode; yields what each hook returned, to be awaited if it is a coroutine."""
        episode.id, episode.task = self.uid or episode.id, self.task
        for trajectory in episode.trajectories:
            steps = trajectory.steps
            if trajectory.built_by_hand and steps and steps[-1].is_empty:
                steps.pop()
            with trajectory.all_rewards.at_once():
                yield self.compute_trajectory_reward(trajectory)
                for step in steps:
                    step.raw_reward = step.reward if step.scored else None
                if len(steps) > 1:
                    yield self.adjust_step_rewards(trajectory)
                reward_completions(trajectory)
        yield self.assign_episode_correctness(episode)
        yield self.collect_metrics(episode)
        if error is not None:
            episode.info["error"] = error
        episode.termination_reason = termination_reason or TerminationReason.UNKNOWN

    # --- agents, environments, threads

    def reset(self, task: Any = None, uid: str | None = None) -> Any:
        """Forget committed trajectories; reset agents and environments for this task."""
        self.uid, self.task, self._committed = uid, task, []
        for agent in self._agents():
            agent.reset()
            if isinstance(agent.trajectory, RllmTrajectory):
                agent.trajectory.task = task
        for environment in self._environments():
            environment.reset(task=task)

    def is_multithread_safe(self) -> bool:
        """True if all its environments are safe to use from a thread."""
        return all(environment.is_multithread_safe() for environment in self._environments())

    async def run_in_executor(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a blocking function in a thread; its model calls belong to this run."""
        loop = asyncio.get_running_loop()
        call = functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)
        return await loop.run_in_executor(self.executor, call)

    def _resettable(self) -> Iterator[Any]:
        """The attributes that can be reset, each once."""
        seen: set[int] = set()
        for owner in (vars(self), *map(vars, type(self).__mro__[:-1])):
            for name, value in list(owner.items()):
                if not name.startswith("_") and id(value) not in seen and _can_reset(value):
                    seen.add(id(value))
                    yield value

    def _agents(self) -> list[Any]:
        return [a for a in self._resettable() if getattr(a, "trajectory", None) is not None]

    def _environments(self) -> list[Any]:
        return [e for e in self._resettable() if hasattr(e, "is_multithread_safe")]


def _can_reset(value: object) -> bool:
    return not isinstance(value, type | Workflow) and hasattr(type(value), "reset")


_EARLY = (
    TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    TerminationReason.MAX_TURNS_EXCEEDED,
)
"""Reasons of runs that a limit cut."""


class WorkflowTimeoutError(TimeoutError):
    """The run took longer than the workflow's `timeout`."""


async def _done(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value


async def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancel the work and wait until it has ended; its result and exception are ignored."""
    work.cancel()
    await asyncio.wait({work})  # raises only a cancellation from outside
    if not work.cancelled():
        work.exception()


async def _judged_async(episode: Episode, first: Awaitable[Any], judging: Iterator[Any]) -> Episode:
    """The episode, once this hook and the following ones have scored it."""
    await first
    for hook in judging:
        await _done(hook)
    return episode
