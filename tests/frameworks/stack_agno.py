"""Agno."""

from __future__ import annotations

from agno.agent import Agent
from agno.models.openai.like import OpenAILike

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


async def run(base_url: str, stream: bool) -> str:
    def agent(message: str, tools: list[object]) -> Agent:
        model = OpenAILike(id="m", base_url=base_url, api_key="k")
        return Agent(model=model, system_message=message, tools=tools, telemetry=False)

    async def answer(asked: Agent, question: str) -> str:
        if not stream:
            return str((await asked.arun(question)).content)
        parts = [event.content async for event in asked.arun(question, stream=True)]
        return "".join(part for part in parts if isinstance(part, str))

    async def ask(who: str) -> str:
        """Ask a helper."""
        return await answer(agent(HELPER, [add]), task_of(who))

    return await answer(agent(LEAD, [add, divide, ask]), TASK)
