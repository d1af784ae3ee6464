"""No framework: a loop of one's own around LiteLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import litellm

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of

EMPTY = {"type": "object", "properties": {}}


async def run(base_url: str, stream: bool) -> str:
    async def said(messages: list[Any], tools: dict[str, Callable[..., Any]]) -> Any:
        declared = [
            {"type": "function", "function": {"name": name, "parameters": EMPTY}} for name in tools
        ]
        reply = await litellm.acompletion(
            "hosted_vllm/m",
            messages,
            api_base=base_url,
            api_key="k",
            tools=declared,
            stream=stream,
            num_retries=2,
        )
        if stream:
            reply = litellm.stream_chunk_builder([chunk async for chunk in reply])
        return reply.choices[0].message

    async def result(tools: dict[str, Callable[..., Any]], call: Any) -> dict[str, Any]:
        try:
            found = tools[call.function.name](**json.loads(call.function.arguments))
            found = await found if asyncio.iscoroutine(found) else found
        except ZeroDivisionError as error:
            found = error
        return {"role": "tool", "tool_call_id": call.id, "content": str(found)}

    async def answer(system: str, tools: dict[str, Callable[..., Any]], question: str) -> str:
        messages: list[Any] = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        while True:
            message = await said(messages, tools)
            messages.append(message)
            if not message.tool_calls:
                return str(message.content)
            messages += await asyncio.gather(*(result(tools, call) for call in message.tool_calls))

    async def ask(who: str) -> str:
        return await answer(HELPER, {"add": add}, task_of(who))

    return await answer(LEAD, {"add": add, "divide": divide, "ask": ask}, TASK)
