"""Calls in threads and pools are part of the rollout that started them."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

from otel_rollout import NoActiveRolloutError, get_current_trajectory, no_capture, rollout
from tests.kit.recording import Clients, Recording
from tests.record.concurrency.calls import WAIT, by_name, call


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
