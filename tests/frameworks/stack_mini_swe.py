"""mini-swe-agent: three runs in a pool of threads, on LiteLLM."""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ["MSWEA_SILENT_STARTUP"] = "1"

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from otel_rollout.testing import Reply, ToolCall
from tests.frameworks.script import ANSWER, HELPER, LEAD, TASK, Script, task_of

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo "


class SweScript(Script):
    """The only tool is a shell."""

    def _reply(self, who: str, turn: int, text: str) -> Reply:
        first = ["echo 5", "false"] if who == "lead" else ["echo 5"]
        more = ["echo 6"] if who == "lead" and turn == 2 else []
        final = [f"{DONE}{ANSWER}"]
        commands = first if turn == 1 else more or final
        calls = [ToolCall("bash", f' {{"command":{json.dumps(c)}}}') for c in commands]
        return Reply("I look.", tool_calls=calls)


SCRIPT = SweScript
STREAMS = False
TOOLS = 5
"""The helpers are no tools."""


async def run(base_url: str, stream: bool) -> str:
    def answer(message: str, task: str) -> str:
        model = LitellmModel(
            model_name="openai/m",
            model_kwargs={"api_base": base_url, "api_key": "k", "num_retries": 2},
            cost_tracking="ignore_errors",
        )
        options: dict[str, Any] = {"system_template": message, "instance_template": "{{task}}"}
        return str(DefaultAgent(model, LocalEnvironment(), **options).run(task)["submission"])

    def solve() -> str:
        with ThreadPoolExecutor(2) as pool:
            helpers = [pool.submit(answer, HELPER, task_of(who)) for who in ("left", "right")]
            lead = answer(LEAD, TASK)
            for helper in helpers:
                helper.result()
        return lead

    return await asyncio.to_thread(solve)
