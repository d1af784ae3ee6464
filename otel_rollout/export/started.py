"""The file of started rollouts: lines that survive a process that is killed.

A line is appended when a rollout begins, and a receipt when its process ends as it should. A
rollout of which no trajectory came is then known, and so is a process that was killed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import asdict

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.export.memory import renew_after_fork
from otel_rollout.lines import STARTED, append_at_once, bounded_lines
from otel_rollout.spans import SpanRecord, group_key
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import dumps, loads


class Started(Struct, frozen=True):
    """A rollout that began, and the process that began it."""

    started: str
    """Its id."""
    group_id: str | None = None
    sample_index: int | None = None
    group_size: int | None = None
    task_id: str | None = None
    name: str = ""
    host: str | None = None
    pid: int | None = None
    time: str = ""
    """When it began: UTC, in ISO 8601."""
    group_run: str | None = None
    writer: str = ""
    """A name of the process that no other one has. "": not known, as from a span."""

    @property
    def group(self) -> str | None:
        """Its group as one text, see `group_key`."""
        return group_key(self.group_id, self.group_run)

    def __str__(self) -> str:
        about = (
            ("group", self.group),
            ("sample", self.sample_index),
            ("task", self.task_id if self.group_id is None else None),
            ("rollout", self.started),
            ("host", self.host),
            ("pid", self.pid),
        )
        named = ", ".join(f"{what} {value}" for what, value in about if value is not None)
        return f"{named}; started {self.time}" if self.time else named  # of a span it is not kept


class Receipt(Struct, frozen=True):
    """What a process that ended as it should has written."""

    receipt: str
    """The `writer` of its lines."""
    host: str
    pid: int
    time: str
    started: int
    """Rollouts that began in the process."""
    ended: dict[str, int]
    """Trajectories that were exported, by status; those that ran at shutdown are "running"."""
    exported: int
    """Their number."""
    left_out: int
    """Rollouts that were not to be exported, such as workflows without calls of their own."""
    dropped: int
    """Rollouts that began and whose trajectories did not reach the file."""


class StartedFile:
    """Appends to the file beside one of trajectories. OSError if a line cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._renew()
        renew_after_fork(self, StartedFile._renew)

    def _renew(self) -> None:
        """Begin anew, in a forked child too: what is open is the parent's."""
        self._lock = threading.Lock()
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._writer = f"{self._pid:x}-{os.urandom(4).hex()}"
        self._began = self._left_out = 0
        self._ended = Counter[str]()
        self._open = set[str]()

    def begin(self, trajectory: Trajectory) -> None:
        """Write that a rollout begins; again if its options were changed since."""
        with self._lock:
            self._began += trajectory.id not in self._open
            self._open.add(trajectory.id)
        line = Started(
            trajectory.id,
            trajectory.group_id,
            trajectory.sample_index,
            trajectory.group_size,
            trajectory.task_id,
            trajectory.name,
            self._host,
            self._pid,
            _now(),
            trajectory.group_run,
            self._writer,
        )
        self._append(asdict(line))

    def end(self, trajectory: Trajectory) -> None:
        """Count a trajectory that is in the file."""
        with self._lock:
            self._open.discard(trajectory.id)
            self._ended[trajectory.status] += 1

    def leave_out(self, trajectory_id: str) -> None:
        """Write that no trajectory of this rollout is to come."""
        with self._lock:
            if trajectory_id not in self._open:
                return
            self._open.discard(trajectory_id)
            self._left_out += 1
        self._append({"left_out": trajectory_id})

    def close(self) -> None:
        """Write the receipt, if a rollout began since the last one."""
        with self._lock:
            if not self._began:
                return
            ended, exported = dict(self._ended), sum(self._ended.values())
            numbers = self._began, ended, exported, self._left_out, len(self._open)
            line = Receipt(self._writer, self._host, self._pid, _now(), *numbers)
        self._renew()
        self._append(asdict(line))

    def _append(self, content: dict[str, Any]) -> None:
        append_at_once(self._path, dumps(content).encode() + b"\n")


