"""DSPy: a program that asks three questions, two of them at once.

Its own HTTP client is only counted, so that it sends with LiteLLM.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dspy

from otel_rollout.testing import Reply
from tests.frameworks.script import ANSWER, TASK, Script, task_of


class DspyScript(Script):
    """Replies are fields in text."""

    def _reply(self, who: str, turn: int, text: str) -> Reply:
        return Reply(
            f"[[ ## reasoning ## ]]\nI look.\n\n[[ ## answer ## ]]\n{ANSWER}\n\n"
            f"[[ ## completed ## ]]"
        )


SCRIPT = DspyScript
STREAMS = False
REQUESTS = 3
TOOLS = 0
"""It draws none, or its own in another way."""


async def run(base_url: str, stream: bool) -> str:
    model = dspy.LM(
        "openai/m", api_base=base_url, api_key="k", cache=False, num_retries=2, engine="litellm"
    )

    def solve() -> str:
        with dspy.context(lm=model):
            program = dspy.ChainOfThought("question -> answer")
            pairs: list[Any] = [
                (program, dspy.Example(question=task_of(who)).with_inputs("question"))
                for who in ("left", "right")
            ]
            dspy.Parallel(num_threads=2, disable_progress_bar=True)(pairs)
            return str(program(question=TASK).answer)

    return await asyncio.to_thread(solve)
