"""Haystack's Agent."""

from __future__ import annotations

import asyncio
from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


def read(chunk: StreamingChunk) -> None:
    """What a user does with a chunk."""


async def run(base_url: str, stream: bool) -> str:
    def answer(message: str, tools: list[Any], question: str) -> str:
        key = Secret.from_token("k")
        agent = Agent(
            chat_generator=OpenAIChatGenerator(key, "m", api_base_url=base_url),
            tools=[create_tool_from_function(tool) for tool in tools],
            system_prompt=message,
            streaming_callback=read if stream else None,
        )
        result = agent.run(messages=[ChatMessage.from_user(question)])
        return str(result["last_message"].text)

    def ask(who: str) -> str:
        """Ask a helper."""
        return answer(HELPER, [add], task_of(who))

    return await asyncio.to_thread(answer, LEAD, [add, divide, ask], TASK)
