"""A process that only reads spans imports no client and no SDK; public names load on first use."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import otel_rollout
from otel_rollout.otlp import JsonLinesSpanExporter
from otel_rollout.view import ProgressBar, note_above
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
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print()
print(json.dumps([status, [*sys.modules]]))
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


def test_a_bar_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes come above it; elsewhere there is none."""
    for is_terminal in (True, False):
        stderr = io.StringIO()
        monkeypatch.setattr(stderr, "isatty", lambda known=is_terminal: known)
        monkeypatch.setattr("sys.stderr", stderr)
        bar = ProgressBar(4, "B", mininterval=0)
        bar.update(3)
        note_above("a note")
        bar.close()
        assert ("75%" in stderr.getvalue()) is is_terminal
        assert "a note\n" in stderr.getvalue()


@pytest.mark.parametrize("verb", ["list", "check"])
def test_a_verb_that_reads_a_file_loads_only_what_reads_it(verb: str, tmp_path: Path) -> None:
    """No progress bar where there is no terminal, no event loop, no TLS, no metadata."""
    path = tmp_path / "trajectories.jsonl"
    path.write_text(otel_rollout.Trajectory(id="t", name="agent").to_json() + "\n")
    text, _, last = python("-c", COMMAND, verb, str(path)).strip().rpartition("\n")
    late = {*HEAVY, "asyncio", "ssl", "importlib.metadata", "multiprocessing"}
    assert "1 trajectory" in text
    assert late.isdisjoint(json.loads(last)[1])


CONFIGURED = """
import gc, json, sys
import openai

openai.OpenAI(api_key="k").chat.completions.create  # loads the resources of the client
gc.collect()
modules, objects = len(sys.modules), len(gc.get_objects())
import otel_rollout
otel_rollout.configure(instrumentor=None)
gc.collect()
print(json.dumps([len(sys.modules) - modules, len(gc.get_objects()) - objects, [*sys.modules]]))
"""


FOR_PEOPLE = ("guard", "instrumentors", "llm_spans", "sums", "tool_spans")


@pytest.mark.slow
def test_without_an_instrumentor_none_is_loaded() -> None:
    """The garbage collector looks at what is loaded, again and again."""
    modules, objects, names = json.loads(python("-c", CONFIGURED))
    assert [name for name in names if name.startswith("opentelemetry.instrumentation.openai")] == []
    assert {f"otel_rollout.look.{name}" for name in FOR_PEOPLE}.isdisjoint(names)
    assert modules <= 267
    assert objects <= 16_500
