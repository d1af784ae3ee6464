"""Groups of trajectories of one task, which group-relative trainers (GRPO) compare.

Failed rollouts without a reward are kept apart: they are no evidence about the policy, which a
reward of 0 would make of them. A failed rollout that has a reward is like any other. So are those
that were cancelled, but where `on_failure="keep"` has rows of those that have a reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, stdev
from typing import Literal

from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.looking import ShownInNotebooks
from otel_rollout.spans import group_key
from otel_rollout.terminal import number_of
from otel_rollout.trajectory.fixed import Fixed
from otel_rollout.trajectory.trajectory import Trajectory
from otel_rollout.wire import Json


def group_in_workflow(group: str, name: str) -> str:
    """The `group_id` of a trajectory inside a workflow run: `{group}:{name}`.

    Trajectories are compared with those of the same name in runs of the same group.
    group: the run's `group_id`, which is its task where none was given.
    """
    return f"{group}:{name}"


@dataclass(eq=True, repr=False, slots=True)
class TrajectoryGroup(Fixed, ShownInNotebooks):
    """The trajectories of one task, in order of their sample index.

    It can be iterated, indexed and measured like the list of its `trajectories`.
    """

    trajectories: list[Trajectory]
    """(N) trajectories that did not fail, or have a reward, and were not cancelled."""
    failures: list[Trajectory] = field(default_factory=list)
    """Trajectories that failed without a reward, and those that were cancelled."""
    id: str | None = None
    """The `group_id` of the trajectories. None: they have none."""
    children: list[Trajectory] = field(default_factory=list)
    """Trajectories of rollouts that ran inside those of the group, at any depth, in order of their
    start. They are not compared. `gather_group` and `groups` of an exporter in memory collect
    them; see `adopt`."""
    run: str | None = None
    """The `group_run` of the trajectories. None: they have none, or several."""

    @property
    def key(self) -> str | None:
        """The group as one text, see `Trajectory.group_key`. None: they have no group."""
        return group_key(self.id, self.run)

    def __repr__(self) -> str:
        rewards = [one.reward for one in self.trajectories if one.reward is not None]
        counts = [number_of(len(self.trajectories), "trajectory")]
        counts += [number_of(len(self.failures), "failure")] if self.failures else []
        counts += [f"{len(self.children)} inside them"] if self.children else []
        mean = (
            f"mean reward {sum(rewards) / len(rewards):.4g} of {len(rewards)}"
            if rewards
            else "no reward"
        )
        return f"<TrajectoryGroup {self.id!r}: {', '.join(counts)}, {mean}>"

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], id: str | None = None) -> TrajectoryGroup:  # noqa: A002
        """The group of these trajectories, with failures separated from the others.

        `id`: default is their common `group_id`; ValueError if they are of several groups.
        """
        members = sorted(trajectories, key=lambda t: (t.sample_index is None, t.sample_index or 0))
        keys = {member.group_key: member for member in members}
        if id is None:
            if len(keys) > 1:
                raise ValueError(
                    f"TrajectoryGroup.of: expected trajectories of one group, got those of "
                    f"{', '.join(sorted(map(repr, keys)))}; see TrajectoryGroup.by_id"
                )
            id = members[0].group_id if members else None  # noqa: A001
        return cls(
            [member for member in members if not failed(member)],
            [member for member in members if failed(member)],
            id,
            run=members[0].group_run if len(keys) == 1 else None,
        )

    @classmethod
    def by_id(
        cls, trajectories: Iterable[Trajectory], *, children: bool = False
    ) -> list[TrajectoryGroup]:
        """The groups of these trajectories by `group_key`, in the order of their first members.

        A trajectory without a `group_id` is a group of its own. With `children`, one that ran
        inside another of them is a child of that one's group instead.
        """
        trajectories = list(trajectories)
        for each in trajectories:
            if not isinstance(each, Trajectory):
                raise ConfigurationError(
                    f"TrajectoryGroup.by_id: expected trajectories, got {each!r:.80}"
                )
        known = {trajectory.id: trajectory for trajectory in trajectories} if children else {}
        groups: dict[str, list[Trajectory]] = {}
        inside: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            top = _ancestor(trajectory, known)
            kept = groups if top is trajectory else inside
            key = f"\0{top.id}" if top.group_key is None else top.group_key
            kept.setdefault(key, []).append(trajectory)
        made = {key: cls.of(members) for key, members in groups.items()}
        for key, nested in inside.items():
            made[key].children = sorted(nested, key=lambda t: (t.start_time_ns, t.id))
        return list(made.values())

    def adopt(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """Make children of those trajectories that ran inside its members; returns them."""
        trajectories = list(trajectories)
        members = {member.id: member for member in (*self.trajectories, *self.failures)}
        known = {trajectory.id: trajectory for trajectory in trajectories} | members
        found = [
            trajectory
            for trajectory in trajectories
            if trajectory.id not in members and _ancestor(trajectory, known).id in members
        ]
        self.children = sorted([*self.children, *found], key=lambda t: (t.start_time_ns, t.id))
        return found

    def member_of(self, child: Trajectory) -> Trajectory | None:
        """The member, or failure, that this trajectory ran inside. None: none of them."""
        members = {member.id: member for member in (*self.trajectories, *self.failures)}
        top = _ancestor(child, members | {nested.id: nested for nested in self.children})
        return None if top is child else members.get(top.id)

    @property
    def rewards(self) -> list[float | None]:
        """(N) reward of each trajectory. None: it has no reward."""
        return [trajectory.reward for trajectory in self.trajectories]

    def advantages(
        self, *, scale: bool = False, epsilon: float = 1e-6, ddof: Literal[0, 1] = 0
    ) -> list[float | None]:
        """(N) reward of each trajectory minus the mean reward. None: it, or all others, have none.

        scale: divide by the standard deviation of the rewards plus `epsilon`, as GRPO does
            (DeepSeekMath, arXiv 2402.03300, section 4.1). Rewards that differ only by rounding
            have advantages of nearly 0 that way.
        epsilon: from 0 on; see `docs/training.md` for those of trainers.
        ddof: 0 has the number of rewards N as divisor of the variance, 1 has N - 1.

        If all rewards are equal, each advantage is 0. A single reward is compared with none: its
        advantage is None. ValueError for another value of an option.
        """
        return advantages_of(self.rewards, scale=scale, epsilon=epsilon, ddof=ddof)

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
            **({"run": self.run} if self.run is not None else {}),
            "trajectories": [trajectory.to_dict() for trajectory in self.trajectories],
            "failures": [trajectory.to_dict() for trajectory in self.failures],
            **({"children": [t.to_dict() for t in self.children]} if self.children else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> TrajectoryGroup:
        """The group that `to_dict` described. SpanFormatError if it is not one."""
        try:
            trajectories = [Trajectory.from_dict(row) for row in data["trajectories"]]
            failures = [Trajectory.from_dict(row) for row in data["failures"]]
            children = [Trajectory.from_dict(row) for row in data.get("children", ())]
            return cls(trajectories, failures, data["id"], children, data.get("run"))
        except (KeyError, TypeError) as error:
            raise SpanFormatError(
                f"TrajectoryGroup.from_dict: expected what to_dict gave, got {str(data)[:80]!r} "
                f"({error!r})"
            ) from None


def advantages_of(
    rewards: Sequence[float | None],
    *,
    scale: bool = False,
    epsilon: float = 1e-6,
    ddof: Literal[0, 1] = 0,
) -> list[float | None]:
    """(N) advantages by the rewards of a group, see `TrajectoryGroup.advantages`."""
    if not (isinstance(epsilon, int | float) and 0 <= epsilon < math.inf):
        raise ValueError(f"advantages(epsilon=...): expected a number from 0 on, got {epsilon!r}")
    if ddof not in (0, 1):
        raise ValueError(f"advantages(ddof=...): expected 0 or 1, got {ddof!r}")
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return [None] * len(rewards)
    mean = fmean(scored)
    divisor = 1.0
    if scale:
        divisor = (stdev if ddof else pstdev)(scored, mean) + epsilon
    equal = len(set(scored)) == 1
    return [
        None if reward is None else 0.0 if equal else (reward - mean) / divisor
        for reward in rewards
    ]


def failed(trajectory: Trajectory) -> bool:
    """True if it is kept apart: it was cancelled, or it failed and nobody scored it."""
    status = trajectory.status
    return status == "cancelled" or (status == "error" and trajectory.reward is None)


def _ancestor(trajectory: Trajectory, known: Mapping[str, Trajectory]) -> Trajectory:
    """The outermost trajectory that this one ran inside, up to one that has a group of its own."""
    top, seen = trajectory, {trajectory.id}
    while top.group_id is None and (parent := known.get(top.parent_id or "")):
        if parent.id in seen:  # spans may say anything
            return trajectory
        seen.add(parent.id)
        top = parent
    return top
