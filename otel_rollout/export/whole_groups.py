"""Groups that have not the samples that they were to have: by their numbers, and by their size.

Memory: a group's id and its size, and two bits for each of its samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from otel_rollout.errors import ExportError
from otel_rollout.terminal import number_of
from otel_rollout.trajectory import Trajectory, failed
from otel_rollout.wire import Json

_NUMBERED = 1 << 16
"""A `sample_index` from here on is the user's own name for a sample, not a count."""
_NAMED = 10
"""Missing samples that are named; the others are counted."""
PARTIAL_GROUPS = (
    "Find the missing samples, or leave these groups out: advantages are relative to all samples "
    "of a group. Two runs of one group_id are two groups if each has a group_run of its own."
)
"""What to do about a group that is not whole."""


class Sample(NamedTuple):
    """What a trajectory says of its place in a group."""

    id: str
    group_id: str | None
    group_size: int | None
    has_ended: bool
    """False: its end is not known."""
    number: int | None
    """None: it has no number that counts."""
    name: str = ""
    """That of its agent: several agents may have a trajectory each of every sample."""
    is_failure: bool = False
    """True if it failed without a reward: it may have been run again."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sample:
        """That of a trajectory."""
        return cls.placed(
            trajectory.id,
            trajectory.group_key,
            trajectory.group_size,
            trajectory.sample_index,
            trajectory.parent_id,
            has_ended=trajectory.status != "unknown",
        )._replace(name=trajectory.name, is_failure=failed(trajectory))

    @classmethod
    def placed(
        cls,
        id_: str,
        group_id: str | None,
        group_size: int | None,
        index: int | None,
        parent_id: str | None,
        *,
        has_ended: bool,
    ) -> Sample:
        """That of a rollout with this `sample_index` and `parent_id`."""
        # A part of a workflow need not be in each of its samples.
        if index is None or not 0 <= index < _NUMBERED or parent_id is not None:
            index = None
        return cls(id_, group_id, group_size, has_ended, index)


@dataclass(slots=True)
class _Group:
    """What is known of one group."""

    id: str
    members: int = 0
    """Trajectories in it, by their ids."""
    size: int = 0
    """Samples that it was to have; 0: not known."""
    numbers: int = 0
    """Bit `n` is set if there is a sample `n`."""
    unnumbered: int = 0
    """Members without a number that counts."""
    is_asked_for: bool = False
    """True if a filter keeps one of them."""
    kept: Counter[str] = field(default_factory=Counter)
    """Members that did not fail, by the name of their agent."""
    by_name: dict[str, int] = field(default_factory=dict)
    """Their numbers, by that name, as bits."""
    again: int = 0
    """Numbers that several members of one name have, as bits."""

    def add(self, sample: Sample) -> None:
        """Count a member."""
        self.members += 1
        self.size = max(self.size, sample.group_size or 0)
        if sample.number is None:
            self.unnumbered += 1
        else:
            self.numbers |= 1 << sample.number
        if not sample.is_failure:
            own = 0 if sample.number is None else 1 << sample.number
            known = self.by_name.get(sample.name, 0)
            self.again |= known & own
            self.by_name[sample.name] = known | own
            self.kept[sample.name] += 1

    def samples(self, size: int) -> int:
        """Number of samples; where more than `size` were recorded, several are of one sample."""
        if self.are_too_many(size):
            return max(self.kept.values())
        if self.members > size and not self.unnumbered:
            return self.numbers.bit_count()
        return self.members

    def are_too_many(self, size: int) -> bool:
        """True if one agent has more than that; without a size, several with one number."""
        return max(self.kept.values(), default=0) > size if size else self.again > 0

    def gaps(self, size: int) -> list[int]:
        """The numbers that are missing; [] if members without a number may be these samples."""
        end = self.numbers.bit_length()
        if self.numbers and end <= size and self.samples(size) < size:
            end = min(size, _NUMBERED)
        gaps = [number for number in range(end) if not self.numbers >> number & 1]
        return gaps if len(gaps) > self.unnumbered else []


@dataclass(slots=True)
class NotWhole:
    """A group that has not the samples that it was to have."""

    group_id: str
    samples: int
    size: int | None
    """Samples that it was to have. None: not known."""
    missing: list[int]
    """Numbers of missing samples, as far as they are known."""
    again: list[int] = field(default_factory=list)
    """Numbers that several samples have, where there are too many."""

    def __str__(self) -> str:
        had = f"{number_of(self.samples, 'sample')}"
        if self.size is not None and self.samples > self.size:
            had += f", but {self.size} were expected"
        elif self.size is not None:
            had = f"{self.samples} of {number_of(self.size, 'sample')}"
        lacks = [f"sample {_listed(self.missing)} missing"] if self.missing else []
        lacks += [f"sample {_listed(self.again)} there more than once"] if self.again else []
        return f"group {self.group_id!r} has {had}{': ' if lacks else ''}{', '.join(lacks)}"

    def to_dict(self) -> dict[str, Json]:
        """The same as JSON."""
        return {
            "group_id": self.group_id,
            "samples": self.samples,
            "size": self.size,
            "missing": [*self.missing],
            **({"again": [*self.again]} if self.again else {}),
        }


def _listed(numbers: list[int]) -> str:
    more = len(numbers) - _NAMED
    named = ", ".join(map(str, numbers[:_NAMED]))
    return f"{named} and {more} more" if more > 0 else named


class Groups:
    """The groups of the trajectories that came.

    expected: the number of samples that each group is to have. None: the number that its
    trajectories name (`group_size`), if they do.
    """

    def __init__(self, expected: int | None = None) -> None:
        self.expected = expected
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        """Number of groups that are asked for."""
        return sum(each.is_asked_for for each in self._groups.values())

    def add(self, sample: Sample) -> None:
        """Count a trajectory whose id did not come before, whether a filter keeps it or not."""
        if (id_ := sample.group_id) is not None:
            if id_ not in self._groups:
                self._groups[id_] = _Group(id_)
            self._groups[id_].add(sample)

    def ask_for(self, group: str | None) -> None:
        """A filter keeps a trajectory of this group (`group_key`): it is judged."""
        # One whose id came before, in another group, was not added.
        if group in self._groups:
            self._groups[group].is_asked_for = True

    def not_whole(self) -> Iterator[NotWhole]:
        """Those that are asked for and not whole, in the order in which they came."""
        for each in self._groups.values():
            size = each.size if self.expected is None else self.expected
            samples, gaps = each.samples(size), each.gaps(size)
            too_many = each.are_too_many(size)
            again = [n for n in range(each.again.bit_length()) if each.again >> n & 1]
            more = too_many or (self.expected is not None and samples > size)
            if each.is_asked_for and (gaps or samples < size or more):
                yield NotWhole(each.id, samples, size or None, gaps, again if too_many else [])


def groups_not_whole(trajectories: Iterable[Trajectory]) -> list[NotWhole]:
    """The groups among these trajectories of which samples are missing."""
    groups = Groups()
    for trajectory in {each.id: each for each in trajectories}.values():
        groups.add(Sample.of(trajectory))
        groups.ask_for(trajectory.group_key)
    return [*groups.not_whole()]


def check_whole(caller: str, trajectories: Iterable[Trajectory]) -> None:
    """ExportError if samples of a group are missing."""
    if partial := groups_not_whole(trajectories):
        raise ExportError(
            f"{caller}: expected whole groups, but {'; '.join(map(str, partial))}. {PARTIAL_GROUPS}"
        )
