"""Programs whose exporters fail in every way: `python chaos.py FOLDER FIRST COUNT` runs COUNT.

Each run is a process that is forked from this one, with a seed. It does some rollouts, among them
in a forked child, while exporters raise, hang or are slow, the disk fills up, and the process ends
in one way or another, or is killed. What does not hold is printed, one finding a line.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import otel_rollout
from otel_rollout import (
    JsonlTrajectoryExporter,
    Trajectory,
    TrajectoryExporter,
    TrajectorySpanProcessor,
    rollout,
)
from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp import JsonLinesSpanExporter, read
from otel_rollout.record import Sender
from otel_rollout.spans import SpanRecord
from tests.kit.disks import limit_files

TIMEOUT_MILLIS = 1500
AT_ONCE = 4
ENDS = ("shutdown", "exit", "raise", "nothing", "_exit", "kill", "kill")


class Bad:
    """An exporter that misbehaves in one way, now and then."""

    def __init__(self, random: random.Random) -> None:
        self.how = random.choice(("raise", "SystemExit", "interrupt", "slow", "hang"))
        self.where = random.choice(("export", "export", "force_flush", "shutdown"))
        # An interrupt on the agent's thread is the user's, and a hang there is the agent's.
        self.blocking = self.how in ("interrupt", "hang", "slow") or random.random() < 0.5
        self._random = random

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        self._misbehave("export")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self._misbehave("force_flush")
        return True

    def shutdown(self) -> None:
        self._misbehave("shutdown")

    def _misbehave(self, where: str) -> None:
        if where != self.where or self._random.random() < 0.5:
            return
        if self.how == "hang":
            threading.Event().wait()
        if self.how == "slow":
            time.sleep(self._random.random() / 50)
            return
        raise {"raise": OSError, "SystemExit": SystemExit, "interrupt": KeyboardInterrupt}[self.how]


class BadSpans(SpanExporter):
    """The same for spans."""

    def __init__(self, random: random.Random) -> None:
        self._bad = Bad(random)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._bad.export([])
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._bad.shutdown()


class Run:
    """One program: its plan, made from the seed, and what it left."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.folder = folder / f"{seed}"
        self.random = random.Random(seed)
        self.end = self.random.choice(ENDS)
        self.rollouts = self.random.randint(1, 30)
        self.disk = self.random.choice((None, None, 5_000, 60_000, 400_000))
        self.text = "x" * self.random.choice((0, 100, 5_000, 200_000))
        self.fork_at = self.random.choice((None, None, None, self.rollouts // 2))
        self.kill_after = self.random.random() / 4
        self.exporters = [Bad(self.random) for _ in range(self.random.randint(0, 2))]
        self.spans = [BadSpans(self.random) for _ in range(self.random.randint(0, 1))]

    # --- in the process of the program

    def program(self) -> None:
        """The program; it ends as the plan says."""
        self.folder.mkdir()
        out = os.open(self.folder / "out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        err = os.open(self.folder / "err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(err, 2)
        atexit.register(self.note)  # last in, first out: it runs after the provider's
        if self.end == "kill":
            pid = os.getpid()
            timer = threading.Timer(self.kill_after, os.kill, (pid, signal.SIGKILL))
            timer.daemon = True
            timer.start()
        jsonl = JsonlTrajectoryExporter(self.folder / "t.jsonl")
        spans = JsonLinesSpanExporter(self.folder / "spans.jsonl")
        exporters: list[TrajectoryExporter] = [*self.exporters, jsonl]
        provider = otel_rollout.configure(
            "chaos", exporters, span_exporters=[*self.spans, spans], instrumentor=None
        )
        found = provider._active_span_processor._span_processors
        self.processor = next(p for p in found if isinstance(p, TrajectorySpanProcessor))
        senders = (each for each in found if isinstance(each, Sender))
        self.sender = next(each for each in senders if each.outlet.exporter is spans)
        self.jsonl = jsonl
        self.who, self.ended = "parent", 0
        if self.disk is not None:
            limit_files(self.disk)
        for number in range(self.rollouts):
            if number == self.fork_at and os.fork() == 0:
                self.who, self.ended = "child", 0
            try:
                with rollout(f"{self.who} {number}") as trajectory:
                    trajectory.metadata["text"] = self.text
                    if self.random.random() < 0.2:
                        raise ValueError(number)
            except ValueError:
                pass
            self.ended += 1
            os.write(1, f"{self.who} {number}\n".encode())
        self.leave()

    def leave(self) -> None:
        if self.end in ("shutdown", "_exit"):
            otel_rollout.shutdown(TIMEOUT_MILLIS)
        if self.end == "_exit":
            self.note()
            os._exit(5)
        if self.end == "kill":
            otel_rollout.shutdown(TIMEOUT_MILLIS)
            time.sleep(60)
        if self.end == "exit":
            sys.exit(7)
        if self.end == "raise":
            raise RuntimeError("the program's own")
        sys.exit(0)

    def note(self) -> None:
        """Write down what the library counts as lost; what it still tries to write does not count.

        The disk is full no more then: what is buffered for stderr must not fail at the exit.
        """
        for name in ("spans.jsonl", "t.jsonl"):
            fcntl.flock(os.open(self.folder / name, os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)
        if self.disk is not None:
            limit_files(None)
        note = {
            "ended": self.ended,
            "dropped": self.processor._delivery_of[id(self.jsonl)].dropped,
            "spans": self.sender.taken,
            "lost": self.sender.lost,
        }
        (self.folder / f"{self.who}.json").write_text(json.dumps(note))

    # --- afterwards

    def findings(self, status: int) -> list[str]:
        """What does not hold."""
        found: list[str] = []
        killed = self.end == "kill"
        codes = {"exit": 7, "raise": 1, "_exit": 5}
        if not killed and os.waitstatus_to_exitcode(status) != codes.get(self.end, 0):
            found.append(f"exit code {os.waitstatus_to_exitcode(status)}")
        names, errors = self.names()
        half = [error for error in errors if "its writer was stopped" in error]
        if errors != half or (half and not killed):
            found.append(f"not readable: {errors}")
        if max(Counter(names).values(), default=0) > 1:
            found.append("a trajectory is there twice")
        if killed:
            return found
        whos = ["parent", "child"] if self.fork_at is not None else ["parent"]
        out = (self.folder / "out").read_text().splitlines()
        start = self.fork_at if self.fork_at is not None else 0
        expected = [f"parent {n}" for n in range(self.rollouts)]
        expected += [f"child {n}" for n in range(start, self.rollouts) if len(whos) > 1]
        if sorted(out) != sorted(expected):
            found.append(f"output {out}")
        if not set(names) <= set(expected):
            found.append("a trajectory that nobody made")
        for who in whos:
            note = json.loads((self.folder / f"{who}.json").read_text())
            there = sum(name.startswith(who) for name in names)
            if there + note["dropped"] != note["ended"]:
                found.append(f"{who}: {there} of {note['ended']} arrived, {note}")
        if self.end == "raise" and "the program's own" not in (self.folder / "err").read_text():
            found.append("its own error is not said")
        return found + self.span_findings(whos)

    def names(self) -> tuple[list[str], list[str]]:
        errors: list[str] = []
        path = self.folder / "t.jsonl"
        if not path.exists():
            return [], []
        note = lambda error: errors.append(str(error))  # noqa: E731
        names = [str(t.name) for t in JsonlTrajectoryExporter.read(path, on_error=note)]
        return names, errors

    def _read(self, path: Path, errors: list[SpanFormatError]) -> list[SpanRecord]:
        return list(read(path, on_error=errors.append)) if path.exists() else []

    def span_findings(self, whos: list[str]) -> list[str]:
        errors: list[SpanFormatError] = []
        path = self.folder / "spans.jsonl"
        # The start of a rollout is written at once, however its process then ends.
        ended = [sc.ROLLOUT_STARTED not in span.attributes for span in self._read(path, errors)]
        there = sum(ended)
        notes = [json.loads((self.folder / f"{who}.json").read_text()) for who in whos]
        expected = sum(note["spans"] - note["lost"] for note in notes)
        found = [f"spans: {error}" for error in errors]
        return found + ([f"spans: {there} of {expected}, {notes}"] if there != expected else [])


def main(folder: str, first: str, count: str) -> None:
    """Fork the programs, some at a time, and print what each of them breaks."""
    any_processor: Any = TrajectorySpanProcessor
    any_sender: Any = Sender
    any_processor.shutdown.__defaults__ = any_sender.shutdown.__defaults__ = (TIMEOUT_MILLIS,)
    for name in ("record.processor", "record.sending.sender", "lanes"):
        module: Any = importlib.import_module(f"otel_rollout.{name}")
        module._LAST_SECONDS = 0.5
    importlib.import_module("openai")  # else each process spends most of its time on it
    running: dict[int, Run] = {}
    ends: Counter[str] = Counter()
    seeds = iter(range(int(first), int(first) + int(count)))
    while True:
        while len(running) < AT_ONCE and (seed := next(seeds, None)) is not None:
            run = Run(Path(folder), seed)
            child = os.fork()
            if child == 0:
                run.program()
            running[child] = run
        if not running:
            break
        child, status = os.wait()
        run = running.pop(child)
        ends[run.end] += 1
        deadline = time.monotonic() + 10
        while run.fork_at is not None and run.end != "kill" and time.monotonic() < deadline:
            if (run.folder / "child.json").exists():
                break
            time.sleep(0.05)
        for finding in run.findings(status):
            print(f"{run.seed} ({run.end}): {finding}", flush=True)
    print(f"{sum(ends.values())} runs: {dict(ends)}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