class StartedRecords:
    """What files of started rollouts say, by the rollouts' ids. Memory: a record for each."""

    def __init__(self) -> None:
        self.started: dict[str, Started] = {}
        self.left_out = set[str]()
        self.ended = set[str]()
        """The rollouts whose own spans came."""
        self.receipts: dict[str, Receipt] = {}
        """By writer."""

    def read(
        self, path: str | os.PathLike[str], on_error: Callable[[SpanFormatError], None]
    ) -> None:
        """Read a file; `on_error` is called with each line that is no such record."""
        with open(path, "rb") as file:
            for number, (line, _) in enumerate(bounded_lines(file), 1):
                if line is None or not self._is_taken(line):
                    on_error(SpanFormatError(f"{path}, line {number}: {_NO_RECORD}"))

    def _is_taken(self, line: bytes) -> bool:
        if not line.strip():
            return True
        try:
            found: Any = loads(line)
            if "receipt" in found:  # it has members of the same names as the other lines
                receipt = convert(found, Receipt)
                self.receipts[receipt.receipt] = receipt
            elif "left_out" in found:
                self.left_out.add(str(found["left_out"]))
            else:
                self.add(convert(found, Started))
        except (ValueError, TypeError, RecursionError):
            return False
        return True

    def add(self, started: Started) -> None:
        """Add a rollout; the last record of one holds."""
        self.started[started.started] = started

    def see(self, record: SpanRecord) -> None:
        """Take from a span that a rollout started, or that it ended."""
        started = record.text(sc.ROLLOUT_STARTED)
        if record.kind == "start" and started is not None:
            self.add(_of_span(started, record))
        elif record.kind == "rollout" and record.end_time_ns is not None:
            self.ended.add(record.text(sc.ROLLOUT_ID) or "")

    def join(self, other: StartedRecords) -> None:
        """Add what others say."""
        self.started |= other.started
        self.left_out |= other.left_out
        self.ended |= other.ended
        self.receipts |= other.receipts

    def never_ended(self, ended: Callable[[str], bool]) -> Iterator[Started]:
        """The rollouts that began and did not end, by what is known of the ends."""
        for id_, started in self.started.items():
            if id_ not in self.left_out and id_ not in self.ended and not ended(id_):
                yield started

    def without_receipt(self) -> Iterator[Started]:
        """The first rollout of each process that left no receipt."""
        seen = set(self.receipts)
        for each in self.started.values():
            if each.writer and each.writer not in seen:
                seen.add(each.writer)
                yield each


def _of_span(rollout_id: str, record: SpanRecord) -> Started:
    """The rollout whose start this span records."""
    return Started(
        rollout_id,
        record.text(sc.ROLLOUT_GROUP_ID),
        record.integer(sc.ROLLOUT_SAMPLE_INDEX),
        record.integer(sc.ROLLOUT_GROUP_SIZE),
        record.text(sc.ROLLOUT_TASK_ID),
        record.text(sc.GEN_AI_AGENT_NAME) or "",
        record.text(sc.HOST_NAME),
        record.integer(sc.PROCESS_PID),
        _text_of(record.start_time_ns / 1e9),
        record.text(sc.ROLLOUT_GROUP_RUN),
    )


def is_of_started(head: bytes) -> bool:
    """True for the head of a file of started rollouts."""
    return head.lstrip().startswith((b'{"started":', b'{"receipt":', b'{"left_out":'))


def started_beside(path: str) -> StartedFile | None:
    """The file beside one of trajectories. None: that is a device or a pipe, and keeps nothing."""
    return StartedFile(path + STARTED) if Path(path).is_file() else None


def _now() -> str:
    return _text_of(time.time())


def _text_of(seconds: float) -> str:
    """A time since 1970 as UTC in ISO 8601; "" for one that has no date."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""


_NO_RECORD = "no record of a started rollout: is this a file that JsonlTrajectoryExporter wrote?"
