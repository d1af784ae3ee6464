"""One step of an export: the trajectories of one group become lines of a trainer's file.

A trajectory travels as an item of bytes, brought together under the key of its group: the place
where its line was read (empty for one that was rebuilt), a line break, and its line of JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_rollout.errors import ExportError, SpanFormatError
from otel_rollout.export.row_contract import RowExporter
from otel_rollout.terminal import without_ids_and_numbers
from otel_rollout.trajectory import Trajectory, TrajectoryGroup
from otel_rollout.wire import Json, dumps, finite, loads

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
    """Lines that are no trajectory."""
    rows: int = 0
    """Rows written."""
    refused: Counter[str] = field(default_factory=Counter)
    """Trajectories that the format cannot carry, by reason."""
    empty: Counter[str] = field(default_factory=Counter)
    """Trajectories without a completion, though their rollouts should have one, by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Completions that the exporter trains in no row, by reason."""

    def add(self, other: Tally) -> None:
        """Add the counts of the other."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

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


def item_of(line: bytes, data: Json, where: str) -> tuple[str, bytes]:
    """Key and item of a line that a trajectory was written as.

    `data` is what the line holds; `where` names file and line. SpanFormatError if it is no
    trajectory.
    """
    if not isinstance(data, dict) or not isinstance(data.get("id"), str):
        raise SpanFormatError(f"{where}: not a Trajectory: {line[:80]!r}")
    return _key(data["id"], data.get("group_id")), where.encode() + b"\n" + line.strip()


def item_of_trajectory(trajectory: Trajectory) -> tuple[str, bytes]:
    """Key and item of a trajectory that was rebuilt."""
    line = dumps(trajectory.to_dict()).encode()
    return _key(trajectory.id, trajectory.group_id), b"\n" + line


def _key(trajectory_id: str, group_id: Json) -> str:
    return f"trajectory {trajectory_id}" if group_id is None else f"group {group_id}"


def rows_of(
    items: Sequence[bytes], exporter: RowExporter, tally: Tally, report: Report, *, strict: bool
) -> list[bytes]:
    """The rows, as lines of JSON, of the trajectories of one key.

    A trajectory that the format cannot carry is reported and left out, and the others of its group
    are exported as if it were not there; with `strict` it is an ExportError.
    """
    members = _members(items, tally, report)
    if not members:
        return []
    group = TrajectoryGroup.of(members.values())
    tally.groups += 1
    tally.trajectories += len(members)
    tally.failures += len(group.failures)
    try:
        return _lines(group, exporter, tally)
    except ExportError as error:
        if strict:
            raise
        refused = _refused(members, exporter, error)
    kept = [member for member in members.values() if member.id not in refused]
    rows: list[bytes] = []
    try:
        if kept:
            rows = _lines(TrajectoryGroup.of(kept, id=group.id), exporter, tally)
    except ExportError as error:
        refused = dict.fromkeys(members, error)
    for each in dict.fromkeys(map(str, refused.values())):
        report(each)
    tally.refused.update(without_ids_and_numbers(str(error)) for error in refused.values())
    return rows


def _members(items: Sequence[bytes], tally: Tally, report: Report) -> dict[str, Trajectory]:
    """The trajectories by id; of several with one id the last."""
    members: dict[str, Trajectory] = {}
    for item in items:
        where, _, line = item.partition(b"\n")
        try:
            trajectory = Trajectory.from_dict(loads(line))
        except SpanFormatError as error:
            tally.unreadable += 1
            report(f"{where.decode()}: {error}" if where else str(error))
            continue
        tally.repeated += members.pop(trajectory.id, None) is not None
        members[trajectory.id] = trajectory
    return members


def _lines(group: TrajectoryGroup, exporter: RowExporter, tally: Tally) -> list[bytes]:
    """The rows of a group; counts them, and the completions that the exporter trains in none."""
    rows = [_line(row) for row in exporter.rows(group)]
    dropped_of = getattr(exporter, "dropped", None)  # optional in `RowExporter`
    for drop in dropped_of(group) if callable(dropped_of) else ():
        if drop.completion is not None:
            tally.dropped[without_ids_and_numbers(drop.reason)] += 1
    empty = (member.why_empty for member in group)  # failures are counted as such
    tally.empty.update(without_ids_and_numbers(why) for why in empty if why is not None)
    tally.rows += len(rows)
    return rows


def _refused(
    members: Mapping[str, Trajectory], exporter: RowExporter, error: ExportError
) -> dict[str, ExportError]:
    """The trajectories that the format cannot carry; all, if each alone can be carried."""
    refused: dict[str, ExportError] = {}
    for member in members.values():
        try:
            for _ in exporter.rows(TrajectoryGroup.of([member])):
                pass
        except ExportError as own:
            refused[member.id] = own
    return refused or dict.fromkeys(members, error)


def _line(row: Mapping[str, Json]) -> bytes:
    """The row as a line of JSON; NaN and infinities are null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(finite(row), separators=(",", ":")).encode() + b"\n"
