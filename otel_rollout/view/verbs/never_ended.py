"""Rollouts that began and never ended, by files of them and by spans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import asdict

from otel_rollout.errors import SpanFormatError
from otel_rollout.export import Started, StartedRecords, is_of_started
from otel_rollout.lines import STARTED
from otel_rollout.otlp import read
from otel_rollout.terminal import note
from otel_rollout.wire import Json

_SHOWN = 20
"""Rollouts that are printed; the others are counted."""


class NeverEnded:
    """The rollouts that began, and those of them that did not end.

    files: those that `JsonlTrajectoryExporter` writes (`FILE.started`), or folders with them, or
        files of spans. OSError for one that cannot be read.
    """

    def __init__(self, files: Sequence[str], on_error: Callable[[SpanFormatError], None]) -> None:
        self.records = StartedRecords()
        for name in (each for file in files for each in started_files(file)):
            if not is_of_starts(name):
                for record in read(name, on_error=on_error):
                    self.records.see(record)
            else:
                self.records.read(name, on_error)
        self.rollouts: list[Started] = []
        """Those that did not end, once `settle` was called."""

    def settle(self, records: StartedRecords, ended: Callable[[str], bool]) -> None:
        """Find those that did not end, by a function that returns whether the rollout of an id did.

        records: what the spans of the sources say.
        """
        self.records.join(records)
        self.rollouts = [*self.records.never_ended(ended)]

    def lines(self, noun: str = "") -> Iterator[str]:
        """For people. noun: what the numbers count, after a blank."""
        count, began = len(self.rollouts), len(self.records.started)
        head = f"{count} of {began}{noun} never ended:"
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


def note_never_ended(records: StartedRecords) -> None:
    """Print the rollouts that started and never ended, by spans alone."""
    found = NeverEnded((), lambda _: None)
    found.settle(records, lambda _: False)
    for line in found.lines(" rollouts"):
        note(line)


def is_of_starts(name: str) -> bool:
    """True if a file is empty, or has lines of started rollouts."""
    with open(name, "rb") as file:
        head = file.read(64)
    return name.endswith(STARTED) or not head.strip() or is_of_started(head)


def started_files(path: str) -> list[str]:
    """The files of started rollouts in a folder; of a file itself."""
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(path, each) for each in sorted(os.listdir(path)) if each.endswith(STARTED)]


def sources_of(files: Sequence[str]) -> list[str]:
    """The files of trajectories that these are beside, as far as there is something in them."""
    beside = [each.removesuffix(STARTED) for file in files for each in started_files(file)]
    return [each for each in beside if os.path.isfile(each) and os.path.getsize(each)]
