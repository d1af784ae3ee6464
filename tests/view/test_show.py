"""The verb `show`: what is folded, and what is said of a trajectory beside its messages."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import Trajectory, record_reward, rollout
from otel_rollout.command.cli import main
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.view import findings_of, format_trajectory
from tests.kit.conversations import said, user
from tests.kit.recording import Clients, Recording
from tests.kit.transports import to_json_line
from tests.view.made import Call, made

Output = pytest.CaptureFixture[str]


@pytest.fixture
def long(recording: Recording, clients: Clients, tmp_path: Path) -> str:
    """A rollout of 20 turns that logs 40 lines, and one of a single turn with a reward."""
    client = clients.sync(clients.serve(lambda body: f"reply {len(body['messages'])}"))
    with rollout("long", sample_index=3, policy_version=7) as trajectory:
        messages: list[Any] = []
        for turn in range(20):
            messages.append(user(f"question {turn}"))
            client.chat.completions.create(model="m", messages=messages)
            messages.append(said(f"reply {len(messages)}"))
            trajectory.log(f"line {turn} of the first\x1b[31m")
            trajectory.log(f"line {turn} of the second")
    with rollout("short") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        trajectory.reward = 1.0
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(to_json_line([span]) for span in recording.spans))
    return str(path)


def test_a_long_history_is_folded(long: str, capsys: Output) -> None:
    """Its first and last messages are shown, and how many are between; `--full` shows all."""
    assert main(["show", long, "--where", "name == 'long'"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("│      … 30 messages (--full)")
    assert "question 1" in lines[at - 2]
    assert "question 17" in lines[at + 1]
    assert "question 10" not in "".join(lines)
    assert "20 of 20 completions train" in lines[-1]
    assert main(["show", long, "--full"]) == 0
    full = capsys.readouterr().out
    assert "(--full)" not in full
    assert all(f"question {turn}" in full for turn in range(20))


def test_a_short_history_is_not(long: str, capsys: Output) -> None:
    """A fold of one message would be no shorter."""
    assert main(["show", long, "--where", "turns < 5"]) == 0
    assert "…" not in capsys.readouterr().out


def test_logs_sample_versions_and_seconds_are_shown(
    long: str, recording: Recording, capsys: Output
) -> None:
    """Of many log lines the first and the last; what could steer a terminal is escaped."""
    assert main(["show", long, "--where", "name == 'long'"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "├─ complete  sample 3  versions 7"
    logs = [line for line in lines if line.startswith("├─ log: ")]
    assert len(logs) == 20
    assert logs[0] == "├─ log: line 0 of the first\\x1b[31m"
    assert "│      … 20 lines (--full)" in lines
    assert lines[-1].endswith(" s")
    assert "versions" not in format_trajectory(recording.trajectories[1])


def test_findings_are_shown_with_what_to_do(long: str, recording: Recording) -> None:
    """Each once, with its advice; a trajectory that lacks nothing has none."""
    first, second = recording.trajectories
    (finding,) = findings_of(first)
    lines = format_trajectory(first, width=None).splitlines()
    at = lines.index(f"├─ unscored: {finding.text}")
    assert lines[at + 1] == f"│      → {finding.advice}"
    assert "→" not in format_trajectory(second)


def test_equal_findings_of_several_completions_are_one(
    recording: Recording, clients: Clients
) -> None:
    """With how many there are; a warning is a line of its own, as it is."""
    client = clients.sync(clients.serve("a", token_ids=False, logprobs=False))
    with rollout("agent") as trajectory:
        for text in ("one", "two", "three"):
            client.chat.completions.create(model="m", messages=[user(text)])
        trajectory.reward = 1.0
    text = format_trajectory(trajectory, width=200)
    assert text.count("warning: 3 completions: the server sends token ids to") == 1
    broken = type(trajectory).from_dict({**trajectory.to_dict(), "warnings": ["it is odd 1"]})
    assert "├─ warning: it is odd 1\n│      → Read the warning" in format_trajectory(
        broken, width=200
    )
    assert "└─ 3 of 3 completions train (3 as messages alone)" in text


def test_nothing_of_a_failed_rollout_trains(recording: Recording, clients: Clients) -> None:
    """Without a reward: no mark says that a reply trains, and the advice is there to its end."""
    client = clients.sync(clients.serve("yes"))
    with suppress(ValueError), rollout("agent") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        raise ValueError("no")
    text = format_trajectory(trajectory, width=60)
    assert "○ assistant" in text
    assert "●" not in text
    assert text.splitlines()[-1].startswith("└─ 0 of 1 completions train, ")
    words = " ".join(text.replace("│", " ").split())
    for finding in findings_of(trajectory):
        assert finding.advice in words
    assert max(map(len, text.splitlines())) <= 60
    trajectory.reward = 0.0
    assert "● assistant" in format_trajectory(trajectory)


def test_what_was_done_comes_before_what_was_thought() -> None:
    """A line has the length of the reasoning alone; without a width it is whole."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    thought: Any = {"role": "assistant", "reasoning_content": "hm " * 100, "tool_calls": [call]}
    trajectory = made(Call([user("Where?")], thought))
    (shown,) = [each for each in format_trajectory(trajectory).splitlines() if "assistant" in each]
    assert re.search(r"assistant +\(think 300\) .*look\(", shown)
    assert "hm hm hm" not in shown
    assert "hm hm hm" in format_trajectory(trajectory, width=None)


