"""A trainer's file, made of any number of trajectories in steps that survive being killed.

Trajectories are first brought together by group, in one transaction (in the folder FILE.groups).
Then the rows of each group are appended to FILE.part, and its end there is committed. An export
that is started again with the same plan goes on after the last of these groups. FILE itself exists
only when it is whole.

A trajectory travels as its line of JSON, an item under the key of its group.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from otel_rollout.errors import ConfigurationError, ExportError, RolloutError, SpanFormatError
from otel_rollout.export.left_out import Facts, LeftOut, PolicyLag
from otel_rollout.export.row_contract import RowExporter
from otel_rollout.export.rows import EachRow
from otel_rollout.export.store import Store
from otel_rollout.export.whole_groups import PARTIAL_GROUPS, groups_not_whole
from otel_rollout.lines import NO_LINKS, SpilledLines, lock, no_links, write_whole
from otel_rollout.terminal import without_ids_and_numbers
from otel_rollout.trajectory import UNREADABLE, Dropped, Trajectory, TrajectoryGroup, advice_about
from otel_rollout.wire import Json, dumps, finite, loads

_OURS = ("trajectories", "spans")
"""How the names of the files in the folder begin."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS plan (plan TEXT, collected INTEGER, tally TEXT)",
    "CREATE TABLE IF NOT EXISTS done (number INTEGER PRIMARY KEY, end INTEGER, tally TEXT)",
)
"""The export, once its trajectories were brought together; the groups whose rows were written."""


class Group(NamedTuple):
    """The items of one key."""

    number: int
    """Its place in the order of groups."""
    items: list[bytes]
    rows: Path
    """A file for its rows, if they are many."""


