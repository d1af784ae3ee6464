"""The cost of `otel-rollout export` and `rebuild` of large files: time and peak memory.

    python benchmarks/export.py [--megabytes 500] [--folder /tmp] [--of spans trajectories]

One rollout of 20 turns is recorded against a model server, with log-probabilities and token ids as
vLLM sends them. The file is that rollout again and again under other ids, in groups of 8 whose
members are far apart, the spans of 16 rollouts mixed. A file that is there is used again. Figures
are those of the command as a process of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, Trajectory, rollout
from otel_rollout.otlp.encoding import json_lines
from otel_rollout.testing import ModelServer, Reply

TURNS, WORDS, GROUP, MIXED = 20, 200, 8, 16
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from otel_rollout.command import main; sys.exit(main())",
]


def recorded() -> tuple[list[str], Trajectory]:
    """The lines of the spans of one rollout, and its trajectory."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure("export", span_exporters=[spans], instrumentor=None)
    words = random.Random(0)
    said = [" ".join(f"{words.randrange(10**6)}" for _ in range(WORDS)) for _ in range(TURNS)]
    with ModelServer([Reply(text) for text in said]) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="unused")
        with rollout("agent", group_id="group-000000") as trajectory:
            messages: list[Any] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"question {turn} " + "word " * 50})
                reply = client.chat.completions.create(model="m", messages=messages, logprobs=True)
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            trajectory.reward = 1.0
    provider.force_flush()
    return [next(json_lines([span])).decode() for span in spans.get_finished_spans()], trajectory


def repeated(lines: list[str], trajectory: Trajectory, size: int) -> Iterator[str]:
    """The lines again and again under other ids, until there are so many bytes."""
    count = -(-size // sum(map(len, lines)))
    groups, mixing = -(-count // GROUP), random.Random(1)
    for first in range(0, count, MIXED):
        mixed = []
        for number in range(first, min(first + MIXED, count)):
            for line in lines:
                text = line.replace(trajectory.id, f"{number:032x}")
                text = text.replace(trajectory.trace_id, f"{number + 1:032x}")
                mixed.append(text.replace("group-000000", f"group-{number % groups:06}"))
        mixing.shuffle(mixed)
        yield from mixed


def write(path: Path, megabytes: int, *, spans: bool) -> None:
    """Write a file of spans, or of trajectories."""
    lines, trajectory = recorded()
    if not spans:
        JsonlTrajectoryExporter(path).export([trajectory])
        lines = [path.read_text()]
    with open(path, "w") as file:
        file.writelines(repeated(lines, trajectory, megabytes * 10**6))
    otel_rollout.shutdown()


def measure(arguments: list[str]) -> str:
    """Run the command; what it took."""
    began = time.monotonic()
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if status:
        raise SystemExit(process.stderr.read().decode() if process.stderr else status)
    cpu = usage.ru_utime + usage.ru_stime
    return f"{cpu:8.1f} s CPU {seconds:8.1f} s {usage.ru_maxrss / 1024:8.0f} MiB"


def main() -> None:
    """Write the files that are missing, and print what the commands take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--of", nargs="+", default=["spans", "trajectories"])
    parser.add_argument("--verbs", nargs="+", default=["export", "rebuild"])
    options = parser.parse_args()
    for kind in options.of:
        source = options.folder / f"export-{kind}-{options.megabytes}.jsonl"
        if not source.exists():
            write(source, options.megabytes, spans=kind == "spans")
        output = options.folder / f"export-output-{os.getpid()}"
        for verb in options.verbs:
            if verb == "rebuild" and kind != "spans":
                continue
            to = ["--to", "tokens"] if verb == "export" else []
            took = measure([verb, *to, str(source), "-o", str(output)])
            print(f"{verb:8} {kind:12} {source.stat().st_size / 1e6:7.0f} MB {took}", flush=True)
            output.unlink()


if __name__ == "__main__":
    main()
