"""The footer of a list: how many trajectories, how they ended, rewards, what does not train.

Memory: a line for each group and each distinct finding, of which there is a bound.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from otel_rollout.terminal import escaped, number_of
from otel_rollout.view.fields import Field
from otel_rollout.view.findings import Finding
from otel_rollout.view.overview import Overview
from otel_rollout.view.sums import Endings, Rewards, RewardsByValue, label
from otel_rollout.view.verbs.columns import number, padded
from otel_rollout.wire import Json

_DISTINCT = 10_000
"""Distinct findings that are counted apart; those after them are counted together."""
_SHOWN = 20
"""Findings, and groups, that are printed."""


@dataclass(slots=True)
class Totals(Endings):
    """The sums over trajectories, which are not kept."""

    group_by: Field | None = None
    """None: groups are only counted."""
    trained_tokens: int = 0
    dropped: int = 0
    """Completions that no row trains."""
    with_findings: int = 0
    """Trajectories that have findings."""
    _groups: RewardsByValue = field(default_factory=RewardsByValue)
    _group_ids: set[int] = field(default_factory=set)
    """Hashes of group ids."""
    _findings: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Kind, text without ids, and advice."""

    def add(self, overview: Overview, findings: Iterable[Finding]) -> None:
        """Count a trajectory."""
        self.add_ending(overview.reward, overview.status, overview.termination_reason)
        self.trained_tokens += overview.trained_tokens
        self.dropped += overview.dropped
        if overview.group_id is not None:
            self._group_ids.add(hash(overview.group_id))
        if self.group_by is not None:
            value = self.group_by.of(overview)
            value = list(value) if isinstance(value, tuple) else value
            self._groups.of(value).add(overview.reward)
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
            "termination_reasons": dict(self.reasons.most_common()),
            "reward": self.rewards.to_dict(),
            "group_ids": len(self._group_ids),
            "group_by": self.group_by and self.group_by.text,
            "groups": self._groups.to_list(),
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
            for reason, n in self.reasons.most_common()
            if reason not in self.statuses
        )
        grouped = f", {number_of(len(self._group_ids), 'group')}" if self._group_ids else ""
        yield escaped(
            f"{number_of(count, 'trajectory')}{grouped}: {endings}"
            + (f" ({reasons})" if reasons else "")
        )
        scored = f"; {self.rewards.scored} of {count} have one" * bool(self.rewards.scored)
        yield f"reward: {_spread(self.rewards)}{scored}"
        yield (
            f"{number_of(self.trained_tokens, 'token')} train; "
            f"{number_of(self.dropped, 'reply')} in no row"
        )
        yield from self._group_lines()
        yield from self._finding_lines(width)

    def _group_lines(self) -> Iterator[str]:
        groups = list(self._groups.most_common())
        if self.group_by is not None and groups:
            yield f"{padded(f'by {self.group_by.text}', 24)}  {'count':>7}  {'scored':>7}  reward"
        for value, rewards in groups[:_SHOWN]:
            name = padded(label(value), 24)
            yield f"{name}  {rewards.count:>7}  {rewards.scored:>7}  {_spread(rewards)}"
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


def _spread(rewards: Rewards) -> str:
    if not rewards.scored:
        return "none"
    return (
        f"mean {number(rewards.mean)}, std {number(rewards.std)}, "
        f"from {number(rewards.least)} to {number(rewards.most)}"
    )
