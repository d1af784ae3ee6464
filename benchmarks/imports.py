"""The cost of importing: rebuild one trajectory, or ask for help, in a fresh interpreter.

    python benchmarks/imports.py

Each program runs in interpreters of its own, in turn with the others. Milliseconds are the median
CPU time from start to exit, less that of an empty program; modules are counted exactly. Byte code
is cached in a temporary folder, which the first round fills.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GOAL_MODULES = 200
GOAL_MS = 80.0
GOAL_HELP_MS = 150.0
"""Of the whole process, the start of the interpreter included."""
COUNT = "import sys; print(len(sys.modules))"
COMMAND = """
import contextlib, io, sys
from otel_rollout.command import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["{argument}"])
print(len(sys.modules))
"""
PROGRAMS = {
    "empty": COUNT,
    "json": f"import json; json.loads(open({{path!r}}).readline()); {COUNT}",
    "otel_rollout": f"import otel_rollout; {COUNT}",
    "rebuild": (
        "import otel_rollout.rebuild; from otel_rollout.otlp import read_json_lines; "
        "(t,) = otel_rollout.rebuild.reconstruct(read_json_lines({path!r})); "
        f"assert len(t.completions) == 1; {COUNT}"
    ),
    "configure": f"from otel_rollout import configure; {COUNT}",
    "--version": COMMAND.format(argument="--version"),
    "--help": COMMAND.format(argument="--help"),
}
"""The programs to compare; each prints how many modules it has loaded."""
RECORD = """
import sys, openai, otel_rollout
from otel_rollout.otlp import JsonLinesSpanExporter
from otel_rollout.testing import ModelServer
exporter = JsonLinesSpanExporter(sys.argv[1])
otel_rollout.configure(span_exporters=[exporter], instrumentor=None)
with ModelServer("Paris") as server, otel_rollout.rollout("agent"):
    client = openai.OpenAI(base_url=server.base_url, api_key="none-needed")
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
otel_rollout.shutdown()
"""


def run(code: str, caches: str, *arguments: str) -> tuple[float, int]:
    """CPU milliseconds of a fresh interpreter, and the number that it printed (0: none)."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = caches
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds * 1000, int(printed or 0)


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    modules: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "spans.jsonl")
        run(RECORD, folder, path)
        for repetition in range(repetitions + 1):
            for name, code in PROGRAMS.items():
                took, modules[name] = run(code.format(path=path), folder)
                if repetition:  # the first round fills the caches
                    times[name].append(took)
    empty = statistics.median(times["empty"])
    print(f"{'program':<14}{'modules':>9}{'more':>7}{'ms more':>9}  (all: min to max)")
    for name, taken in times.items():
        more = modules[name] - modules["empty"]
        print(
            f"{name:<14}{modules[name]:>9}{more:>7}{statistics.median(taken) - empty:>9.1f}"
            f"  ({min(taken):.0f} to {max(taken):.0f})"
        )
    more, ms = modules["rebuild"] - modules["empty"], statistics.median(times["rebuild"]) - empty
    met = more <= GOAL_MODULES and ms <= GOAL_MS
    print(
        f"goal of rebuild: at most {GOAL_MODULES} modules and {GOAL_MS:.0f} ms more: "
        f"{'met' if met else 'NOT MET'}"
    )
    whole = max(statistics.median(times[name]) for name in ("--version", "--help"))
    print(
        f"goal of --version and --help: at most {GOAL_HELP_MS:.0f} ms in all: {whole:.0f}, "
        f"{'met' if whole <= GOAL_HELP_MS else 'NOT MET'}"
    )


if __name__ == "__main__":
    main()
