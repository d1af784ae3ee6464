"""A trainer's file out of any number of trajectories, in steps that survive being killed.

Trajectories are first brought together by group (FILE.groups), then each group's rows are appended
to FILE.part and said to be there in FILE.journal. Who begins again with the same plan goes on
behind the last group of the journal; FILE itself is there when all of it is.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from otel_rollout.errors import ConfigurationError, ExportError, SpanFormatError
from otel_rollout.export.partitions import Partitions
from otel_rollout.export.rows import RowExporter
from otel_rollout.trajectory import TokenSequences, Trajectory, TrajectoryGroup
from otel_rollout.wire import Json, dumps, loads

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Report = Callable[[str], None]


@dataclass
class Tally:
    """What came of trajectories: numbers, and how often which reason was given."""

    groups: int = 0
    trajectories: int = 0
    failures: int = 0
    """Trajectories of them that failed without a reward."""
    repeated: int = 0
    """Trajectories that came again; the last of each counts."""
    unreadable: int = 0
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Trajectories that the format cannot carry, by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Completions that no token sequence trains, by reason."""

    def add(self, other: Tally) -> None:
        """Count what the other counted, too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Json]:
        """JSON without what is zero."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tally:
        """The inverse of `to_dict`."""
        tally = cls()
        for name, value in data.items():
            setattr(tally, name, Counter(value) if isinstance(value, dict) else value)
        return tally


