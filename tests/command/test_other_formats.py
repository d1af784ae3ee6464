"""Files that are no lines of OTLP or of trajectories: they are read, or named in one sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from otel_rollout.command.cli import main
from tests.command.exports import spans_of, trajectories_of
from tests.kit.recording import Recording


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("write", [spans_of, trajectories_of])
def test_utf_16(recorded: Recording, write: Any, encoding: str, tmp_path: Path, capsys: Any):
    """What PowerShell's `>` writes is named as that, once."""
    given = recorded if write is spans_of else recorded.trajectories
    path = Path(write(given, tmp_path / "t"))
    path.write_bytes(path.read_text().encode(encoding))
    assert main(["list", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"{path}: it is UTF-16" in said
    assert said.count("UTF-16") == 1


def test_objects_over_several_lines(recorded: Recording, tmp_path: Path, capsys: Any):
    """The objects that `jq .` prints one after the other are read as those of lines."""
    path = Path(spans_of(recorded, tmp_path / "s"))
    assert main(["list", str(path), "--json"]) == 0
    expected = capsys.readouterr().out
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(each, indent=2) for each in objects))
    assert main(["list", str(path), "--json"]) == 0
    assert capsys.readouterr().out == expected


def test_what_the_console_exporter_prints(tmp_path: Path, capsys: Any):
    """It is refused with one sentence that names it, and what to write instead."""
    out = io.StringIO()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out)))
    for _ in range(3):
        provider.get_tracer("x").start_span("chat").end()
    path = tmp_path / "console"
    path.write_text(out.getvalue())
    assert main(["list", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.count("this is what ConsoleSpanExporter prints") == 1
    assert "JsonLinesSpanExporter" in said


@pytest.mark.parametrize("more", [[], ["--infer-rollouts"]])
@pytest.mark.parametrize("verb", ["list", "rebuild"])
def test_spans_that_no_dialect_reads(tmp_path: Path, capsys: Any, verb: str, more: list[str]):
    """Their count and their scope are printed, and the exit status is 1."""
    attributes = [{"key": "ai.operationId", "value": {"stringValue": "ai.generateText"}}]
    span = {"traceId": "07" * 16, "name": "ai.generateText", "attributes": attributes}
    span |= {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    spans = [{**span, "spanId": f"{number:016x}"} for number in range(1, 4)]
    path = tmp_path / "ai"
    scoped = [{"scope": {"name": "ai"}, "spans": spans}]
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": scoped}]}) + "\n")
    output = ["-o", str(tmp_path / "t")] if verb == "rebuild" else []
    assert main([verb, str(path), *more, *output]) == 1
    assert "in a dialect that is read (3 spans of 'ai')" in capsys.readouterr().err


def test_half_a_line_is_as_an_empty_file(recorded: Recording, tmp_path: Path):
    """A file with nothing whole in it cannot be read; after a whole line half a line is no harm."""
    path = Path(trajectories_of(recorded.trajectories, tmp_path / "t"))
    first, second, *_ = path.read_text().splitlines()
    path.write_text(first[:-20])
    assert main(["list", str(path)]) == 1
    path.write_text(f"{first}\n{second[:-20]}")
    assert main(["list", str(path)]) == 0
