"""Whatever runs at once: each exchange is part of the rollout that it was made in, or of none."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import openai
import pytest
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    NoActiveRolloutError,
    Trajectory,
    TrajectorySpanProcessor,
    gather_trajectory,
    get_current_trajectory,
    no_capture,
    record_reward,
    rollout,
)
from otel_rollout.testing import Reply
from tests.conftest import Clients, Recording
from tests.test_capture import replayed

WAIT = 60.0
"""Seconds for what takes none, on a machine that has other things to do."""


@pytest.fixture(autouse=True)
def nobody_complains(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No way of running things makes the library, or OpenTelemetry on its behalf, log a warning."""
    yield
    for source in ("otel_rollout", "opentelemetry"):
        logged = [r for r in caplog.get_records("call") if r.name.startswith(source)]
        assert [r.getMessage() for r in logged if r.levelno >= 30] == []


def ask(marker: str) -> list[Any]:
    return [{"role": "user", "content": marker}]


def call(client: openai.OpenAI, marker: str, messages: list[Any] | None = None) -> Any:
    return client.chat.completions.create(model="m", messages=messages or ask(marker))


async def acall(client: openai.AsyncOpenAI, marker: str, *, stream: bool = False) -> None:
    result: Any = await client.chat.completions.create(
        model="m",
        messages=ask(marker),
        stream=stream,
    )
    if stream:
        async for _ in result:
            await asyncio.sleep(0)


def heard(trajectory: Trajectory) -> list[str]:
    """What was asked in this trajectory, sorted; nothing in it is out of order or missing."""
    assert trajectory.warnings == []
    assert {c.status for c in trajectory.completions} <= {"complete"}
    for completion in trajectory.completions:
        message = completion.message or {}
        assert message["content"] == f"You said: {completion.request_messages[-1]['content']}"
    return sorted(c.request_messages[0]["content"] for c in trajectory.completions)


def by_name(recording: Recording) -> dict[str, list[str]]:
    """What was heard in each trajectory, by its name."""
    names = {t.name: heard(t) for t in recording.trajectories}
    assert len(names) == len(recording.trajectories)
    return names


# --- ways to have something run


def _thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT)


def _timer(work: Callable[[], None]) -> None:
    timer = threading.Timer(0, work)
    timer.start()
    timer.join(WAIT)


def _own_pool(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(WAIT)


def _map(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda do: do(), [work]))


def _own_thread_pool_of_multiprocessing(work: Callable[[], None]) -> None:
    with ThreadPool(1) as pool:
        pool.apply(work)


def _copied_context(work: Callable[[], None]) -> None:
    context, errors = contextvars.copy_context(), []

    def run() -> None:
        try:
            context.run(work)
        except BaseException as error:
            errors.append(error)

    with no_capture():  # what is current where the thread starts does not matter
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(WAIT)
    assert errors == []


def _nested_threads(work: Callable[[], None]) -> None:
    _thread(lambda: _own_pool(lambda: _timer(work)))


def _loop_in_a_thread(work: Callable[[], None]) -> None:
    async def run() -> None:
        await asyncio.to_thread(work)

    _thread(lambda: asyncio.run(run()))


WAYS = [
    _thread,
    _timer,
    _own_pool,
    _map,
    _own_thread_pool_of_multiprocessing,
    _copied_context,
    _nested_threads,
    _loop_in_a_thread,
]


@pytest.mark.parametrize("way", WAYS)
def test_threads(recording: Recording, clients_now: Clients, way: Any) -> None:
    """Work that a rollout gives to a thread is its own, also when rollouts use the way in turns."""
    client = clients_now.sync(clients_now.serve())
    for name in ("a", "b"):
        with rollout(name):
            way(functools.partial(call, client, f"{name} inside"))
            with rollout(f"{name} nested"):
                way(functools.partial(call, client, f"{name} in nested"))
            way(functools.partial(call, client, f"{name} again"))
        way(functools.partial(call, client, "nobody's"))
    assert by_name(recording) == {
        "a": ["a again", "a inside"],
        "a nested": ["a in nested"],
        "b": ["b again", "b inside"],
        "b nested": ["b in nested"],
    }


@pytest.fixture
def clients_now(recording: Recording) -> Iterator[Clients]:
    """Servers and clients for a test that is no coroutine."""
    made = Clients()
    yield made
    for client in made.closing:
        client.close()
    for server in made.servers:
        server.stop()


def test_a_pool_that_is_older_than_the_rollouts(recording: Recording, clients_now: Clients) -> None:
    """The threads of a shared pool are in the rollout of what they do, and in none in between."""
    client = clients_now.sync(clients_now.serve())
    begun = threading.Barrier(4)

    def agent(pool: ThreadPoolExecutor, name: str) -> None:
        with rollout(name):
            begun.wait(WAIT)
            futures = [pool.submit(call, client, f"{name} {n}") for n in range(4)]
            for future in futures:
                future.result(WAIT)

    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(4) as agents:
        pool.submit(int).result(WAIT)
        for done in [agents.submit(agent, pool, name) for name in "abcd"]:
            done.result(WAIT)
        with pytest.raises(NoActiveRolloutError):
            pool.submit(get_current_trajectory).result(WAIT)
        pool.submit(call, client, "nobody's").result(WAIT)
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(4)] for name in "abcd"}


