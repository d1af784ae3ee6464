"""Names of rLLM for agents and workflows that were written for it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from otel_rollout.trajectory import Episode, Trajectory
from otel_rollout.wire import Json


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
