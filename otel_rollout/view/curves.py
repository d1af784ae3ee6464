"""Rates by policy version, by task or by another field: what passed, what failed, pass@k, tokens.

The page, the verb `list` and notebooks get their numbers here. A trajectory of several policy
versions counts at each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_rollout.errors import ConfigurationError
from otel_rollout.view.fields import Field
from otel_rollout.view.overview import PASS_THRESHOLD
from otel_rollout.view.page_types import CurveView
from otel_rollout.view.sums import Sample, Scores, ScoresByValue
from otel_rollout.wire import Json

VERSION = "policy_version"
"""The name that trajectories are grouped by, beside their fields."""
MOST_POINTS = 1_000
"""Points of a curve that a page shows."""
_HARDEST_FIRST = ("task_id", "group_id")


@dataclass(frozen=True, slots=True)
class By:
    """The value that trajectories are grouped by: `policy_version`, or a field."""

    text: str
    _field: Field | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> By:
        """Of a text that an option has. ConfigurationError, with what is known, for another."""
        if text == VERSION:
            return cls(text)
        try:
            return cls(text, Field.parse(option, text))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; or {VERSION}") from None

    def values(self, sample: Sample) -> Sequence[Json]:
        """The values that a trajectory counts at; [None] where it is not known."""
        if self._field is None:
            return sample.versions or [None]
        value = self._field.of(sample)
        return [list(value) if isinstance(value, tuple) else value]

    def where(self, value: Json) -> str | None:
        """The filter expression for these trajectories. None: there is none."""
        quoted = json.dumps(value, ensure_ascii=False)
        if self._field is None:
            return None if value is None else f"{quoted} in versions"
        if isinstance(value, list):
            return None
        return f"{self.text} is None" if value is None else f"{self.text} == {quoted}"

    def order(self, points: ScoresByValue) -> list[tuple[Json, Scores]]:
        """Versions in their order, the hardest tasks first, all else by its number."""
        if self._field is None:
            by_number = _names_differ_by_numbers([value for value, _ in points])
            return sorted(points, key=lambda each: _version_key(each[0], by_number=by_number))
        found = points.most_common()
        return sorted(found, key=_hardest) if self.text in _HARDEST_FIRST else found

    def place(self, value: Json) -> float | None:
        """The version on an axis of numbers. None: it is a name."""
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if self._field is None and is_number else None


def _hardest(point: tuple[Json, Scores]) -> tuple[bool, bool, float, float]:
    """What passes least often, then what has the least reward; what is not known is last."""
    value, scores = point
    mean = scores.mean if scores.scored else -math.inf
    return value is None, not scores.rated, scores.pass_rate or 0.0, mean


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
    scored_only: bool = False
    """As in `Scores`."""
    all: Scores = field(init=False)
    several: int = 0
    """Trajectories that count at several values."""
    _of: ScoresByValue = field(init=False)

    def __post_init__(self) -> None:
        self.all = self._scores()
        self._of = ScoresByValue(self._scores)

    def _scores(self) -> Scores:
        return Scores(self.threshold, self.scored_only)

    def add(self, sample: Sample) -> None:
        """Count a trajectory."""
        self.all.add(sample)
        values = self.by.values(sample)
        self.several += len(values) > 1
        for value in values:
            self._of.of(value).add(sample)

    def __len__(self) -> int:
        return len(self._of)

    @property
    def failures(self) -> str:
        """What a failure is in the rates, in words."""
        return "left out without a reward" if self.scored_only else "not passed"

    def points(self) -> list[tuple[Json, Scores]]:
        """Each value with its scores, in the order of `By.order`."""
        return self.by.order(self._of)

    def ks(self) -> list[int]:
        """The k of pass@k: powers of two, up to the most that a task has rated at one value."""
        most = max((n for _, s in self._of for n, _ in s.tasks.values()), default=0)
        return [1 << power for power in range(most.bit_length())]

    def to_list(self) -> list[dict[str, Json]]:
        """The points as JSON."""
        ks = self.ks()
        return [_point(value, scores, ks) for value, scores in self.points()]

    def answer(self) -> CurveView:
        """The points as the page takes them, with what they are about."""
        ks, points = self.ks(), self.points()
        shown: list[Any] = [
            {
                **_point(value, scores, ks),
                "place": self.by.place(value),
                "where": self.by.where(value),
            }
            for value, scores in points[:MOST_POINTS]
        ]
        return {
            "by": self.by.text,
            "threshold": self.threshold,
            "scoredOnly": self.scored_only,
            "count": self.all.count,
            "rated": self.all.rated,
            "failed": self.all.failed,
            "several": self.several,
            "ks": ks,
            "total": len(points),
            "points": shown,
        }


def _point(name: Json, scores: Scores, ks: Iterable[int]) -> dict[str, Json]:
    at = {str(k): scores.pass_at(k) for k in ks}
    return {
        "value": name,
        **scores.to_dict(),
        "rated": scores.rated,
        "passed": scores.passed,
        "pass_rate": scores.pass_rate,
        "pass_at": {k: rate for k, (rate, _) in at.items()},
        "pass_at_tasks": {k: tasks for k, (_, tasks) in at.items()},
        "tasks": len(scores.tasks),
    }
