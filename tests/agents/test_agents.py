"""Real agents that read, mend and run a file: every byte that the server saw is recorded."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import to_token_rows
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall
from otel_rollout.testing.bodies import dump
from otel_rollout.wire import dumps
from tests.agents.ran import FILE, RIGHT, TASK, WRONG, Agent, Ran, results

pytestmark = pytest.mark.agent

RUN = f"{shlex.quote(sys.executable)} {FILE}"
CLIENTS = Path(__file__).with_name("clients")
JARS = Path(__file__).parents[2] / ".agents" / "java"
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


GEMINI = "/v1beta/models/m:streamGenerateContent"
GEMINI_SETTINGS = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
AIDER = (
    *("aider", "--model", "openai/m", "--edit-format", "whole", "--yes-always", "--no-git"),
    *("--no-check-update", "--no-show-model-warnings", "--analytics-disable"),
    *("--message", TASK, FILE),
)


@dataclass(frozen=True)
class Kind:
    """One of the agents: how it is run, and the tools that it has."""

    command: Sequence[str]
    steps: Callable[[Path], Sequence[tuple[str, dict[str, Any]]]]
    """The tools that read, mend and run the file, in this folder."""
    path: str
    """The end of the path of its calls."""
    stream: bool = True
    end: Sequence[tuple[str, dict[str, Any]]] = ()
    """The tools that its last reply calls."""
    differs: Sequence[str] = ()
    """Members of its requests that are others in each run: ids of sessions, times."""


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
        differs=["metadata.user_id"],
    ),
    "codex": Kind(
        ("sh", "-c", CODEX, TASK),
        lambda _: [
            ("exec_command", {"cmd": f"cat {FILE}"}),
            ("exec_command", {"cmd": f"sed -i 's/2 - 2/2 + 2/' {FILE}"}),
            ("exec_command", {"cmd": RUN}),
        ],
        "/v1/responses",
        differs=["prompt_cache_key", "client_metadata", "input[].id", "input[].output"],
    ),
    "gemini": Kind(
        ("gemini", "-m", "m", "--yolo", "--skip-trust", "-p", TASK),
        lambda folder: [
            ("read_file", {"file_path": str(folder / FILE)}),
            (
                "replace",
                {
                    "file_path": str(folder / FILE),
                    "instruction": "Add instead of subtracting.",
                    "old_string": WRONG,
                    "new_string": RIGHT,
                },
            ),
            ("run_shell_command", {"command": RUN, "description": "Run it"}),
        ],
        f"{GEMINI}?alt=sse",
        differs=["contents[].parts[].functionCall.id", "contents[].parts[].functionResponse"],
    ),
    "qwen": Kind(
        # It sends every call through a proxy where one is set.
        (
            "env",
            "-u",
            "HTTP_PROXY",
            "-u",
            "HTTPS_PROXY",
            "qwen",
            "--auth-type",
            "openai",
            "-m",
            "m",
            "--yolo",
            "-p",
            TASK,
        ),
        lambda folder: [
            ("read_file", {"file_path": str(folder / FILE)}),
            (
                "edit",
                {"file_path": str(folder / FILE), "old_string": WRONG, "new_string": RIGHT},
            ),
            (
                "run_shell_command",
                {"command": RUN, "description": "Run it", "is_background": False},
            ),
        ],
        "/v1/chat/completions",
        differs=["messages[].content[].text"],  # it prints the number of a process
    ),
    "mini": Kind(
        ("mini", "-m", "openai/m", "-t", TASK, "--yolo", "--exit-immediately", "-o", "said.json"),
        lambda _: [
            ("bash", {"command": f"cat {FILE}"}),
            ("bash", {"command": f"sed -i 's/2 - 2/2 + 2/' {FILE}"}),
            ("bash", {"command": RUN}),
        ],
        "/v1/chat/completions",
        stream=False,
        end=[("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})],
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


def scripted(kind: Kind) -> Callable[[dict[str, Any]], Reply]:
    """A model that takes one step after each result, then answers; titles are none of the steps."""
    steps = kind.steps(Path.cwd())

    def reply(body: dict[str, Any]) -> Reply:
        if not body.get("tools"):
            return Reply("A sum that is mended")
        done = len(results(body))
        calls = steps[done : done + 1] or kind.end
        said = f"Step {done + 1}." if done < len(steps) else "It prints 4 now: 2 + 2 = 4 ✓"
        return Reply(said, tool_calls=[ToolCall(name, json.dumps(each)) for name, each in calls])

    return reply


def in_gemini(reply: Callable[[dict[str, Any]], Reply]) -> Callable[[dict[str, Any]], Raw]:
    """The same model in Gemini's API, each reply as a stream of one event."""

    def raw(body: dict[str, Any]) -> Raw:
        said = reply(body)
        calls = [
            {"functionCall": {"name": call.name, "args": json.loads(call.arguments)}}
            for call in said.tool_calls
        ]
        content = {"role": "model", "parts": [{"text": said.content}, *calls]}
        event = {
            "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
            "modelVersion": "m",
            "responseId": f"response-{len(body['contents'])}",
            "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 5},
        }
        return Raw(body=b"data: %b\r\n\r\n" % dump(event), content_type="text/event-stream")

    return raw


