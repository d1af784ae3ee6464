"""Rollouts that began and never ended: what `check --started` asks files about."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import asdict

from otel_rollout.errors import SpanFormatError
from otel_rollout.export import Started, StartedRecords
from otel_rollout.lines import STARTED
from otel_rollout.wire import Json

_SHOWN = 20
"""Rollouts that are printed; the others are counted."""


class NeverEnded:
    """The rollouts that began, and those of them that did not end.

    files: those that `JsonlTrajectoryExporter` writes (`FILE.started`), or folders with them.
    OSError for one that cannot be read.
    """

    def __init__(self, files: Sequence[str], on_error: Callable[[SpanFormatError], None]) -> None:
        self.records = StartedRecords()
        for name in (each for file in files for each in started_files(file)):
            self.records.read(name, on_error)
        self.rollouts: list[Started] = []
        """Those that did not end, once `settle` was called."""

    def settle(self, ended: Callable[[str], bool]) -> None:
        """Find those that did not end, by what tells of an id whether its rollout did."""
        self.rollouts = [*self.records.never_ended(ended)]

    def lines(self) -> Iterator[str]:
        """For people."""
        count, began = len(self.rollouts), len(self.records.started)
        head = f"{count} of {began} never ended:"
        if count == 1:
            yield f"{head} {self.rollouts[0]}"
        elif count:
            yield head
            yield from (f"    {each}" for each in self.rollouts[:_SHOWN])
        if count > _SHOWN:
            yield f"and {count - _SHOWN} more (--json has all)"
        for each in self.records.without_receipt():
            yield (
                f"host {each.host}, pid {each.pid}: no receipt. The process was killed, or has "
                f"not ended yet"
            )
        if dropped := sum(each.dropped for each in self.records.receipts.values()):
            yield f"{dropped} trajectories did not reach their file, by the receipts"

    def to_dict(self) -> dict[str, Json]:
        """The same as JSON."""
        return {
            "rollouts": len(self.records.started),
            "never_ended": [asdict(each) for each in self.rollouts],
            "without_receipt": [
                {"host": each.host, "pid": each.pid} for each in self.records.without_receipt()
            ],
            "receipts": [asdict(each) for each in self.records.receipts.values()],
        }


def started_files(path: str) -> list[str]:
    """The files of started rollouts in a folder; of a file itself."""
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(path, each) for each in sorted(os.listdir(path)) if each.endswith(STARTED)]


def sources_of(files: Sequence[str]) -> list[str]:
    """The files of trajectories that these are beside, as far as there is something in them."""
    beside = [each.removesuffix(STARTED) for file in files for each in started_files(file)]
    return [each for each in beside if os.path.isfile(each) and os.path.getsize(each)]
