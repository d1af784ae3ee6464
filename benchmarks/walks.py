"""How data walks through the package: function calls of ours, files, and crossings between files.

    python benchmarks/walks.py

Counted with `sys.setprofile`, so the figures are the same on any machine. A walk is what the
package does for one thing that a program does: a rollout, a model call, a chunk of a stream, a look
into a trajectory, a reward. A crossing is a call from one of our files into another. Also printed:
the lines of each room, the arrows between rooms, and the floors inside each (the longest chain of
imports between its modules).
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import openai

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, JsonlTrajectoryExporter, reconstruct, rollout
from otel_rollout.command import main
from otel_rollout.testing import ModelServer, Reply

PACKAGE = Path(otel_rollout.__file__).parent
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Walk:
    """What was called while it was open."""

    def __init__(self) -> None:
        self.calls = 0
        self.crossings = 0
        self.files: set[str] = set()
        self._prefix = f"{PACKAGE}/"

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(self._prefix) or "/testing/" in name:
            return
        self.calls += 1
        self.files.add(name)
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        self.crossings += caller != name and caller.startswith(self._prefix)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count what this thread calls meanwhile."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self, name: str) -> str:
        """The walk as a row of a table."""
        lines = sum(len(Path(file).read_text().splitlines()) for file in self.files)
        return f"| {name} | {self.calls} | {len(self.files)} ({lines:,}) | {self.crossings} |"


def counted(step: Callable[[], object]) -> Walk:
    """The walk of one step."""
    walk = Walk()
    with walk.open():
        step()
    return walk


def calls(client: openai.OpenAI, messages: list[Any], *, stream: bool = False) -> Any:
    """One model call of a conversation; the reply is added to it."""
    reply: Any = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, stream=stream
    )
    if not stream:
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": f"and {len(messages)}"}]
    return reply


def recorded(*, instrumentor: Any) -> Iterator[tuple[str, Walk]]:
    """The walks of the agent's process."""
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], instrumentor=instrumentor)
    name = "default" if instrumentor else "capture only"
    replies = [Reply(f"word {n}") for n in range(64)]
    with ModelServer(replies, token_ids=True, logprobs=True) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k")

        def empty() -> None:
            with rollout("agent"):
                pass

        empty()
        yield f"an empty rollout, {name}", counted(empty)
        with rollout("agent") as trajectory:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(3):
                calls(client, messages)
            yield f"a call, {name}", counted(lambda: calls(client, messages))
            if not instrumentor:
                yield "`completions`, live, after 4 calls", counted(lambda: trajectory.completions)
                yield "a reward while it runs", counted(lambda: setattr(trajectory, "reward", 1.0))
            calls(client, messages, stream=True).close()
            stream = calls(client, messages, stream=True)
            chunks = iter(stream)
            for _ in range(2):
                next(chunks)
            yield f"a chunk, {name}", counted(lambda: next(chunks))
            stream.close()
        if not instrumentor:
            yield (
                "a reward after the end",
                counted(lambda: setattr(trajectory, "reward", 2.0)),
            )
    otel_rollout.shutdown()


def stored() -> Iterator[tuple[str, Walk]]:
    """The walks of a process that reads what was recorded."""
    from otel_rollout.otlp import JsonLinesSpanExporter, read_json_lines

    with (
        tempfile.TemporaryDirectory() as folder,
        ModelServer([Reply(f"{n}") for n in range(9)]) as server,
    ):
        spans, file = Path(folder) / "spans.jsonl", Path(folder) / "trajectories.jsonl"
        otel_rollout.configure(
            exporters=[JsonlTrajectoryExporter(str(file))],
            span_exporters=[JsonLinesSpanExporter(str(spans))],
            instrumentor=None,
        )
        client = openai.OpenAI(base_url=server.base_url, api_key="k")
        for _ in range(3):
            with rollout("agent") as trajectory:
                messages: list[Any] = [{"role": "user", "content": "hi"}]
                for _ in range(3):
                    calls(client, messages)
                trajectory.reward = 1.0
        otel_rollout.shutdown()
        records = list(read_json_lines(str(spans)))
        one = [r for r in records if r.trace_id == records[0].trace_id]
        yield (
            "`reconstruct` of 3 calls and `completions`",
            counted(lambda: [trajectory.completions for trajectory in reconstruct(one)]),
        )
        for name, path in (("trajectories", file), ("spans", spans)):
            with contextlib.redirect_stdout(io.StringIO()):
                walk = counted(lambda path=path: main(["list", str(path)]))  # type: ignore[misc]
            yield f"`list` of 3 rollouts, {name}", walk


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("otel_rollout"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {name.removeprefix("otel_rollout").removeprefix(".") for name in found}


def structure() -> Iterator[str]:
    """The rooms: their lines, files, and floors; the arrows between them."""
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    needs = {name: imports_of(path) & modules.keys() for name, path in modules.items()}
    floors: dict[str, int] = {}

    def floor(module: str, room: str) -> int:
        key = f"{room}:{module}"
        if key not in floors:
            floors[key] = 0
            below = [n for n in needs[module] if not room or n.split(".")[0] == room]
            floors[key] = 1 + max((floor(n, room) for n in below), default=0)
        return floors[key]

    rooms: dict[str, list[Path]] = {}
    arrows = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = parts[0] if len(parts) > 1 else "top"
        rooms.setdefault(room, []).append(path)
        others = {name.split(".")[0] for name in imports_of(path) if name}
        arrows |= {(room, other) for other in others if other not in (room, "")}
    yield "| room | files | lines | floors |\n|---|---|---|---|"
    total = 0
    for room, paths in sorted(rooms.items()):
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        total += lines
        inside = [n for n in modules if n.split(".")[0] == room]
        height = max((floor(n, room) for n in inside), default=1)
        yield f"| {room} | {len(paths)} | {lines:,} | {height} |"
    yield f"| all | {sum(map(len, rooms.values()))} | {total:,} | |"
    yield f"\n{len({(a, b) for a, b in arrows if a != 'top'})} arrows between rooms"


if __name__ == "__main__":
    for row in structure():
        print(row)
    print("\n| walk | calls of ours | files (their lines) | crossings |\n|---|---|---|---|")
    for walks in (recorded(instrumentor=None), recorded(instrumentor="openai"), stored()):
        for name, walk in walks:
            print(walk.row(name))
