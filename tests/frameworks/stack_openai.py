"""The OpenAI Agents SDK."""

from __future__ import annotations

import openai
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


async def run(base_url: str, stream: bool) -> str:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as client:
        model = OpenAIChatCompletionsModel(model="m", openai_client=client)

        async def answer(agent: Agent, question: str) -> str:
            if not stream:
                return str((await Runner.run(agent, question)).final_output)
            result = Runner.run_streamed(agent, question)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

        @function_tool
        async def ask(who: str) -> str:
            """Ask a helper."""
            helper = Agent("helper", instructions=HELPER, tools=[function_tool(add)], model=model)
            return await answer(helper, task_of(who))

        tools = [function_tool(add), function_tool(divide), ask]
        return await answer(Agent("lead", instructions=LEAD, tools=tools, model=model), TASK)
