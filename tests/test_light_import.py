"""A process that only reads spans imports no client and no SDK; public names load on first use."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import otel_rollout
from otel_rollout.otlp import JsonLinesSpanExporter
from tests.kit.programs import python
from tests.kit.recording import Clients, Recording

HEAVY = (
    "anthropic",
    "openai",
    "opentelemetry.exporter",
    "opentelemetry.instrumentation",
    "opentelemetry.sdk",
    "tqdm",
)
MORE_MODULES = 200
"""Modules that reading a file may load beside those of an empty interpreter."""
READ = """
import json, sys
empty = len(sys.modules)
import otel_rollout.rebuild
from otel_rollout.otlp import read_json_lines
(trajectory,) = otel_rollout.rebuild.reconstruct(read_json_lines(sys.argv[1]))
print(json.dumps([trajectory.id, trajectory.warnings, len(sys.modules) - empty, [*sys.modules]]))
"""


def recorded(recording: Recording, clients: Clients, path: Path) -> str:
    """The file at this path has the spans of one rollout; returns the rollout's id."""
    client = clients.sync(clients.serve("Paris"))
    with otel_rollout.rollout("agent"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    exporter = JsonLinesSpanExporter(path)
    exporter.export(recording.spans)
    exporter.shutdown()
    return recording.trajectory.id


@pytest.mark.slow
def test_reading_a_file_imports_no_client_and_no_sdk(
    recording: Recording, clients: Clients, tmp_path: Path
) -> None:
    """A fresh interpreter rebuilds a trajectory from OTLP/JSON lines and stays small."""
    path = tmp_path / "traces.jsonl"
    id_ = recorded(recording, clients, path)
    found, warnings, more, modules = json.loads(python("-c", READ, str(path)))
    assert (found, warnings) == (id_, [])
    heavy = [name for name in modules if f"{name}.".startswith(tuple(f"{h}." for h in HEAVY))]
    assert heavy == []
    assert more <= MORE_MODULES


COMMAND = """
import json, sys
from otel_rollout.command import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print()
    print(json.dumps([end.code, [*sys.modules]]))
"""


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_command_answers_without_what_it_does_not_need(argument: str) -> None:
    """Its version and its help load no progress bar, no span, no client; help no metadata."""
    text, _, last = python("-c", COMMAND, argument).strip().rpartition("\n")
    status, modules = json.loads(last)
    assert (status, text.strip() != "") == (0, True)
    late = [*HEAVY, "otel_rollout.wire", "otel_rollout.spans"]
    late += [] if argument == "--version" else ["importlib.metadata"]
    assert [name for name in modules if f"{name}.".startswith(tuple(f"{h}." for h in late))] == []


def test_each_public_name_is_in_one_room() -> None:
    """Every name of `__all__` is loaded from exactly one room, and no room gives another name."""
    names = [name for room in otel_rollout._ROOMS.values() for name in room]
    assert sorted(names) == sorted(otel_rollout.__all__)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING give each public name from the room it is loaded from."""
    tree = ast.parse(Path(otel_rollout.__file__).read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)][:1]
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    seen = {
        (node.module, alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    loaded = {
        (f"otel_rollout.{room}", name)
        for room, names in otel_rollout._ROOMS.items()
        for name in names
    }
    assert seen == loaded
