"""deepagents: a lead with a sub-agent that its own `task` tool starts."""

from __future__ import annotations

from deepagents import create_deep_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.frameworks.script import HELPER, LEAD, TASK, Script, add, divide, task_of
from tests.frameworks.stack_langchain import told


class DeepScript(Script):
    """The task tool takes the helper's task and its kind."""

    def named(self, who: str) -> str:
        return f'{task_of(who)}", "subagent_type": "helper'


SCRIPT = DeepScript
OPTIONS = {"ask": "task", "text": "description"}


async def run(base_url: str, stream: bool) -> str:
    model = ChatOpenAI(model="m", base_url=base_url, api_key="k", streaming=stream)
    helper = {
        "name": "helper",
        "description": "looks at things",
        "system_prompt": HELPER,
        "tools": [add],
    }
    lead = create_deep_agent(
        model, [add, divide], system_prompt=LEAD, subagents=[helper], middleware=[told]
    )
    state = await lead.ainvoke({"messages": [HumanMessage(TASK)]})
    return str(state["messages"][-1].text)
