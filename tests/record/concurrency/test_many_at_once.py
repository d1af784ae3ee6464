"""Hundreds of conversations at once, and one trajectory used by several threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    Trajectory,
    TrajectorySpanProcessor,
    gather_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.testing import Reply
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording
from tests.record.concurrency.calls import WAIT, acall, ask, by_name, call, heard

pytestmark = pytest.mark.slow

# --- very many


async def test_two_hundred_conversations_at_once(recording: Recording, clients: Clients) -> None:
    """Many agents in one loop and in 16 threads: turns, streams, nested ones, rewards, histories.

    Each conversation has its own turns in order, its reward, and the judge of nobody else.
    """
    rollouts, turns = 100, 2
    server = clients.serve()
    client, sync = clients.asynchronous(server), clients.sync(server)

    def check(trajectory: Trajectory, name: str, completion_id: str, turn: int) -> None:
        history = trajectory.get_history(completion_id)
        said = [m["content"] for m in history.messages() if m["role"] == "user"]
        assert said == [f"{name} {n}" for n in range(turn + 1)]
        record_reward(turn / 10, completion_id=completion_id)
        trajectory.metrics[f"turn {turn}"] = turn

    async def agent(number: int) -> None:
        name = f"task {number}"
        async with rollout(name) as trajectory:
            messages: list[Any] = []
            for turn in range(turns):
                messages += ask(f"{name} {turn}")
                if (number + turn) % 2:
                    result: Any = await client.chat.completions.create(
                        model="m", messages=messages, stream=True
                    )
                    chunks = [chunk async for chunk in result]
                    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    found = chunks[0].id
                else:
                    result = await client.chat.completions.create(model="m", messages=messages)
                    text, found = result.choices[0].message.content, result.id
                messages.append({"role": "assistant", "content": text})
                check(trajectory, name, found, turn)
            async with rollout(f"judge of {name}"):
                await asyncio.gather(acall(client, f"judge {name}"), asyncio.sleep(0))
            trajectory.reward = number

    def sync_agent(number: int) -> None:
        name = f"thread {number}"
        with rollout(name) as trajectory:
            messages: list[Any] = []
            for turn in range(turns):
                messages += ask(f"{name} {turn}")
                reply = call(sync, name, messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                check(trajectory, name, reply.id, turn)
            trajectory.reward = number

    with ThreadPoolExecutor(16) as pool:
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(pool, sync_agent, n) for n in range(rollouts)]
        await asyncio.gather(*map(agent, range(rollouts)), *threads)
    trajectories = {t.name: t for t in recording.trajectories}
    assert len(trajectories) == len(recording.trajectories) == 3 * rollouts
    for number in range(rollouts):
        for name in (f"task {number}", f"thread {number}"):
            trajectory = trajectories[name]
            assert heard(trajectory) == [f"{name} 0"] * turns
            (history,) = trajectory.histories
            assert [c.reward for c in history.completions] == [n / 10 for n in range(turns)]
            assert trajectory.reward == number
            assert dict(trajectory.metrics) == {f"turn {n}": n for n in range(turns)}
        judge = trajectories[f"judge of task {number}"]
        assert heard(judge) == [f"judge task {number}"]
        assert judge.parent_id == trajectories[f"task {number}"].id


# --- one trajectory, several threads


class Reader(SpanProcessor):
    """Reads live trajectories while their rollout span ends, before the train lane has it."""

    def __init__(self) -> None:
        self.live: list[Trajectory] = []
        self.seen: list[tuple[int, int]] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.name.startswith("invoke_agent"):
            (live,) = self.live
            self.seen.append((len(live.completions), len(live.histories)))


async def test_a_trajectory_that_is_read_while_its_rollout_ends(clients: Clients) -> None:
    """Whoever looks between the end of the function and that of the span sees every call."""
    exporter, reader = InMemoryTrajectoryExporter(), Reader()
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider()
    provider.add_span_processor(reader)
    otel_rollout.configure(exporters=[exporter], tracer_provider=provider)
    client = clients.sync(clients.serve())
    with rollout("agent") as live:
        reader.live.append(live)
        call(client, "one")
        call(client, "two")
    assert reader.seen == [(2, 2)]
    assert [len(live.completions), len(live.histories)] == [2, 2]
    (trajectory,) = exporter.get_finished_trajectories()
    assert trajectory is live
    provider.shutdown()


def test_rewards_that_race_with_the_end(recording: Recording) -> None:
    """What another thread sets while the rollout ends is on a span, whichever is first."""
    for number in range(40):
        go, stop = threading.Event(), threading.Event()
        held: list[Trajectory] = []

        def score(go: threading.Event, stop: threading.Event, held: list[Trajectory]) -> None:
            go.wait(WAIT)
            n = 0
            while not stop.is_set() or n < 20:
                n += 1
                held[0].rewards[f"r{n % 50}"] = n
                with contextlib.suppress(otel_rollout.TrajectorySealedError):
                    held[0].metrics[f"m{n % 50}"] = n

        thread = threading.Thread(target=score, args=(go, stop, held))
        thread.start()
        with rollout(f"agent {number}") as trajectory:
            held.append(trajectory)
            go.set()
            while not trajectory.rewards and thread.is_alive():
                assert trajectory.to_dict()
        stop.set()
        thread.join(WAIT)
        assert trajectory.status == "complete"
    spans = {t.name: t for t in otel_rollout.reconstruct(recording.spans)}
    for trajectory in recording.trajectories:
        rebuilt = spans[trajectory.name]
        assert dict(rebuilt.rewards) == dict(trajectory.rewards)
        assert rebuilt.status == "complete"


async def test_threads_that_read_a_sealed_trajectory_get_the_same(
    recording: Recording, clients: Clients
) -> None:
    """An exporter's thread and the trainer's may both be the first to look: one answer for all."""
    client = clients.asynchronous(clients.serve())
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            with rollout("agent") as trajectory:
                await asyncio.gather(*(acall(client, str(n), stream=True) for n in range(8)))
            begun = threading.Barrier(8)

            def look(
                trajectory: Trajectory = trajectory, begun: threading.Barrier = begun
            ) -> tuple[list[int], list[int], list[str]]:
                begun.wait(WAIT)
                histories = trajectory.histories
                items = [id(i.completion) for h in histories for i in h.items if i.completion]
                return [id(c) for c in trajectory.completions], items, trajectory.warnings

            seen = [future.result(WAIT) for future in [pool.submit(look) for _ in range(8)]]
            assert all(found == seen[0] for found in seen)
            completions, items, warnings = seen[0]
            assert len(completions) == 8
            assert sorted(completions) == sorted(items)
            assert warnings == []


async def test_live_histories_while_calls_end(recording: Recording, clients: Clients) -> None:
    """Reading the live trajectory from a thread, over and over, disturbs no call and no reader."""
    client = clients.asynchronous(clients.serve(lambda body: Reply(f"You said: {_last(body)}")))
    over = threading.Event()
    counts: list[int] = []

    def watch(trajectory: Trajectory) -> None:
        while not over.is_set():
            completions = trajectory.completions
            counts.append(len(completions))
            for completion in completions[-2:]:
                messages = trajectory.get_history(completion.id).messages()
                assert messages[-1] == completion.message
            assert len(trajectory.histories) >= len(completions) > -1

    with rollout("agent") as live:
        watching = asyncio.ensure_future(asyncio.to_thread(watch, live))
        await asyncio.gather(*(acall(client, str(n), stream=bool(n % 2)) for n in range(40)))
        over.set()
        await watching
    assert counts == sorted(counts)
    assert heard(replayed(recording)) == sorted(map(str, range(40)))


def _last(body: dict[str, Any]) -> str:
    content: str = body["messages"][-1]["content"]
    return content


async def test_gather_in_threads_and_loops(recording: Recording, clients: Clients) -> None:
    """`gather_trajectory` in loops of many threads gives each caller the run that it asked for."""
    server = clients.serve()

    @rollout
    async def agent(name: str) -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k" * 20) as client:
            await acall(client, name)

    def run(name: str) -> Trajectory:
        return asyncio.run(gather_trajectory(agent(name), task_id=name))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, [f"task {n}" for n in range(24)]))
    assert [heard(t) for t in found] == [[f"task {n}"] for n in range(24)]
    assert [t.task_id for t in found] == [f"task {n}" for n in range(24)]


def test_the_train_lane_is_empty_afterwards(recording: Recording, clients_now: Clients) -> None:
    """Rollouts on many threads leave no span in the processor's buffers."""
    client = clients_now.sync(clients_now.serve())

    def agent(number: int) -> None:
        with rollout(f"agent {number}"):
            call(client, f"call {number}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(agent, range(64)))
    (processor,) = [
        p
        for p in recording.provider._active_span_processor._span_processors
        if isinstance(p, TrajectorySpanProcessor)
    ]
    assert (processor._buffers, processor._rollouts, processor._bytes) == ({}, {}, 0)
    assert by_name(recording) == {f"agent {n}": [f"call {n}"] for n in range(64)}