def test_an_error_is_whole_on_lines_of_its_own() -> None:
    """At any width; a very long one ends with an ellipsis."""
    message = "Error code: 400: the context is 32768 tokens, you requested 40112 tokens."
    trajectory = Trajectory(
        id="a", status="error", error={"type": "BadRequestError", "message": message}
    )
    for width in (60, 80, 200, None):
        lines = format_trajectory(trajectory, width=width).splitlines()
        assert lines[1].split() == ["├─", "error"]
        text = " ".join(" ".join(lines).replace("│", " ").split())
        assert f"error: BadRequestError: {message}" in text
    trajectory.error = {"type": "E", "message": "x " * 2000}
    lines = format_trajectory(trajectory, width=80).splitlines()
    assert [each[-1] for each in lines[2:7]] == ["x", "x", "x", "x", "…"]


def test_filter_and_order(long: str, tmp_path: Path, capsys: Output) -> None:
    """In `show` as in `rebuild`: whole trajectories; those without a value are last."""
    assert main(["show", long, "--sort", "reward"]) == 0
    out = capsys.readouterr().out
    assert out.index("short ") < out.index("long ")
    assert main(["show", long]) == 0
    out = capsys.readouterr().out
    assert out.index("long ") < out.index("short ")
    path = tmp_path / "t.jsonl"
    for arguments, names in (
        ([], ["long", "short"]),
        (["--sort=turns"], ["short", "long"]),
        (["--sort=-turns"], ["long", "short"]),
        (["--where", "'unscored' in findings"], ["long"]),
    ):
        assert main(["rebuild", long, "-o", str(path), "--force", *arguments]) == 0
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["name"] for row in rows] == names


def test_export_filters_before_it_groups(long: str, tmp_path: Path, capsys: Output) -> None:
    """From spans and from trajectories; an interrupted export does not go on with another one."""
    made, path = str(tmp_path / "t.jsonl"), str(tmp_path / "rows.jsonl")
    assert main(["rebuild", long, "-o", made]) == 0
    for source in (long, made):
        arguments = ["export", "--to", "tokens", source, "-o", path, "--restart", "--force"]
        assert main([*arguments, "--where", "reward is not None"]) == 0
        assert "1 group, 1 trajectory -> 1 row" in capsys.readouterr().err
        assert main([*arguments, "--where", "reward > 5"]) == 1
        assert "0 groups, 0 trajectories" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--where", "reward >"])


def test_print_shows_the_tree(recording: Recording, clients: Clients) -> None:
    """`print(trajectory)` is for people; `repr`, in a line, is for logs."""
    with rollout("agent") as trajectory:
        clients.sync(clients.serve("hi")).chat.completions.create(model="m", messages=[user("hi")])
    assert str(trajectory) == f"{trajectory}" == format_trajectory(trajectory)
    assert "\n" not in repr(trajectory)


@pytest.mark.usefixtures("recording")
def test_a_line_is_for_its_text(clients: Clients) -> None:
    """Ids of servers are cut to their beginning, letters are themselves, weights have a total."""
    id_ = "chatcmpl-" + "0f" * 16
    call = ToolCall("look", '{"city": "M\\u00fcnchen \\ud83d\\ude00 \\\\u00e4", "n": 1.50}', id="c")
    client = clients.sync(clients.serve([Reply(tool_calls=[call], id=id_)]))
    with rollout("agent") as trajectory:
        client.chat.completions.create(model="m", messages=[user("hi")])
        record_reward(1.0, name="tests", weight=0.5)
        record_reward(0.5, name="style", weight=0.5)
    text = format_trajectory(trajectory, width=100)
    assert '→ look({"city": "München 😀 \\\\u00e4", "n": 1.50})  [chatcmpl-0f0f0f0f]' in text
    assert id_ in format_trajectory(trajectory, width=None)
    assert "reward tests: 1 x 0.5" in text
    assert "reward in all: 0.75" in text
