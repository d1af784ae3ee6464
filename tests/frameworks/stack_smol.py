"""smolagents: a ToolCallingAgent with two agents that it manages."""

from __future__ import annotations

import asyncio
import json

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent
from smolagents import tool as as_tool

from otel_rollout.testing import Reply, ToolCall
from tests.frameworks.script import TASK, Script, add, divide, task_of


class SmolScript(Script):
    """A conversation ends with a call of `final_answer`."""

    def final(self, answer: str, body: str) -> Reply:
        return Reply(tool_calls=[ToolCall("final_answer", json.dumps({"answer": answer}))])


SCRIPT = SmolScript
REWRITES = True
"""Tool calls are sent again as text."""
TOOLS = 0
"""It draws none, or its own in another way."""


async def run(base_url: str, stream: bool) -> str:
    model = OpenAIModel("m", api_base=base_url, api_key="k")
    quiet = {"verbosity_level": LogLevel.OFF, "stream_outputs": stream}

    @as_tool
    def ask(who: str) -> str:
        """Ask a helper.

        Args:
            who: whom it looks at

        """
        return str(ToolCallingAgent([as_tool(add)], model, **quiet).run(task_of(who)))

    lead = ToolCallingAgent([as_tool(add), as_tool(divide), ask], model, **quiet)
    return str(await asyncio.to_thread(lead.run, TASK))
