"""Microsoft's Agent Framework."""

from __future__ import annotations

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatCompletionClient

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


async def run(base_url: str, stream: bool) -> str:
    client = OpenAIChatCompletionClient("m", base_url=base_url, api_key="k")

    async def answer(agent: Agent, question: str) -> str:
        if not stream:
            return str((await agent.run(question)).text)
        return "".join([update.text async for update in agent.run(question, stream=True)])

    @tool(approval_mode="never_require")
    async def ask(who: str) -> str:
        """Ask a helper."""
        return await answer(Agent(client, HELPER, tools=[plus]), task_of(who))

    plus = tool(add, approval_mode="never_require")
    by = tool(divide, approval_mode="never_require")
    return await answer(Agent(client, LEAD, tools=[plus, by, ask]), TASK)
