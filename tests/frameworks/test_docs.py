"""What docs/frameworks.md shows, run."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import agents
import pytest

from otel_rollout import Trajectory
from otel_rollout.testing import ModelServer
from tests.frameworks.wire import TOOL_LOOP

pytestmark = pytest.mark.framework

TEXT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
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
    with ModelServer(TOOL_LOOP, token_ids=False, logprobs=False) as server:
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