def check_every_byte(ran: Ran, *, stream: bool = True, is_compact: bool = True) -> None:
    """What the server was asked and has answered is in the completions, in the order of the end.

    is_compact: False for a client that writes its JSON in another way than `dumps`.
    """
    recorded = [dumps(completion.request).encode() for completion in ran.trajectory.completions]
    asked = [exchange.request for exchange in ran.exchanges]
    if not is_compact:
        asked = [dumps(json.loads(request)).encode() for request in asked]
    assert sorted(recorded) == sorted(asked)
    assert {exchange.status for exchange in ran.exchanges} == {200}
    for completion in ran.trajectory.completions:
        assert (completion.status, completion.stream) == ("complete", stream)


@pytest.mark.parametrize("name", KINDS)
def test_an_agent_mends_a_file(agent: Agent, name: str):
    """Four turns with three tools that really run; each turn continues the one before."""
    kind = KINDS[name]
    folder, home = Path.cwd(), Path.home()
    (folder / "opencode.json").write_text(json.dumps(OPENCODE))
    (home / ".gemini").mkdir()
    (home / ".gemini" / "settings.json").write_text(json.dumps(GEMINI_SETTINGS))
    model = scripted(kind)
    routes = {GEMINI: in_gemini(model)}
    with ModelServer(model, token_ids=True, logprobs=True, routes=routes) as server:
        ran = agent(server, kind.command)
    assert (folder / FILE).read_text() == RIGHT
    assert "It prints 4 now: 2 + 2 = 4 ✓" in ran.out
    check_every_byte(ran, stream=kind.stream)
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
    again = ran.again(kind.command, kind.differs)
    assert again.status == 0, again.err
    assert (folder / FILE).read_text() == RIGHT
    assert "It prints 4 now: 2 + 2 = 4 ✓" in again.out
    count = len(ran.exchanges)
    assert f"{count} of {count} recorded calls asked again" in again.err


def test_a_changed_agent_is_stopped(agent: Agent):
    """At its first call, which asks for another task; nothing of the rest is asked."""
    kind = KINDS["claude"]
    with ModelServer(scripted(kind), token_ids=True, logprobs=True) as server:
        ran = agent(server, kind.command)
    changed = [each.replace("has to print 4", "has to print 5") for each in kind.command]
    again = ran.again(changed, kind.differs)
    assert again.status != 0
    assert Path(FILE).read_text() == WRONG
    assert "0 of 4 recorded calls asked again" in again.err
    assert "has to print 5" in again.err


