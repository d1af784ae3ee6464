"""Which trajectories a verb is about (`--where`, `--search`), and in which order they come."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from otel_rollout.errors import ConfigurationError
from otel_rollout.terminal import number_of
from otel_rollout.trajectory import Trajectory
from otel_rollout.view.curves import By, Curve
from otel_rollout.view.fields import Field
from otel_rollout.view.filter_expression import Where
from otel_rollout.view.overview import HEAD, Examined, Overview, check_threshold, examine
from otel_rollout.view.search import Search
from otel_rollout.view.sources import lines_in_order, ordered


class Choice:
    """The filter, order and groups that a command line asks for; a wrong one ends the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.where: Where | None = None
        """None: every trajectory."""
        self.search: Search | None = None
        """None: nothing is searched for."""
        self._asked = 0
        """Trajectories that the filter was asked about."""
        self.sorts: str | None = getattr(options, "sort", None)
        """A field, `-` before it for descending; None: as they come."""
        self._by: Field | None = None
        self.curve: Curve | None = None
        """The sums by the values of a field, empty. None: groups are only counted."""
        try:
            if options.where is not None:
                self.where = Where.parse(options.where)
            if getattr(options, "search", None) is not None:
                self.search = Search.parse("--search", options.search)
            if self.sorts is not None:
                self._by = Field.parse("--sort", self.sorts.removeprefix("-"), not_of=("list",))
            if getattr(options, "group_by", None) is not None:
                threshold = check_threshold("--pass-threshold", options.pass_threshold)
                self.curve = Curve(
                    By.parse("--group-by", options.group_by), threshold, options.scored_only
                )
        except ConfigurationError as error:
            options.wrong(str(error))

    def nothing(self) -> str:
        """The sentence for people where no trajectory is left."""
        given = {"--where": self.where, "--search": self.search}
        names = " and ".join(name for name, each in given.items() if each is not None)
        if not names or not self._asked:
            return "no trajectories"
        return f"{names}: 0 of {number_of(self._asked, 'trajectory')} match"

    def keeps(self, trajectory: Trajectory) -> bool:
        """True for a trajectory that is asked for; its calls are read if that needs them."""
        where = self.where
        self._asked += 1
        matches = where is None or where.matches(Overview.of(trajectory, where.names))
        return matches and self.hit(trajectory) is not None

    def hit(self, trajectory: Trajectory) -> list[str] | None:
        """The excerpt around what is searched for (`Search.hit`); [] where nothing is."""
        return [] if self.search is None else self.search.hit(trajectory)

    @property
    def reads_replies(self) -> bool:
        """True if `examined` reads the replies of each trajectory: the filter needs them too."""
        return self.where is None or not self.where.names <= HEAD

    def examined(self, trajectory: Trajectory) -> Examined | None:
        """What is computed of a trajectory; None for one that is not asked for."""
        where, names = self.where, self.where.names if self.where else set[str]()
        self._asked += 1
        if where is not None and names <= HEAD:
            if not where.matches(Overview.of(trajectory, names)):
                return None
            where = None
        hit = self.hit(trajectory)
        if hit is None:
            return None
        examined = examine(trajectory)._replace(hit=hit or None)
        return examined if where is None or where.matches(examined.overview) else None

    def keyed(self, trajectory: Trajectory) -> tuple[Any, Trajectory] | None:
        """Its key and the trajectory; None for one that the filter does not keep."""
        return (self.key(trajectory), trajectory) if self.keeps(trajectory) else None

    def in_order_of_keys(self, keyed: Iterable[tuple[Any, Trajectory]]) -> Iterator[Trajectory]:
        """The trajectories in the order that is asked for, by a temporary file."""
        for line in lines_in_order(keyed, descending=self.descending):
            yield Trajectory.from_json(line)

    @property
    def descending(self) -> bool:
        """True if the greatest comes first."""
        return self.sorts is not None and self.sorts.startswith("-")

    def key(self, trajectory: Trajectory) -> Any:
        """What trajectories are sorted by; without `--sort` their start and id."""
        if self._by is None:
            return trajectory.start_time_ns, trajectory.id
        return self._by.of(Overview.of(trajectory, {self._by.name}))

    def in_order(self, overviews: Iterable[Overview]) -> Iterable[Overview]:
        """The overviews in the order that is asked for; without one, as `together` has them."""
        if self._by is None:
            return together(overviews)
        return ordered(overviews, self._by.of, descending=self.descending)


def together(overviews: Iterable[Overview]) -> Iterator[Overview]:
    """Overviews as they come, but those of a group together, by their sample index.

    A group comes once all are there that it is to have, or at the end. Memory: unfinished groups.
    """
    groups: dict[str, list[Overview]] = {}
    for each in overviews:
        if each.group_id is None or each.group_size is None:
            yield each
            continue
        members = groups.setdefault(each.group_id, [])
        members.append(each)
        if len(members) >= each.group_size:
            yield from _by_sample(groups.pop(each.group_id))
    for members in groups.values():
        yield from _by_sample(members)


def _by_sample(members: list[Overview]) -> list[Overview]:
    return ordered(members, lambda member: member.sample_index, descending=False)
