"""Strands."""

from __future__ import annotations

from strands import Agent
from strands import tool as as_tool
from strands.models.openai import OpenAIModel

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


async def run(base_url: str, stream: bool) -> str:
    def agent(message: str, tools: list[object]) -> Agent:
        model = OpenAIModel(
            client_args={"base_url": base_url, "api_key": "k"}, model_id="m", stream=stream
        )
        return Agent(model=model, system_prompt=message, tools=tools, callback_handler=None)

    @as_tool
    async def ask(who: str) -> str:
        """Ask a helper."""
        return str(await agent(HELPER, [as_tool(add)]).invoke_async(task_of(who))).strip()

    lead = agent(LEAD, [as_tool(add), as_tool(divide), ask])
    return str(await lead.invoke_async(TASK)).strip()
