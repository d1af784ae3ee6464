"""Agents of one process on one host: their samples of groups that other hosts run, too.

    python -m tests.backends.scale_agents TRUTH FIRST_GROUP GROUPS SIZE FIRST_SAMPLE STEP

TRUTH is the file of the trajectories as they were in the process. Spans go where the environment
says. Each call of `step` is one trace, as in a training loop that has a span of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from openai import AsyncOpenAI
from opentelemetry import trace

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, gather_trajectory, get_current_trajectory, rollout
from otel_rollout.testing import ModelServer, Reply

GROUPS_OF_A_STEP = 4
SHUTDOWN_MILLIS = 300_000


@rollout
async def agent(client: AsyncOpenAI, task: str) -> str:
    """Two turns, with a sub-agent of its own in between."""
    messages: list[Any] = [{"role": "user", "content": task}]
    first = await client.chat.completions.create(model="m", messages=messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": await helper(client, task)},
    ]
    second = await client.chat.completions.create(model="m", messages=messages)
    get_current_trajectory().reward = float(len(task) % 2)
    return second.choices[0].message.content or ""


@rollout
async def helper(client: AsyncOpenAI, task: str) -> str:
    """A rollout inside a rollout."""
    reply = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": f"help with {task}"}]
    )
    return reply.choices[0].message.content or ""


async def step(client: AsyncOpenAI, groups: range, samples: range, size: int) -> None:
    """Run this host's samples of some groups, all at the same time and in one trace."""
    with trace.get_tracer("training loop").start_as_current_span("step"):
        await asyncio.gather(
            *(
                gather_trajectory(
                    agent(client, f"task {group}, sample {sample}"),
                    group_id=f"group-{group}",
                    sample_index=sample,
                    group_size=size,
                )
                for group in groups
                for sample in samples
            )
        )


async def steps(base_url: str, groups: range, samples: range, size: int) -> None:
    """All steps, one after the other."""
    async with AsyncOpenAI(base_url=base_url, api_key="none-needed", timeout=60) as client:
        for first in range(groups.start, groups.stop, GROUPS_OF_A_STEP):
            some = range(first, min(first + GROUPS_OF_A_STEP, groups.stop))
            await step(client, some, samples, size)
            print(f"groups before {some.stop} are done", flush=True)


def main(truth: str, *numbers: str) -> int:
    """The exit status: 0 if everything was acknowledged."""
    first, count, size, first_sample, stride = map(int, numbers)
    otel_rollout.configure("agents", [JsonlTrajectoryExporter(truth)], request_token_ids=True)

    def answer(request: dict[str, Any]) -> Reply:
        return Reply(f"reply to {request['messages'][-1]['content']} " + "and so on " * 40)

    with ModelServer(answer, token_ids=True, logprobs=True) as server:
        samples = range(first_sample, size, stride)
        asyncio.run(steps(server.base_url, range(first, first + count), samples, size))
    return int(not otel_rollout.shutdown(SHUTDOWN_MILLIS))


if __name__ == "__main__":
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "200")
    sys.exit(main(*sys.argv[1:]))
