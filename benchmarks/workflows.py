"""The cost of the engine: `run_workflows` against `asyncio.gather` and a semaphore; its memory.

    python benchmarks/workflows.py [--repetitions 7] [--episodes 60] [--memory 1000 10000]

Each episode makes three calls one after the other, sixteen episodes at once, on a server in another
process. The same calls are made bare (nothing recorded), in a `@rollout` each, and in a workflow
each; the replies of the latter two are read. CPU time of this process, the three in turn, the
ratios of each repetition. Memory is Python's own peak (tracemalloc) over runs that make no call and
build a trajectory by hand, with the episodes kept and not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import openai

import otel_rollout
from benchmarks.overhead import server
from otel_rollout import (
    InMemoryTrajectoryExporter,
    Step,
    Trajectory,
    Workflow,
    gather_trajectory,
    rollout,
)
from otel_rollout.workflows import run_workflows

PARALLEL = 16
CALLS = 3
Client = openai.AsyncOpenAI


async def work(client: Client) -> None:
    """The work of one episode, the same in every variant."""
    for number in range(CALLS):
        message: Any = {"role": "user", "content": f"question {number}"}
        await client.chat.completions.create(model="m", messages=[message])


class Calls(Workflow):
    """The same work as a workflow."""

    async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
        await work(self.rollout_engine)


async def gathered(one: Callable[[Client], Awaitable[None]], client: Client, count: int) -> None:
    """The same work with `asyncio.gather`, without an engine."""
    room = asyncio.Semaphore(PARALLEL)

    async def bounded() -> None:
        async with room:
            await one(client)

    await asyncio.gather(*(bounded() for _ in range(count)))


async def bare(client: Client, count: int) -> None:
    """Nothing is recorded."""
    await gathered(work, client, count)


async def rollouts(client: Client, count: int) -> None:
    """Each episode is a rollout, and its completions are read as a workflow reads them."""
    agent = rollout(work)

    async def one(client: Client) -> None:
        trajectory = await gather_trajectory(agent(client))
        assert len(trajectory.completions) == CALLS

    await gathered(one, client, count)


async def workflows(client: Client, count: int) -> None:
    """Each episode is a workflow."""
    episodes = await run_workflows(lambda: Calls(client), range(count), n_parallel=PARALLEL)
    assert [len(episode.trajectories[0].completions) for episode in episodes] == [CALLS] * count


async def measure(base_url: str, repetitions: int, count: int) -> dict[str, list[float]]:
    """CPU seconds per episode of each variant, one number for each repetition."""
    variants = [bare, rollouts, workflows]
    figures: dict[str, list[float]] = {variant.__name__: [] for variant in variants}
    async with Client(base_url=base_url, api_key="none-needed") as client:
        for variant in variants:
            await variant(client, 2)
        for repetition in range(repetitions):
            turn = repetition % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                gc.collect()
                start = time.process_time()
                await variant(client, count)
                figures[variant.__name__].append((time.process_time() - start) / count)
    return figures


class ByHand(Workflow):
    """A workflow without calls, so that only the engine holds memory."""

    async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        messages = [{"role": "user", "content": f"question {task}"}]
        self.commit(trajectory=Trajectory(steps=[Step(chat_completions=messages, reward=1.0)]))


def peak(count: int, *, keep: bool) -> float:
    """Peak memory of so many episodes, in megabytes."""
    gc.collect()
    tracemalloc.start()
    asyncio.run(run_workflows(ByHand, iter(range(count)), n_parallel=PARALLEL, keep_episodes=keep))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


def main() -> None:
    """Print the ratios, then the memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--memory", type=int, nargs="*", default=[1000, 10_000])
    options = parser.parse_args()
    exporter = InMemoryTrajectoryExporter(max_trajectories=1)
    otel_rollout.configure(exporters=[exporter], instrumentor=None)
    print(f"Python {sys.version.split()[0]}, {options.repetitions} repetitions")
    print(f"{'variant':>10} {'ms/episode':>11} {'ratio to bare':>24} {'ratio to rollouts':>24}")
    with server() as base_url:
        figures = asyncio.run(measure(base_url, options.repetitions, options.episodes))
    for name, own in figures.items():
        cells = [f"{name:>10} {statistics.median(own) * 1000:>11.2f}"]
        for other in ("bare", "rollouts"):
            ratios = [a / b for a, b in zip(own, figures[other], strict=True)]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            cells.append(f"{f'{middle:.2f} ({low:.2f} to {high:.2f})':>24}")
        print(*cells, flush=True)
    print(f"\n{'episodes':>10} {'peak MB':>11} {'with all kept':>24}")
    for count in options.memory:
        held, kept = peak(count, keep=False), peak(count, keep=True)
        print(f"{count:>10} {held:>11.2f} {kept:>24.2f}", flush=True)
    otel_rollout.shutdown()


if __name__ == "__main__":
    main()
