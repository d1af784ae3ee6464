"""Real agents that read, mend and run a file: every byte that the server saw is recorded."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import to_token_rows
from otel_rollout.testing import ModelServer, Reply, ToolCall
from otel_rollout.wire import dumps
from tests.agents.ran import FILE, RIGHT, TASK, WRONG, Agent, Ran, results

pytestmark = pytest.mark.agent

RUN = f"{shlex.quote(sys.executable)} {FILE}"
PROVIDER = (
    '{name="gateway",base_url="$OPENAI_BASE_URL",env_key="OPENAI_API_KEY",wire_api="responses"}'
)
CODEX = (
    "exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m m "
    f'-c model_provider=gateway -c "model_providers.gateway={json.dumps(PROVIDER)[1:-1]}" "$0"'
)
"""Codex takes the address of a provider from its configuration only."""
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"m": {}},
        }
    },
}


@dataclass(frozen=True)
class Kind:
    """One of the agents: how it is run, and the tools that it has."""

    command: Sequence[str]
    steps: Callable[[Path], Sequence[tuple[str, dict[str, Any]]]]
    """The tools that read, mend and run the file, in this folder."""
    path: str
    """The end of the path of its calls."""


CLAUDE_COMMAND = ("claude", "-p", TASK, "--model", "m", "--allowedTools", "Read,Edit,Bash,Agent")
KINDS = {
    "claude": Kind(
        CLAUDE_COMMAND,
        lambda folder: [
            ("Read", {"file_path": str(folder / FILE)}),
            (
                "Edit",
                {
                    "file_path": str(folder / FILE),
                    "old_string": WRONG,
                    "new_string": RIGHT,
                    "replace_all": False,
                },
            ),
            ("Bash", {"command": RUN, "description": "Run it"}),
        ],
        "/v1/messages?beta=true",
    ),
    "codex": Kind(
        ("sh", "-c", CODEX, TASK),
        lambda _: [
            ("exec_command", {"cmd": f"cat {FILE}"}),
            ("exec_command", {"cmd": f"sed -i 's/2 - 2/2 + 2/' {FILE}"}),
            ("exec_command", {"cmd": RUN}),
        ],
        "/v1/responses",
    ),
    "opencode": Kind(
        ("opencode", "run", "-m", "gateway/m", TASK),
        lambda folder: [
            ("read", {"filePath": str(folder / FILE)}),
            ("edit", {"filePath": str(folder / FILE), "oldString": WRONG, "newString": RIGHT}),
            ("bash", {"command": RUN, "description": "Run it"}),
        ],
        "/v1/chat/completions",
    ),
}


def scripted(steps: Sequence[tuple[str, dict[str, Any]]]) -> Callable[[dict[str, Any]], Reply]:
    """A model that takes one step after each result, then answers; titles are none of the steps."""

    def reply(body: dict[str, Any]) -> Reply:
        if not body.get("tools"):
            return Reply("A sum that is mended")
        done = len(results(body))
        if done == len(steps):
            return Reply("It prints 4 now: 2 + 2 = 4 ✓")
        name, arguments = steps[done]
        return Reply(f"Step {done + 1}.", tool_calls=[ToolCall(name, json.dumps(arguments))])

    return reply


def check_every_byte(ran: Ran) -> None:
    """What the server was asked and has answered is in the completions, in the order of the end."""
    recorded = [dumps(completion.request).encode() for completion in ran.trajectory.completions]
    assert sorted(recorded) == sorted(exchange.request for exchange in ran.exchanges)
    assert {exchange.status for exchange in ran.exchanges} == {200}
    for completion in ran.trajectory.completions:
        assert (completion.status, completion.stream) == ("complete", True)


@pytest.mark.parametrize("name", KINDS)
def test_an_agent_mends_a_file(agent: Agent, name: str):
    """Four turns with three tools that really run; each turn continues the one before."""
    kind = KINDS[name]
    folder = Path.cwd()
    (folder / "opencode.json").write_text(json.dumps(OPENCODE))
    with ModelServer(scripted(kind.steps(folder)), token_ids=True, logprobs=True) as server:
        ran = agent(server, kind.command)
    assert (folder / FILE).read_text() == RIGHT
    assert "It prints 4 now: 2 + 2 = 4 ✓" in ran.out
    check_every_byte(ran)
    turns = [exchange for exchange in ran.exchanges if json.loads(exchange.request).get("tools")]
    assert len(turns) == 4
    assert len(ran.exchanges) == (5 if name == "opencode" else 4)  # it asks for a title, too
    assert all(exchange.path.endswith(kind.path) for exchange in turns)
    printed = results(json.loads(turns[-1].request))
    assert len(printed) == 3
    assert "print(2 - 2)" in printed[0]
    assert "4" in printed[2]
    (history,) = [each for each in ran.trajectory.histories if each.tools]
    assert len(history.completions) == 4
    assert all(item.trainable for item in history.items if item.completion is not None)


def test_claude_rewrites_what_was_sampled(agent: Agent):
    """It fills in arguments that the model left out: the call trains as it was sampled, once."""
    file = str(Path.cwd() / FILE)
    sampled = {"file_path": file, "old_string": WRONG, "new_string": RIGHT}
    steps = [("Read", {"file_path": file}), ("Edit", sampled)]
    with ModelServer(scripted(steps), token_ids=True, logprobs=True) as server:
        ran = agent(server, CLAUDE_COMMAND)
    check_every_byte(ran)
    first, second = ran.trajectory.histories
    assert [len(first.completions), len(second.completions)] == [2, 2]
    edited = second.items[-3]
    assert json.dumps(edited.message).count('"replace_all": false') == 1
    assert edited.completion is None
    items = [item for history in ran.trajectory.histories for item in history.items]
    assert sum(item.trainable for item in items) == len(ran.exchanges) == 3


def test_claude_has_a_sub_agent(agent: Agent):
    """Its sub-agent's turns are a history of the same rollout, and each turn trains once."""

    def reply(body: dict[str, Any]) -> Reply:
        done = len(results(body))
        if "Say how many" in json.dumps(body["messages"][0]):
            call = ToolCall("Bash", json.dumps({"command": "ls | wc -l", "description": "Count"}))
            return Reply("There is 1." if done else "I count.", tool_calls=[] if done else [call])
        ask = {"description": "Count", "prompt": "Say how many", "subagent_type": "general-purpose"}
        call = ToolCall("Agent", json.dumps({**ask, "run_in_background": False}))
        return Reply("It is 1." if done else "I ask.", tool_calls=[] if done else [call])

    with ModelServer(reply, token_ids=True, logprobs=True) as server:
        ran = agent(server, CLAUDE_COMMAND)
    check_every_byte(ran)
    assert sorted(len(history.completions) for history in ran.trajectory.histories) == [2, 2]
    items = [item for history in ran.trajectory.histories for item in history.items]
    assert sum(item.trainable for item in items) == len(ran.exchanges) == 4


def test_the_npm_client(agent: Agent):
    """An agent in Node on OpenAI's client: two questions, a tool, one row for a trainer."""
    script = str(Path(__file__).with_name("node_agent.cjs"))

    def reply(body: dict[str, Any]) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "tool" or last["content"] == "and now?":
            return Reply(f"said: {last['content'].strip()} ✓")
        return Reply(tool_calls=[ToolCall("shell", '{"command": "python3 sum.py"}')])

    with ModelServer(reply, token_ids=True, logprobs=True) as server:
        ran = agent(server, ("node", script, json.dumps(["what does it print?", "and now?"])))
    assert ran.out == "said: 0 ✓\nsaid: and now? ✓\n"
    check_every_byte(ran)
    (history,) = ran.trajectory.histories
    assert [item.message["role"] for item in history.items] == (
        ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    )
    (row,) = to_token_rows([ran.trajectory])
    ids = [token for each in history.completions for token in each.token_ids or ()]
    assert [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] == ids
