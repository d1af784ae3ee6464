"""The verb `drift`: drift of recorded spans, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.command.cli import main
from otel_rollout.testing import Reply
from tests.kit.conversations import said, user
from tests.kit.recording import Clients, Recording
from tests.kit.transports import to_json_line


@pytest.fixture
def spans(recording: Recording, clients: Clients, tmp_path: Path) -> Path:
    """A file with two rollouts of two calls: one appends, one drops its reasoning."""
    client = clients.sync(clients.serve([Reply("a"), Reply("b"), Reply("a", reasoning="hm"), "b"]))
    for name in ("appends", "drops\x1b[31m"):
        with rollout(name, task_id="t"):
            messages: list[Any] = [user("hi")]
            client.chat.completions.create(model="m", messages=messages)
            messages += [said("a"), user("so?")]
            client.chat.completions.create(model="m", messages=messages)
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(to_json_line([span]) for span in recording.spans))
    return path


def test_the_table(spans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each trajectory with forks, these below it, and the sums of all by class."""
    assert main(["drift", str(spans)]) == 0
    head, drops, fork, total, cause = capsys.readouterr().out.splitlines()
    numbers = "calls continued merged forked unknown ratio read again"
    assert head.split() == ["trajectory", *numbers.split()]
    assert drops.split()[1:-1] == ["drops\\x1b[31m", "2", "1", "0", "1", "0", "0.00"]
    assert "chatcmpl-000003 -> chatcmpl-000004: reasoning dropped; token 5 of " in fork
    assert total.split()[:-1] == ["2", "trajectories", "4", "2", "1", "1", "0", "0.50"]
    assert cause.split()[:4] == ["1", "x", "reasoning", "dropped,"]


def test_as_json(
    spans: Path, recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has what `Trajectory.drift` gives, and a file of trajectories gives the same."""
    assert main(["drift", "--json", str(spans)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    live = sorted(recording.trajectories, key=lambda t: t.start_time_ns)
    for one, trajectory in zip(found["trajectories"], live, strict=True):
        assert one == {
            "id": trajectory.id,
            "name": trajectory.name,
            "task_id": "t",
            "calls": 2,
            **trajectory.drift().to_dict(),
        }
    assert found["total"]["merge_ratio"] == 0.5
    assert found["total"]["causes"] == {"reasoning_dropped": 1}
    rebuilt = str(tmp_path / "trajectories.jsonl")
    assert main(["rebuild", str(spans), "-o", rebuilt]) == 0
    assert main(["drift", "--json", rebuilt]) == 0
    assert capsys.readouterr().out == printed


def test_few_forks_are_shown_unless_all_are_asked_for(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation that drifts at each call has a line for five of them, or for each."""
    client = clients.sync(clients.serve([Reply("a", reasoning="hm")] * 8))
    with rollout("agent"):
        messages: list[Any] = [user("hi")]
        for _ in range(8):
            client.chat.completions.create(model="m", messages=messages)
            messages += [said("a"), user("so?")]
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(to_json_line([span]) for span in recording.spans))
    assert main(["drift", str(path)]) == 0
    short = capsys.readouterr().out
    assert main(["drift", "--full", str(path)]) == 0
    full = capsys.readouterr().out
    assert (short.count("->"), full.count("->")) == (5, 7)
    assert "and 2 more (--full)" in short


def test_nothing_to_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source without spans is reported, and the exit status is 1."""
    path = tmp_path / "empty.jsonl"
    path.write_text("{}\n")
    assert main(["drift", str(path)]) == 1
    assert "no trajectories" in capsys.readouterr().err
