"""Agents of one process on one host: their samples of groups that other hosts run, too.

    python -m tests.backends.scale_agents FOLDER GROUPS SIZE FIRST_SAMPLE STEP

In FOLDER are `truth.jsonl`, the trajectories as they were in the process; what it could not send;
and how far it came, from where it goes on when it is started again. Spans go where the environment
says, some of them twice, and some later than others. `SCALE_SKEW` has seconds by which the clock is
wrong.
Each call of `step` is one trace, as in a training loop that has a span of its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from opentelemetry import trace
from requests import RequestException, Session

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, gather_trajectory, get_current_trajectory, rollout
from otel_rollout.testing import ModelServer, Reply

GROUPS_OF_A_STEP = 4
SHUTDOWN_MILLIS = 300_000
SEND = Session.send


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


async def steps(base_url: str, groups: int, samples: range, size: int, done: Path) -> None:
    """All steps that are not done, one after the other."""
    first = int(done.read_text()) if done.exists() else 0
    async with AsyncOpenAI(base_url=base_url, api_key="none-needed", timeout=60) as client:
        while first < groups:
            some = range(first, min(first + GROUPS_OF_A_STEP, groups))
            await step(client, some, samples, size)
            first = some.stop
            whole = done.with_suffix(".part")
            whole.write_text(str(first))
            whole.replace(done)


def send(self: Session, *arguments: Any, **options: Any) -> Any:
    """Send a request of spans, now and then twice, or later than others."""
    if random.random() < 0.1:
        SEND(self, *arguments, **options)
    if random.random() < 0.1:
        raise RequestException("it is sent again")
    return SEND(self, *arguments, **options)


def main(folder: Path, groups: int, size: int, first_sample: int, stride: int) -> int:
    """The exit status: 0 if everything was acknowledged."""
    otel_rollout.configure(
        "agents",
        [JsonlTrajectoryExporter(folder / "truth.jsonl")],
        train_folder=folder / "spool",
        request_token_ids=True,
    )

    def answer(request: dict[str, Any]) -> Reply:
        return Reply(f"reply to {request['messages'][-1]['content']} " + "and so on " * 40)

    with ModelServer(answer, token_ids=True, logprobs=True) as server:
        samples = range(first_sample, size, stride)
        asyncio.run(steps(server.base_url, groups, samples, size, folder / "done"))
    return int(not otel_rollout.shutdown(SHUTDOWN_MILLIS))


def skew(seconds: float) -> None:
    """Let the clock be wrong."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + int(seconds * 1e9)


if __name__ == "__main__":
    Session.send = send  # type: ignore[method-assign]
    skew(float(os.environ.get("SCALE_SKEW", "0")))
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
