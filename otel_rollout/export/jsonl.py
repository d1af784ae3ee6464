"""Trajectories in a file, one JSON object a line."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from otel_rollout.errors import ConfigurationError, SpanFormatError
from otel_rollout.export.fork import renew_after_fork
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import dumps, loads


class JsonlTrajectoryExporter:
    """Appends finished trajectories to a file, one JSON object a line; `read` gives them back.

    Each line is one write: after a crash at most the last line is truncated, and the next run
    starts a new one. `fsync=True` also survives the loss of power, at the cost of a disk flush for
    each line.
    """

    blocking = True
    """It writes to a file, so it is called on the processor's thread."""

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = Path(path)
        """The file, which is opened at the first trajectory."""
        self._fsync = fsync
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        if not self.path.parent.is_dir():
            raise ConfigurationError(
                f"JsonlTrajectoryExporter({str(path)!r}): the folder {str(self.path.parent)!r} "
                f"does not exist: create it first"
            )
        renew_after_fork(self, _renew)

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        """Append the trajectories."""
        for trajectory in trajectories:
            line = dumps(trajectory.to_dict()).encode() + b"\n"
            with self._lock:
                if self._file is None:
                    self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
                    if self._last_byte() not in (b"", b"\n"):
                        line = b"\n" + line
                self._file.write(line)
                if self._fsync:
                    os.fsync(self._file.fileno())

    def _last_byte(self) -> bytes:
        assert self._file is not None
        if self._file.seek(0, os.SEEK_END) == 0:
            return b""
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered."""
        return True

    def shutdown(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
        """The trajectories of a file, one at a time. A line that a crash truncated is left out.

        SpanFormatError, with the line's number, for any other line that is not a trajectory.
        """
        with open(path, "rb") as file:
            yield from read_lines(file, str(path))


def _renew(exporter: JsonlTrajectoryExporter) -> None:
    exporter._lock = threading.Lock()


LINE_PREFIX = b'{"schema_version":'
"""Prefix of every line that is written."""


def read_lines(lines: Iterable[bytes], name: str) -> Iterator[Trajectory]:
    """The trajectories of JSON lines; `name` is the name of their file in an error."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = loads(line)
        except ValueError:
            if line.startswith(LINE_PREFIX) or LINE_PREFIX.startswith(line.rstrip()):
                continue  # truncated while it was written
            raise SpanFormatError(
                f"{name}, line {number}: not a Trajectory: is this a file that "
                f"JsonlTrajectoryExporter wrote?"
            ) from None
        try:
            yield Trajectory.from_dict(data)
        except SpanFormatError as error:
            raise SpanFormatError(f"{name}, line {number}: {error}") from None