class RowFile:
    """A file of rows while it is made; it is written by one process at a time."""

    def __init__(self, output: Path, plan: Mapping[str, Json], *, restart: bool = False) -> None:
        self.output = output
        """The file that is made."""
        self.tally = Tally()
        """Counts of all its groups, those of an earlier process included."""
        self.collected: int | None = None
        """Trajectories that were brought together; None while they are not."""
        self._plan = plan
        self._part = output.with_name(output.name + ".part")
        self._folder = output.with_name(output.name + ".groups")
        self.spans = self._folder / _OURS[1]
        """For the spans from which trajectories are rebuilt."""
        self._number = 0
        """The group that was written last by an earlier process."""
        self._rows: io.FileIO | None = None
        self._held = ExitStack()
        try:
            self._lock()
            if restart:
                self._remove_rest()
            self._store = self._held.enter_context(Store(self._folder / _OURS[0]))
            self._resume()
        except BaseException as error:
            self.close()
            if isinstance(error, UNREADABLE) and not isinstance(error, RolloutError):
                raise ConfigurationError(
                    f"{self._folder} is damaged ({error!r:.200}): begin anew with --restart"
                ) from error
            raise

    def _lock(self) -> None:
        """ConfigurationError if another process writes the file, or the folder is not ours."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink() or not all(
            path.name.startswith(_OURS) for path in self._folder.iterdir()
        ):
            raise ConfigurationError(
                f"{self._folder}: expected the folder of an export, got a link or files of others: "
                f"move it away"
            )
        if os.name == "nt":  # a folder cannot be opened there
            return
        folder = os.open(self._folder, os.O_RDONLY | NO_LINKS)
        self._held.callback(os.close, folder)
        if not lock(folder):
            raise ConfigurationError(
                f"{self._folder}: another process is writing {self.output.name}: let it end"
            )

    def _resume(self) -> None:
        """Go on with what an export of the same plan has committed; else begin."""
        for table in _TABLES:
            self._store.execute(table)
        known = self._store.execute("SELECT * FROM plan")
        if not known:
            self._part.unlink(missing_ok=True)
            return
        ((plan, self.collected, tally),) = known
        self._check_plan(loads(plan))
        self._store.commit()
        self._drop_lost_rows()
        self.tally = Tally.from_dict(loads(tally))
        for number, tally in self._store.execute("SELECT number, tally FROM done ORDER BY number"):
            self._number = number
            self.tally.add(Tally.from_dict(loads(tally)))

    def _check_plan(self, was: Any) -> None:
        """ConfigurationError if the plan of the export that was interrupted is another."""
        differ = [
            f"{key} was {was.get(key)!r} and is {self._plan.get(key)!r}"
            for key in sorted(was.keys() | self._plan.keys())
            if was.get(key) != self._plan.get(key)
        ]
        if differ:
            raise ConfigurationError(
                f"{self._folder} is of another export: {'; '.join(differ)}; go on with that one, "
                f"or begin anew with --restart"
            )

    def _drop_lost_rows(self) -> None:
        """Forget groups whose rows are not in FILE.part, unless that has become FILE already."""
        ((last,),) = self._store.execute("SELECT ifnull(max(number), 0) FROM done")
        if not self._part.exists() and next(self._store.each_key(after=last), None) is None:
            return
        with open(self._part, "ab", opener=no_links) as rows:
            # The machine may have lost power before the rows were on its disk.
            self._store.execute("DELETE FROM done WHERE end > ?", rows.tell())
            ((end,),) = self._store.execute("SELECT ifnull(max(end), 0) FROM done")
            rows.truncate(end)

    def collect(self, items: Iterable[tuple[str, bytes]], unreadable: Callable[[], int]) -> None:
        """Bring items together by key. `unreadable` counts the lines that were no item."""
        self.collected = 0
        for key, item in items:
            self._store.add(key, item)
            self.collected += 1
        self.tally.unreadable = unreadable()
        plan = dumps(self._plan), self.collected, dumps(self.tally.to_dict())
        self._store.execute("INSERT INTO plan VALUES (?, ?, ?)", *plan)
        self._store.commit()

    def leave_out(self, facts: Facts) -> None:
        """Count a trajectory that is not to be brought together."""
        LeftOut(self.tally.left_out).add(facts, "not kept by --where")

    def groups(self) -> Iterator[Group]:
        """The items of each key whose rows have not been written."""
        for number, key in self._store.each_key(after=self._number):
            rows = self._folder / f"{_OURS[0]}.rows.{number}"
            yield Group(number, self._store.items(key), rows)

    def facts(self) -> Iterator[Facts]:
        """Those of all trajectories that were brought together and can be read."""
        for item in self._store.every():
            if (facts := _facts_of(Trajectory.from_json(item))) is not None:
                yield facts

    def write(self, group: Group, rows: SpilledLines, tally: Tally) -> None:
        """Write the rows of a group, after those of the groups that `groups` gave before."""
        if self._rows is None:
            # Unbuffered: a short write is seen.
            file = open(self._part, "ab", 0, opener=no_links)  # noqa: SIM115 - closed by close()
            self._rows = self._held.enter_context(file)
        for piece in rows.pieces():
            write_whole(self._rows, piece)
        done = group.number, self._rows.tell(), dumps(tally.to_dict())
        self._store.execute("INSERT INTO done VALUES (?, ?, ?)", *done)
        self.tally.add(tally)

    def finish(self, exporter: RowExporter) -> None:
        """Make FILE of the rows, and remove the files beside it."""
        if self._rows is not None:
            self._rows.close()
        if self.tally.rows and self._part.exists():
            exporter.finish(self._part, self.output)
        self._remove_rest()
        self._folder.rmdir()
        self.close()

    def close(self) -> None:
        """Close the files; another process can go on after that."""
        self._held.close()

    def _remove_rest(self) -> None:
        # The trajectories are last: the rest is useless without them.
        self._part.unlink(missing_ok=True)
        for path in self._folder.iterdir():
            path.unlink()


# --- the rows of a group


Report = Callable[[str], None]


@dataclass
class Tally:
    """Counts of one export, or of one group of it: items read, rows made, and reasons."""

    groups: int = 0
    """Groups whose rows were made."""
    trajectories: int = 0
    """Trajectories in them, each counted once."""
    failures: int = 0
    """Trajectories among them that failed without a reward."""
    repeated: int = 0
    """Trajectories that came again; the last of each counts."""
    unreadable: int = 0
    """Places in the sources that could not be read."""
    rows: int = 0
    """Rows written."""
    refused: Counter[str] = field(default_factory=Counter)
    """Trajectories that the format cannot carry, by reason."""
    empty: Counter[str] = field(default_factory=Counter)
    """Trajectories without a completion, though their rollouts should have one, by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Completions that the exporter trains in no row, by reason."""
    partial: Counter[str] = field(default_factory=Counter)
    """Groups that are not whole, each with what it lacks."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What is kept and what is left out, as `LeftOut` counts it."""
    examples: dict[str, str] = field(default_factory=dict)
    """The id of one for each reason; a reason has what to do about it on a line of its own."""

    def add(self, other: Tally) -> None:
        """Add the counts of the other."""
        self.examples = {**other.examples, **self.examples}
        for name, value in vars(other).items():
            if name != "examples":
                setattr(self, name, getattr(self, name) + value)

    def count(self, reasons: Counter[str], text: str, id_: str, advice: str = "") -> None:
        """Count a reason, without what differs between equal ones."""
        reason = "\n".join(filter(None, (without_ids_and_numbers(text), advice)))
        reasons[reason] += 1
        self.examples.setdefault(reason, id_)

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON without the counts that are zero."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tally:
        """The inverse of `to_dict`."""
        tally = cls()
        for name, value in data.items():
            setattr(tally, name, Counter(value) if isinstance(value, dict) else value)
        return tally


