"""Sums over trajectories, which are not kept: those of the page and of the verb `list`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from otel_rollout.terminal import without_ids
from otel_rollout.wire import Json, finite


def differ_by_rounding(one: float, other: float) -> bool:
    """True if they are equal but for what sums of decimal fractions lose."""
    return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-15)


@dataclass(slots=True)
class Rewards:
    """Count, mean and spread of rewards."""

    count: int = 0
    """Trajectories."""
    scored: int = 0
    """Those of them that have a reward."""
    mean: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    _squares: float = 0.0
    """Sum of the squared distances from the mean (Welford)."""

    def add(self, reward: float | None) -> None:
        """Count a trajectory; None: it has no reward."""
        self.count += 1
        if reward is None:
            return
        self.scored += 1
        before = reward - self.mean
        self.mean += before / self.scored
        self._squares += before * (reward - self.mean)
        if reward < self.least:
            self.least = reward
        if reward > self.most:
            self.most = reward

    @property
    def std(self) -> float:
        """Standard deviation of those that are there (of the population)."""
        if self.scored < 2 or differ_by_rounding(self.least, self.most):
            return 0.0
        return math.sqrt(max(self._squares, 0.0) / self.scored)

    def to_dict(self) -> dict[str, Json]:
        """The numbers as JSON; None where no trajectory has a reward."""
        numbers = {"mean": self.mean, "std": self.std, "min": self.least, "max": self.most}
        return {
            "count": self.count,
            "scored": self.scored,
            **(finite(numbers) if self.scored else dict.fromkeys(numbers)),
        }


_DISTINCT = 1_000
"""Messages of one type of error that are counted apart."""


@dataclass(slots=True)
class Endings:
    """How trajectories ended: their rewards, statuses, termination reasons and errors."""

    rewards: Rewards = field(default_factory=Rewards)
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Termination reasons of those that have one."""
    _errors: dict[str, Counter[str]] = field(default_factory=dict)
    """Messages without ids, by the type of the error."""

    def add_ending(self, reward: float | None, status: str, reason: str | None) -> None:
        """Count a trajectory."""
        self.rewards.add(reward)
        self.statuses[status] += 1
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


AnyRewards = TypeVar("AnyRewards", bound=Rewards)


@dataclass(slots=True)
class RewardsByValue(Generic[AnyRewards]):
    """The rewards of the trajectories that have the same value of a field."""

    new: Callable[[], AnyRewards]
    """Makes the rewards of a value that is new."""
    _of: dict[str, tuple[Json, AnyRewards]] = field(default_factory=dict)
    """Value and rewards, by the value as a text."""

    def __len__(self) -> int:
        return len(self._of)

    def of(self, value: Json) -> AnyRewards:
        """The rewards of a value, to add to."""
        name = label(value)
        if name not in self._of:
            self._of[name] = value, self.new()
        return self._of[name][1]

    def as_they_came(self) -> Iterable[tuple[Json, AnyRewards]]:
        """Each value with its rewards, in the order of the first trajectory of each."""
        return self._of.values()

    def most_common(self) -> Iterator[tuple[Json, AnyRewards]]:
        """Each value with its rewards: the most frequent first, then what differs most."""
        named = sorted(
            self._of.items(), key=lambda each: (-each[1][1].count, -each[1][1].std, each[0])
        )
        return (found for _, found in named)

    def to_list(self, start: int = 0, end: int | None = None) -> list[Json]:
        """The most frequent ones as JSON."""
        found = list(self.most_common())[start:end]
        return [{"value": value, **rewards.to_dict()} for value, rewards in found]


def short_id(id_: str | None) -> str | None:
    """An id as people read it: of one that was made at random its first eight digits."""
    return id_[:8] if id_ is not None and _RANDOM.fullmatch(id_) else id_


_RANDOM = re.compile("[0-9a-f]{32}")


def label(value: Json) -> str:
    """A value in a table."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
