"""The footer of a list: how many trajectories, how they ended, rewards, what does not train.

Memory: a line for each group and each distinct finding, of which there is a bound.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from otel_rollout.command.table import number, padded
from otel_rollout.command.text import escaped, number_of
from otel_rollout.trajectory import Finding, Overview
from otel_rollout.view import Field
from otel_rollout.wire import Json

_DISTINCT = 10_000
"""Distinct findings that are counted apart; those after them are counted together."""
_SHOWN = 20
"""Findings, and groups, that are printed."""


@dataclass(slots=True)
class Rewards:
    """Count, mean and spread of rewards, which are not kept."""

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
        self.least, self.most = min(self.least, reward), max(self.most, reward)

    @property
    def std(self) -> float:
        """Standard deviation of those that are there (of the population)."""
        return math.sqrt(max(self._squares, 0.0) / self.scored) if self.scored else 0.0

    def to_dict(self) -> dict[str, Json]:
        """The numbers as JSON; None where no trajectory has a reward."""
        known = self.scored > 0
        return {
            "count": self.count,
            "scored": self.scored,
            "mean": self.mean if known else None,
            "std": self.std if known else None,
            "min": self.least if known else None,
            "max": self.most if known else None,
        }

    def __str__(self) -> str:
        if not self.scored:
            return "none"
        return (
            f"mean {number(self.mean)}, std {number(self.std)}, "
            f"from {number(self.least)} to {number(self.most)}"
        )


@dataclass(slots=True)
class Totals:
    """The sums over trajectories, which are not kept."""

    group_by: Field | None = None
    """None: groups are only counted."""
    rewards: Rewards = field(default_factory=Rewards)
    statuses: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    """Termination reasons of those that have one."""
    trained_tokens: int = 0
    dropped: int = 0
    """Completions that no row trains."""
    with_findings: int = 0
    """Trajectories that have findings."""
    _groups: dict[str, tuple[Json, Rewards]] = field(default_factory=dict)
    """Value and rewards of each group, by the value as a text."""
    _group_ids: set[int] = field(default_factory=set)
    """Hashes of group ids."""
    _findings: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Kind, text without ids, and advice."""

    def add(self, overview: Overview, findings: Iterable[Finding]) -> None:
        """Count a trajectory."""
        self.rewards.add(overview.reward)
        self.statuses[overview.status] += 1
        if overview.termination_reason is not None:
            self.endings[overview.termination_reason] += 1
        self.trained_tokens += overview.trained_tokens
        self.dropped += overview.dropped
        if overview.group_id is not None:
            self._group_ids.add(hash(overview.group_id))
        if self.group_by is not None:
            value = self.group_by.of(overview)
            value = list(value) if isinstance(value, tuple) else value
            self._groups.setdefault(_label(value), (value, Rewards()))[1].add(overview.reward)
        found = list(findings)
        self.with_findings += bool(found)
        for one in found:
            name = (one.kind, one.plain, one.advice)
            if name not in self._findings and len(self._findings) >= _DISTINCT:
                name = ("uncertain", "others", "See the findings of each trajectory.")
            self._findings[name] += 1

    def to_dict(self) -> dict[str, Json]:
        """The sums as JSON."""
        return {
            "trajectories": self.rewards.count,
            "statuses": dict(self.statuses.most_common()),
            "termination_reasons": dict(self.endings.most_common()),
            "reward": self.rewards.to_dict(),
            "group_ids": len(self._group_ids),
            "group_by": self.group_by and self.group_by.text,
            "groups": [{"value": value, **of.to_dict()} for value, of in self._most_common()],
            "trained_tokens": self.trained_tokens,
            "dropped": self.dropped,
            "with_findings": self.with_findings,
            "findings": [
                {"kind": kind, "text": text, "advice": advice, "count": count}
                for (kind, text, advice), count in self._findings.most_common()
            ],
        }

    def lines(self, width: int) -> Iterator[str]:
        """The footer for people."""
        count = self.rewards.count
        endings = ", ".join(f"{n} {status}" for status, n in self.statuses.most_common())
        reasons = ", ".join(
            f"{n} {reason}"
            for reason, n in self.endings.most_common()
            if reason not in self.statuses
        )
        grouped = f", {number_of(len(self._group_ids), 'group')}" if self._group_ids else ""
        yield escaped(
            f"{number_of(count, 'trajectory')}{grouped}: {endings}"
            + (f" ({reasons})" if reasons else "")
        )
        scored = f"; {self.rewards.scored} of {count} have one" * bool(self.rewards.scored)
        yield f"reward: {self.rewards}{scored}"
        yield (
            f"{number_of(self.trained_tokens, 'token')} train; "
            f"{number_of(self.dropped, 'reply')} in no row"
        )
        yield from self._group_lines()
        yield from self._finding_lines(width)

    def _most_common(self) -> list[tuple[Json, Rewards]]:
        return sorted(self._groups.values(), key=lambda each: -each[1].count)

    def _group_lines(self) -> Iterator[str]:
        groups = self._most_common()
        if self.group_by is not None and groups:
            yield f"{padded(f'by {self.group_by.text}', 24)}  {'count':>7}  {'scored':>7}  reward"
        for value, rewards in groups[:_SHOWN]:
            name = padded(_label(value), 24)
            yield f"{name}  {rewards.count:>7}  {rewards.scored:>7}  {rewards}"
        if len(groups) > _SHOWN:
            yield f"and {len(groups) - _SHOWN} more (--json has all)"

    def _finding_lines(self, width: int) -> Iterator[str]:
        if not self._findings:
            return
        yield f"findings, in {number_of(self.with_findings, 'trajectory')}:"
        for (kind, text, advice), count in self._findings.most_common(_SHOWN):
            room = max(width - 9, 40)
            yield f"{count:>6} x " + padded(f"{kind}: {text}", room).rstrip()
            yield from textwrap.wrap(
                advice, room + 9, initial_indent=" " * 9, subsequent_indent=" " * 9
            )
        if len(self._findings) > _SHOWN:
            yield f"       and {len(self._findings) - _SHOWN} more (--json has all)"


def _label(value: Json) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
