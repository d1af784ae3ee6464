"""The cookbook's page about Claude Code, run as it stands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter
from otel_rollout.testing import ModelServer, Reply, ToolCall
from tests.agents.ran import FILE, RIGHT, WRONG, results

pytestmark = pytest.mark.agent

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook" / "claude-code.md").read_text()
SCRIPT, *COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
(ROWS,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
_cwd = re.compile(r"[^\s\"\\\\]*/work-\d")


def model(body: dict[str, Any]) -> Reply:
    """Reads the file and mends it, in the folder that the agent says it works in."""
    if not body.get("tools"):
        return Reply("A sum")
    (where, *_) = sorted(set(_cwd.findall(json.dumps(body))), key=len)
    file = f"{where}/{FILE}"
    edit = {"file_path": file, "old_string": WRONG, "new_string": RIGHT, "replace_all": False}
    steps = [("Read", {"file_path": file}), ("Edit", edit)]
    done = len(results(body))
    if done == len(steps):
        return Reply("It prints 4 now.")
    name, arguments = steps[done]
    return Reply(tool_calls=[ToolCall(name, json.dumps(arguments))])


def test_train_claude_code(folder: Path):
    """Its commands run one after the other: a group of two, with rewards, and rows of them."""
    (folder / "sample.sh").write_text(SCRIPT)
    printed: list[str] = []
    with ModelServer(model, token_ids=True, logprobs=True) as server:
        for command in COMMANDS:
            ran = subprocess.run(
                ["sh", "-ec", command.replace("http://localhost:8000/v1", server.base_url)],
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            printed.append(ran.stdout)
    trajectories = list(JsonlTrajectoryExporter.read(folder / "trajectories.jsonl"))
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0]
    assert {trajectory.sample_index for trajectory in trajectories} == {0, 1}
    assert len({trajectory.group_id for trajectory in trajectories}) == 1
    assert all(len(trajectory.completions) == 3 for trajectory in trajectories)
    exec(ROWS, {})
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["advantage"] for row in rows] == [0.0, 0.0]
    assert all(len(row["messages"]) == len(trajectories[0].messages()) for row in rows)
    assert {"Read", "Edit", "Bash"} <= {tool["name"] for tool in rows[0]["tools"]}
    assert len(printed) == 2
    assert "It prints 4 now." in printed[1]