# --- ways of asyncio

Work = Callable[[], Coroutine[Any, Any, None]]


async def _gather(work: Work) -> None:
    await asyncio.gather(work())


async def _task(work: Work) -> None:
    await asyncio.ensure_future(work())


async def _task_group(work: Work) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(work)


async def _wait_for(work: Work) -> None:
    await asyncio.wait_for(work(), WAIT)


async def _shield(work: Work) -> None:
    await asyncio.shield(work())


async def _callback(work: Work) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Future[None]] = []

    def start() -> None:
        tasks.append(asyncio.ensure_future(work()))
        tasks[0].add_done_callback(lambda _: done.set())

    loop.call_soon(lambda: loop.call_later(0, start))
    await done.wait()
    tasks[0].result()


async def _call_soon_threadsafe(work: Work) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(work(), loop).result(WAIT))


async def _anyio_thread_and_back(work: Work) -> None:
    await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(work))


async def _async_generator(work: Work) -> None:
    async def steps() -> AsyncIterator[int]:
        yield 1
        await work()
        yield 2

    assert [n async for n in steps()] == [1, 2]


async def _generator_closed_elsewhere(work: Work) -> None:
    async def steps() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await work()

    generator: Any = steps()
    await generator.asend(None)
    await asyncio.ensure_future(generator.aclose())


ASYNC_WAYS = [
    _gather,
    _task,
    _task_group,
    _wait_for,
    _shield,
    _callback,
    _call_soon_threadsafe,
    _anyio_thread_and_back,
    _async_generator,
    _generator_closed_elsewhere,
]


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_tasks(recording: Recording, clients: Clients, way: Any, stream: bool) -> None:
    """Rollouts that run at once over one client have the calls of their own tasks."""
    client = clients.asynchronous(clients.serve())
    begun: list[str] = []
    all_begun = asyncio.Event()

    async def agent(name: str) -> None:
        async with rollout(name):
            begun.append(name)
            if len(begun) == 3:
                all_begun.set()
            await all_begun.wait()
            await way(lambda: acall(client, f"{name} inside", stream=stream))
            async with rollout(f"{name} nested"):
                await way(lambda: acall(client, f"{name} in nested", stream=stream))
            await acall(client, f"{name} again", stream=stream)
        await way(lambda: acall(client, "nobody's", stream=stream))

    await asyncio.gather(*map(agent, "abc"))
    expected = {name: [f"{name} again", f"{name} inside"] for name in "abc"}
    expected |= {f"{name} nested": [f"{name} in nested"] for name in "abc"}
    assert by_name(recording) == expected


async def test_a_loop_in_the_background(recording: Recording, clients: Clients) -> None:
    """Sync agents that share a loop in a thread of its own: what they have it run is theirs."""
    server = clients.serve()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k" * 20)
    begun = threading.Barrier(3)

    def agent(name: str) -> None:
        with rollout(name):
            begun.wait(WAIT)
            for n in range(3):
                asyncio.run_coroutine_threadsafe(acall(client, f"{name} {n}"), loop).result(WAIT)

    try:
        await asyncio.gather(*(asyncio.to_thread(agent, name) for name in "abc"))
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(WAIT)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, WAIT)
        loop.close()
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


async def test_a_sync_client_in_a_running_loop(recording: Recording, clients: Clients) -> None:
    """A sync call that blocks the loop belongs to the task that makes it."""
    client = clients.sync(clients.serve())

    async def agent(name: str) -> None:
        with rollout(name):
            for n in range(3):
                call(client, f"{name} {n}")
                await asyncio.sleep(0)

    await asyncio.gather(*map(agent, "abc"))
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


# --- generators


async def test_an_async_generator_that_is_closed_in_another_context(
    recording: Recording, clients: Clients
) -> None:
    """A rollout inside an async generator that somebody else closes ends, once, and quietly."""
    client = clients.asynchronous(clients.serve())

    async def steps(name: str) -> AsyncIterator[int]:
        with rollout(name):
            await acall(client, f"{name} 1")
            yield 1
            await acall(client, f"{name} 2")
            yield 2

    async def begin(name: str) -> Any:
        generator: Any = steps(name)
        assert await generator.asend(None) == 1
        return generator

    generators = await asyncio.gather(*(begin(name) for name in "abc"))
    with pytest.raises(NoActiveRolloutError):
        get_current_trajectory()
    for generator in generators:
        await asyncio.ensure_future(generator.aclose())
    await acall(client, "nobody's")
    assert by_name(recording) == {name: [f"{name} 1"] for name in "abc"}


