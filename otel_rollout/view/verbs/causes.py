"""What fails in many trajectories, by cause: each is printed once, with how many have it.

Findings whose texts differ only in ids and numbers have one cause. A trajectory of which no token
trains for a reason that is a finding of its own has one cause too, which fails both requirements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from otel_rollout.terminal import for_commands
from otel_rollout.trajectory import SequenceOptions
from otel_rollout.view.findings import NOTHING_TRAINS, Finding

_IDS = 3
"""Trajectories of a cause that are named."""
_SHOWN = 20
"""Causes that are printed; the others are counted."""
_KEPT = 1000
"""Causes that are told apart by their texts; further ones by their advice."""


@dataclass(slots=True)
class _Cause:
    text: str
    """The text of its first finding; of several trajectories without ids and numbers."""
    plain: str
    advice: str
    requirements: set[str] = field(default_factory=set)
    trajectories: int = 0
    ids: list[str] = field(default_factory=list)


class Causes:
    """Causes by their texts, in the order in which they came; memory does not grow with ids."""

    def __init__(self) -> None:
        self._causes: dict[str, _Cause] = {}

    def add(self, trajectory_id: str, failing: Sequence[tuple[Finding, str]]) -> None:
        """Count the findings of a trajectory, each with the requirement that it fails."""
        found = dict[str, _Cause]()
        for one, name in failing:
            cause = self._cause(_own_finding(one, failing))
            found[cause.plain] = cause
            cause.requirements.add(name)
        for cause in found.values():
            cause.trajectories += 1
            if len(cause.ids) < _IDS:
                cause.ids.append(trajectory_id)

    def _cause(self, finding: Finding) -> _Cause:
        key = finding.plain
        if key not in self._causes and len(self._causes) >= _KEPT:
            key = finding.advice
        text, plain = (" ".join(each.split()) for each in (finding.text, finding.plain))
        return self._causes.setdefault(key, _Cause(text, plain, finding.advice))

    def lines(self, required: Sequence[str]) -> Iterator[str]:
        """For people: in the order of the requirements, of one requirement the most frequent first.

        A cause has three lines: requirements and text, advice, and the first trajectories.
        """
        place = {name: number for number, name in enumerate(required)}
        causes = sorted(
            self._causes.values(),
            key=lambda each: (min(map(place.__getitem__, each.requirements)), -each.trajectories),
        )
        options = [*SequenceOptions.__annotations__, "require_whole_groups"]
        for each in causes[:_SHOWN]:
            names = ", ".join(sorted(each.requirements, key=place.__getitem__))
            more = each.trajectories - len(each.ids)
            text = each.text if each.trajectories == 1 else each.plain
            yield f"{each.trajectories:>6} x {names}: {for_commands(text, options)}"
            yield f"         {for_commands(each.advice, options)}"
            yield f"         {', '.join(each.ids)}{f' and {more} more' if more else ''}"
        if len(causes) > _SHOWN:
            yield f"and {len(causes) - _SHOWN} more causes (--json has all)"


def _own_finding(one: Finding, failing: Sequence[tuple[Finding, str]]) -> Finding:
    """The finding that is the reason why no token trains, if that is what this one reports."""
    reason = one.text.removeprefix(NOTHING_TRAINS)
    if reason == one.text:
        return one
    return next((each for each, _ in failing if each is not one and each.text in reason), one)
