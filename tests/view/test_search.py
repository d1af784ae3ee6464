"""Search: whole texts, ids and failed calls are found, with the text around the hit."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from otel_rollout import JsonlTrajectoryExporter, Trajectory, rollout
from otel_rollout.command.cli import main
from otel_rollout.testing import Raw, Reply, ToolCall
from otel_rollout.view.answers import Answers
from otel_rollout.view.html import InMemory
from otel_rollout.view.search import Search, searched_text
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording
from tests.view.made import Call, ask, made

Output = pytest.CaptureFixture[str]
LONG = "filler " * 30_000
REFUSED = json.dumps({"error": {"message": "the quota of zebras is used up"}}).encode()


@pytest.fixture
def found(recording: Recording, clients: Clients, tmp_path: Path) -> Any:
    """A rollout with a long message, a call of a tool and a call that was refused; its file."""
    call = ToolCall("look", '{"city": "M\\u00fcnchen"}', id="call_5f3e9a")
    client = clients.sync(clients.serve([Reply(tool_calls=[call]), Raw(429, REFUSED)]))
    with rollout("agent", task_id="task-77", metadata={"split": "dev"}) as trajectory:
        asked = [user(f"{LONG} the needle 北京大学 is here {LONG}")]
        client.chat.completions.create(model="m", messages=asked)
        with suppress(openai.APIError):
            client.chat.completions.create(model="m", messages=asked)
    other = made(Call([user("nothing of it")]), id_="other")
    path = tmp_path / "t.jsonl"
    exporter = JsonlTrajectoryExporter(path)
    exporter.export([trajectory, other])
    exporter.shutdown()
    return trajectory, other, str(path)


def searches(trajectory: Trajectory) -> list[str]:
    """What finds it, and nothing else."""
    first, second = trajectory.completions
    return [
        *(
            "needle",
            "NEEDLE is",
            '"needle 北京大学"',
            "北京",
            "大学",
            "münchen",
            "munchen",
            "zebras",
        ),
        *("task-77", "dev", "call_5f3e9a", "call_5f", first.id, first.span_id, second.span_id),
        *(trajectory.id, trajectory.id[:12], trajectory.trace_id, trajectory.span_id),
    ]


def test_whole_texts_ids_and_failed_calls_are_found(found: Any, capsys: Output) -> None:
    """On the page and by `list`, with the same excerpt, whose odd pieces are what was found."""
    trajectory, other, path = found
    capsys.readouterr()
    with InMemory([trajectory, other]) as held:
        asked = Answers(held)
        for text in searches(trajectory):
            rows = ask(asked, "trajectories", search=text)["rows"]
            assert [row["id"] for row in rows] == [trajectory.id], text
            assert main(["list", path, "--json", "--search", text]) == 0
            listed, summary = map(json.loads, capsys.readouterr().out.splitlines())
            assert summary["summary"]["trajectories"] == 1
            assert listed["hit"] == rows[0]["hit"]
            assert len(listed["hit"]) >= 3
            assert len("".join(listed["hit"])) < 1_000
        (row,) = ask(asked, "trajectories", search="needle")["rows"]
        assert row["hit"][1] == "needle"
        assert row["hit"][2].startswith(" 北京大学 is here")
        assert ask(asked, "trajectories", search="nowhere")["rows"] == []
        assert not [row for row in ask(asked, "trajectories")["rows"] if "hit" in row]


def test_the_list_prints_the_text_around_a_hit(
    found: Any, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the line of its trajectory; `show` shows what is found."""
    monkeypatch.setenv("COLUMNS", "120")
    trajectory, _, path = found
    capsys.readouterr()
    assert main(["list", path, "--search", "zebras", "--where", "turns > 0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(trajectory.id[:8])
    assert "the quota of «zebras» is used up" in lines[2]
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["list", path, "--search", "zebras"]) == 0
    assert "«zebras»" in capsys.readouterr().out
    assert main(["show", path, "--search", "zebras"]) == 0
    assert trajectory.id in capsys.readouterr().out
    assert main(["list", path, "--search", "giraffe"]) == 0
    assert capsys.readouterr().err == "--search: 0 of 2 trajectories match\n"


def test_several_processes_search_as_one(found: Any, capsys: Output) -> None:
    """`--jobs` changes nothing of what is printed."""
    *_, path = found
    capsys.readouterr()
    printed = []
    for jobs in ("1", "2"):
        assert main(["list", path, path, "--jobs", jobs, "--search", "needle"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].count("«needle»") == 2


def test_a_search_without_a_word_is_a_wrong_command_line(found: Any, capsys: Output) -> None:
    """Every trajectory would match it."""
    with pytest.raises(SystemExit):
        main(["list", found[2], "--search", "-> !"])
    assert "--search: expected words of letters or digits, got '-> !'" in capsys.readouterr().err


def test_a_search_leaves_nothing_behind() -> None:
    """Each trajectory is searched alone."""
    search = Search.parse("--search", "alpha")
    one, two = (made(Call([user(text)]), id_=text) for text in ("alpha", "beta"))
    assert [bool(search.hit(each)) for each in (one, two, one)] == [True, False, True]
    assert "alpha" in searched_text(one)
