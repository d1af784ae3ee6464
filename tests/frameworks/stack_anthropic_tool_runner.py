"""Anthropic's tool runner, the agent loop of its client."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import beta_async_tool

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of

CHAT = False
TOOLS = 0
"""It draws none, or its own in another way."""


async def run(base_url: str, stream: bool) -> str:
    async with anthropic.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1"), api_key="k"
    ) as client:

        async def answer(system: str, tools: list[Any], question: str) -> str:
            runner: Any = client.beta.messages.tool_runner(
                model="m",
                max_tokens=100,
                system=system,
                tools=tools,
                messages=[{"role": "user", "content": question}],
                stream=stream,
            )
            async for turn in runner:
                message = await turn.get_final_message() if stream else turn
            return "".join(block.text for block in message.content if block.type == "text")

        @beta_async_tool
        async def plus(a: int, b: int) -> str:
            """Add two numbers."""
            return str(add(a, b))

        @beta_async_tool(name="divide")
        async def by(a: int, b: int) -> str:
            """Divide one number by another."""
            return str(divide(a, b))

        @beta_async_tool
        async def ask(who: str) -> str:
            """Ask a helper."""
            return await answer(HELPER, [plus], task_of(who))

        plus.name = "add"
        return await answer(LEAD, [plus, by, ask], TASK)
