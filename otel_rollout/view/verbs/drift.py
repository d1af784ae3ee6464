"""The verb `drift`: how the token ids of conversations went on, and where they did not.

A trajectory with forks is printed as it is read, and forgotten: memory holds one, as in `show`, and
for `--json` the numbers of all.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from otel_rollout.terminal import escaped, note, number_of, shortened
from otel_rollout.trajectory import Drift, TokenFork, Trajectory
from otel_rollout.view.sources import Sources, note_unreadable
from otel_rollout.wire import Json, dumps

_FORKS_SHOWN = 5
_HEAD = ("calls", "continued", "merged", "forked", "unknown", "ratio", "read again")
_NUMBERS = ("calls", "continued", "merged", "unknown")
"""Numbers of a trajectory that are added up."""
_NAMES = 26
"""Characters of the column that names a trajectory."""


def drift(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    sources = Sources(options.sources, prints_lines=not options.json)
    total = _Total()
    each: list[Json] = []
    found = sources.trajectories(
        lambda t: (t, t.drift(), _calls(t)),
        infer_rollouts=options.infer_rollouts,
        reads_replies=True,
    )
    for trajectory, forked, calls in found:
        if options.json:
            named = {name: getattr(trajectory, name) for name in ("id", "name", "task_id")}
            each.append({**named, "calls": calls, **forked.to_dict()})
        else:
            if not total.trajectories:
                print(_line("trajectory", _HEAD))
            most = None if options.full else _FORKS_SHOWN
            for line in _lines(trajectory, calls, forked, most) if forked.forks else ():
                print(escaped(line))
        total.add(calls, forked)
    if options.json:
        print(dumps({"trajectories": each, "total": total.to_dict()}))
    elif total.trajectories:
        print("\n".join(total.lines()))
    else:
        note("no trajectories")
    return note_unreadable(sources.errors)


@dataclass
class _Total:
    """The sums over all trajectories, which are not kept."""

    trajectories: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    """The numbers `_NUMBERS` of all trajectories, by name."""
    causes: Counter[str] = field(default_factory=Counter)
    """Forks by class."""
    again: Counter[str] = field(default_factory=Counter)
    """Tokens that were read again by class."""

    def add(self, calls: int, drift: Drift) -> None:
        """Count the calls of a trajectory."""
        self.trajectories += 1
        self.numbers.update(
            calls=calls, continued=drift.continued, merged=drift.merged, unknown=drift.unknown
        )
        for fork in drift.forks:
            self.causes[fork.cause] += 1
            self.again[fork.cause] += fork.prefilled_again

    @property
    def merge_ratio(self) -> float | None:
        """As that of one trajectory."""
        known = self.numbers["merged"] + self.causes.total()
        return self.numbers["merged"] / known if known else None

    def lines(self) -> Iterator[str]:
        """The last lines of the table: the sums, and a line for each class."""
        calls, continued, merged, unknown = (self.numbers[name] for name in _NUMBERS)
        numbers = (calls, continued, merged, self.causes.total(), unknown)
        name = number_of(self.trajectories, "trajectory")
        yield _line(name, (*numbers, _ratio(self.merge_ratio), self.again.total()))
        for cause, count in self.causes.most_common():
            yield f"  {count:>6} x {_words(cause)}, {self.again[cause]} tokens read again"

    def to_dict(self) -> dict[str, Json]:
        """The sums as JSON."""
        return {
            "trajectories": self.trajectories,
            **{name: self.numbers[name] for name in _NUMBERS},
            "merge_ratio": self.merge_ratio,
            "prefilled_again": self.again.total(),
            "causes": dict(self.causes.most_common()),
        }


def _calls(trajectory: Trajectory) -> int:
    """Number of calls that generate; several choices are of one call."""
    return len({completion.span_id for completion in trajectory.completions})


def _lines(trajectory: Trajectory, calls: int, drift: Drift, most: int | None) -> Iterator[str]:
    """The line of a trajectory, and one for each of its first forks."""
    numbers = (calls, drift.continued, drift.merged, len(drift.forks), drift.unknown)
    name = f"{trajectory.id[:8]}  {' '.join(trajectory.name.split())}"
    yield _line(name, (*numbers, _ratio(drift.merge_ratio), drift.prefilled_again))
    for fork in drift.forks[:most]:
        yield _fork_line(fork)
    if most is not None and len(drift.forks) > most:
        yield f"    and {len(drift.forks) - most} more (--full)"


def _fork_line(fork: TokenFork) -> str:
    found = "its end" if fork.prompt_id is None else str(fork.prompt_id)
    return (
        f"    {fork.before_id} -> {fork.after_id}: {_words(fork.cause)}; token {fork.position} "
        f"of {fork.held} was {fork.held_id}, is {found}; {fork.prefilled_again} read again"
    )


def _line(name: str, cells: tuple[object, ...]) -> str:
    return f"{shortened(name, _NAMES):<{_NAMES}}" + "".join(
        f"  {cell!s:>{len(head)}}" for head, cell in zip(_HEAD, cells, strict=True)
    )


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _words(cause: str) -> str:
    return cause.replace("_", " ")
