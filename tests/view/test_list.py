"""The verb `list`: a line for each trajectory as it is read, filters, order, and sums."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import JsonlTrajectoryExporter, Trajectory
from otel_rollout.command.cli import main
from otel_rollout.view import Overview, Where
from otel_rollout.view.curves import SampleRow, Scores
from otel_rollout.view.overview import HEAD
from otel_rollout.view.verbs.listing import Table
from tests.kit.conversations import user
from tests.kit.recording import Recording
from tests.kit.transports import to_json_line
from tests.view.made import Call, line, write

Output = pytest.CaptureFixture[str]


@pytest.fixture
def spans(recorded: Recording, tmp_path: Path) -> str:
    """The rollouts of three groups, one of none and one that failed, as spans."""
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(to_json_line([span]) for span in recorded.spans))
    return str(path)


@pytest.fixture
def trajectories(spans: str, tmp_path: Path) -> str:
    """The same as a file of trajectories."""
    path = str(tmp_path / "trajectories.jsonl")
    assert main(["rebuild", spans, "-o", path]) == 0
    return path


@pytest.fixture
def listed(spans: str, capsys: Output) -> Any:
    """Runs `list --json`; the overviews and the summary."""

    def run(*arguments: str) -> tuple[list[Any], Any]:
        assert main(["list", "--json", *(arguments or ()), spans]) == 0
        *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
        return lines, last["summary"]

    return run


def test_rows_are_counted_and_not_made(trajectories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither verb has a use for lists of tokens."""
    monkeypatch.setattr("otel_rollout.trajectory.tokens.TokenSequence.token_id_array", None)
    assert main(["list", trajectories]) == 0
    assert main(["check", trajectories]) == 1  # some failed


