"""Trajectories of spans and lines that were changed in any way can be indexed and shown."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from otel_rollout import Trajectory, reconstruct
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import as_json
from otel_rollout.view.details import Opened
from otel_rollout.view.html import InMemory
from otel_rollout.view.index import Index
from otel_rollout.view.tokens import Tokens
from tests.kit.fuzzing import changed, mutated_json
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import SCENARIOS, play
from tests.view.made import ask

pytestmark = pytest.mark.not_replayed("spans are changed on purpose")


@pytest.fixture
def traces(recording: Recording, clients: Clients) -> list[list[SpanRecord]]:
    """The spans of rollouts of every kind, by trace."""
    play(*(name for name in SCENARIOS if name != "long"))
    found: dict[str, list[SpanRecord]] = {}
    for span in map(as_record, recording.spans):
        found.setdefault(span.trace_id, []).append(span)
    return list(found.values())


def show(trajectory: Trajectory) -> None:
    """All that the page asks about a trajectory, as JSON."""
    opened = Opened(trajectory)
    detail = opened.detail()
    as_json(detail)
    tokens = Tokens(trajectory, opened.shown_rows)
    for row in detail["rows"]:
        as_json(tokens.window(row["row"], 0, 4096))
    for node in detail["nodes"]:
        as_json(opened.message(node["id"]))


def test_rollouts_of_every_kind_are_shown(traces: list[list[SpanRecord]]):
    """Alone and together: in the list, in sums, in detail."""
    trajectories = [each for spans in traces for each in reconstruct(spans)]
    for trajectory in trajectories:
        show(trajectory)
    with InMemory(trajectories) as held:
        answers = Answers(held)
        assert ask(answers, "summary")["total"] == len(trajectories)
        for trajectory in trajectories:
            found = ask(answers, "trajectory", id=trajectory.id)
            assert len(found["completions"]) == len(trajectory.completions)


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_span_is_shown(traces: list[list[SpanRecord]], seed: int):
    """Whatever the trajectory of it holds."""
    draw = random.Random(seed)
    for _ in range(60):
        spans = draw.choice(traces)
        change = changed(spans, draw)
        for trajectory in reconstruct(change.spans):
            show(trajectory)


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_line_is_no_end(traces: list[list[SpanRecord]], tmp_path: Path, seed: int):
    """It is in the list and can be opened, or it is an error; the others are there."""
    draw = random.Random(seed)
    whole = [each.to_dict() for spans in traces for each in reconstruct(spans)]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(mutated_json(draw.choice(whole), draw)) for _ in range(60)]
    path.write_text("\n".join([*lines, *map(json.dumps, whole)]) + "\n")
    with Index([str(path)], cached=False, follow=False) as index:
        assert index.wait()
        answers = Answers(index)
        rows = ask(answers, "trajectories", limit=1000)["rows"]
        assert {each["id"] for each in whole} <= {row["id"] for row in rows}
        assert not [error for error in index.errors if "not written any more" in error]
        as_json(ask(answers, "summary"))
        for row in rows:
            as_json(ask(answers, "trajectory", id=row["id"]))
