"""The groups of one partition of trajectories: which are open, and which were given. Pure.

A record comes at least once. What is here makes of it: each group once, with the rewards that came
before it was whole, and where to go on so that none is lost and none comes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Struct

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.evidence import Late, rollout_of
from otel_rollout.export import groups_not_whole
from otel_rollout.rebuild import apply_rewards
from otel_rollout.spans import SpanRecord
from otel_rollout.trajectory import Trajectory

Came = Literal["new", "copy", "late"]
"""What a record is: of an open group; a copy; of a group that was given without it."""
_REMEMBERED = 1_000
"""Groups that were given and are known again, besides those with records that are read again."""
_READ = sc.REWARD, sc.REWARD_NUMBER, sc.GEN_AI_EVALUATION_NAME


class LateReward(Struct, frozen=True, omit_defaults=True):
    """A reward on a span of its own, as it is in a record."""

    rollout: str
    trace: str
    span: str
    time_ns: int
    attributes: dict[str, str | int]
    """Those that `apply_rewards` reads."""
    cut: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: SpanRecord) -> LateReward:
        """That of a span, as `as_record` gives it."""
        found = ((name, record.attributes.get(name)) for name in _READ)
        attributes = {name: value for name, value in found if isinstance(value, str | int)}
        place = rollout_of(record) or "", *record.key, record.start_time_ns
        return cls(*place, attributes, tuple(sorted(record.cut)))

    @property
    def key(self) -> str:
        """What names the span."""
        return f"{self.trace}/{self.span}"

    @property
    def late(self) -> Late:
        """That it came late."""
        reward = self.attributes.get(sc.REWARD)
        return Late(self.rollout, self.span, None if reward is None else str(reward))

    def as_record(self) -> SpanRecord:
        """As much of the span as `apply_rewards` reads."""
        place = self.trace, self.span, None, self.time_ns, self.time_ns
        cut = frozenset(self.cut)
        return SpanRecord("", *place, self.attributes, cut=cut, is_checked=True)


class _Rewards(Struct):
    late_rewards: list[LateReward]


def value_of(rewards: Sequence[LateReward]) -> bytes:
    """The value of a record of rewards, JSON."""
    return msgspec.json.encode(_Rewards([*rewards]))


def rewards_of(value: bytes) -> list[LateReward]:
    """The rewards of a record. SpanFormatError if it has none."""
    try:
        return msgspec.json.decode(value, type=_Rewards).late_rewards
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SpanFormatError(f"no late rewards: {error}") from None


class Given(TypedDict):
    """A group that was given."""

    last: int
    """Offset of the last record of it that was seen."""
    ids: list[str]
    """Its rollouts."""
    rewards: list[str]
    """The keys of the late rewards that are known of it."""


class _Waiting(NamedTuple):
    """A reward that is not in a given group."""

    reward: LateReward
    offset: int
    came: float


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
        if not members[0].group_id:
            return []  # a rollout alone
        if not any(one.group_size for one in members):
            return [f"group {self.key!r} has no size: more of it may come"]
        return [str(each) for each in groups_not_whole(members)]

    def _is_member(self, one: Trajectory) -> bool:
        return self.key in (one.group_key, one.id)


class OpenGroups:
    """The groups of a partition. Memory: the trajectories of open groups, the ids of others.

    resume: where to go on. Without it, from `offset` on.
    """

    def __init__(self, offset: int = 0, resume: Resume | None = None) -> None:
        self._next = resume["offset"] if resume else offset
        self._open: dict[str, OpenGroup] = {}
        self._given: dict[str, Given] = {}
        self._group_of: dict[str, str] = {}
        """The keys of the groups that the rollouts are in."""
        self._rewards: dict[str, dict[str, _Waiting]] = {}
        """Those of rollouts that are in no given group, each by its key."""
        for key, each in (resume["given"] if resume else {}).items():
            self._given[key] = {**each, "rewards": each.get("rewards", [])}  # or written before
            self._group_of |= dict.fromkeys(each["ids"], key)
        self.copies = self.late = 0
        """Trajectories and rewards that came again, and those of groups that were given before."""

    def __len__(self) -> int:
        """Number of open groups."""
        return len(self._open)

    def add(self, key: str, trajectory: Trajectory, offset: int, now: float) -> Came:
        """Take in the record at an offset; `now` in seconds of a clock that does not go back."""
        self._next = max(self._next, offset + 1)
        if (given := self._given.get(key)) is not None:
            given["last"] = max(given["last"], offset)
            return self._counted("copy" if trajectory.id in given["ids"] else "late")
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = OpenGroup(key, offset, now)
        if trajectory.id in group.trajectories:
            return self._counted("copy")
        group.last = now
        group.trajectories[trajectory.id] = trajectory
        self._group_of[trajectory.id] = key
        return "new"

    def add_reward(self, reward: LateReward, offset: int, now: float) -> Came:
        """Take in a reward of the record at an offset; its trajectory may come after it."""
        self._next = max(self._next, offset + 1)
        group = self._group_of.get(reward.rollout, "")
        if (given := self._given.get(group)) is not None:
            given["last"] = max(given["last"], offset)
            if reward.key in given["rewards"]:
                return self._counted("copy")
            given["rewards"] = [*given["rewards"], reward.key]  # a position may have the other
            return self._counted("late")
        of_one = self._rewards.setdefault(reward.rollout, {})
        known = of_one.get(reward.key)
        if known is not None and (reward.cut or not known.reward.cut):
            return self._counted("copy")
        of_one[reward.key] = _Waiting(reward, known.offset if known else offset, now)
        if group in self._open:
            self._open[group].last = now
        return "new"

    def _counted(self, came: Came) -> Came:
        self.copies += came == "copy"
        self.late += came == "late"
        return came

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
        rewards = list[str]()
        for trajectory in group.trajectories.values():
            if found := self._rewards.pop(trajectory.id, None):
                apply_rewards(
                    (each.reward.as_record() for each in found.values()), trajectory.all_rewards
                )
                rewards += found
        del self._open[group.key]
        ids = [*group.trajectories]
        self._given[group.key] = {"last": self._next - 1, "ids": ids, "rewards": rewards}
        low = self._low
        while len(self._given) > _REMEMBERED:
            oldest = next(iter(self._given))
            if self._given[oldest]["last"] >= low:
                break
            for id_ in self._given.pop(oldest)["ids"]:
                if self._group_of.get(id_) == oldest:
                    del self._group_of[id_]

    @property
    def lone_rewards(self) -> list[LateReward]:
        """The rewards of rollouts that did not come."""
        every = self._rewards.items()
        lone = (of_one.values() for id_, of_one in every if id_ not in self._group_of)
        return [each.reward for of_one in lone for each in of_one]

    def due_rewards(self, now: float, seconds: float) -> list[LateReward]:
        """The rewards whose rollouts did not come for so long; they are not waited for longer."""
        due = [
            reward
            for reward in self.lone_rewards
            if now - self._rewards[reward.rollout][reward.key].came >= seconds
        ]
        for reward in due:
            self._counted("late")
            del self._rewards[reward.rollout][reward.key]
            if not self._rewards[reward.rollout]:
                del self._rewards[reward.rollout]
        return due

    @property
    def _low(self) -> int:
        needed = [group.first for group in self._open.values()]
        needed += (each.offset for of_one in self._rewards.values() for each in of_one.values())
        return min(needed, default=self._next)

    @property
    def resume(self) -> Resume:
        """Where to go on so that what is open comes again, and what was given does not."""
        given = {key: each.copy() for key, each in self._given.items()}
        return {"offset": self._low, "given": given}
