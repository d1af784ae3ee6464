"""AutoGen's AssistantAgent."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


async def run(base_url: str, stream: bool) -> str:
    client = OpenAIChatCompletionClient(
        model="m", base_url=base_url, api_key="k", model_info=INFO, include_name_in_message=False
    )

    def agent(name: str, message: str, tools: list[object]) -> AssistantAgent:
        return AssistantAgent(
            name,
            client,
            tools=tools,
            system_message=message,
            model_client_stream=stream,
            max_tool_iterations=5,
        )

    async def ask(who: str) -> str:
        """Ask a helper."""
        result = await agent("helper", HELPER, [add]).run(task=task_of(who))
        return str(result.messages[-1].content)

    result = await agent("lead", LEAD, [add, divide, ask]).run(task=TASK)
    await client.close()
    return str(result.messages[-1].content)
