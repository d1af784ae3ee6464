"""The cost of capture in instructions, which are the same on a slow, a fast and a busy machine.

    python benchmarks/instructions.py [--columns 1 10 s1 s10 50] [--variants capture default]
        [--parts rollout span request reply rebuild] [--check | --write]

Counted by valgrind's cachegrind without its simulation of caches, in thousands. One process starts
under it, loads what the figures need, and for each forks two children, one with few rollouts and
one with more: the difference over the calls is the figure. String hashes are fixed and the garbage
collector is off; the model server is a process that is not counted, all threads of the agent's
process are. A bare client that is counted twice differs by 0.3 % at most.

A column is the number of turns of a rollout, with `s` if the replies are streamed (50 chunks). The
figure of a variant is what it adds to a call of the bare client; that comes from the budget,
`instructions.json`, where `bare` is not among the variants. Named variants are counted in all
columns, or in those that are named; parts only if they are named, or if nothing is.

`--check` counts the two cheapest columns and the empty rollout, and fails if one is more than 3 %
above its budget; `--write` makes the figures the budget. It holds for the Python version it names.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import openai
import rebuild  # type: ignore[import-not-found]  # the one beside this script, as the next
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from overhead import conversation, one_rollout, server  # type: ignore[import-not-found]

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.spans import ExchangeWriter

Scope = Callable[[str], AbstractContextManager[Any]]
TOKENS = 512
VARIANTS = ("bare", "instrumentor", "capture", "default")


class Column(NamedTuple):
    """Rollouts of so many turns."""

    turns: int
    stream: bool
    rollouts: tuple[int, int]
    """How many the one and the other child play."""


COLUMNS = {
    "1": Column(1, False, (10, 30)),
    "10": Column(10, False, (1, 3)),
    "s1": Column(1, True, (4, 12)),
    "s10": Column(10, True, (1, 2)),
    "50": Column(50, False, (1, 2)),
}
PARTS = {
    "rollout": (20, 60),
    "span": (20, 60),
    "request": (20, 60),
    "reply": (20, 60),
    "rebuild": (1, 3),
}
"""A rollout without a call; a plain span of the SDK, made current; the writer of exchange spans on
a request and on a reply; rebuilding 100 turns with completions and histories. Each with how often
the one and the other child do it."""
CHECKED = [f"{name} {column}" for name in ("bare", "capture", "default") for column in ("1", "10")]
MARGIN = 1.03
BUDGET = Path(__file__).with_suffix(".json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


# In the process that is counted.


class LLMSpans(SpanProcessor):
    """Counts the spans of the instrumentor."""

    count = 0

    def on_end(self, span: ReadableSpan) -> None:
        scope = span.instrumentation_scope
        self.count += scope is not None and "instrumentation.openai" in scope.name


@contextmanager
def instrumented(name: str, turns: int, rollouts: int) -> Iterator[Scope]:
    """Instrumented as the variant is, with its kind of scope; checks that calls were captured."""
    provider, spans = TracerProvider(shutdown_on_exit=False), LLMSpans()
    provider.add_span_processor(spans)
    exporter = InMemoryTrajectoryExporter(max_trajectories=1)
    if name in ("capture", "default"):
        instrumentor: Any = "openai" if name == "default" else None
        otel_rollout.configure(
            exporters=[exporter], tracer_provider=provider, instrumentor=instrumentor
        )
        yield rollout
        otel_rollout.shutdown()
    else:
        if name == "instrumentor":
            # Not before: where it is imported, `configure` connects what writes LLM spans.
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor

            instrumentor = OpenAIInstrumentor(upload_base64_image=None)
            instrumentor.instrument(tracer_provider=provider)
        yield nullcontext
    assert spans.count == (turns * rollouts if name in ("instrumentor", "default") else 0)
    completions = [c for t in exporter.get_finished_trajectories() for c in t.completions]
    assert len(completions) == (turns if name in ("capture", "default") else 0)
    assert all(len(completion.logprobs or ()) == TOKENS for completion in completions)


async def play(scope: Scope, column: Column, count: int) -> None:
    """So many rollouts with a client of their own."""
    url = os.environ["BASE_URL"]
    async with openai.AsyncOpenAI(base_url=url, api_key="none-needed") as client:
        for _ in range(count):
            with scope("bench"):
                await one_rollout(client, column.turns, stream=column.stream)


def call(name: str, column: Column, count: int) -> None:
    """So many rollouts of a variant."""
    with instrumented(name, column.turns, count) as scope:
        asyncio.run(play(scope, column, count))


def empty_rollouts(count: int) -> None:
    with instrumented("capture", 0, count):
        for _ in range(count):
            with rollout("bench"):
                pass


def plain_spans(count: int) -> None:
    tracer = TracerProvider().get_tracer("bench")
    for _ in range(count):
        with tracer.start_as_current_span("bench"):
            pass


def prepared(names: list[str]) -> dict[str, Callable[[int], object]]:
    """The functions to count, by name; each is given how often. What they need is warm."""
    ((request, reply),) = conversation(1)
    functions: dict[str, Callable[[int], object]] = {
        "rollout": empty_rollouts,
        "span": plain_spans,
        "request": lambda count: [ExchangeWriter().request(request) for _ in range(count)],
        "reply": lambda count: [ExchangeWriter().response(reply) for _ in range(count)],
    }
    if "rebuild" in names:
        recorded, _ = rebuild.played(100, 512, tokens=True)
        functions["rebuild"] = lambda count: [rebuild.rebuild(recorded) for _ in range(count)]
    for name in names:
        if " " in name:
            variant, column = name.split()
            functions[name] = partial(call, variant, COLUMNS[column])
    for stream in {COLUMNS[name.split()[1]].stream for name in names if " " in name}:
        asyncio.run(play(nullcontext, Column(2, stream, (1, 1)), 1))
    return functions


def run_children(names: list[str]) -> None:
    """Run each in two children, one after the other, and print the ids of their processes."""
    gc.disable()
    functions = prepared(names)
    for name in names:
        for count in counts(name):
            child = os.fork()
            if not child:
                functions[name](count)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                sys.exit(f"{name} failed")
            print(child, flush=True)


# Outside of it.


def counts(name: str) -> tuple[int, int]:
    """How often the two children do what has this name."""
    return COLUMNS[name.split()[1]].rollouts if " " in name else PARTS[name]


def thousands(names: list[str]) -> dict[str, int]:
    """Thousands of instructions of a call, or of what the part is."""
    if not shutil.which("valgrind"):
        sys.exit("instructions are counted by valgrind, which is missing: apt-get install valgrind")
    figures = {}
    with server() as base_url, tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--log-file=/dev/null"]
        command += [f"--cachegrind-out-file={folder}/%p", sys.executable, __file__, "--here"]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "BASE_URL": base_url}
        done = subprocess.run(
            [*command, *names], env=environment, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"what was counted ended with {done.returncode}")
        children = iter(done.stdout.split())
        for name in names:
            few, many = (instructions(Path(folder, next(children))) for _ in range(2))
            once, more = counts(name)
            turns = COLUMNS[name.split()[1]].turns if " " in name else 1
            figures[name] = round((many - few) / (more - once) / turns / 1000)
    return figures


def instructions(path: Path) -> int:
    """The instructions of a process: the last line of cachegrind's file."""
    last = path.read_text().rstrip().rpartition("\n")[2]
    assert last.startswith("summary: "), last
    return int(last.split()[1])