def test_aider_mends_a_file(agent: Agent):
    """It has no tools: the reply is the file."""
    said = f"I mend it ✓\n\n{FILE}\n```python\n{RIGHT}```\n"
    with ModelServer(said, token_ids=True, logprobs=True) as server:
        ran = agent(server, AIDER)
    assert Path(FILE).read_text() == RIGHT
    check_every_byte(ran)
    (history,) = ran.trajectory.histories
    assert history.messages()[-1]["content"] == said
    (row,) = to_token_rows([ran.trajectory])
    assert sum(row["loss_mask"]) == len(history.completions[-1].token_ids or ())
    again = ran.again(AIDER, ())
    assert again.status == 0, again.err
    assert Path(FILE).read_text() == RIGHT


def test_claude_rewrites_what_was_sampled(agent: Agent):
    """It fills in arguments that the model left out: the call trains as it was sampled, once."""
    file = str(Path.cwd() / FILE)
    sampled = {"file_path": file, "old_string": WRONG, "new_string": RIGHT}
    steps = [("Read", {"file_path": file}), ("Edit", sampled)]
    kind = replace(KINDS["claude"], steps=lambda _: steps)
    with ModelServer(scripted(kind), token_ids=True, logprobs=True) as server:
        ran = agent(server, CLAUDE_COMMAND)
    check_every_byte(ran)
    first, second = ran.trajectory.histories
    assert [len(first.completions), len(second.completions)] == [2, 2]
    edited = second.items[-3]
    assert json.dumps(edited.message).count('"replace_all": false') == 1
    assert edited.completion is None
    items = [item for history in ran.trajectory.histories for item in history.items]
    assert sum(item.trainable for item in items) == len(ran.exchanges) == 3
    again = ran.again(CLAUDE_COMMAND, kind.differs)
    assert again.status == 0, again.err


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
    took = "messages[].content[].content"  # how many milliseconds it took is in it
    again = ran.again(CLAUDE_COMMAND, [*KINDS["claude"].differs, took])
    assert again.status == 0, again.err


def java(name: str) -> Sequence[str]:
    return ("java", "-cp", f"{JARS}/*", str(CLIENTS / "java" / f"{name}.java"))


@pytest.mark.parametrize(
    ("command", "path", "stream"),
    [
        (("node", str(CLIENTS / "openai.cjs")), "/v1/chat/completions", True),
        (("node", str(CLIENTS / "ai_sdk.cjs"), "openai"), "/v1/responses", True),
        (("node", str(CLIENTS / "ai_sdk.cjs"), "anthropic"), "/v1/messages", True),
        (("go_agent",), "/v1/chat/completions", True),
        (java("OpenAIAgent"), "/v1/chat/completions", True),
        (java("LangChain4jAgent"), "/v1/chat/completions", False),
    ],
    ids=["npm", "ai-sdk-openai", "ai-sdk-anthropic", "go", "java", "langchain4j"],
)
def test_a_client(agent: Agent, command: Sequence[str], path: str, stream: bool):
    """An agent on a client of another language: two questions, a tool, one row for a trainer."""

    def reply(body: dict[str, Any]) -> Reply:
        last = json.dumps((body.get("messages") or body["input"])[-1])
        if "and now?" in last or results(body):
            return Reply(f"said: {'and now?' if 'and now?' in last else 0} ✓")
        return Reply(tool_calls=[ToolCall("shell", '{"command": "python3 sum.py"}')])

    command = (*command, json.dumps(["what does it print?", "and now?"]))
    with ModelServer(reply, token_ids=True, logprobs=True) as server:
        ran = agent(server, command)
    assert "said: 0 ✓\nsaid: and now? ✓\n" in ran.out
    check_every_byte(ran, stream=stream, is_compact=command[0] != "java")
    assert {exchange.path for exchange in ran.exchanges} == {path}
    (history,) = ran.trajectory.histories
    assert len(history.completions) == 3
    assert all(item.trainable for item in history.items if item.completion is not None)
    if path == "/v1/chat/completions":  # the others give no token ids
        (row,) = to_token_rows([ran.trajectory])
        ids = [token for each in history.completions for token in each.token_ids or ()]
        assert [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] == ids
    again = ran.again(command, ())
    assert (again.status, again.out) == (0, ran.out)
    assert f"3 of {len(ran.exchanges)} recorded calls asked again" in again.err
