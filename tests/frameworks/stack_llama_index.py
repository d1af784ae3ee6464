"""LlamaIndex's FunctionAgent."""

from __future__ import annotations

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


async def run(base_url: str, stream: bool) -> str:
    model = OpenAILike(
        model="m",
        api_base=base_url,
        api_key="k",
        is_chat_model=True,
        is_function_calling_model=True,
    )

    async def ask(who: str) -> str:
        """Ask a helper."""
        helper = FunctionAgent(tools=[add], llm=model, system_prompt=HELPER, streaming=stream)
        return str(await helper.run(task_of(who)))

    tools = [add, divide, ask]
    lead = FunctionAgent(tools=tools, llm=model, system_prompt=LEAD, streaming=stream)
    return str(await lead.run(TASK))
