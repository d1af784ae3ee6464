"""Every example and benchmark runs and prints what it claims."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from otel_rollout.testing import ModelServer, Reply
from tests.kit.programs import ROOT, python

pytestmark = pytest.mark.slow


async def test_port_from_rllm() -> None:
    """What the ported workflow prints: endings, metrics, and the rows of what is not masked."""
    before, after = re.findall(
        r"```python\n(.*?)```", (ROOT / "examples" / "port_from_rllm.md").read_text(), re.DOTALL
    )
    compile(before, "port_from_rllm.md", "exec")
    guesser = "class Guesser", "\n\n\nclass GuessWorkflow"
    bodies = [code[code.index(guesser[0]) : code.index(guesser[1])] for code in (before, after)]
    assert bodies[0].replace("(BaseAgent)", "") == bodies[1]  # the agent stays as it is

    def guess(request: dict[str, Any]) -> Reply:
        return Reply(str(2 * sum(m["role"] == "assistant" for m in request["messages"]) + 3))

    with ModelServer(guess, token_ids=True, logprobs=True) as server:
        lines = (await asyncio.to_thread(python, "-c", after, server=server)).splitlines()
    assert lines[0] == "number-3:0 env_done {'guesser_acc': 1.0}"
    assert [line.split()[0] for line in lines[4:8]] == [f"number-7:{n}" for n in range(4)]
    assert lines[-1] == "8 rows, 0 masked"
    with ModelServer("4", token_ids=True, logprobs=True) as server:
        lines = (await asyncio.to_thread(python, "-c", after, server=server)).splitlines()
    assert {line.split()[1] for line in lines[:8]} == {"max_turns_exceeded"}
    assert lines[-1] == "0 rows, 8 masked"


def test_the_solver_judge_example() -> None:
    """It prints the three trees of an episode, how the four ended, and how many rows there are."""
    printed = python(str(ROOT / "examples" / "workflow_solver_judge.py"))
    names = re.findall(r"^(\w+) [0-9a-f]{32}$", printed, re.MULTILINE)
    assert sorted(names) == ["judge", "solver", "solver"]
    assert "group sum:judge" in printed
    assert printed.count("1 of 1 completions train") == 3
    assert printed.count("env_done correct=") == 4
    assert printed.endswith("12 rows to train on, 0 trajectories masked\n")


def test_the_toy_example(tmp_path: Path) -> None:
    """It says at each step how well it went, that goes up, and the picture is one."""
    picture = tmp_path / "reward.png"
    printed = python(
        str(ROOT / "examples" / "train_toy.py"), "--steps", "6", "--plot", str(picture)
    )
    rewards = [float(value) for value in re.findall(r"^step +\d+  reward (\S+)", printed, re.M)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_quickstart_example() -> None:
    """The example prints four trajectories, each with what trains in it."""
    printed = python(str(ROOT / "examples" / "quickstart.py"))
    assert len(re.findall(r"^travel_agent [0-9a-f]{32}\n├─ complete", printed, re.MULTILINE)) == 4
    assert printed.count("4 of 4 completions train") == 3
    assert printed.count("1 of 1 completions train") == 1
    assert printed.count("├─ history 2") == 3
    assert "warning" not in printed
    assert "trace:" not in printed


def test_the_quickstart_example_on_another_endpoint() -> None:
    """With OPENAI_BASE_URL the example's agent talks to that endpoint."""
    with ModelServer("I do not know.") as server:
        printed = python(str(ROOT / "examples" / "quickstart.py"), server=server)
        assert len(server.exchanges) == 4
    assert printed.count("I do not know.") == 4


def test_the_by_hand_example() -> None:
    """The example by hand prints the trajectory and the spans."""
    printed = python(str(ROOT / "examples" / "by_hand.py"))
    assert "1 of 1 completions train" in printed
    assert printed.count("span: invoke_agent summarize") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["imports.py", "--repetitions", "1"],
        ["overhead.py", "--repetitions", "1", "--turns", "1", "3", "--calls", "6"],
        ["rebuild.py", "--repetitions", "1", "--turns", "10"],
        ["transports.py", "--requests", "50"],
        ["workflows.py", "--repetitions", "1", "--episodes", "2", "--memory", "20"],
        [
            "lateness.py",
            "--parts",
            "loop",
            "--seconds",
            "0.1",
            "--rounds",
            "1",
            "--variants",
            "bare",
            "default, both",
        ],
        ["training.py", "--trajectories", "2", "--turns", "3", "--tokens", "20"],
    ],
)
def test_benchmarks_run(arguments: list[str]) -> None:
    """The benchmarks run, and check that each variant captured what it claims."""
    name, *options = arguments
    printed = python(str(ROOT / "benchmarks" / name), *options)
    assert len(printed.splitlines()) >= 4
