"""Pydantic AI."""

from __future__ import annotations

import openai
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.frameworks.script import HELPER, LEAD, TASK, add, task_of


def divide(a: int, b: int) -> float:
    """Divide one number by another."""
    if b == 0:
        raise ModelRetry("division by zero")
    return a / b


async def run(base_url: str, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as client:
        model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))

        async def answer(agent: Agent, question: str) -> str:
            if not stream:
                return str((await agent.run(question)).output)
            async with agent.run_stream(question) as result:
                return str(await result.get_output())

        async def ask(who: str) -> str:
            """Ask a helper."""
            return await answer(Agent(model, system_prompt=HELPER, tools=[add]), task_of(who))

        lead = Agent(model, system_prompt=LEAD, tools=[add, divide, ask])
        return await answer(lead, TASK)
