"""Rewards by policy version, by time, by task or by another field: mean, spread, pass rate, pass@k.

The page, the verb `list` and notebooks get their numbers here. A trajectory without a reward is
counted and is in no mean and no rate. A trajectory of several policy versions counts at each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeAlias

from otel_rollout.errors import ConfigurationError
from otel_rollout.view.fields import Field
from otel_rollout.view.overview import PASS_THRESHOLD, Overview
from otel_rollout.view.page_types import CurveView
from otel_rollout.view.sums import Rewards, RewardsByValue
from otel_rollout.wire import Json

_INTERVALS = {
    "minute": (60, "%Y-%m-%d %H:%M"),
    "hour": (3600, "%Y-%m-%d %H:00"),
    "day": (86_400, "%Y-%m-%d"),
}
"""Seconds of each, and how its start is written, in UTC."""
_MOST_INTERVALS = 100
"""Intervals of a curve over "time": the shortest ones are chosen that are not more."""
NAMES = (*_INTERVALS, "policy_version")
"""What trajectories are grouped by, beside their fields."""
MOST_POINTS = 1_000
"""Points of a curve that a page shows."""
_HARDEST_FIRST = ("task_id", "group_id")


class SampleRow(NamedTuple):
    """What is used of an `Overview` here, from a table of them."""

    reward: float | None
    task_id: str | None
    group_id: str | None
    versions: Sequence[str | int]
    start_time_ns: int


Sample: TypeAlias = Overview | SampleRow


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that one of k samples passes, estimated from more: unbiased (Chen et al. 2021).

    1 - C(samples - passed, k) / C(samples, k), for 1 <= k <= samples.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(slots=True)
class Scores(Rewards):
    """Rewards, and how many of them pass, in all and in each task."""

    threshold: float = PASS_THRESHOLD
    passed: int = 0
    """Those with a reward from `threshold` on."""
    tasks: dict[str, list[int]] = field(default_factory=dict)
    """Scored trajectories and passed ones of each task: of its id, else of its group."""

    def add_sample(self, sample: Sample) -> None:
        """Count a trajectory."""
        self.add(sample.reward)
        if sample.reward is None:
            return
        passes = sample.reward >= self.threshold
        self.passed += passes
        task = sample.group_id if sample.task_id is None else sample.task_id
        if task is not None:
            counts = self.tasks.setdefault(task, [0, 0])
            counts[0] += 1
            counts[1] += passes

    @property
    def pass_rate(self) -> float | None:
        """Share of the scored trajectories that passes. None: none is scored."""
        return self.passed / self.scored if self.scored else None

    def pass_at(self, k: int) -> float | None:
        """Mean pass@k of the tasks with at least k scored trajectories. None: there is none."""
        found = [pass_at_k(n, passed, k) for n, passed in self.tasks.values() if n >= k]
        return math.fsum(found) / len(found) if found else None


@dataclass(frozen=True, slots=True)
class By:
    """What trajectories are grouped by: `policy_version`, a length of time, or a field."""

    text: str
    _field: Field | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> By:
        """Of a text that an option has. ConfigurationError, with what is known, for another."""
        if text in NAMES:
            return cls(text)
        try:
            return cls(text, Field.parse(option, text))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; or {', '.join(NAMES)}") from None

    def values(self, sample: Sample) -> Sequence[Json]:
        """The values that a trajectory counts at; [None] where it is not known."""
        if self._field is not None:
            value = self._field.of(sample)
            return [list(value) if isinstance(value, tuple) else value]
        if self.text == "policy_version":
            return sample.versions or [None]
        seconds, started = _INTERVALS[self.text][0], sample.start_time_ns
        return [started // (seconds * 10**9) * seconds if started > 0 else None]

    def name(self, value: Json) -> Json:
        """The value as it is written: of an interval its start, in UTC."""
        if self.text not in _INTERVALS or value is None:
            return value
        try:
            return datetime.fromtimestamp(value, timezone.utc).strftime(_INTERVALS[self.text][1])
        except (OverflowError, ValueError, OSError):
            return f"{value} s"

    def where(self, value: Json) -> str | None:
        """The filter expression for these trajectories. None: there is none."""
        if self.text == "policy_version":
            return None if value is None else f"{_quoted(value)} in versions"
        if self.text in _INTERVALS:
            if value is None:
                return "start_time_ns <= 0"
            start, end = (each * 10**9 for each in (value, value + _INTERVALS[self.text][0]))
            return f"start_time_ns >= {start} and start_time_ns < {end}"
        if isinstance(value, list):
            return None
        return f"{self.text} is None" if value is None else f"{self.text} == {_quoted(value)}"

    def order(self, points: Iterable[tuple[Json, Scores]]) -> list[tuple[Json, Scores]]:
        """Versions and times in their order, the hardest tasks first, all else as it is."""
        found = list(points)
        if self.text == "policy_version":
            by_number = _names_differ_by_numbers([value for value, _ in found])
            return sorted(found, key=lambda each: _version_key(each[0], by_number=by_number))
        if self.text in _INTERVALS:
            return sorted(found, key=lambda each: (each[0] is None, each[0]))
        if self.text in _HARDEST_FIRST:
            return sorted(
                found, key=lambda each: (each[0] is None, not each[1].scored, each[1].mean)
            )
        return found

    def place(self, value: Json) -> float | None:
        """Where it is on an axis of numbers, seconds since 1970 for times. None: it is a name."""
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if self._field is None and is_number else None


def interval_of(first_ns: int, last_ns: int) -> str:
    """The shortest of minute, hour and day that has at most `_MOST_INTERVALS` between two times."""
    for name, (seconds, _) in _INTERVALS.items():
        if last_ns - first_ns <= seconds * 10**9 * _MOST_INTERVALS:
            return name
    return "day"


def _quoted(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


_digits = re.compile(r"(\d+)")


def _names_differ_by_numbers(values: Sequence[Json]) -> bool:
    """True for `step-9` and `step-10`, whose numbers give an order."""
    return len({_digits.sub("0", value) for value in values if isinstance(value, str)}) == 1


def _version_key(value: Json, *, by_number: bool) -> tuple[int, list[float]]:
    """Numbers by size, then names by their numbers, else as they are; None is last."""
    if isinstance(value, str):
        return 1, [float(part) for part in _digits.findall(value)] if by_number else []
    return (2, []) if value is None else (0, [float(value)])


@dataclass(slots=True)
class Curve:
    """The scores of trajectories by a value of each, added one at a time."""

    by: By
    threshold: float = PASS_THRESHOLD
    all: Scores = field(init=False)
    several: int = 0
    """Trajectories that count at several values."""
    _of: RewardsByValue[Scores] = field(init=False)

    def __post_init__(self) -> None:
        self.all = self._scores()
        self._of = RewardsByValue(self._scores)

    def _scores(self) -> Scores:
        return Scores(threshold=self.threshold)

    def add(self, sample: Sample) -> None:
        """Count a trajectory."""
        self.all.add_sample(sample)
        values = self.by.values(sample)
        self.several += len(values) > 1
        for value in values:
            self._of.of(value).add_sample(sample)

    def __len__(self) -> int:
        return len(self._of)

    def points(self) -> list[tuple[Json, Scores]]:
        """Each value with its scores, in the order of `By.order`."""
        is_version = self.by.text == "policy_version"
        return self.by.order(self._of.as_they_came() if is_version else self._of.most_common())

    def ks(self) -> list[int]:
        """The k of pass@k: powers of two, up to the most that a task has scored at one value."""
        most = max((n for _, s in self._of.most_common() for n, _ in s.tasks.values()), default=0)
        return [1 << power for power in range(most.bit_length())]

    def to_list(self) -> list[dict[str, Json]]:
        """The points as JSON."""
        ks = self.ks()
        return [_point(self.by.name(value), scores, ks) for value, scores in self.points()]

    def answer(self) -> CurveView:
        """The points as the page takes them, with what they are about."""
        ks, points = self.ks(), self.points()
        shown: list[Any] = [
            {
                **_point(self.by.name(value), scores, ks),
                "place": self.by.place(value),
                "where": self.by.where(value),
            }
            for value, scores in points[:MOST_POINTS]
        ]
        return {
            "by": self.by.text,
            "threshold": self.threshold,
            "count": self.all.count,
            "scored": self.all.scored,
            "several": self.several,
            "ks": ks,
            "total": len(points),
            "points": shown,
        }


def _point(name: Json, scores: Scores, ks: Sequence[int]) -> dict[str, Json]:
    return {
        "value": name,
        **scores.to_dict(),
        "pass_rate": scores.pass_rate,
        "pass_at": {str(k): scores.pass_at(k) for k in ks},
        "tasks": len(scores.tasks),
    }
