"""What is left out of training, beside what is kept: by version, ending and task. Pure.

Leaving out what is old or failed changes what is learned from. The counts of parts add up.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from otel_rollout.terminal import number_of
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps, loads

_NAMED = ("version", "ending", "task")
_LEAST = 16
"""Of fewer trajectories shares say nothing."""
_SHOWN = 10
"""Versions, endings and tasks that are printed; the others are counted."""


class Facts(NamedTuple):
    """What is compared of a trajectory; None is unknown."""

    versions: tuple[str | int, ...]
    """Policy versions that it was sampled with."""
    ending: str
    task_id: str | None
    reward: float | None

    @classmethod
    def of(cls, trajectory: Trajectory) -> Facts:
        """Those of a trajectory; its calls are read."""
        head = cls.of_head(trajectory)
        versions = dict.fromkeys([*trajectory.policy_versions, *head.versions])
        return head._replace(versions=tuple(versions))

    @classmethod
    def of_head(cls, trajectory: Trajectory) -> Facts:
        """Those of a trajectory for which no call is read."""
        return cls(
            () if trajectory.policy_version is None else (trajectory.policy_version,),
            trajectory.termination_reason or trajectory.status,
            trajectory.task_id,
            None if trajectory.reward is None else float(trajectory.reward),
        )

    @property
    def oldest(self) -> int | None:
        """The oldest of the versions that are numbers."""
        return min(_numbers(self), default=None)


class PolicyLag(NamedTuple):
    """A limit on how many versions behind the newest one a trajectory may be."""

    most: int
    newest: int | None
    """None: no trajectory names a version that is a number."""

    @classmethod
    def of(cls, most: int, each: Iterable[Facts]) -> PolicyLag:
        """The limit, with the newest version of all."""
        return cls(most, max(itertools.chain.from_iterable(map(_numbers, each)), default=None))

    def reason(self, facts: Facts) -> str | None:
        """Why a trajectory is left out; None: it is not, or its versions are not known."""
        oldest = facts.oldest
        if self.newest is None or oldest is None or self.newest - oldest <= self.most:
            return None
        return f"sampled more than {number_of(self.most, 'version')} before {self.newest}"


def _numbers(facts: Facts) -> Iterator[int]:
    """The versions that are numbers, or texts of one."""
    for version in facts.versions:
        if isinstance(version, int) or _is_number(version):
            yield int(version)


_is_number = re.compile(r"-?[0-9]{1,18}").fullmatch


class LeftOut:
    """Counts of the trajectories that are kept and of those that are left out.

    counts: by reason ("" for what is kept), what is counted, and its value, as JSON lists.
    """

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self.counts: Counter[str] = Counter() if counts is None else counts

    def add(self, facts: Facts, reason: str | None) -> None:
        """Count a trajectory; `reason` says why it is left out. None: it is kept."""

        def count(what: str, value: Json, by: Any = 1) -> None:
            self.counts[dumps([reason or "", what, value])] += by

        version: Json = next(iter(facts.versions), None) if facts.oldest is None else facts.oldest
        for what, value in zip(_NAMED, (version, facts.ending, facts.task_id), strict=True):
            count(what, value)
        if facts.reward is not None and math.isfinite(facts.reward):
            count("scored", None)
            count("reward", None, facts.reward)

    @property
    def reasons(self) -> dict[str, Json]:
        """How many trajectories are left out, by reason; "": how many are kept."""
        found = Counter[str]()
        for key, count in self.counts.items():
            reason, what, _ = loads(key)
            found[reason] += count if what == "ending" else 0
        return {**found}

    def to_dict(self) -> dict[str, Json]:
        """The same as JSON."""
        reasons = self.reasons
        kept = reasons.pop("", 0)
        named: dict[str, Json] = {
            what: [
                {"value": value, "kept": kept, "left_out": left}
                for value, kept, left in sorted(self._beside(what), key=lambda row: -row[2])
            ]
            for what in _NAMED
        }
        (_, *sums), (_, *scored) = (
            next(self._beside(what), (None, 0, 0)) for what in ("reward", "scored")
        )
        means = [sum_ / count if count else None for sum_, count in zip(sums, scored, strict=True)]
        return {
            "kept": kept,
            "left_out": sum(reasons.values()),
            "reasons": reasons,
            "reward": dict(zip(("kept", "left_out"), means, strict=True)),
            **named,
        }

    def lines(self) -> Iterator[str]:
        """For people; nothing of a few, or where nothing is left out, or nothing kept."""
        found: dict[str, Any] = self.to_dict()
        count = found["kept"] + found["left_out"]
        if count < _LEAST or not (found["left_out"] and found["kept"]):
            return
        total = number_of(count, "trajectory")
        whys = ", ".join(f"{count} {why}" for why, count in found["reasons"].items())
        yield f"{found['left_out']} of {total} left out: {whys}"
        for what in _NAMED:
            yield from _line_by_value(what, found[what])
        rewards = found["reward"]
        if None not in rewards.values():
            kept, left = rewards["kept"], rewards["left_out"]
            yield f"  mean reward: {kept:.3f} of what is kept, {left:.3f} of what is left out"

    def _beside(self, what: str) -> Iterator[tuple[Any, Any, Any]]:
        """Each value with the count that is kept of it and the one that is left out."""
        sides = Counter[Any](), Counter[Any]()
        for key, count in self.counts.items():
            reason, name, value = loads(key)
            if name == what:
                sides[reason != ""][value] += count
        for value in {**sides[1], **sides[0]}:
            yield value, sides[0][value], sides[1][value]


def _line_by_value(what: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How much is left out of each value, where there are several."""
    known = [row for row in rows if row["value"] is not None]
    texts = [
        f"{row['value']}: {row['left_out']} of {row['kept'] + row['left_out']}"
        for row in known[:_SHOWN]
    ]
    texts += [f"{len(known) - _SHOWN} more"] if len(known) > _SHOWN else []
    if len(known) > 1:
        yield f"  by {what}: {', '.join(texts)}"