def test_a_generator_that_is_read_in_turns(recording: Recording, clients_now: Clients) -> None:
    """A generator of the agent makes its calls in the rollout of whoever asks for the next item."""
    client = clients_now.sync(clients_now.serve())

    def steps(name: str) -> Iterator[str]:
        for n in range(3):
            call(client, f"{name} {n}")
            yield name

    def agent(name: str) -> Iterator[None]:
        context = contextvars.copy_context()
        scope, items = rollout(name), steps(name)
        context.run(scope.__enter__)
        while context.run(next, items, None) is not None:
            yield
        context.run(scope.__exit__, None, None, None)

    agents = [agent(name) for name in "abc"]
    while [None for running in agents if next(running, "over") != "over"]:
        pass
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


# --- workers that are older than the rollouts they work for


async def test_a_worker_task_is_in_no_rollout_by_itself(
    recording: Recording, clients: Clients
) -> None:
    """A task that was there before has no rollout: its calls are nobody's, never another's."""
    client = clients.asynchronous(clients.serve())
    work: asyncio.Queue[tuple[str, asyncio.Future[None]] | None] = asyncio.Queue()

    async def worker() -> None:
        while (item := await work.get()) is not None:
            await acall(client, item[0])
            item[1].set_result(None)

    async def agent(name: str) -> None:
        async with rollout(name):
            done = asyncio.get_running_loop().create_future()
            await work.put((f"{name} by worker", done))
            await done
            await acall(client, f"{name} itself")

    workers = [asyncio.ensure_future(worker()) for _ in range(2)]
    await asyncio.gather(*map(agent, "abc"))
    for _ in workers:
        await work.put(None)
    await asyncio.gather(*workers)
    assert by_name(recording) == {name: [f"{name} itself"] for name in "abc"}


@pytest.mark.parametrize("lazy", [False, True], ids=["before", "by the first rollout"])
async def test_a_worker_task_that_is_handed_the_context(
    recording: Recording, clients: Clients, lazy: bool
) -> None:
    """A worker that attaches the context that came with its work serves many rollouts rightly."""
    client = clients.asynchronous(clients.serve())
    work: asyncio.Queue[tuple[str, Any, asyncio.Future[None]] | None] = asyncio.Queue()
    workers: list[asyncio.Future[None]] = []

    async def worker() -> None:
        while (item := await work.get()) is not None:
            marker, context, done = item
            token = otel_context.attach(context)
            try:
                await acall(client, marker)
            finally:
                otel_context.detach(token)
            done.set_result(None)

    def start() -> None:
        if not workers:
            workers.extend(asyncio.ensure_future(worker()) for _ in range(2))

    async def agent(name: str) -> None:
        async with rollout(name):
            start()
            for n in range(3):
                done = asyncio.get_running_loop().create_future()
                await work.put((f"{name} {n}", otel_context.get_current(), done))
                await done

    if not lazy:
        start()
    await asyncio.gather(*map(agent, "abc"))
    for _ in workers:
        await work.put(None)
    await asyncio.gather(*workers)
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


@pytest.mark.parametrize("lazy", [False, True], ids=["before", "by the first rollout"])
def test_a_worker_thread_that_is_handed_the_context(
    recording: Recording, clients_now: Clients, lazy: bool
) -> None:
    """The same for threads, with the contextvars context that a queue carries."""
    client = clients_now.sync(clients_now.serve())
    work: queue.Queue[tuple[contextvars.Context, str, Future[Any]] | None] = queue.Queue()
    begun = threading.Barrier(3)
    starting = threading.Lock()
    workers: list[threading.Thread] = []

    def worker() -> None:
        while (item := work.get()) is not None:
            context, marker, done = item
            done.set_result(context.run(call, client, marker))

    def start() -> None:
        with starting:
            if not workers:
                workers.extend(threading.Thread(target=worker) for _ in range(2))
                for thread in workers:
                    thread.start()

    def agent(name: str) -> None:
        with rollout(name):
            start()
            begun.wait(WAIT)
            for n in range(3):
                done: Future[Any] = Future()
                work.put((contextvars.copy_context(), f"{name} {n}", done))
                done.result(WAIT)

    if not lazy:
        start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(agent, "abc"))
    for _ in workers:
        work.put(None)
    for thread in workers:
        thread.join(WAIT)
    assert by_name(recording) == {name: [f"{name} {n}" for n in range(3)] for name in "abc"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="create_task(context=) came with 3.11")
async def test_a_task_in_a_context_of_ones_choice(recording: Recording, clients: Clients) -> None:
    """`create_task(..., context=...)` is in the rollout of that context, wherever it is made."""
    client = clients.asynchronous(clients.serve())
    with rollout("outer"):
        outer = contextvars.copy_context()
        with rollout("inner"):
            make: Any = asyncio.get_running_loop().create_task
            await make(acall(client, "for outer"), context=outer)
            await acall(client, "for inner")
    assert by_name(recording) == {"outer": ["for outer"], "inner": ["for inner"]}


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
