"""The verb `check`: exit status and findings, for a pipeline before its trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import Trajectory, rollout
from otel_rollout import semconv as sc
from otel_rollout.command.cli import main
from otel_rollout.testing import Reply
from otel_rollout.view import findings_of
from otel_rollout.view.verbs.requirements import DEFAULT, REQUIREMENTS
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording
from tests.kit.transports import to_json_line

Output = pytest.CaptureFixture[str]


def written(path: Path, *trajectories: Trajectory) -> str:
    """A file of these trajectories."""
    path.write_text("".join(json.dumps(each.to_dict()) + "\n" for each in trajectories))
    return str(path)


@pytest.fixture
def good(recording: Recording, clients: Clients) -> Trajectory:
    """A trajectory that lacks nothing."""
    client = clients.sync(clients.serve())
    with rollout("agent", task_id="t1") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        trajectory.reward = 1.0
    return trajectory


@pytest.fixture
def bad(recording: Recording, clients: Clients) -> Trajectory:
    """One whose server sends no token ids, without a reward."""
    server = clients.serve(Reply("a", id="bad"), token_ids=False, logprobs=False)
    client = clients.sync(server)
    with rollout("other") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
    return trajectory


def test_what_lacks_nothing_passes(good: Trajectory, tmp_path: Path, capsys: Output) -> None:
    """Status 0 and one line; every requirement may be asked for."""
    path = written(tmp_path / "t.jsonl", good)
    assert main(["check", path]) == 0
    assert capsys.readouterr() == (f"1 trajectory: {', '.join(DEFAULT)}\n", "")
    assert main(["check", path, "--require", ",".join(REQUIREMENTS)]) == 0


def test_what_fails_is_said_with_what_to_do(
    good: Trajectory, bad: Trajectory, tmp_path: Path, capsys: Output
) -> None:
    """Status 1; each cause once, also if it fails two requirements, with what has it."""
    path = written(tmp_path / "t.jsonl", good, bad)
    assert main(["check", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("     1 x exact, tokens: the server sends token ids to those")
    assert lines[1].strip().startswith("Ask the server for them")
    assert lines[2].strip() == bad.id
    assert lines[3] == "     1 x reward: it has no reward"
    assert lines[-1] == "2 trajectories, 1 fail: exact 1, tokens 1, reward 1"


@pytest.mark.parametrize(
    ("asked", "server", "mixed"),
    [
        ({}, [("7", 1), ("8", 9)], "7, 8"),
        ({"policy_version": 3}, [("7", 1), ("8", 9)], "7, 8"),
        ({"policy_version": iter([3, 3, 4, 4]).__next__}, [], "3, 4"),
        ({"policy_version": 3}, [("default", 9)], None),
        ({}, [], None),
    ],
)
def test_several_policy_versions(
    recording: Recording,
    clients: Clients,
    tmp_path: Path,
    capsys: Output,
    asked: dict[str, Any],
    server: list[tuple[str, int]],
    mixed: str | None,
) -> None:
    """By the rollout's word or the server's; what is not known is no second version."""
    client = clients.sync(clients.serve(Reply("abc", weight_versions=server)))
    with rollout("x", **asked) as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
    path = written(tmp_path / "t.jsonl", trajectory)
    assert main(["check", path, "--require", "one-policy"]) == int(mixed is not None)
    cause = f"     1 x one-policy: 2 policy versions sampled what trains: {mixed}"
    assert (cause in capsys.readouterr().out) == (mixed is not None)


def test_a_cause_is_printed_once_for_all_that_have_it(
    good: Trajectory, bad: Trajectory, tmp_path: Path, capsys: Output
) -> None:
    """Three are named; causes are in the order of the requirements, in the last line too."""
    poor = []
    for number in range(5):
        data = json.dumps(bad.to_dict()).replace(bad.id, f"poor-{number}")
        poor.append(Trajectory.from_dict(json.loads(data)))
    path = written(tmp_path / "t.jsonl", good, *poor)
    assert main(["check", path, "--require", "reward,exact,tokens"]) == 1
    lines = capsys.readouterr().out.splitlines()
    causes = [line.split(":")[0] for line in lines if " x " in line]
    assert causes == ["     5 x reward", "     5 x exact, tokens"]
    assert sum("poor-0, poor-1, poor-2 and 2 more" in line for line in lines) == 2
    assert lines[-1] == "6 trajectories, 5 fail: reward 5, exact 5, tokens 5"


def test_a_call_that_is_missing_fails_two_requirements_by_one_cause(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: Output
) -> None:
    """All model calls were lost: `complete` and `tokens` fail, and the sentence is there once."""
    client = clients.sync(clients.serve())
    with rollout("agent") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        trajectory.reward = 1.0
    path = tmp_path / "spans.jsonl"
    kept = [each for each in recording.spans if sc.EXCHANGE_VERSION not in (each.attributes or {})]
    path.write_text("".join(to_json_line([span]) for span in kept))
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("     1 x complete, tokens: 1 ")
    assert out.endswith("1 trajectory, 1 fail: complete 1, tokens 1\n")


@pytest.mark.parametrize(
    ("required", "fails"),
    [("complete,undamaged", []), ("reward", ["reward"]), ("tokens, exact", ["exact", "tokens"])],
)
def test_only_what_is_required_fails(
    required: str, fails: list[str], bad: Trajectory, tmp_path: Path, capsys: Output
) -> None:
    """The other findings are in the JSON all the same, without a requirement."""
    path = written(tmp_path / "t.jsonl", bad)
    assert main(["check", "--json", path, "--require", required]) == int(bool(fails))
    found, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["id"], found["ok"], found["fails"]) == (bad.id, not fails, fails)
    findings = [one.to_dict() for one in findings_of(bad)]
    assert [{k: v for k, v in one.items() if k != "fails"} for one in found["findings"]][
        : len(findings)
    ] == findings
    assert {one["fails"] for one in found["findings"]} - {None} == set(fails)
    assert last["summary"] == {
        "ok": not fails,
        "required": [name.strip() for name in required.split(",")],
        "trajectories": 1,
        "failed": int(bool(fails)),
        "fails": dict.fromkeys(fails, 1),
        "unreadable": 0,
    }


def test_a_filter_leaves_out_what_is_known(
    good: Trajectory, bad: Trajectory, tmp_path: Path, capsys: Output
) -> None:
    """What it does not keep is not checked; if it keeps none, that fails."""
    path = written(tmp_path / "t.jsonl", good, bad)
    assert main(["check", path, "--where", "reward is not None"]) == 0
    assert main(["check", path, "--where", "turns > 5"]) == 1
    error = capsys.readouterr().err
    assert "no trajectory to train on: there is none that --where keeps (0 of 2)" in error


def test_an_id_that_comes_twice_is_a_duplicate(
    good: Trajectory, tmp_path: Path, capsys: Output
) -> None:
    """Over all sources."""
    one, two = (written(tmp_path / name, good) for name in ("a.jsonl", "b.jsonl"))
    assert main(["check", one]) == 0
    assert main(["check", one, two]) == 1
    assert "unique: its id came before in the sources" in capsys.readouterr().out
    assert main(["check", one, two, "--require", "reward"]) == 0
    data = {**good.to_dict(), "group_id": "another", "sample_index": 3}
    three = written(tmp_path / "c.jsonl", Trajectory.from_dict(data), good)
    assert main(["check", one, three, "--require", "whole,unique"]) == 1
    assert "unique: its id came before in the sources" in capsys.readouterr().out


def test_calls_that_are_missing_fail(
    good: Trajectory, recording: Recording, tmp_path: Path, capsys: Output
) -> None:
    """Of spans as of trajectories."""
    path = tmp_path / "spans.jsonl"
    kept = [each for each in recording.spans if sc.EXCHANGE_VERSION not in (each.attributes or {})]
    path.write_text("".join(to_json_line([span]) for span in kept))
    assert main(["check", "--json", str(path)]) == 1
    found, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert "complete" in found["fails"]


def test_what_is_not_to_be_trained_on_needs_no_reward(
    recording: Recording, clients: Clients, tmp_path: Path
) -> None:
    """Nor tokens; its calls have to be there."""
    client = clients.sync(clients.serve())
    with rollout("judge", trainable=False):
        client.chat.completions.create(model="m", messages=[user("hi")])
    path = written(tmp_path / "t.jsonl", recording.trajectory)
    assert main(["check", path]) == 0


def test_an_empty_source_fails(tmp_path: Path, capsys: Output) -> None:
    """A pipeline that lost its data must not train on nothing."""
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert main(["check", str(path)]) == 2
    assert "there is none in the sources" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["no json\n", None])
def test_what_cannot_be_read_is_another_status(
    content: str | None, good: Trajectory, tmp_path: Path, capsys: Output
) -> None:
    """2, whatever else is found: neither fine nor a finding."""
    path = written(tmp_path / "t.jsonl", good)
    if content is None:
        assert main(["check", path, str(tmp_path / "not there")]) == 2
        assert "No such file" in capsys.readouterr().err
    else:
        Path(path).write_text(Path(path).read_text() + content)
        assert main(["check", "--json", path]) == 2
        summary: Any = json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]
        assert (summary["ok"], summary["unreadable"]) == (False, 1)


@pytest.mark.parametrize("required", ["", "tokens,everything", ","])
def test_a_requirement_that_is_not_known_is_a_wrong_command_line(
    required: str, tmp_path: Path, capsys: Output
) -> None:
    """Status 2, with what there is."""
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path), "--require", required])
    assert ended.value.code == 2
    assert f"expected some of {', '.join(REQUIREMENTS)}" in capsys.readouterr().err


def test_few_causes_are_printed_of_many(good: Trajectory, tmp_path: Path, capsys: Output) -> None:
    """The others are counted; the JSON has all."""
    many = []
    for number in range(25):
        error = {"type": "E", "message": f"cause {number}", "traceback": ""}
        data = {"id": f"{number:032x}", "status": "error", "error": error, "exchanges": []}
        many.append(Trajectory.from_dict({**good.to_dict(), **data}))
    path = written(tmp_path / "t.jsonl", *many)
    assert main(["check", path, "--require", "no-failures"]) == 1
    out = capsys.readouterr().out
    assert out.count(" x no-failures: ") == 20
    assert "and 5 more causes (--json has all)" in out
    assert main(["check", "--json", path]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 26


def test_the_page_names_every_requirement() -> None:
    """In the order of the command's help, with the same words and the kind that fails it."""
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    rows = [
        f"| `{name}` | {what} | {f'`{kind}` ' if kind else ''}|"
        for name, (kind, what) in REQUIREMENTS.items()
    ]
    assert "\n".join(rows) in page
    assert tuple(REQUIREMENTS)[:7] == DEFAULT
