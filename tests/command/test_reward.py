"""`otel-rollout reward`: a reward that comes later, on the trace of its rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, Trajectory, rollout
from otel_rollout.command.cli import main
from otel_rollout.otlp import JsonLinesSpanExporter, read_json_lines
from tests.kit.receivers import HttpReceiver
from tests.kit.recording import Clients, Recording


@pytest.fixture
def recorded(recording: Recording, clients: Clients, tmp_path: Path) -> list[Trajectory]:
    """Two rollouts with a call; their spans and trajectories are in files."""
    recording.provider.add_span_processor(
        SimpleSpanProcessor(JsonLinesSpanExporter(tmp_path / "spans.jsonl"))
    )
    client = clients.sync(clients.serve())
    for name in ("first", "second"):
        with rollout(name, task_id="t1"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
    ended = list(recording.trajectories)
    JsonlTrajectoryExporter(tmp_path / "trajectories.jsonl").export(ended)
    otel_rollout.shutdown()
    return ended


def rebuilt(tmp_path: Path) -> dict[str, Trajectory]:
    """The trajectories of the file of spans, by id."""
    target = tmp_path / "rebuilt.jsonl"
    assert main(["rebuild", str(tmp_path / "spans.jsonl"), "-o", str(target)]) == 0
    return {each.id: each for each in JsonlTrajectoryExporter.read(target)}


def test_a_reward_in_a_file(recorded: list[Trajectory], tmp_path: Path, capsys: Any):
    """It is a span on the rollout's trace, and the rollout that is rebuilt has it, no other."""
    spans = str(tmp_path / "spans.jsonl")
    first, second = recorded
    assert main(["reward", first.id[:12], "0.5", "--spans", spans]) == 0
    assert main(["reward", first.id, "1", "--name", "tests", "--spans", spans]) == 0
    found = rebuilt(tmp_path)
    assert found[first.id].reward == 0.5
    assert dict(found[first.id].rewards) == {"tests": 1.0}
    assert found[second.id].reward is None
    added = [span for span in read_json_lines(spans) if span.name.startswith("evaluate")]
    assert {span.trace_id for span in added} == {first.trace_id}
    assert {span.parent_span_id for span in added} == {first.span_id}
    assert f"reward tests of {first.id}: 1\n-> {spans} (spans)\n" in capsys.readouterr().err


def test_the_last_reward_counts(recorded: list[Trajectory], tmp_path: Path):
    """A reward that is given again replaces the earlier one."""
    spans = str(tmp_path / "spans.jsonl")
    for value in ("1", "-3"):
        assert main(["reward", recorded[0].id, value, "--spans", spans]) == 0
    assert rebuilt(tmp_path)[recorded[0].id].reward == -3


def test_a_rollout_of_a_file_of_trajectories(recorded: list[Trajectory], tmp_path: Path):
    """The rollout may be looked up elsewhere than the reward is written."""
    source, spans = str(tmp_path / "trajectories.jsonl"), tmp_path / "more.jsonl"
    wanted = recorded[1].id
    assert main(["reward", wanted, "2", "--in", source, "--spans", str(spans)]) == 0
    with open(tmp_path / "spans.jsonl", "a") as file:
        file.write(spans.read_text())
    assert rebuilt(tmp_path)[wanted].reward == 2


def test_a_reward_over_otlp(
    recorded: list[Trajectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Without a file it goes where the environment says."""
    with HttpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        source = str(tmp_path / "trajectories.jsonl")
        assert main(["reward", recorded[0].id, "1", "--in", source]) == 0
    assert [span.trace_id for span in receiver.spans] == [recorded[0].trace_id]
    assert f"-> {receiver.url} (spans, OTLP)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "1"], "where to? Give --spans FILE"),
        (["x", "nan", "--spans", "f"], "expected a finite number, got 'nan'"),
        (["x", "good", "--spans", "f"], "expected a finite number, got 'good'"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], said: str, capsys: Any):
    """What is wrong with it is said, and nothing is written."""
    with pytest.raises(SystemExit) as ended:
        main(["reward", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_rollout_has_to_be_looked_up(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """With a collector alone nothing tells the rollout's trace."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(SystemExit):
        main(["reward", "x", "1"])
    assert "--in SOURCE is required" in capsys.readouterr().err


@pytest.mark.parametrize(("wanted", "said"), [("zz", "no rollout whose id"), ("", "2 rollouts")])
def test_not_one_rollout(
    recorded: list[Trajectory], tmp_path: Path, capsys: Any, wanted: str, said: str
):
    """An id that is of none, or of several, gets no reward."""
    spans = tmp_path / "spans.jsonl"
    before = spans.read_bytes()
    assert main(["reward", wanted, "1", "--spans", str(spans)]) == 1
    assert said in capsys.readouterr().err
    assert spans.read_bytes() == before


def test_the_reward_is_in_the_rows(recorded: list[Trajectory], tmp_path: Path):
    """What a trainer reads has the later reward."""
    spans, rows = str(tmp_path / "spans.jsonl"), tmp_path / "rows.jsonl"
    assert main(["reward", recorded[0].id, "0.25", "--spans", spans]) == 0
    assert main(["reward", recorded[1].id, "0.75", "--spans", spans]) == 0
    assert main(["export", "--to", "tokens", spans, "-o", str(rows)]) == 0
    found = [json.loads(line)["reward"] for line in rows.read_text().splitlines()]
    assert sorted(found) == [0.25, 0.75]
