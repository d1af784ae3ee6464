"""Instructor: structured output, with a reply that does not fit the model at first."""

from __future__ import annotations

import asyncio

import instructor
import openai
import pydantic

from otel_rollout.testing import Reply, ToolCall
from tests.frameworks.script import ANSWER, TASK, Script, task_of


class Found(pydantic.BaseModel):
    """What was found."""

    answer: str
    score: int


class InstructorScript(Script):
    """A reply is a call of the model's schema; the lead's first one does not fit it."""

    def _reply(self, who: str, turn: int, text: str) -> Reply:
        score = '"much"' if who == "lead" and turn == 1 else "5"
        return Reply(tool_calls=[ToolCall("Found", f'{{"answer": "{ANSWER}", "score":{score}}}')])


SCRIPT = InstructorScript
STREAMS = False
REQUESTS = 5
TOOLS = 1
"""The answer that it parses is asked for as a tool."""


async def run(base_url: str, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as plain:
        client = instructor.from_openai(plain)

        async def answer(question: str) -> str:
            found = await client.create(
                model="m",
                response_model=Found,
                messages=[{"role": "user", "content": question}],
                max_retries=2,
            )
            return str(found.answer)

        await asyncio.gather(*(answer(task_of(who)) for who in ("left", "right")))
        return await answer(TASK)
