"""A trainer's file, made of any number of trajectories in steps that survive being killed.

Trajectories are first brought together by group (FILE.groups). Then the rows of each group are
appended to FILE.part, and the group is noted in FILE.journal. An export that is started again with
the same plan goes on after the last group of the journal. FILE itself exists only when it is whole.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_rollout.errors import ConfigurationError
from otel_rollout.export.group_rows import Tally
from otel_rollout.export.partitions import Partitions, without_links
from otel_rollout.export.row_exporter import RowExporter
from otel_rollout.lines import write_whole
from otel_rollout.wire import Json, dumps

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class RowFile:
    """A file of rows while it is made; it is written by one process at a time."""

    def __init__(self, output: Path, plan: Mapping[str, Json], *, restart: bool = False) -> None:
        self.output = output
        """The file that is made."""
        self.tally = Tally()
        """Counts of all its groups, those of an earlier process included."""
        self.collected: int | None = None
        """Trajectories that were brought together; None while they are not."""
        self.is_complete = False
        """True once all its rows were written."""
        self._part = output.with_name(output.name + ".part")
        self._journal = output.with_name(output.name + ".journal")
        self.folder = output.with_name(output.name + ".groups")
        """Folder for temporary files; it is removed when FILE is finished, or started anew."""
        self._parts = 1
        self._done = -1, -1
        self._at = self._done
        self._rows: io.FileIO | None = None
        # Unbuffered: a short write is seen.
        self._steps = open(self._journal, "ab", 0, opener=without_links)  # noqa: SIM115 - closed by close()
        try:
            self._lock()
            if restart:
                self._begin_anew()
            self._resume(plan)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """ConfigurationError if another process writes the file, where there are file locks."""
        if fcntl is not None:
            try:
                fcntl.flock(self._steps, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigurationError(
                    f"{self._journal}: another process is writing {self.output.name}: let it end"
                ) from None

    def _resume(self, plan: Mapping[str, Json]) -> None:
        lines = self._journal.read_bytes().splitlines(True)
        steps = list(_whole_steps(lines))
        if not steps and lines and lines[0].endswith(b"\n"):
            raise ConfigurationError(
                f"{self._journal} is not the journal of an export: move it away, or remove it "
                f"with --restart"
            )
        if steps and steps[0] != plan:
            was = steps[0]
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
        with open(self._part, "ab", opener=without_links) as file:
            file.truncate(end)

    def collect(
        self, items: Iterable[tuple[str, bytes]], parts: int, unreadable: Callable[[], int]
    ) -> None:
        """Bring items together by key. `unreadable` gives the number of lines that were no item."""
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
            self._rows = open(self._part, "ab", 0, opener=without_links)  # noqa: SIM115 - closed by close()
        write_whole(self._rows, b"".join(rows))
        part, group = self._at
        end = self._rows.tell()
        self._append({"part": part, "group": group, "end": end, "tally": tally.to_dict()})
        self.tally.add(tally)

    def finish(self, exporter: RowExporter) -> None:
        """Make FILE of the rows, and remove the files beside it."""
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
        """Close the files; another process can go on after that."""
        if self._rows is not None:
            self._rows.close()
        self._steps.close()

    def _append(self, step: Mapping[str, Json]) -> None:
        write_whole(self._steps, dumps(step).encode() + b"\n")

    def _begin_anew(self) -> None:
        self._remove_rest()
        os.truncate(self._journal, 0)

    def _remove_rest(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._part.unlink(missing_ok=True)


def _whole_steps(lines: Iterable[bytes]) -> Iterator[Any]:
    """The steps of a journal up to the first that is not whole."""
    for line in lines:
        try:
            step = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            return
        if not isinstance(step, dict):
            return
        yield step
