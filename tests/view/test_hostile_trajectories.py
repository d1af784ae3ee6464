"""Trajectories of spans and lines that were changed in any way can be indexed and shown."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from otel_rollout import Trajectory, reconstruct
from otel_rollout.command.cli import main as view_trajectories
from otel_rollout.errors import ConfigurationError
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import as_json
from otel_rollout.view.details import Opened
from otel_rollout.view.html import InMemory
from otel_rollout.view.index import Index
from otel_rollout.view.server import _answered
from otel_rollout.view.tokens import Tokens
from tests.kit.fuzzing import changed, damage_bytes, damage_cells, mutated_json
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import SCENARIOS, play
from tests.view.made import Call, ask, line, write

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


def open_damaged(source: Path, whole: Path, folder: Path, draw: random.Random) -> None:
    """Damage a copy of an index, and ask for all that it has; 404 is an answer."""
    path = folder / "index.sqlite"
    for each in folder.glob("index.sqlite*"):
        each.unlink()
    shutil.copy(whole, path)
    draw.choice((damage_bytes, damage_cells))(path, draw)
    page, said = folder / "page.html", str(path)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("OTEL_ROLLOUT_VIEW_INDEX", str(path))
            status = view_trajectories(["view", str(source), "--html", str(page), "--force"])
        assert status in (0, 1)
        with Index([str(source)], path=path, follow=False) as index:
            assert index.wait()
            answers = Answers(index)
            named = answers.named()
            for query in ({}, {"sort": "-advantage"}, {"sort": "metadata"}, {"search": "hi"}):
                for name in ("state", "trajectories", "summary", "groups"):
                    _answered(named[name], query)
            for number in range(10):
                for name in ("trajectory", "tokens", "group"):
                    _answered(named[name], {"id": str(number)})
    except ConfigurationError as error:
        said = str(error)
    assert str(path) in said


def damaged_indexes(folder: Path, seed: int, count: int) -> None:
    """Indexes of one file that were damaged in so many ways."""
    draw, source, whole = random.Random(seed), folder / "a.jsonl", folder / "whole.sqlite"
    asked = [Call([{"role": "user", "content": "hi"}], prompt_ids=[1, 2], ids=[3])]
    write(source, *(line(str(n), *asked, group_id=str(n % 3), reward=n / 3) for n in range(9)))
    with Index([str(source)], path=whole, follow=False) as index:
        assert index.wait()
        assert index.errors == []
    for number in range(count):
        try:
            open_damaged(source, whole, folder, draw)
        except Exception as error:
            raise AssertionError(f"seed {seed}, index {number}") from error


def test_a_damaged_index_is_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It is made anew, or said to be damaged; what is asked of it has an answer or is not found."""
    damaged_indexes(tmp_path, 1, 25)
    source, whole = str(tmp_path / "a.jsonl"), tmp_path / "whole.sqlite"
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute("UPDATE trajectories SET name = ?", (b"\xff",))
        connection.commit()
    with Index([source], path=whole, follow=False) as index:
        assert index.wait()
        assert _answered(Answers(index).trajectories, {}).status_code == 404
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute("UPDATE trajectories SET metadata = '{'")
        connection.commit()
    capsys.readouterr()
    page = str(tmp_path / "page.html")
    monkeypatch.setenv("OTEL_ROLLOUT_VIEW_INDEX", str(whole))
    assert view_trajectories(["view", source, "--html", page, "--force"]) == 1
    assert "the index is damaged (JSONDecodeError" in capsys.readouterr().err
    with Index([source], path=whole, follow=False) as index:
        assert index.wait()
        answer = _answered(Answers(index).trajectories, {})
    assert answer.status_code == 404
    assert b"the index, is damaged" in answer.body


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(300, 310))
def test_many_damaged_indexes(tmp_path: Path, seed: int):
    """The same for long: `make fuzz`."""
    damaged_indexes(tmp_path, seed, 500)


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