class RowFile:
    """FILE while it is made. `tally` is of all its groups, of an earlier process too."""

    def __init__(self, output: Path, plan: Mapping[str, Json], *, restart: bool = False) -> None:
        self.output = output
        self.tally = Tally()
        self.collected: int | None = None
        """Trajectories that were brought together; None while they are not."""
        self.is_complete = False
        """Whether all its rows were written."""
        self._part = output.with_name(output.name + ".part")
        self._journal = output.with_name(output.name + ".journal")
        self.folder = output.with_name(output.name + ".groups")
        """What is in it is gone when FILE is finished, or begun anew."""
        self._parts = 1
        self._done = -1, -1
        self._at = self._done
        self._rows: BinaryIO | None = None
        self._steps = open(self._journal, "ab")  # noqa: SIM115 - closed by close()
        try:
            self._lock()
            if restart:
                self._begin_anew()
            self._resume(plan)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """Two processes would spoil the file; they are kept apart where files have locks."""
        if fcntl is not None:
            try:
                fcntl.flock(self._steps, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigurationError(
                    f"{self._journal}: another process is writing {self.output.name}: let it end"
                ) from None

    def _resume(self, plan: Mapping[str, Json]) -> None:
        lines = self._journal.read_bytes().splitlines(True)
        steps = [json.loads(line) for line in lines if line.endswith(b"\n")]
        if steps and steps[0] != plan:
            was = steps[0] if isinstance(steps[0], dict) else {}
            differ = [
                f"{key} was {was.get(key)!r} and is {plan.get(key)!r}"
                for key in sorted(was.keys() | plan.keys())
                if was.get(key) != plan.get(key)
            ]
            raise ConfigurationError(
                f"{self._journal} is of another export: {'; '.join(differ)}; go on with that one, "
                f"or begin anew with --restart"
            )
        if len(steps) < 2:
            self._begin_anew()
            self._append(plan)
            return
        size = self._part.stat().st_size if self._part.exists() else 0
        kept = 2
        self.collected, self._parts = steps[1]["collected"], steps[1]["parts"]
        self.tally = Tally.from_dict(steps[1]["tally"])
        end = 0
        is_renamed = steps[-1].get("complete") and not self._part.exists()
        for step in steps[2:]:
            if step.get("complete"):
                self.is_complete = True
            elif step["end"] > size and not is_renamed:
                break  # the machine lost power before the rows were on its disk
            else:
                self.tally.add(Tally.from_dict(step["tally"]))
                self._done, end = (step["part"], step["group"]), step["end"]
            kept += 1
        if self.is_complete and kept == len(steps):
            return
        self.is_complete = False
        os.truncate(self._journal, sum(map(len, lines[:kept])))
        with open(self._part, "ab") as file:
            file.truncate(end)

    def collect(
        self, items: Iterable[tuple[str, bytes]], parts: int, unreadable: Callable[[], int]
    ) -> None:
        """Bring items together by key. `unreadable` counts what was no item, in the end."""
        groups = Partitions(self.folder, parts)
        count = 0
        for key, item in items:
            groups.add(key, item)
            count += 1
        groups.flush()
        self.collected, self._parts = count, parts
        self.tally.unreadable = unreadable()
        tally = self.tally.to_dict()
        self._append({"collected": count, "parts": parts, "tally": tally})

    def groups(self) -> Iterator[list[bytes]]:
        """The items of each key whose rows have not been written."""
        groups = Partitions(self.folder, self._parts)
        for part in range(self._parts):
            for number, items in enumerate(groups.groups(part)):
                self._at = part, number
                if self._at > self._done:
                    yield items

    def write(self, rows: Sequence[bytes], tally: Tally) -> None:
        """Write the rows of the group that `groups` gave last."""
        if self._rows is None:
            self._rows = open(self._part, "ab")  # noqa: SIM115 - closed by close()
        self._rows.writelines(rows)
        self._rows.flush()
        part, group = self._at
        end = self._rows.tell()
        self._append({"part": part, "group": group, "end": end, "tally": tally.to_dict()})
        self.tally.add(tally)

    def finish(self, exporter: RowExporter) -> None:
        """Make FILE of the rows; what stood beside it is gone then."""
        if self._rows is not None:
            self._rows.close()
        if not self.is_complete:
            self._append({"complete": True})
        if self.tally.rows and self._part.exists():
            exporter.finish(self._part, self.output)
        self._remove_rest()
        # The journal is last: without it nobody would know what the rest is.
        self._journal.unlink()
        self.close()

    def close(self) -> None:
        """Close what is open; the next process goes on."""
        if self._rows is not None:
            self._rows.close()
        self._steps.close()

    def _append(self, step: Mapping[str, Json]) -> None:
        self._steps.write(dumps(step).encode() + b"\n")
        self._steps.flush()

    def _begin_anew(self) -> None:
        self._remove_rest()
        os.truncate(self._journal, 0)

    def _remove_rest(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._part.unlink(missing_ok=True)


def item_of(line: bytes, where: str) -> tuple[str, bytes]:
    """Key and item of a line that a trajectory was written as; `where` it stands.

    ValueError if it is no JSON, SpanFormatError if it is, but no trajectory.
    """
    data = loads(line)
    if not isinstance(data, dict) or not isinstance(data.get("id"), str):
        raise SpanFormatError(f"{where}: not a Trajectory: {line[:80]!r}")
    return _key(data["id"], data.get("group_id")), where.encode() + b"\n" + line.strip()


def item_of_trajectory(trajectory: Trajectory) -> tuple[str, bytes]:
    """The same of a trajectory."""
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
    members: dict[str, _Watched] = {}
    for item in items:
        where, _, line = item.partition(b"\n")
        try:
            trajectory = _Watched.from_dict(loads(line))
        except SpanFormatError as error:
            tally.unreadable += 1
            report(f"{where.decode()}: {error}" if where else str(error))
            continue
        assert isinstance(trajectory, _Watched)
        tally.repeated += members.pop(trajectory.id, None) is not None
        members[trajectory.id] = trajectory
    if not members:
        return []
    group = TrajectoryGroup.of(members.values())
    tally.groups += 1
    tally.trajectories += len(members)
    tally.failures += len(group.failures)
    try:
        rows = [_line(row) for row in exporter.rows(group)]
    except ExportError as error:
        if strict:
            raise
        refused = _refused(members, exporter, error)
        kept = [member for member in members.values() if member.id not in refused]
        try:
            rest = TrajectoryGroup.of(kept, id=group.id)
            rows = [_line(row) for row in exporter.rows(rest)] if kept else []
        except ExportError as error:
            rows, kept, refused = [], [], dict.fromkeys(members, error)
        for each in dict.fromkeys(map(str, refused.values())):
            report(each)
        tally.refused.update(_plain(error) for error in refused.values())
        members = {member.id: member for member in kept}
    tally.rows += len(rows)
    for member in members.values():
        tally.dropped.update(_plain(drop.reason) for drop in member.found.dropped)
    return rows


def _refused(
    members: Mapping[str, Trajectory], exporter: RowExporter, error: ExportError
) -> dict[str, ExportError]:
    """Which trajectories the format cannot carry; all, where it is the group that it cannot."""
    refused: dict[str, ExportError] = {}
    for member in members.values():
        try:
            for _ in exporter.rows(TrajectoryGroup.of([member])):
                pass
        except ExportError as own:
            refused[member.id] = own
    return refused or dict.fromkeys(members, error)


class _Watched(Trajectory):
    """A trajectory that remembers the token sequences that an exporter asked it for."""

    found = TokenSequences()

    def token_sequences(self, **options: Any) -> TokenSequences:
        self.found = super().token_sequences(**options)
        return self.found


_id = re.compile(r"\b(?:span-)?[0-9a-f]{16,32}\b")
_number = re.compile(r"\b\d+\b")


def _plain(reason: object) -> str:
    """A reason without what tells one case from the next."""
    return _number.sub("N", _id.sub("...", str(reason)))


def _line(row: Mapping[str, Json]) -> bytes:
    """The row as a line of JSON: what is no number there is null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(_finite(row), separators=(",", ":")).encode() + b"\n"


def _finite(value: Any) -> Json:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