def rows_of(
    items: Sequence[bytes | Trajectory],
    exporter: RowExporter,
    tally: Tally,
    report: Report,
    *,
    strict: bool,
    lag: PolicyLag | None = None,
    lines: SpilledLines | None = None,
) -> list[bytes]:
    """The rows, as lines of JSON, of the trajectories of one key.

    items: the trajectories, or their JSON.
    lines: gets the rows, each as soon as it is made, instead of what is returned.
    lag: those that are older are left out, as if they were not there. None: none are.
    A trajectory that is damaged, or that the format cannot carry, is reported and left out, and the
    others of its group are exported as if it were not there; with `strict` its error is raised.
    """
    members = _members(items, tally)
    tally.groups += 1
    tally.trajectories += len(members)
    for lacks in groups_not_whole(members.values()):
        text = str(lacks).replace(repr(lacks.group_id), "…")
        tally.count(tally.partial, text, lacks.group_id, PARTIAL_GROUPS)
    facts = {id_: _facts_of(member) for id_, member in members.items()}
    left = {id_: why for id_, each in facts.items() if lag and each and (why := lag.reason(each))}
    group = TrajectoryGroup.of(member for member in members.values() if member.id not in left)
    tally.failures += len(group.failures)
    made = _Made(exporter, tally, [] if lines is None else lines)
    try:
        made.add(group)
    except UNREADABLE as error:
        if strict:
            raise
        _add_carried(made, group, report, left, error)
    for id_, each in facts.items():
        if each is not None:
            LeftOut(tally.left_out).add(each, left.get(id_, made.why_none(members[id_])))
    return made.rows if isinstance(made.rows, list) else []


def _facts_of(trajectory: Trajectory) -> Facts | None:
    try:
        return Facts.of(trajectory)
    except UNREADABLE:  # it is reported where its rows are made
        return None


def _add_carried(
    made: _Made, group: TrajectoryGroup, report: Report, left: dict[str, str], error: Exception
) -> None:
    """Make the rows of those that the format can carry; the others are reported, and left out."""
    members = {member.id: member for member in (*group, *group.failures)}
    refused = _refused(members, made.exporter, error)
    kept = [member for member in members.values() if member.id not in refused]
    try:
        if kept:
            made.add(TrajectoryGroup.of(kept, id=group.id))
    except ExportError as other:
        refused = {**dict.fromkeys(members, other), **refused}
    for each in {str(each): each for each in refused.values()}.values():
        if not isinstance(each, ExportError):  # those are counted by reason
            report(str(each))
    for id_, each in refused.items():
        left[id_] = "refused by the format"
        if isinstance(each, ExportError):
            made.tally.count(made.tally.refused, str(each), id_)
        else:
            made.tally.unreadable += 1


def _members(items: Sequence[bytes | Trajectory], tally: Tally) -> dict[str, Trajectory]:
    """The trajectories by id; of several with one id the last."""
    members: dict[str, Trajectory] = {}
    for item in items:
        trajectory = (
            item if isinstance(item, Trajectory) else Trajectory.from_json(item, reads_replies=True)
        )
        tally.repeated += members.pop(trajectory.id, None) is not None
        members[trajectory.id] = trajectory
    return members


