"""What the README and the examples show, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import rollout
from otel_rollout.testing import ModelServer, Reply, ToolCall

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(text: str) -> str:
    """The README's block that has this text."""
    (found,) = [str(code) for code in BLOCKS if text in code]
    return found


def python(
    *arguments: str, server: ModelServer | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """What a Python program prints; it must succeed."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OPENAI_"))}
    variables |= {"PYTHONPATH": str(ROOT), **(environment or {})}
    if server is not None:
        variables |= {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none-needed"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_of_the_readme() -> None:
    """The first block runs as it stands and prints a reward, the messages, ids and logprobs."""
    with ModelServer(Reply("It is 4.")) as server:
        printed = python("-c", block("gather_trajectory(solve("), server=server)
    first, second = printed.splitlines()
    assert first.startswith("1.0 [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant'")
    assert re.fullmatch(r"\[\d+(, \d+)*\] \[-\d.*\]", second)


def test_inside_a_rollout() -> None:
    """The block about what can be done inside a rollout runs inside one."""
    code = block("history.append(")
    otel_rollout.configure()
    call = SimpleNamespace(id="call_1", function=SimpleNamespace(name="f", arguments="{}"))
    reply = Reply(tool_calls=[ToolCall("f", "{}", id="call_1")])

    def judge(client: openai.OpenAI) -> Any:
        message = {"role": "user", "content": "good?"}
        return client.chat.completions.create(model="m", messages=[message])  # type: ignore[list-item]

    with (
        ModelServer([reply, "yes"]) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none-needed") as client,
        rollout("agent") as trajectory,
    ):
        completion = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "go"}]
        )
        exec(code, {"completion": completion, "call": call, "client": client, "judge": judge})
    assert trajectory.reward == 0.7
    assert trajectory.rewards["format"] == 0.5
    (sampled,) = trajectory.completions
    assert sampled.reward == 0.2
    assert [message["role"] for message in trajectory.messages()] == ["user", "assistant", "tool"]
    assert trajectory.metrics["turns"] == 3
    assert trajectory.warnings == []


def test_by_hand() -> None:
    """The block that sets everything up by hand records a rollout."""
    code = block("capture.instrument()") + (
        "\nimport openai\n"
        "from otel_rollout import rollout\n"
        "with rollout('x') as trajectory:\n"
        "    message = {'role': 'user', 'content': 'hi'}\n"
        "    openai.OpenAI().chat.completions.create(model='m', messages=[message])\n"
        "print(trajectory.messages()[1]['content'], trajectory.warnings)\n"
    )
    with ModelServer("hello") as server:
        assert python("-c", code, server=server) == "hello []\n"


def test_reading_back_is_valid() -> None:
    """The block that reads trajectories back names what there is."""
    code = block("read_jaeger(")
    compile(code, "README.md", "exec")
    for line in code.splitlines():
        if line.startswith("from "):
            exec(line)


def test_every_block_is_run() -> None:
    """A block that is added to the README needs a test here."""
    assert len(BLOCKS) == 4


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
        ["overhead.py", "--repetitions", "1", "--messages", "1"],
        ["rebuild.py", "--repetitions", "1", "--turns", "10"],
    ],
)
def test_benchmarks_run(arguments: list[str]) -> None:
    """The benchmarks run, and check that each variant captured what it claims."""
    name, *options = arguments
    printed = python(str(ROOT / "benchmarks" / name), *options)
    assert len(printed.splitlines()) >= 4
