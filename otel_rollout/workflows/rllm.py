"""rLLM's names for what is here, for agents and workflows that were written for it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from otel_rollout.trajectory import Episode, Trajectory
from otel_rollout.wire import Json


class RllmTrajectory(Trajectory):
    """A trajectory that an agent builds by hand, with the attributes that rLLM's has."""

    def __init__(self, *, task: Any = None, **fields: Any) -> None:
        super().__init__(**fields)
        self.task = task
        """The task that the workflow was given; it is recorded with the episode."""

    @property
    def uid(self) -> str:
        """The trajectory's `id`."""
        return self.id

    @property
    def info(self) -> MutableMapping[str, Json]:
        """The trajectory's `metadata`."""
        return self.metadata


def rollout_idx(episode: Episode) -> str:
    """The sample's part of an episode's `id`, after the last colon; "" where it has none."""
    return episode.id.rpartition(":")[2] if ":" in episode.id else ""
