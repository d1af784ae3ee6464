"""The verb `rebuild`: spans become trajectories, one JSON object a line, or records of Kafka."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from otel_rollout.export import reconstruct_by_rollout
from otel_rollout.kafka import Rebuilder
from otel_rollout.lines import check_folder
from otel_rollout.terminal import for_commands, note, number_of, without_ids_and_numbers
from otel_rollout.trajectory import Trajectory
from otel_rollout.view import Choice, Sources, lines_in_order, note_never_ended, note_unreadable


def rebuild(options: argparse.Namespace) -> int:
    """Run the verb; the exit status."""
    if options.kafka is not None:
        return _from_kafka(options)
    if not options.sources:
        options.wrong("expected a SOURCE, or --kafka BROKERS")
    choice = Choice(options)
    sources = Sources(options.sources)
    rebuilt = _Rebuilt()
    whole = _whole_file(options.output, lambda: sources.spans > 0)
    with whole as file, _folder_beside(options.output) as folder:
        found = reconstruct_by_rollout(
            sources.records(), folder / "spans", infer_rollouts=options.infer_rollouts
        )
        kept = ((key, rebuilt.counted(one)) for key, one in sources.each(choice.keyed, found))
        file.writelines(lines_in_order(kept, descending=choice.descending, folder=folder))
    _note_rebuilt(rebuilt, sources, options)
    note_never_ended(sources.started)
    if choice.where is not None and not rebuilt.statuses:
        note(choice.nothing())
    foreign = 0 if rebuilt.statuses else sources.note_foreign(are_read=options.infer_rollouts)
    return max(note_unreadable(sources.errors), int(not sources.spans), foreign)


def _from_kafka(options: argparse.Namespace) -> int:
    """Rebuild out of Kafka into it, until a signal."""
    if options.sources or options.output != "-":
        options.wrong("--kafka: expected no SOURCE and no --output, it uses topics")
    rebuilder = Rebuilder(
        options.kafka,
        spans=options.spans_topic,
        trajectories=options.trajectories_topic,
        name=options.consumer,
        rollout_seconds=options.rollout_timeout,
        settings=dict(options.settings),
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    print(f"{options.spans_topic} -> {options.trajectories_topic} at {options.kafka}", flush=True)
    try:
        while not stopped.is_set():
            rebuilder.run_once()
    finally:
        rebuilder.close()
    counts = ", ".join(f"{count} {name}" for name, count in sorted(rebuilder.counts.items()))
    note(f"{counts or 'nothing came'}; {number_of(len(rebuilder), 'rollout')} open")
    return int(rebuilder.counts["deleted"] > 0)


@dataclass
class _Rebuilt:
    """How the trajectories that were written ended."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Trajectories by status."""
    warned: int = 0
    """Trajectories that have warnings."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Trajectories by warning, without ids."""

    def counted(self, trajectory: Trajectory) -> Trajectory:
        """Count a trajectory, and return it."""
        self.statuses[trajectory.status] += 1
        warnings = trajectory.warnings
        self.warned += bool(warnings)
        self.warnings.update({without_ids_and_numbers(warning) for warning in warnings})
        return trajectory


def _note_rebuilt(rebuilt: _Rebuilt, sources: Sources, options: argparse.Namespace) -> None:
    total = sum(rebuilt.statuses.values())
    note(
        f"{number_of(total, 'rollout')} from {number_of(sources.spans, 'span')}"
        + (f" ({sources.foreign} of other libraries)" if sources.foreign else "")
        + ("" if options.output == "-" or not sources.spans else f" -> {options.output}")
    )
    if total:
        by_status = rebuilt.statuses.most_common()
        note("  " + ", ".join(f"{count} {status}" for status, count in by_status))
    if rebuilt.warned:
        note(f"  {rebuilt.warned} with warnings:")
    for warning, count in rebuilt.warnings.most_common():
        note(f"  {count:>6} x {for_commands(warning, ())}")


@contextmanager
def _whole_file(name: str, may_be_empty: Callable[[], bool]) -> Iterator[BinaryIO]:
    """A file that is replaced when all of it is written.

    The former one stays after a failure, and if nothing was written.
    may_be_empty: asked in the end. False: an empty file is not made where there was none, either.
    ConfigurationError where its folder is not there.
    """
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(os.path.realpath(name))
    if path.exists() and not path.is_file():  # a device, a named pipe
        with open(path, "wb") as file:
            yield file
        return
    check_folder(path, "-o")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with open(part, "xb") as file:  # never through a link that somebody put there
            yield file
            is_empty = file.tell() == 0
        if is_empty and path.exists() and path.stat().st_size > 0:
            note(f"nothing to write: {name} stays as it was")
        elif is_empty and not may_be_empty():
            note(f"nothing to write: no {name} was made")
        else:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _folder_beside(name: str) -> Iterator[Path]:
    """A folder for temporary files, beside the output: there is room for them."""
    path = Path(os.path.realpath(name))
    beside = path.parent if name != "-" and path.parent.is_dir() else None
    if path.exists() and not path.is_file():
        beside = None
    with tempfile.TemporaryDirectory(prefix=".otel-rollout-", dir=beside) as folder:
        yield Path(folder)
