"""The groups of one partition of trajectories: which are open, and which were given. Pure.

A record comes at least once. What is here makes of it: each group once, and where to go on so that
none is lost and none comes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from otel_rollout.export import groups_not_whole
from otel_rollout.trajectory import Trajectory

Came = Literal["new", "copy", "late"]
"""What a record is: of an open group; a copy; of a group that was given without it."""
_REMEMBERED = 1_000
"""Groups that were given and are known again, besides those with records that are read again."""


class Given(TypedDict):
    """A group that was given."""

    last: int
    """Offset of the last record of it that was seen."""
    ids: list[str]
    """Its rollouts."""


class Resume(TypedDict):
    """Where to go on in a partition, as JSON."""

    offset: int
    """That of the first record to read."""
    given: dict[str, Given]
    """The groups that were given, and may come again."""


@dataclass(slots=True)
class OpenGroup:
    """A group, or a rollout without one, and the rollouts inside its members."""

    key: str
    first: int
    """Offset of its first record."""
    last: float
    """When its last record came, in seconds."""
    trajectories: dict[str, Trajectory] = field(default_factory=dict)

    @property
    def members(self) -> list[Trajectory]:
        """Its trajectories without those of rollouts inside them."""
        return [one for one in self.trajectories.values() if self._is_member(one)]

    @property
    def children(self) -> list[Trajectory]:
        """Those of rollouts inside its members, in order of their start."""
        found = [one for one in self.trajectories.values() if not self._is_member(one)]
        return sorted(found, key=lambda one: (one.start_time_ns, one.id))

    @property
    def missing(self) -> list[str]:
        """What its size, or the numbers of its samples, say of missing ones; [] if it is whole."""
        members = self.members
        if not members:
            return [f"{self.key!r}: only rollouts inside it have come"]
        if members[0].group_id is not None and not any(one.group_size for one in members):
            return [f"group {self.key!r} has no size: more of it may come"]
        return [str(each) for each in groups_not_whole(members)]

    def _is_member(self, one: Trajectory) -> bool:
        return self.key in (one.group_id, one.id)


class OpenGroups:
    """The groups of a partition. Memory: the trajectories of open groups, the ids of others.

    resume: where to go on. Without it, from `offset` on.
    """

    def __init__(self, offset: int = 0, resume: Resume | None = None) -> None:
        self._next = resume["offset"] if resume else offset
        self._open: dict[str, OpenGroup] = {}
        self._given: dict[str, Given] = (
            {key: each.copy() for key, each in resume["given"].items()} if resume else {}
        )
        self.copies = self.late = 0
        """Records that came again, and those of groups that were given without them."""

    def __len__(self) -> int:
        """Number of open groups."""
        return len(self._open)

    def add(self, key: str, trajectory: Trajectory, offset: int, now: float) -> Came:
        """Take in the record at an offset; `now` in seconds of a clock that does not go back."""
        self._next = max(self._next, offset + 1)
        if (given := self._given.get(key)) is not None:
            given["last"] = max(given["last"], offset)
            if trajectory.id in given["ids"]:
                self.copies += 1
                return "copy"
            self.late += 1
            return "late"
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = OpenGroup(key, offset, now)
        if trajectory.id in group.trajectories:
            self.copies += 1
            return "copy"
        group.last = now
        group.trajectories[trajectory.id] = trajectory
        return "new"

    def skip(self, offset: int) -> None:
        """The record at this offset is none of a trajectory."""
        self._next = max(self._next, offset + 1)

    def ready(self, key: str) -> OpenGroup | None:
        """The group, if it is whole; it is to be `give`n."""
        group = self._open.get(key)
        return group if group is not None and not group.missing else None

    def due(self, now: float, seconds: float) -> Iterator[OpenGroup]:
        """The groups of which nothing came for so long."""
        for group in list(self._open.values()):
            if now - group.last >= seconds:
                yield group

    def give(self, group: OpenGroup) -> None:
        """The group is given: what comes of it from now on is a copy, or late."""
        del self._open[group.key]
        self._given[group.key] = {"last": self._next - 1, "ids": [*group.trajectories]}
        low = self._low
        while len(self._given) > _REMEMBERED:
            oldest = next(iter(self._given))
            if self._given[oldest]["last"] >= low:
                break
            del self._given[oldest]

    @property
    def _low(self) -> int:
        return min((group.first for group in self._open.values()), default=self._next)

    @property
    def resume(self) -> Resume:
        """Where to go on so that what is open comes again, and what was given does not."""
        given = {key: each.copy() for key, each in self._given.items()}
        return {"offset": self._low, "given": given}
