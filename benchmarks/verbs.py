"""The cost of the verbs that read files: CPU time against `json.loads` of each line, and memory.

    python benchmarks/verbs.py [--size 100] [--verbs list check ...] [--repeat 3] [--folder FOLDER]

The file has trajectories of 10 calls in groups of 8 whose members are far apart; a reply is one of
`server.py`, 50 KB with 512 sampled ids and log-probabilities, and the prompt's ids. Two rollouts
are recorded, and the ids of each call of one of them drift; the others are these two in turn under
other ids. Their spans are in a file of their own, those of
16 rollouts mixed. The figures are those of each verb as a process of its own, its start included:
seconds of CPU, the least of so many runs; the same as a multiple of what `json.loads` takes for
the lines of the trajectories, in such a process too; peak memory. Byte code is cached, as where the
package is installed: in the temporary folder, which a first run of each verb fills.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
from overhead import one_rollout, server  # type: ignore[import-not-found]  # the one beside this

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, JsonlTrajectoryExporter, Trajectory, rollout
from otel_rollout.otlp import JsonLinesSpanExporter

TURNS, GROUP, MIXED = 10, 8, 16
MEGABYTES = 0.5
"""Size of a trajectory, roughly."""
MEMORY = """
import atexit, re
def peak():
    with open("/proc/self/status") as status:
        print("KiB:", re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])
atexit.register(peak)
"""
"""Prints the peak memory at the end. That of `wait4` is no less than that of this process."""
COMMAND = f"{MEMORY}import sys; from otel_rollout.command import main; sys.exit(main())"
INDEX = (
    f"{MEMORY}import sys; from pathlib import Path; from otel_rollout.view.index import Index\n"
    "with Index(sys.argv[1:2], path=Path(sys.argv[2]), follow=False) as index: index.wait()\n"
    "sys.exit(index.errors and str(index.errors) or not index.complete)"
)
PARSED = (
    f"{MEMORY}import json, sys; [json.loads(line) and None for line in open(sys.argv[1], 'rb')]"
)
VERBS: dict[str, list[str]] = {
    "list": [COMMAND, "list", "TRAJECTORIES"],
    "list --where": [COMMAND, "list", "--where", "reward < 0.5", "TRAJECTORIES"],
    "check": [COMMAND, "check", "TRAJECTORIES"],
    "export": [COMMAND, "export", "--to", "tokens", "TRAJECTORIES", "-o", "OUTPUT"],
    "rebuild": [COMMAND, "rebuild", "SPANS", "-o", "OUTPUT"],
    "export from spans": [COMMAND, "export", "--to", "tokens", "SPANS", "-o", "OUTPUT"],
    "index": [INDEX, "TRAJECTORIES", "OUTPUT"],
}
"""The programs, with their arguments."""
BARE = "json.loads"
PROGRAMS = {BARE: [PARSED, "TRAJECTORIES"], **VERBS}


def recorded(folder: Path, model: str) -> tuple[Trajectory, dict[str, list[str]]]:
    """One rollout, and the lines of its trajectory and of its spans, by the names of files."""
    files = {name: folder / f"{name}-{model}" for name in ("TRAJECTORIES", "SPANS")}
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure(
        exporters=[memory, JsonlTrajectoryExporter(files["TRAJECTORIES"])],
        span_exporters=[JsonLinesSpanExporter(files["SPANS"])],
        instrumentor=None,
    )

    async def play() -> None:
        with server() as url:
            async with openai.AsyncOpenAI(base_url=url, api_key="none-needed") as client:
                with rollout("agent", group_id="group-000000") as trajectory:
                    await one_rollout(client, TURNS, stream=False, model=model)
                    trajectory.reward = 1.0

    asyncio.run(play())
    assert otel_rollout.shutdown()
    (trajectory,) = memory.get_finished_trajectories()
    assert all(len(each.logprobs or ()) == 512 for each in trajectory.completions)
    assert len(trajectory.drift().forks) == (TURNS - 1 if model == "drifts" else 0)
    lines = {name: file.read_text().splitlines() for name, file in files.items()}
    lines["SPANS"] = [json.dumps(span) for line in lines["SPANS"] for span in each_span(line)]
    assert len(lines["SPANS"]) == TURNS + 2  # the rollout started, and ended
    return trajectory, lines


def each_span(line: str) -> Iterator[object]:
    """The spans of an OTLP/JSON object, each in an object of its own."""
    (resource,) = json.loads(line)["resourceSpans"]
    for scope in resource["scopeSpans"]:
        for span in scope["spans"]:
            alone = {**resource, "scopeSpans": [{**scope, "spans": [span]}]}
            yield {"resourceSpans": [alone]}


def repeated(each: list[tuple[Trajectory, list[str]]], count: int) -> Iterator[str]:
    """The lines of rollouts in turn again and again, each time under other ids."""
    groups, mixing = -(-count // GROUP), random.Random(1)
    for first in range(0, count, MIXED):
        mixed = []
        for number in range(first, min(first + MIXED, count)):
            trajectory, lines = each[number % len(each)]
            for line in lines:
                text = line.replace(trajectory.id, f"{number:032x}")
                text = text.replace(trajectory.trace_id, f"{number + 1:032x}")
                mixed.append(text.replace("group-000000", f"group-{number % groups:06}") + "\n")
        mixing.shuffle(mixed)
        yield from mixed


def measure(program: list[str], caches: str) -> tuple[float, float]:
    """Seconds of CPU and MiB of peak memory of a program; its byte code is in the folder."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = caches
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", *program], stdout=said, stderr=said, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        said.seek(0)
        text, _, peak = said.read().rpartition("KiB:")
    if status:
        raise SystemExit(text or status)
    return usage.ru_utime + usage.ru_stime, int(peak) / 1024


def main() -> None:
    """Write the files, and print a line for each verb."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", type=int, default=100, help="of the trajectories, MB")
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        made_of = [recorded(folder, model) for model in ("m", "drifts")]
        names = list(made_of[0][1])
        for name in names:
            each = [(trajectory, lines[name]) for trajectory, lines in made_of]
            with (folder / name).open("w") as file:
                file.writelines(repeated(each, int(options.size / MEGABYTES)))
            print(f"{name.lower():<20}{(folder / name).stat().st_size / 1e6:>7.0f} MB")
        best: dict[str, tuple[float, float]] = {}
        for repetition in range(options.repeat + 1):  # the first fills the cache of byte code
            for verb in (BARE, *options.verbs):
                output = folder / "OUTPUT"
                files = {name: str(folder / name) for name in (*names, output.name)}
                found = measure([files.get(word, word) for word in PROGRAMS[verb]], made)
                assert "OUTPUT" not in PROGRAMS[verb] or output.stat().st_size
                output.unlink(missing_ok=True)
                if repetition:
                    best[verb] = min(best.get(verb, found), found)
        for verb, (seconds, memory) in best.items():
            print(f"{verb:<20}{seconds:>7.2f} s{seconds / best[BARE][0]:>7.2f}{memory:>6.0f} MiB")


if __name__ == "__main__":
    main()
