"""LangChain's `create_agent` on LangGraph."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


@wrap_tool_call
async def told(request: Any, handler: Any) -> Any:
    """A tool that fails is the model's business."""
    try:
        return await handler(request)
    except ZeroDivisionError as error:
        return ToolMessage(f"failed: {error}", tool_call_id=request.tool_call["id"])


async def run(base_url: str, stream: bool) -> str:
    model = ChatOpenAI(model="m", base_url=base_url, api_key="k", streaming=stream)

    async def ask(who: str) -> str:
        """Ask a helper."""
        helper = create_agent(model, [add], system_prompt=HELPER)
        state = await helper.ainvoke({"messages": [HumanMessage(task_of(who))]})
        return str(state["messages"][-1].text)

    lead = create_agent(model, [add, divide, ask], system_prompt=LEAD, middleware=[told])
    state = await lead.ainvoke({"messages": [HumanMessage(TASK)]})
    return str(state["messages"][-1].text)
