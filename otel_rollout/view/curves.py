"""Sums and rates of trajectories, which are not kept: the page's, notebooks' and those of `list`.

By policy version, by task or by another field: what passed, what failed, pass@k, tokens. A failure
(`FAILED`) has not passed, whether or not it has a reward; with `scored_only` rates are of what has
a reward. What did not fail and has no reward is in no rate. A trajectory of several policy versions
counts at each.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from otel_rollout.errors import ConfigurationError
from otel_rollout.terminal import number_of, without_ids
from otel_rollout.view.fields import Field
from otel_rollout.view.overview import PASS_THRESHOLD, Overview
from otel_rollout.view.page_types import CurveView
from otel_rollout.wire import Json, finite

FAILED = ("error", "cancelled")
"""Statuses of trajectories that failed."""


class SampleRow(NamedTuple):
    """The part of an `Overview` that is used here, from a table of them."""

    reward: float | None
    status: str = "complete"
    task_id: str | None = None
    group_id: str | None = None
    versions: tuple[str | int, ...] = ()
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None


Sample: TypeAlias = Overview | SampleRow


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that one of k samples passes, estimated from more: unbiased (Chen et al. 2021).

    1 - C(samples - passed, k) / C(samples, k), for 1 <= k <= samples.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(slots=True)
class TokenSum:
    """A sum of token counts, and of how many trajectories it is: the others are not known."""

    total: int = 0
    known: int = 0

    def add(self, count: int | None) -> None:
        """Count a trajectory."""
        if count is not None:
            self.total += count
            self.known += 1

    def text(self, count: int) -> str:
        """The sum for people; of so many trajectories, which is said where some are not known."""
        of = f" (of {self.known} of {number_of(count, 'trajectory')})" * (self.known < count)
        return f"{self.total}{of}" if self.known else "-"


@dataclass(slots=True)
class Scores:
    """Trajectories, their rewards, failures and tokens, and how many of them pass."""

    threshold: float = PASS_THRESHOLD
    scored_only: bool = False
    """True if what has no reward is in no rate, failures too; False: a failure has not passed."""
    count: int = 0
    """Trajectories."""
    scored: int = 0
    """Those of them that have a reward."""
    failed: int = 0
    """Those of them that failed."""
    rated: int = 0
    """Those of them that rates are of."""
    passed: int = 0
    """Those of these that have a reward from `threshold` on, and did not fail."""
    mean: float = 0.0
    """Mean reward of those that have one."""
    tasks: dict[str, list[int]] = field(default_factory=dict)
    """`rated` and `passed` of each task: of its id, else of its group."""
    prompt: TokenSum = field(default_factory=TokenSum)
    sampled: TokenSum = field(default_factory=TokenSum)

    def add(self, sample: Sample) -> None:
        """Count a trajectory."""
        reward, failed = sample.reward, sample.status in FAILED
        self.count += 1
        self.failed += failed
        self.prompt.add(sample.prompt_tokens)
        self.sampled.add(sample.sampled_tokens)
        if reward is not None:
            self.scored += 1
            self.mean += (reward - self.mean) / self.scored
        if reward is None and (self.scored_only or not failed):
            return
        counts = failed and not self.scored_only
        passes = not counts and reward is not None and reward >= self.threshold
        self.rated += 1
        self.passed += passes
        task = sample.group_id if sample.task_id is None else sample.task_id
        if task is not None:
            both = self.tasks.setdefault(task, [0, 0])
            both[0] += 1
            both[1] += passes

    @property
    def pass_rate(self) -> float | None:
        """Share of `rated` that passes. None: none is rated."""
        return self.passed / self.rated if self.rated else None

    def pass_at(self, k: int) -> tuple[float | None, int]:
        """Mean pass@k of the tasks with at least k rated samples, and their number."""
        found = [pass_at_k(n, passed, k) for n, passed in self.tasks.values() if n >= k]
        return (math.fsum(found) / len(found) if found else None), len(found)

    def to_dict(self) -> dict[str, Json]:
        """The numbers as JSON; None where nothing is known."""
        return {
            "count": self.count,
            "scored": self.scored,
            "failed": self.failed,
            "mean": finite(self.mean) if self.scored else None,
            **token_numbers(prompt_tokens=self.prompt, sampled_tokens=self.sampled),
        }


def token_numbers(**sums: TokenSum) -> Any:
    """Each sum, and after it the number of trajectories that it is of (`..._known`)."""
    found = dict[str, Json]()
    for name, tokens in sums.items():
        found |= {name: tokens.total if tokens.known else None, f"{name}_known": tokens.known}
    return found


_DISTINCT = 1_000
"""Messages of one type of error that are counted apart."""


@dataclass(slots=True)
class Endings:
    """How trajectories ended: their rewards, statuses, termination reasons and errors."""

    scores: Scores = field(default_factory=Scores)
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Termination reasons of those that have one."""
    _errors: dict[str, Counter[str]] = field(default_factory=dict)
    """Messages without ids, by the type of the error."""

    def add(self, sample: Sample, reason: str | None) -> None:
        """Count a trajectory, and why it ended."""
        self.scores.add(sample)
        self.statuses[sample.status] += 1
        if reason is not None:
            self.reasons[reason] += 1

    def add_error(self, type_: str | None, message: str | None) -> None:
        """Count the error of a trajectory, if it has one."""
        if type_ is None and message is None:
            return
        texts = self._errors.setdefault(type_ or "error", Counter())
        text = without_ids(message or "")
        texts[text if text in texts or len(texts) < _DISTINCT else "others"] += 1

    def errors(self) -> list[tuple[str, str, int]]:
        """Type of each error, its most frequent message and how many trajectories have the type."""
        found = [
            (name, *texts.most_common(1)[0][:1], texts.total())
            for name, texts in self._errors.items()
        ]
        return sorted(found, key=lambda each: (-each[2], each[0]))


@dataclass(slots=True)
class ScoresByValue:
    """The scores of the trajectories that have the same value of a field."""

    new: Callable[[], Scores] = Scores
    """Makes the scores of a value that is new."""
    _of: dict[str, tuple[Json, Scores]] = field(default_factory=dict)
    """Value and scores, by the value as a text, in the order of the first trajectory of each."""

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[tuple[Json, Scores]]:
        return iter(self._of.values())

    def of(self, value: Json) -> Scores:
        """The scores of a value, to add to."""
        name = label(value)
        if name not in self._of:
            self._of[name] = value, self.new()
        return self._of[name][1]

    def most_common(self) -> list[tuple[Json, Scores]]:
        """Each value with its scores, the most frequent first."""
        return sorted(self, key=lambda each: (-each[1].count, label(each[0])))

    def to_list(self, start: int = 0, end: int | None = None) -> list[Json]:
        """The most frequent ones as JSON."""
        return [{"value": value, **s.to_dict()} for value, s in self.most_common()[start:end]]


def short_id(id_: str | None) -> str | None:
    """An id as people read it: of one that was made at random its first eight digits."""
    return id_[:8] if id_ is not None and _RANDOM.fullmatch(id_) else id_


_RANDOM = re.compile("[0-9a-f]{32}")


def label(value: Json) -> str:
    """A value in a table."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


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
