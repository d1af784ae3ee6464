"""An episode: the trajectories of one run of a workflow on a task, and how they were scored."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from otel_rollout.errors import SpanFormatError
from otel_rollout.looking import ShownInNotebooks
from otel_rollout.trajectory.fixed import Fixed
from otel_rollout.trajectory.steps import Step, json_of
from otel_rollout.trajectory.trajectory import Trajectory
from otel_rollout.wire import Json


class TerminationReason(str, Enum):
    """The reason why an episode ended."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"

    @classmethod
    def of(cls, reason: Any) -> Any:
        """The reason with this value, also from another library's enumeration.

        An unknown value is returned as text, None as None.
        """
        text = getattr(reason, "value", reason)
        try:
            return cls(text)
        except ValueError:
            return None if text is None else str(text)


class TerminationEvent(Exception):  # noqa: N818 - it ends a run as it should end
    """Raise it in `Workflow.run` to end the run with a reason."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN) -> None:
        super().__init__(f"Terminated: {reason}")
        self.reason: TerminationReason = TerminationReason.of(reason)
        """The reason; a text if it is no `TerminationReason`."""


def task_of(uid: str) -> str:
    """The task's part of the id of a run, `{task}:{sample}`: all before the last colon."""
    return uid.rpartition(":")[0] or uid


@dataclass(slots=True)
class Episode(Fixed, ShownInNotebooks):
    """The trajectories of one task run by a workflow."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The `uid` of the run; `{task id}:{sample}` from `run_workflows`."""
    task: Any = None
    """The task that the workflow was given; rebuilt from spans: as JSON, or its text."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """The trajectories of the run: committed ones, then those of agents and rollouts."""
    is_correct: bool = False
    """True if the task was solved; by default, if the rewards sum to more than 0."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers by name; by default `{name}_acc`, the mean reward of the trajectories of a name."""
    info: dict[str, Any] = field(default_factory=dict)
    """Values by name; `error` (`error_message`, `error_type`, `traceback`) if the run failed."""
    termination_reason: TerminationReason | None = None
    """The reason why the run ended. None: not set."""

    @property
    def task_id(self) -> str:
        """The part of `id` before the last colon; the whole `id` if it has none."""
        return task_of(self.id)

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of its trajectories. None: none of them has a reward."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        return sum(rewards) if rewards else None

    def summary(self) -> dict[str, Json]:
        """The episode as JSON for the span; of each trajectory only id, name and steps."""
        return {
            "id": self.id,
            "task": json_of(self.task),
            "is_correct": bool(self.is_correct),
            "metrics": json_of(self.metrics),
            "info": json_of(self.info),
            "termination_reason": getattr(
                self.termination_reason, "value", self.termination_reason
            ),
            "trajectories": [
                {
                    "id": trajectory.id,
                    "name": trajectory.name,
                    "reward": None if trajectory.reward is None else float(trajectory.reward),
                    "steps": [step.to_dict() for step in trajectory.steps],
                }
                for trajectory in self.trajectories
            ],
        }

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON from which `from_dict` makes an equal episode."""
        return {
            **self.summary(),
            "contents": [trajectory.to_dict() for trajectory in self.trajectories],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Episode:
        """The episode that `to_dict` described. SpanFormatError if it is not one."""
        try:
            trajectories = {row["id"]: Trajectory.from_dict(row) for row in data["contents"]}
            return cls.of(data, trajectories)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SpanFormatError(
                f"Episode.from_dict: expected what to_dict gave, got {str(data)[:80]!r} ({error!r})"
            ) from None

    @classmethod
    def of(cls, summary: Mapping[str, Json], trajectories: Mapping[str, Trajectory]) -> Episode:
        """The episode of a summary, with those of its trajectories that are given."""
        found: list[Trajectory] = []
        for row in summary["trajectories"]:
            trajectory = trajectories.get(row["id"])
            if trajectory is None:
                continue
            trajectory.name = row["name"]
            trajectory.steps = [Step.from_dict(step) for step in row["steps"]]
            found.append(trajectory)
        return cls(
            id=summary["id"],
            task=summary["task"],
            trajectories=found,
            is_correct=summary["is_correct"],
            metrics=summary["metrics"],
            info=summary["info"],
            termination_reason=TerminationReason.of(summary["termination_reason"]),
        )

    def __eq__(self, other: object) -> bool:
        """Equal if `to_dict()` of both is the same."""
        if not isinstance(other, Episode):
            return NotImplemented
        return self is other or self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle through `to_dict()`; `task` and `info` keep their objects."""
        return _copied, (self.to_dict(), self.task, self.info)


def _copied(data: Mapping[str, Json], task: Any, info: dict[str, Any]) -> Episode:
    episode = Episode.from_dict(data)
    episode.task, episode.info = task, info
    return episode
