"""Trajectories that agents build by hand, with rLLM's names, and copies of them for episodes."""

from __future__ import annotations

import copy
import logging
from collections.abc import MutableMapping
from typing import Any

from otel_rollout.trajectory import Episode, Reward, Step, Trajectory
from otel_rollout.wire import Json

logger = logging.getLogger("otel_rollout")


class RllmTrajectory(Trajectory):
    """A trajectory that an agent builds by hand, with rLLM's attributes `task`, `uid`, `info`."""

    __slots__ = ("task",)

    def __init__(self, *, task: Any = None, **fields: Any) -> None:
        super().__init__(**fields)
        self.task = task
        """The task of the workflow's run; recorded with the episode. None: not set."""

    @property
    def uid(self) -> str:
        """The trajectory's `id`."""
        return self.id

    @property
    def info(self) -> MutableMapping[str, Json]:
        """The trajectory's `metadata`."""
        return self.metadata


def rollout_idx(episode: Episode) -> str:
    """The sample's part of an episode's `id`, after the last colon; "" if there is no colon."""
    return episode.id.rpartition(":")[2] if ":" in episode.id else ""


def reward_completions(trajectory: Trajectory) -> None:
    """Set the reward of each step on its completion, for trainers that read completions."""
    for step in trajectory.steps:
        completion = step.completion
        if completion is None or not step.scored:
            continue
        key = None, completion.id, completion.choice_index
        if trajectory.all_rewards.get(key) != step.reward:
            trajectory.all_rewards.put(
                Reward(
                    step.reward, completion_id=completion.id, choice_index=completion.choice_index
                )
            )


def snapshot(trajectory: Trajectory) -> Trajectory:
    """A copy of a trajectory built by hand, which its agent may change; others as they are."""
    if not trajectory.built_by_hand:
        return trajectory
    return RllmTrajectory(
        id=trajectory.id,
        name=trajectory.name,
        metadata=dict(trajectory.metadata),
        metrics=dict(trajectory.metrics),
        rewards=dict(trajectory.all_rewards),
        trainable=trajectory.trainable,
        output=trajectory.output,
        logs=trajectory.logs,
        steps=[_copied(step) for step in trajectory.steps],
        task=getattr(trajectory, "task", None),
    )


def _copied(step: Step) -> Step:
    copied = copy.copy(step)
    for name in ("chat_completions", "action", "observation", "info"):
        value = getattr(step, name)
        try:
            setattr(copied, name, copy.deepcopy(value))
        except Exception:
            logger.debug("a step's %s cannot be copied; it is kept as it is", name)
    return copied
