"""Groups of trajectories of one task, which group-relative trainers (GRPO) compare.

Failed rollouts without a reward are kept apart: they are no evidence about the policy, which a
reward of 0 would make of them. A failed rollout that has a reward is like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from otel_rollout.errors import SpanFormatError
from otel_rollout.trajectory.trajectory import Trajectory
from otel_rollout.wire import Json


def group_in_workflow(group: str, name: str) -> str:
    """The `group_id` of a trajectory inside a workflow run: `{group}:{name}`.

    Trajectories are compared with those of the same name in runs of the same group.
    group: the run's `group_id`, which is its task where none was given.
    """
    return f"{group}:{name}"


@dataclass(eq=True)
class TrajectoryGroup:
    """The trajectories of one task, in order of their sample index.

    It can be iterated, indexed and measured like the list of its `trajectories`.
    """

    trajectories: list[Trajectory]
    """(N) trajectories that did not fail, or have a reward."""
    failures: list[Trajectory] = field(default_factory=list)
    """Trajectories that failed or were cancelled, and have no reward."""
    id: str | None = None
    """The `group_id` of the trajectories. None: they have none."""

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], id: str | None = None) -> TrajectoryGroup:  # noqa: A002
        """The group of these trajectories, with failures separated from the others.

        `id`: default is their common `group_id`; ValueError if they have several.
        """
        members = sorted(trajectories, key=lambda t: (t.sample_index is None, t.sample_index or 0))
        ids = {member.group_id for member in members}
        if id is None:
            if len(ids) > 1:
                raise ValueError(
                    f"TrajectoryGroup.of: expected trajectories of one group, got those of "
                    f"{', '.join(sorted(map(repr, ids)))}; see TrajectoryGroup.by_id"
                )
            id = next(iter(ids), None)  # noqa: A001
        return cls(
            [member for member in members if not _failed(member)],
            [member for member in members if _failed(member)],
            id,
        )

    @classmethod
    def by_id(cls, trajectories: Iterable[Trajectory]) -> list[TrajectoryGroup]:
        """The groups of these trajectories by `group_id`, in the order of their first members.

        A trajectory without a `group_id` is a group of its own.
        """
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group_id or f"\0{trajectory.id}", []).append(trajectory)
        return [cls.of(members) for members in groups.values()]

    @property
    def rewards(self) -> list[float | None]:
        """(N) reward of each trajectory. None: it has no reward."""
        return [trajectory.reward for trajectory in self.trajectories]

    def advantages(self, *, scale: bool = False) -> list[float | None]:
        """(N) reward of each trajectory minus the mean reward. None: it has no reward.

        `scale` divides by the standard deviation of the rewards, as GRPO does (DeepSeekMath, arXiv
        2402.03300, section 4.1). If all rewards are equal, each advantage is 0.
        """
        scored = [reward for reward in self.rewards if reward is not None]
        if not scored:
            return [None] * len(self.trajectories)
        mean = fmean(scored)
        deviation = pstdev(scored, mean) if scale else 1.0
        return [
            None if reward is None else (reward - mean) / deviation if deviation else 0.0
            for reward in self.rewards
        ]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON from which `from_dict` makes an equal group."""
        return {
            "id": self.id,
            "trajectories": [trajectory.to_dict() for trajectory in self.trajectories],
            "failures": [trajectory.to_dict() for trajectory in self.failures],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> TrajectoryGroup:
        """The group that `to_dict` described. SpanFormatError if it is not one."""
        try:
            trajectories = [Trajectory.from_dict(row) for row in data["trajectories"]]
            failures = [Trajectory.from_dict(row) for row in data["failures"]]
            return cls(trajectories, failures, data["id"])
        except (KeyError, TypeError) as error:
            raise SpanFormatError(
                f"TrajectoryGroup.from_dict: expected what to_dict gave, got {str(data)[:80]!r} "
                f"({error!r})"
            ) from None


def _failed(trajectory: Trajectory) -> bool:
    return trajectory.status in ("error", "cancelled") and trajectory.reward is None
