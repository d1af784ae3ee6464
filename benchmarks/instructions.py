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
their columns, or in those that are named; parts only if they are named, or if nothing is.

`capture` leaves finished trajectories in memory, unread. Beside it are the ways on from there, with
all that is handed over written or sent before the count ends: each trajectory into a file (`file`),
asked for its token sequences (`tokens`), for the messages of its histories (`messages`), for its
`to_dict`; its spans into a file (`spans`) or over OTLP/HTTP (`otlp`) to a receiver that is not
counted. What arrived is read again and compared with what was played.

`--check` counts the cheapest columns and the empty rollout, and fails if a figure is more than 3 %
above its budget three times in a row: how many reads a reply takes, and when threads switch, depend
on time, and can make that difference. `--write` makes the figures the budget. It holds for the
Python version it names.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import openai
import opentelemetry
import rebuild  # type: ignore[import-not-found]  # the one beside this script, as the next
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from overhead import conversation, one_rollout, server  # type: ignore[import-not-found]

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    reconstruct,
    rollout,
)
from otel_rollout.otlp import JsonLinesSpanExporter, read_json_lines, read_protobuf
from otel_rollout.spans import ExchangeWriter

Scope = Callable[[str], AbstractContextManager[Any]]
TOKENS = 512


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
READINGS: dict[str, Callable[[Trajectory], Any]] = {
    "tokens": Trajectory.token_sequences,
    "messages": lambda trajectory: [history.messages() for history in trajectory.histories],
    "to_dict": Trajectory.to_dict,
}
"""What is asked of each trajectory as soon as it has ended."""
SENT = ("file", "spans", "otlp")
"""Variants whose trajectories or spans arrive outside of the process that is counted."""
VARIANTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bare", "instrumentor", "capture", "default"), tuple(COLUMNS)),
    **dict.fromkeys(("file", *READINGS, "spans", "otlp"), ("1", "10", "s1")),
}
"""The columns of each variant."""
CHECKED = [
    *(f"{name} {column}" for name in ("bare", "capture", "default") for column in ("1", "10")),
    *("file 1", "messages 1"),
]
MARGIN = 1.03
TRIES = 3
BUDGET = Path(__file__).with_suffix(".json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


# In the process that is counted.


class LLMSpans(SpanProcessor):
    """Counts the spans of the instrumentor."""

    count = 0

    def on_end(self, span: ReadableSpan) -> None:
        scope = span.instrumentation_scope
        self.count += scope is not None and "instrumentation.openai" in scope.name


class Reader(InMemoryTrajectoryExporter):
    """Reads each trajectory, and keeps the last one with what was read of it."""

    def __init__(self, read: Callable[[Trajectory], Any] | None) -> None:
        super().__init__(max_trajectories=1)
        self.read = read
        self.last: Any = None

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        super().export(trajectories)
        for trajectory in trajectories if self.read else ():
            assert self.read
            self.last = self.read(trajectory)


def exporting(name: str, reader: Reader) -> dict[str, Any]:
    """The arguments of `configure` for a variant of ours."""
    options: dict[str, Any] = {"instrumentor": "openai" if name == "default" else None}
    file = sent(Path(os.environ["FOLDER"]), os.getpid())
    if name == "file":
        return {**options, "exporters": [JsonlTrajectoryExporter(file)]}
    if name == "spans":
        return {**options, "span_exporters": [JsonLinesSpanExporter(file)]}
    if name == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = f"{os.environ['RECEIVER']}/{os.getpid()}"
        return {**options, "span_exporters": [OTLPSpanExporter(endpoint)]}
    return {**options, "exporters": [reader]}


@contextmanager
def instrumented(name: str, turns: int, rollouts: int) -> Iterator[Scope]:
    """Instrumented as the variant is, with its kind of scope; checks that calls were captured."""
    provider, spans = TracerProvider(shutdown_on_exit=False), LLMSpans()
    provider.add_span_processor(spans)
    reader = Reader(READINGS.get(name))
    if name in ("bare", "instrumentor"):
        if name == "instrumentor":
            # Not before: where it is imported, `configure` connects what writes LLM spans.
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor

            instrumentor = OpenAIInstrumentor(upload_base64_image=None)
            instrumentor.instrument(tracer_provider=provider)
        yield nullcontext
    else:
        otel_rollout.configure(tracer_provider=provider, **exporting(name, reader))
        yield rollout
        assert otel_rollout.shutdown()
    assert spans.count == (turns * rollouts if name in ("instrumentor", "default") else 0)
    if name in ("capture", "default", *READINGS):
        (trajectory,) = reader.get_finished_trajectories()
        check_trajectory(trajectory, turns)
        if turns and name in READINGS:
            check_reading(name, reader.last, turns)


def check_trajectory(trajectory: Trajectory, turns: int) -> None:
    """AssertionError if a call of it is missing, or a token of one."""
    completions = trajectory.completions
    assert len(completions) == turns
    assert all(len(each.logprobs or ()) == TOKENS for each in completions)
    assert all(len(each.token_ids or ()) == TOKENS for each in completions)


def check_reading(name: str, read: Any, turns: int) -> None:
    """AssertionError if not all was read of a trajectory."""
    if name == "tokens":
        assert sum(sum(row.loss_mask) for row in read) == TOKENS * turns
    elif name == "messages":
        assert [len(messages) for messages in read] == [2 * turns]
    else:
        check_trajectory(Trajectory.from_dict(read), turns)


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


class Receiver(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, and appends the messages of each path to a file."""

    protocol_version = "HTTP/1.1"  # connections are kept, as a collector does
    folder: Path

    def do_POST(self) -> None:
        message = self.rfile.read(int(self.headers["content-length"]))
        with sent(self.folder, int(self.path[1:])).open("ab") as file:
            file.write(message)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def receiver(folder: Path) -> Iterator[str]:
    """The URL of a receiver of spans."""
    handler = type("ReceiverInFolder", (Receiver,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def sent(folder: Path, process: int) -> Path:
    """The file of what arrived from a process that is counted."""
    return folder / f"{process}.sent"


def check_sent(name: str, count: int, file: Path) -> None:
    """AssertionError if not all rollouts of a figure arrived with all of their tokens."""
    variant, column = name.split()
    if variant == "file":
        arrived = list(JsonlTrajectoryExporter.read(file))
    elif variant == "spans":
        arrived = reconstruct(read_json_lines(str(file)))
    else:
        # Messages that are written one after the other are one message.
        arrived = reconstruct(read_protobuf(file.read_bytes()))
    assert len(arrived) == count, (name, len(arrived))
    for trajectory in arrived:
        check_trajectory(trajectory, COLUMNS[column].turns)


def counts(name: str) -> tuple[int, int]:
    """How often the two children do what has this name."""
    return COLUMNS[name.split()[1]].rollouts if " " in name else PARTS[name]


def thousands(names: list[str]) -> dict[str, int]:
    """Thousands of instructions of a call, or of what the part is."""
    if not shutil.which("valgrind"):
        sys.exit("instructions are counted by valgrind, which is missing: apt-get install valgrind")
    figures = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(Path(__file__).parent),
            "BASE_URL": stack.enter_context(server()),
            "FOLDER": str(folder),
            "RECEIVER": stack.enter_context(receiver(folder)),
            "OTEL_BSP_SCHEDULE_DELAY": "600000",  # batches by number, not by time
        }
        command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--log-file=/dev/null"]
        command += [f"--cachegrind-out-file={folder}/%p", sys.executable, __file__, "--here"]
        done = subprocess.run(
            [*command, *names], env=environment, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"what was counted ended with {done.returncode}")
        children = iter(map(int, done.stdout.split()))
        for name in names:
            figures[name] = round(per_call(name, [next(children) for _ in range(2)], folder))
    return figures


def per_call(name: str, children: list[int], folder: Path) -> float:
    """Thousands of instructions of a call, or a part, from the two children that counted it."""
    variant, _, column = name.partition(" ")
    if variant in SENT:
        for count, child in zip(counts(name), children, strict=True):
            check_sent(name, count, sent(folder, child))
    few, many = (instructions(folder / str(child)) for child in children)
    once, more = counts(name)
    return (many - few) / (more - once) / (COLUMNS[column].turns if column else 1) / 1000


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
    """The figures that are above their budget; each is printed."""
    dear = [
        name
        for name in names
        if not name.startswith("bare") and added(name, figures) > added(name, budget) * MARGIN
    ]
    for name in dear:
        got, limit = added(name, figures), added(name, budget)
        print(f"{name}: {got:,} thousand instructions, the budget is {limit:,}")
    return dear


def chosen(options: argparse.Namespace) -> list[str]:
    """The names of the figures to count."""
    if options.check:
        return [*CHECKED, "rollout"]
    all_of_it = not (options.variants or options.columns or options.parts)
    variants = options.variants or (VARIANTS if all_of_it or options.columns else ())
    parts = PARTS if all_of_it else options.parts
    return [
        *(
            f"{variant} {column}"
            for variant in variants
            for column in VARIANTS[variant]
            if column in (options.columns or COLUMNS)
        ),
        *parts,
    ]


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
    # A module that is compiled when the first child needs it would be counted in one of two.
    for folder in (*otel_rollout.__path__, *openai.__path__, *opentelemetry.__path__):
        compileall.compile_dir(folder, quiet=2)
    kept = json.loads(BUDGET.read_text())
    names, budget = chosen(options), kept["figures"]
    figures = {**budget, **thousands(names)}
    report(names, figures)
    if options.write:
        BUDGET.write_text(json.dumps({"python": VERSION, "figures": figures}, indent=1) + "\n")
    elif options.check and kept["python"] != VERSION:
        print(f"The budget is one for Python {kept['python']}: not compared.")
    elif options.check:
        for _ in range(TRIES - 1):
            if not (names := too_dear(names, figures, budget)):
                return
            print("Counted again:", flush=True)
            figures |= thousands(chosen(options))
        if names := too_dear(names, figures, budget):
            sys.exit(f"above the budget each time: {', '.join(names)}")


if __name__ == "__main__":
    main()