def test_the_table(
    trajectories: str, spans: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head, a line for each in order of its start, aligned; spans and trajectories alike."""
    monkeypatch.setenv("COLUMNS", "125")
    capsys.readouterr()
    assert main(["list", spans]) == 0
    printed = capsys.readouterr().out
    table, _, footer = printed.partition("\n\n")
    head, *lines = table.splitlines()
    heads = "id task # status reward error or answer turns prompt sampled trained seconds findings"
    assert " ".join(head.split()) == heads
    assert len(lines) == 8
    asked = Overview.of(next(iter(JsonlTrajectoryExporter.read(trajectories)))).question
    assert asked
    assert asked.split()[0] in lines[0]
    assert "complete" in lines[0]
    assert all(len(line) <= 125 for line in table.splitlines())
    place = head.index("reward") + len("reward")
    assert {line[place - 1] for line in lines} <= set("01-")
    read = [Overview.of(each) for each in JsonlTrajectoryExporter.read(trajectories)]
    prompt = sum(each.prompt_tokens or 0 for each in read)
    sampled = sum(each.sampled_tokens or 0 for each in read)
    trained = sum(each.trained_tokens for each in read)
    assert [each.prompt_tokens for each in read].count(None) == 1  # it made no call
    of = " (of 7 of 8 trajectories)"
    assert footer.splitlines()[:3] == [
        "8 trajectories, 3 groups: 7 complete, 1 error",
        "reward: mean 0.5; 6 of 8 have one",
        f"tokens: prompt {prompt}{of}, sampled {sampled}{of}, {trained} train; 0 replies in no row",
    ]
    assert "errors, in 1 trajectory:\n     1 x " in footer
    assert "2 x unscored: it has no reward" in footer
    assert "Set trajectory.reward" in footer
    assert main(["list", trajectories]) == 0
    assert capsys.readouterr().out == printed


def test_tasks_and_errors_are_in_the_list(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns, too; they filter, sort and group, and each type of error is counted."""
    ways = ["docker: no space left", "docker: no space left", "it hung"]
    lines = [
        line(
            f"{number:032x}",
            Call(
                [{"role": "system", "content": "Be brief."}, user(f"Where is Paris, {number}?")],
                "Here.",
            ),
            status="error",
            error={"type": "OSError" if "docker" in way else "TimeoutError", "message": way},
            group_id=f"{9 + number // 2:032x}",
        )
        for number, way in enumerate(ways)
    ]
    path = str(write(tmp_path / "t.jsonl", *lines, line("d" * 32, Call([user("2 + 2?")], "4"))))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", path]) == 0
    printed = capsys.readouterr().out
    assert "Where is" in printed
    assert "OSError: docke…" in printed
    assert "     2 x OSError: docker: no space left\n     1 x TimeoutError: it hung" in printed
    assert all(len(each) <= 80 for each in printed.splitlines())

    def ids(*arguments: str) -> list[str]:
        assert main(["list", path, "--json", *arguments]) == 0
        return [json.loads(each)["id"][-1] for each in capsys.readouterr().out.splitlines()[:-1]]

    assert ids("--where", '"docker" in error') == ["0", "1"]
    assert ids("--where", 'error_type == "TimeoutError" and "Paris" in question') == ["2"]
    assert ids("--where", 'answer == "4"') == ["d"]
    assert ids("--sort=-question") == ["2", "1", "0", "d"]
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["list", path, "--group-by", "group_id"]) == 0
    assert "00000000 Where is Paris, 0?" in capsys.readouterr().out
    assert main(["list", path, "--group-by", "error_type"]) == 0
    assert re.search(r"^OSError +2 ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("width", [10, 60, 80, 100, 200])
def test_a_line_fits_the_terminal(width: int) -> None:
    """The least important columns are left out; id, status, reward and trained stay."""
    overview = Overview.of(Trajectory(id="ab" * 16, name="n" * 99, task_id="t\n\x1b[31m" * 9))
    table = Table(width)
    head, line = table.head(), table.line(overview)
    assert {"id", "status", "reward", "turns", "trained"} <= set(head.split())
    assert len(head) <= max(width, 50)
    assert len(line) <= max(width, 50)
    assert "\x1b" not in line


def test_as_json(listed: Any, recorded: Recording) -> None:
    """The lines are overviews, the last one the sums."""
    lines, summary = listed()
    live = sorted(recorded.trajectories, key=lambda t: (t.start_time_ns, t.id))
    assert lines == [json.loads(json.dumps(Overview.of(each).to_dict())) for each in live]
    assert summary["trajectories"] == 8
    assert summary["statuses"] == {"complete": 7, "error": 1}
    assert summary["reward"] == {"count": 8, "scored": 6, "mean": 0.5}
    assert summary["failed"] == 1
    for name in ("prompt_tokens", "sampled_tokens"):
        assert summary[name] == sum(line[name] or 0 for line in lines) > 0
        assert summary[f"{name}_known"] == 7
    assert summary["group_ids"] == 3
    assert summary["groups"] == []
    assert {one["kind"] for one in summary["findings"]} == {"unscored", "failed", "incomplete"}
    assert all(one["advice"] for one in summary["findings"])


def test_a_filter_acts_on_lines_and_sums(listed: Any) -> None:
    """On whole trajectories, by any field."""
    lines, summary = listed("--where", "reward > 0.5 and group_id != 'g1'")
    assert [(line["group_id"], line["reward"]) for line in lines] == [("g0", 1.0), ("g2", 1.0)]
    assert summary["trajectories"] == 2
    assert listed("--where", "reward is None")[1]["trajectories"] == 2
    assert listed("--where", "reward > 2") == (
        [],
        {**listed("--where", "turns < 0")[1], "trajectories": 0},
    )


@pytest.mark.parametrize(
    "command",
    [
        ["list", "--where", 'reward > 1 and metadata["a"] is None'],
        ["check", "--where", "seconds < 0"],
        ["show", "--where", "status == 'unknown'", "--sort", "reward"],
        ["show", "--id", "none", "--where", "turns > 0"],
        ["export", "--to", "tokens", "-o", "ROWS", "--where", "reward > 1"],
    ],
    ids=lambda command: command[0],
)
def test_no_call_is_read_of_what_is_not_kept(
    command: list[str], trajectories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the filter is not about calls."""

    def read(trajectory: Trajectory) -> None:
        raise AssertionError(f"a call of {trajectory.id} is read")

    monkeypatch.setattr(Trajectory, "completions", property(read))
    rows = str(tmp_path / "rows")
    assert main([rows if each == "ROWS" else each for each in (*command, trajectories)]) in (0, 1)


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Overview)])
def test_a_field_is_the_same_alone(name: str, recorded: Recording) -> None:
    """As a filter, or an order, asks for it."""
    for trajectory in recorded.trajectories:
        alone = Overview.of(trajectory, {name})
        assert getattr(alone, name) == getattr(Overview.of(trajectory), name)
        assert (alone.rows is None) == (name in HEAD)


@pytest.mark.parametrize("descending", [False, True])
def test_in_order_of_a_field(listed: Any, descending: bool) -> None:
    """Either way; those of which it is not known are last."""
    option = "--sort=-reward" if descending else "--sort=reward"
    rewards = [line["reward"] for line in listed(option)[0]]
    known = sorted((r for r in rewards if r is not None), reverse=descending)
    assert rewards == [*known, None, None]


def test_values_by_name_sort_and_group(tmp_path: Path, capsys: Output) -> None:
    """Of metrics, rewards and metadata, whatever is in it; what is not there is not known."""
    notes: list[Any] = [3, "b", {"x": 1}, None, [2], 1, "a", float("nan")]
    path = tmp_path / "t.jsonl"
    exporter = JsonlTrajectoryExporter(path)
    for number, note in enumerate(notes):
        metrics = {"tests": float(number % 3)} if number % 2 else {}
        exporter.export([Trajectory(id=f"{number:032x}", metrics=metrics, metadata={"note": note})])
    exporter.shutdown()

    def listed(*arguments: str) -> list[Any]:
        assert main(["list", "--json", *arguments, str(path)]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def numbers(*arguments: str) -> list[int]:
        return [int(line["id"], 16) for line in listed(*arguments)[:-1]]

    assert numbers('--sort=metrics["tests"]') == [3, 1, 7, 5, 0, 2, 4, 6]
    assert numbers("--sort=-metrics['tests']") == [5, 1, 7, 3, 0, 2, 4, 6]
    assert numbers("--sort=metadata['note']") == [5, 0, 4, 6, 1, 2, 3, 7]
    summary = listed("--group-by", 'metrics["tests"]')[-1]["summary"]
    assert summary["group_by"] == 'metrics["tests"]'
    assert [(g["value"], g["count"]) for g in summary["groups"]] == [
        (None, 4),
        (1.0, 2),
        (0.0, 1),
        (2.0, 1),
    ]


def test_by_the_values_of_a_field(
    listed: Any, spans: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each value with its count and rewards; groups by their mean, then the largest."""
    groups = listed("--group-by", "group_id")[1]["groups"]
    assert [(g["value"], g["count"], g["scored"], g["mean"]) for g in groups] == [
        ("g1", 3, 2, 0.5),
        ("g0", 2, 2, 0.5),
        ("g2", 2, 2, 0.5),
        (None, 1, 0, None),
    ]
    assert listed("--group-by", "versions")[1]["groups"][0]["value"] == []
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list", "--group-by", "status", spans]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("by status"))
    assert lines[at + 1].split()[:4] == ["complete", "7", "0", "6"]
    assert lines[at + 2].split()[:6] == ["error", "1", "1", "0", "-", "0.0%"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--where", "prize > 1"], "there is no field 'prize'"),
        (["--where", "import os"], "expected an expression"),
        (["--sort", "prize"], "--sort: expected one of id, name"),
        (["--sort=-versions"], "got 'versions'"),
        (["--sort", "metrics"], '--sort: expected a single value, such as metrics["..."]'),
        (["--sort", "metrics[0]"], "--sort: expected one of id, name"),
        (["--sort", "task_id["], "--sort: expected one of id, name"),
        (["--sort", "name['x']"], "--sort: expected one of id, name"),
        (["--group-by", ""], "--group-by: expected one of id, name"),
        (["--sort", ""], "--sort: expected one of id, name"),
        (["--group-by", "metadata"], "--group-by: expected a single value"),
    ],
)
def test_a_wrong_option_is_a_wrong_command_line(
    arguments: list[str], said: str, spans: str, capsys: Output
) -> None:
    """With what was got and what there is; nothing is read."""
    with pytest.raises(SystemExit) as ended:
        main(["list", *arguments, spans])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_lines_come_while_the_source_is_still_written() -> None:
    """The first line is there before the second trajectory has come, and memory holds one."""
    line = json.dumps(Trajectory(id="a" * 32, name="first", reward=1.0).to_dict())
    program = "import sys; from otel_rollout.command.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "list", "-"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        process.stdout.readline()
        assert process.stdout.readline().startswith("aaaaaaaa  first")
        process.stdin.close()
        assert "1 trajectory: 1 complete" in process.stdout.read()
    assert process.returncode == 0


def test_samples_of_a_group_stand_together(tmp_path: Path, capsys: Output) -> None:
    """By their index, each group once it is whole; what has no group comes at once."""
    ended = [("b", 1, 2), ("a", 2, 3), (None, None, None), ("a", 0, 3), ("b", 0, 2), ("c", 1, 9)]
    lines = [
        line(f"{group}{n}", group_id=group, sample_index=n, group_size=size)
        for group, n, size in [*ended, ("a", 1, 3), ("c", 0, 9)]
    ]
    assert main(["list", "--json", str(write(tmp_path / "t.jsonl", *lines))]) == 0
    found = [json.loads(text).get("id") for text in capsys.readouterr().out.splitlines()]
    assert found[:-1] == ["NoneNone", "b0", "b1", "a0", "a1", "a2", "c0", "c1"]


def test_values_of_different_kinds_are_sorted(tmp_path: Path, capsys: Output) -> None:
    """A text may be where others have a number."""
    path = tmp_path / "t.jsonl"
    JsonlTrajectoryExporter(path).export(
        [Trajectory(id=name, metadata={"n": value}) for name, value in (("a", "x"), ("b", 3))]
    )
    assert main(["list", "--json", "--sort", 'metadata["n"]', str(path)]) == 0
    first, second, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [first["metadata"]["n"], second["metadata"]["n"]] == [3, "x"]


def test_where_none_matches_that_is_said(trajectories: str, capsys: Output) -> None:
    """With how many there are; `--sort -FIELD` is what it looks like."""
    capsys.readouterr()
    for verb in ("list", "show"):
        assert main([verb, trajectories, "--where", "reward > 9"]) == 0
        assert "--where: 0 of 8 trajectories match" in capsys.readouterr().err
    assert main(["list", trajectories, "--sort", "-reward"]) == 0
    apart = capsys.readouterr().out
    assert main(["list", trajectories, "--sort=-reward"]) == 0
    assert capsys.readouterr().out == apart


def test_a_last_line_that_is_not_whole_is_named(tmp_path: Path, capsys: Output) -> None:
    """Its writer may still be writing, so the status is 0; but 1 where the file has no other."""
    path = write(tmp_path / "t.jsonl", line("a" * 32, Call([user("hi")])))
    whole = path.read_bytes()
    for content, count in ((whole + whole[:300], 1), (whole[:300], 0)):
        path.write_bytes(content)
        for verb in ("list", "show"):
            assert main([verb, str(path)]) == 1 - count
            said = capsys.readouterr()
            assert f"{path}, line {count + 1}, the last one, is not whole" in said.err
            assert ("aaaaaaaa" in said.out) == bool(count)


def test_no_trajectory_is_said(tmp_path: Path, spans: str, capsys: Output) -> None:
    """An empty list has no head; as JSON the sums are there."""
    assert main(["list", "--where", "turns > 99", spans]) == 0
    assert capsys.readouterr() == ("", "--where: 0 of 8 trajectories match\n")


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=30))
def test_the_mean_is_that_of_all_rewards(rewards: list[float | None]) -> None:
    """Though none of them is kept."""
    sums = Scores()
    for reward in rewards:
        sums.add(SampleRow(reward))
    known = [reward for reward in rewards if reward is not None]
    assert (sums.count, sums.scored) == (len(rewards), len(known))
    if known:
        assert math.isclose(sums.mean, fmean(known), abs_tol=1e-6)
    else:
        assert sums.to_dict()["mean"] is None


PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"^--where '(.*)'$", PAGE, re.MULTILINE))
def test_the_filters_of_the_page_are_filters(text: str) -> None:
    """Each can be asked of a trajectory."""
    assert Where.parse(text).matches(Overview.of(Trajectory(id="a"))) in (True, False)


def test_the_page_names_what_the_summary_has(listed: Any) -> None:
    """Every field of it, in its order."""
    summary = listed()[1]
    described = PAGE[PAGE.index('`{"summary": ...}` with `trajectories`') :]
    places = [described.index(f"`{name}`") for name in summary if name != "group_by"]
    assert places == sorted(places)
    assert places[-1] < 800
