"""What docs/frameworks.md shows, run."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
from pathlib import Path
from typing import Any

import agents
import pytest
from pydantic_ai import Agent

from otel_rollout import JsonlTrajectoryExporter, Trajectory, to_token_rows
from otel_rollout.testing import ModelServer, Reply, ToolCall
from tests.frameworks.wire import TOOL_LOOP

pytestmark = pytest.mark.framework

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "frameworks.md").read_text()
COOKBOOK = (DOCS / "cookbook" / "existing-traces.md").read_text()
ROWS = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE))
"""The version of each row of the tables, by what the row is about."""
STACKS = {
    "OpenAI Agents SDK": "openai-agents",
    "LangChain, LangGraph": "langchain langgraph",
    "deepagents": "deepagents",
    "Pydantic AI": "pydantic-ai-slim",
    "smolagents": "smolagents",
    "AutoGen": "autogen-agentchat",
    "DSPy": "dspy",
    "LlamaIndex": "llama-index-core",
    "Agno": "agno",
    "Haystack": "haystack-ai",
    "Strands": "strands-agents",
    "Google ADK": "google-adk",
    "mini-swe-agent": "mini-swe-agent",
    "Microsoft Agent Framework": "agent-framework-core",
    "Instructor": "instructor",
    "Anthropic's tool runner": "anthropic",
    "LiteLLM and a loop of one's own": "litellm",
    "MCP tools": "mcp",
    "OpenAI, Anthropic, groq": "openai anthropic groq",
    "httpx, to a path of an API that is known (`/v1/chat/completions`, ...)": "httpx",
}
BLOCKS = re.findall(r"## ([^\n]*)\n+```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_block_is_run() -> None:
    """Each framework of the table has its block below."""
    assert len(BLOCKS) == TEXT.count("```python") == 4


@pytest.mark.parametrize("row", STACKS)
def test_the_versions_of_the_table_are_those_that_are_run(row: str) -> None:
    """The table tells of what is installed here."""
    installed = [importlib.metadata.version(name) for name in STACKS[row].split()]
    assert re.findall(r"\d[\w.]*", ROWS[row]) == installed


def test_every_stack_that_is_run_is_in_the_table() -> None:
    """Each module `stack_*` has its row; MCP's has none."""
    run = list(Path(__file__).parent.glob("stack_*.py"))
    rows = TEXT[: TEXT.index("| client |")].splitlines()
    ours = [row for row in rows if row.startswith("| ") and "¹" not in row]
    assert len(run) == len(ours) - 2


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_block(name: str, code: str) -> None:
    """It gives a trajectory with the tool loop in it, token ids and log-probabilities too."""
    values: dict[str, Any] = {"__name__": "docs"}
    with ModelServer(TOOL_LOOP) as server:
        try:
            exec(code.replace("http://localhost:8000/v1", server.base_url), values)
        finally:
            agents.set_tracing_disabled(False)
    trajectory: Trajectory = values["trajectory"]
    assert trajectory.warnings == []
    (history,) = trajectory.histories
    assert len(history.completions) == len(server.exchanges) == 2
    assert history.messages()[-2]["content"] == "5"
    assert history.messages()[-1]["content"] == "It is 5."
    for completion in history.completions:
        assert completion.trainable
        assert completion.token_ids
        assert completion.logprobs


async def test_existing_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The cookbook's blocks are one program: traces of Pydantic AI become rows, then rollouts."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    def reply(request: dict[str, Any]) -> Reply:
        question = next(m["content"] for m in request["messages"] if m["role"] == "user")
        if request["messages"][-1]["role"] == "tool":
            return Reply(f"It is {request['messages'][-1]['content']}.")
        a, b = question.rstrip("?").split(" + ")
        return Reply(tool_calls=[ToolCall("add", json.dumps({"a": int(a), "b": int(b)}))])

    program = re.findall(r"```python\n(.*?)```", COOKBOOK, re.DOTALL)
    with ModelServer(reply) as server:
        try:
            for code in program:
                code = code.replace("http://localhost:8000/v1", server.base_url)
                compiled = compile(code, "cookbook", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                running = eval(compiled, names)
                if inspect.iscoroutine(running):
                    await running
        finally:
            Agent.instrument_all(False)
    assert [t.reward for t in names["trajectories"]] == [1.0, 1.0]
    roles = ["system", "user", "assistant", "tool", "assistant"]
    lines = [json.loads(line) for line in Path("sft.jsonl").read_text().splitlines()]
    assert [[m["role"] for m in line["messages"]] for line in lines] == [roles, roles]
    assert all(line["tools"][0]["function"]["name"] == "add" for line in lines)
    assert [t.reward for t in JsonlTrajectoryExporter.read("trajectories.jsonl")] == [1.0, 1.0]
    assert to_token_rows(names["trajectories"]) == []
    assert len(names["trajectory"].token_sequences()) == 2
    assert names["trajectory"].drift().causes == {"arguments_reformatted": 1}