def added(name: str, figures: dict[str, int]) -> int:
    """A figure, less that of a call of the bare client where it is one of a call."""
    variant, _, column = name.partition(" ")
    return figures[name] - (figures[f"bare {column}"] if column and variant != "bare" else 0)


def report(names: list[str], figures: dict[str, int]) -> None:
    """Print a row for each figure."""
    print(f"Python {sys.version.split()[0]}, openai {openai.__version__}; thousands")
    for name in names:
        row = f"{name:<16}{figures[name]:>10,}"
        if " " in name and not name.startswith("bare"):
            bare = figures[f"bare {name.split()[1]}"]
            row += f"{added(name, figures):>+10,}{figures[name] / bare:>8.3f}"
        print(row)


def too_dear(names: list[str], figures: dict[str, int], budget: dict[str, int]) -> list[str]:
    """A line for each figure that is above its budget."""
    return [
        f"{name}: {added(name, figures):,} thousand instructions, the budget is {limit:,}"
        for name in names
        if not name.startswith("bare")
        and added(name, figures) > (limit := added(name, budget)) * MARGIN
    ]


def chosen(options: argparse.Namespace) -> list[str]:
    """The names of the figures to count."""
    if options.check:
        return [*CHECKED, "rollout"]
    all_of_it = not (options.variants or options.columns or options.parts)
    variants = options.variants or (VARIANTS if all_of_it or options.columns else ())
    columns = options.columns or COLUMNS
    parts = PARTS if all_of_it else options.parts
    return [*(f"{variant} {column}" for variant in variants for column in columns), *parts]


def main() -> None:
    """Count, print, and compare with the budget."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="*", default=[], choices=VARIANTS)
    parser.add_argument("--columns", nargs="*", default=[], choices=COLUMNS)
    parser.add_argument("--parts", nargs="*", default=[], choices=PARTS)
    parser.add_argument("--check", action="store_true", help="fail above the budget")
    parser.add_argument("--write", action="store_true", help="make the figures the budget")
    parser.add_argument("--here", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_children(options.here)
        return
    kept = json.loads(BUDGET.read_text())
    names, budget = chosen(options), kept["figures"]
    figures = {**budget, **thousands(names)}
    report(names, figures)
    if options.write:
        BUDGET.write_text(json.dumps({"python": VERSION, "figures": figures}, indent=1) + "\n")
    elif options.check and kept["python"] != VERSION:
        print(f"The budget is one for Python {kept['python']}: not compared.")
    elif options.check and (lines := too_dear(names, figures, budget)):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