class _Made:
    """The rows of a group as lines; counts them, and the completions that none of them trains."""

    def __init__(
        self, exporter: RowExporter, tally: Tally, rows: list[bytes] | SpilledLines
    ) -> None:
        self.exporter = exporter
        self.tally = tally
        self.rows = rows
        self._dropped = set[tuple[str, int]]()
        """Span and choice of these completions."""
        self._failed = set[str]()
        """The trajectories that failed without a reward, and have no row."""

    def add(self, group: TrajectoryGroup) -> None:
        """Make the rows. ExportError, and none, if the format cannot carry a trajectory."""
        made = self.exporter.rows(group)
        count, kept = 0, set[object]()
        try:
            for row in made:
                self.rows.append(_line(row))
                count += 1
                kept.add(row.get("trajectory_id") if isinstance(made, EachRow) else None)
        except BaseException:
            self.rows.clear()
            raise
        dropped_of = getattr(self.exporter, "dropped", None)  # optional in `RowExporter`
        if isinstance(made, EachRow):
            drops: Iterable[Dropped] = made.left.dropped
        else:
            drops = dropped_of(group) if callable(dropped_of) else ()
        members = (*group, *group.failures, *group.children)
        by_span = {each.span_id: t.id for t in members for each in t.completions}
        for drop in drops:
            if (completion := drop.completion) is not None:
                self._dropped.add((completion.span_id, completion.choice_index))
                id_ = by_span.get(completion.span_id, "")
                self.tally.count(self.tally.dropped, drop.reason, id_, advice_about(drop))
        empty = ((member.id, member.why_empty) for member in group)  # failures are counted as such
        for id_, why in empty:
            if why is not None:
                self.tally.count(self.tally.empty, why, id_)
        self.tally.rows += count
        self._failed |= {each.id for each in group.failures} - kept

    def why_none(self, trajectory: Trajectory) -> str | None:
        """Why no row trains anything of a trajectory; None: one does, as far as is known."""
        if trajectory.id in self._failed:
            return "failed without a reward"
        places = {(each.span_id, each.choice_index) for each in trajectory.completions}
        return "without a token that trains" if places <= self._dropped else None


def _refused(
    members: Mapping[str, Trajectory], exporter: RowExporter, error: Exception
) -> dict[str, Exception]:
    """The trajectories that the format cannot carry, or that are damaged.

    All, if each alone can be carried; raises what is no ExportError then.
    """
    refused: dict[str, Exception] = {}
    exporter = getattr(exporter, "of_one", exporter)
    for member in members.values():
        try:
            for _ in exporter.rows(TrajectoryGroup.of([member])):
                pass
        except ExportError as own:
            refused[member.id] = own
        except UNREADABLE as own:
            refused[member.id] = SpanFormatError(
                f"trajectory {member.id!r}: damaged ({own!r:.200})"
            )
    if not refused and not isinstance(error, ExportError):
        raise error
    return refused or dict.fromkeys(members, error)


def _line(row: Mapping[str, Json]) -> bytes:
    """The row as a line of JSON; NaN and infinities are null. ExportError for what is no JSON."""
    for name, value in row.items():
        _check_json(name, value)
    try:
        return _encode(row) + b"\n"
    except (TypeError, ValueError, OverflowError):  # lone surrogates, mappings that are no dict
        return json.dumps(finite(row), separators=(",", ":")).encode() + b"\n"


def _check_json(name: str, value: object) -> None:
    """ExportError if a field has what JSON has not: `_encode` would write bytes, sets, dates."""
    unchecked: list[object] = [[value]]
    while unchecked:
        found = unchecked.pop()
        items = list(found.values() if isinstance(found, Mapping) else found)  # type: ignore[call-overload]
        if set(map(type, items)) <= _PLAIN:
            continue
        for item in items:
            if isinstance(item, Mapping | list | tuple):
                unchecked.append(item)
            elif not isinstance(item, str | int | float | None):
                raise ExportError(
                    f"row exporter: field {name!r} of a row: expected JSON (text, number, bool, "
                    f"None, list, dict), got {type(item).__name__}: {item!r:.100}"
                )


_PLAIN = frozenset((str, int, float, bool, type(None)))


_encode = msgspec.json.Encoder().encode
