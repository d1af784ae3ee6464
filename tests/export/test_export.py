"""Exporters: what they hold, when they wait, what they write, and what they drop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    SpanFormatError,
    Trajectory,
    TrajectoryExporter,
    gather_trajectory,
    rollout,
)
from otel_rollout.testing import Raw, Reply
from tests.kit.recording import Clients, Recording


def some(count: int, start: int = 0) -> list[Trajectory]:
    return [Trajectory(id=f"t{number}", name="x") for number in range(start, start + count)]


def ids(trajectories: Sequence[Trajectory]) -> list[str]:
    return [trajectory.id for trajectory in trajectories]


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    message: Any = {"role": "user", "content": text}
    return client.chat.completions.create(model="m", messages=[message], **options)


# --- in memory


def test_finished_trajectories_are_held_in_order():
    """A snapshot is in the order of arrival, removes nothing and does not change later."""
    exporter = InMemoryTrajectoryExporter()
    assert exporter.get_finished_trajectories() == ()
    exporter.export(some(2))
    snapshot = exporter.get_finished_trajectories()
    exporter.export(some(1, 2))
    assert ids(snapshot) == ["t0", "t1"]
    assert ids(exporter.get_finished_trajectories()) == ["t0", "t1", "t2"]
    exporter.clear()
    assert exporter.get_finished_trajectories() == ()
    assert exporter.dropped == 0


def test_take_removes_the_oldest():
    """`take` gives the oldest and leaves the rest."""
    exporter = InMemoryTrajectoryExporter()
    exporter.export(some(5))
    assert ids(exporter.take()) == ["t0"]
    assert ids(exporter.take(3)) == ["t1", "t2", "t3"]
    assert ids(exporter.get_finished_trajectories()) == ["t4"]


def test_take_waits_for_enough():
    """`take` sleeps until as many have come as it asked for."""
    exporter = InMemoryTrajectoryExporter()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(exporter.take, 3, 30)
        for trajectory in some(3):
            time.sleep(0.02)
            assert not taken.done()
            exporter.export([trajectory])
        assert ids(taken.result(5)) == ["t0", "t1", "t2"]


def test_take_times_out_and_removes_nothing():
    """When too few have come in time, the error says how many, and they stay."""
    exporter = InMemoryTrajectoryExporter()
    exporter.export(some(1))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited for 2 trajectories, 1 are held and 0.1 s"):
        exporter.take(2, timeout=0.1)
    assert 0.09 < time.monotonic() - began < 5
    assert ids(exporter.get_finished_trajectories()) == ["t0"]


async def test_take_async_waits_without_blocking():
    """`take_async` lets other tasks run, and wakes for an export on any thread."""
    exporter = InMemoryTrajectoryExporter()
    taken = asyncio.ensure_future(exporter.take_async(2, timeout=30))
    exporter.export(some(1))
    await asyncio.sleep(0.02)
    assert not taken.done()
    await asyncio.to_thread(exporter.export, some(1, 1))
    assert ids(await taken) == ["t0", "t1"]


async def test_take_async_times_out_and_removes_nothing():
    """When too few have come in time, the error says how many, and they stay."""
    exporter = InMemoryTrajectoryExporter()
    exporter.export(some(1))
    with pytest.raises(TimeoutError, match=r"waited for 2 trajectories, 1 are held and 0.1 s"):
        await exporter.take_async(2, timeout=0.1)
    assert ids(exporter.get_finished_trajectories()) == ["t0"]
    assert ids(await exporter.take_async(1, timeout=0)) == ["t0"]


async def test_a_cancelled_take_loses_nothing():
    """Cancelling a `take_async` leaves what has come for the next."""
    exporter = InMemoryTrajectoryExporter()
    taken = asyncio.ensure_future(exporter.take_async(2))
    exporter.export(some(1))
    await asyncio.sleep(0.01)
    taken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taken
    exporter.export(some(1, 1))
    assert ids(await exporter.take_async(2, timeout=5)) == ["t0", "t1"]


@pytest.mark.parametrize("timeout", [None, 30])
async def test_several_takers_share(timeout: float | None):
    """Takers that wait at once each get their own; one that finds none left waits on."""
    exporter = InMemoryTrajectoryExporter()
    takers = [asyncio.ensure_future(exporter.take_async(1, timeout)) for _ in range(4)]
    await asyncio.sleep(0)
    for number in range(4):
        exporter.export(some(1, number))
        await asyncio.sleep(0.02)
        assert sum(taker.done() for taker in takers) == number + 1
    assert sorted(ids([(await taker)[0] for taker in takers])) == ["t0", "t1", "t2", "t3"]


def test_iteration_ends_at_shutdown():
    """A `for` gives each trajectory as it comes, and ends once all are given and it is shut."""
    exporter = InMemoryTrajectoryExporter()
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(lambda: ids(list(exporter)))
        exporter.export(some(2))
        time.sleep(0.02)
        exporter.export(some(1, 2))
        exporter.shutdown()
        assert seen.result(5) == ["t0", "t1", "t2"]
    assert list(exporter) == []


async def test_async_iteration_ends_at_shutdown():
    """An `async for` does the same without blocking the loop."""
    exporter = InMemoryTrajectoryExporter()

    async def consume() -> list[str]:
        return [trajectory.id async for trajectory in exporter]

    consumers = [asyncio.ensure_future(consume()) for _ in range(3)]
    for number in range(6):
        exporter.export(some(1, number))
        await asyncio.sleep(0.005)
    assert not any(consumer.done() for consumer in consumers)
    exporter.shutdown()
    seen = [name for consumer in consumers for name in await asyncio.wait_for(consumer, 5)]
    assert sorted(seen) == [f"t{number}" for number in range(6)]


async def test_shutdown_wakes_whoever_waits():
    """After shutdown waiting is an error that says so; what is held can still be taken."""
    exporter = InMemoryTrajectoryExporter()
    exporter.export(some(1))
    waiting = asyncio.ensure_future(exporter.take_async(2))
    blocking = asyncio.ensure_future(asyncio.to_thread(exporter.take, 2))
    await asyncio.sleep(0.02)
    exporter.shutdown()
    for taker in (waiting, blocking):
        with pytest.raises(TimeoutError, match="the exporter is shut down"):
            await taker
    exporter.export(some(1, 1))
    assert exporter.dropped == 1
    assert ids(exporter.take(1)) == ["t0"]
    assert exporter.force_flush()


@pytest.mark.parametrize(
    ("on_full", "kept"), [("drop_oldest", ["t2", "t3"]), ("drop_newest", ["t0", "t1"])]
)
def test_a_full_exporter_drops_and_counts(on_full: Any, kept: list[str]):
    """A bounded exporter drops the end it was told to, and counts."""
    exporter = InMemoryTrajectoryExporter(2, on_full)
    assert not exporter.blocking
    exporter.export(some(3))
    exporter.export(some(1, 3))
    assert ids(exporter.get_finished_trajectories()) == kept
    assert exporter.dropped == 2


def test_a_full_exporter_blocks():
    """With `block` the exporting thread waits for room, keeps order and drops nothing."""
    exporter = InMemoryTrajectoryExporter(2, "block")
    assert exporter.blocking
    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(exporter.export, some(5))
        time.sleep(0.05)
        assert not exporting.done()
        assert ids(exporter.get_finished_trajectories()) == ["t0", "t1"]
        taken = [exporter.take(1, timeout=5)[0] for _ in range(5)]
        exporting.result(5)
    assert ids(taken) == [f"t{number}" for number in range(5)]
    assert exporter.dropped == 0


def test_shutdown_releases_a_blocked_export():
    """Whoever waits for room is let go at shutdown; what did not fit is counted."""
    exporter = InMemoryTrajectoryExporter(1, "block")
    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(exporter.export, some(3))
        time.sleep(0.02)
        exporter.shutdown()
        exporting.result(5)
    assert (ids(exporter.get_finished_trajectories()), exporter.dropped) == (["t0"], 2)


def test_a_blocking_exporter_does_not_hold_the_agent_up(clients: Clients):
    """With `block` the rollouts go on, and all trajectories arrive once there is room."""
    exporter = InMemoryTrajectoryExporter(1, "block")
    otel_rollout.configure("x", [exporter])
    began = time.monotonic()
    for _ in range(5):
        with rollout("x"):
            pass
    assert time.monotonic() - began < 10
    assert len([exporter.take(1, timeout=5) for _ in range(5)]) == 5
    assert exporter.dropped == 0


@pytest.mark.parametrize("count", [0, -1, 1.5, "10"])
def test_a_wrong_bound_is_refused(count: Any):
    """A bound is a number from 1 on."""
    with pytest.raises(ConfigurationError, match=r"max_trajectories=...\): expected a number"):
        InMemoryTrajectoryExporter(count)


def test_a_wrong_policy_is_refused():
    """A policy that there is not is refused with those that there are."""
    wrong: Any = "drop"
    with pytest.raises(ConfigurationError, match="'drop_oldest', 'drop_newest' or 'block'"):
        InMemoryTrajectoryExporter(1, wrong)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_taking_more_than_it_may_hold_is_refused(asynchronous: bool):
    """A `take` that could never be satisfied is an error, not an endless wait."""
    exporter = InMemoryTrajectoryExporter(2, "block")
    with pytest.raises(ValueError, match=r"3 trajectories.*max_trajectories=2"):
        await (
            exporter.take_async(3, timeout=1)
            if asynchronous
            else asyncio.to_thread(exporter.take, 3, 1)
        )


def test_many_threads_lose_nothing():
    """Eight exporting and eight taking threads: each trajectory is taken exactly once."""
    exporter = InMemoryTrajectoryExporter()
    with ThreadPoolExecutor(16) as pool:
        takers = [pool.submit(lambda: exporter.take(50, timeout=30)) for _ in range(8)]
        for trajectory in some(400):
            pool.submit(exporter.export, [trajectory])
        taken = [name for taker in takers for name in ids(taker.result(30))]
    assert sorted(taken) == sorted(f"t{number}" for number in range(400))


# --- JSON lines


def test_json_lines_give_the_trajectories_back(clients: Clients, tmp_path: Path):
    """What was written is read equal, with its token ids, rewards and error, as strict JSON."""
    path = tmp_path / "trajectories.jsonl"
    memory = InMemoryTrajectoryExporter()
    otel_rollout.configure("x", [memory, JsonlTrajectoryExporter(path, fsync=True)])
    client = clients.sync(clients.serve(Reply("é\u2028\n🙂", reasoning="hm")))
    for number in range(3):
        with rollout("x", task_id=number) as trajectory:
            ask(client, "a")
            ask(client, "b")
            trajectory.reward = number
            trajectory.rewards["r"] = 0.1
            trajectory.metrics["m"] = 0.1 + 0.2
            trajectory.metadata["text"] = "\ud800\u2028\n"

    @rollout
    def failing() -> None:
        ask(client, "c")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert otel_rollout.shutdown()
    written = list(JsonlTrajectoryExporter.read(path))
    held = memory.get_finished_trajectories()
    assert len(held) == 4
    assert [t.to_dict() for t in written] == [t.to_dict() for t in held]
    assert [c.token_ids for t in written for c in t.completions] == [
        c.token_ids for t in held for c in t.completions
    ]
    assert written[0].completions[0].token_ids
    assert written[0].completions[0].prompt_token_ids == held[0].completions[0].prompt_token_ids
    assert written[0].completions[0].logprobs == held[0].completions[0].logprobs
    assert [h.to_list() for h in written[0].histories] == [h.to_list() for h in held[0].histories]
    assert written[3].error == held[3].error
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4
    for line in lines:
        json.loads(line, parse_constant=not_strict)


def not_strict(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_lines_are_strict_json_whatever_the_server_says(clients: Clients, tmp_path: Path):
    """A log-probability that a server gives as NaN makes no line that other readers refuse."""
    body = (
        b'{"id":"r","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
        b'"finish_reason":"stop","message":{"role":"assistant","content":"a"},"logprobs":'
        b'{"content":[{"token":"a","logprob":NaN,"bytes":null,"top_logprobs":[]}]}}]}'
    )
    path = tmp_path / "trajectories.jsonl"
    otel_rollout.configure("x", [JsonlTrajectoryExporter(path)])
    client = clients.sync(clients.serve(Raw(body=body)))
    with rollout("x") as trajectory:
        ask(client, "a")
    otel_rollout.shutdown()
    assert trajectory.completions[0].logprobs == [None]
    (written,) = JsonlTrajectoryExporter.read(path)
    assert written.to_dict() == trajectory.to_dict()
    json.loads(path.read_bytes(), parse_constant=not_strict)


def test_json_lines_are_appended(tmp_path: Path):
    """A second run adds to the file of the first; a late reward is not in it."""
    path = tmp_path / "trajectories.jsonl"
    for start in (0, 2):
        exporter = JsonlTrajectoryExporter(str(path))
        exporter.export(some(2, start))
        assert exporter.force_flush()
        exporter.shutdown()
        exporter.shutdown()
    assert ids(list(JsonlTrajectoryExporter.read(path))) == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("missing", [1, 2, 50, -1])
def test_a_cut_last_line_costs_only_itself(tmp_path: Path, missing: int):
    """After a crash within a line the next run begins a new one, and all others are read."""
    path = tmp_path / "trajectories.jsonl"
    exporter = JsonlTrajectoryExporter(path)
    exporter.export([Trajectory(id="é" * 20, name="x", logs=["é" * 50]), *some(1)])
    exporter.shutdown()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    cut = whole[: first + 5] if missing == -1 else whole[:-missing]
    path.write_bytes(cut)
    before = ids(list(JsonlTrajectoryExporter.read(path)))
    assert before == ["é" * 20, *(["t0"] if missing == 1 else [])]  # 1: only the line's end is cut
    exporter = JsonlTrajectoryExporter(path)
    exporter.export(some(1, 1))
    exporter.shutdown()
    assert ids(list(JsonlTrajectoryExporter.read(path))) == [*before, "t1"]


def test_a_line_cut_within_a_character(tmp_path: Path):
    """A cut in the middle of a character is passed over like any other."""
    path = tmp_path / "trajectories.jsonl"
    exporter = JsonlTrajectoryExporter(path)
    exporter.export([*some(1), Trajectory(id="é")])
    exporter.shutdown()
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("é".encode()) + 1])
    assert ids(list(JsonlTrajectoryExporter.read(path))) == ["t0"]


@pytest.mark.parametrize(
    "line", [b'{"a": 1}', b"[]", b"3", b"null", b'{"schema_version": 99}', b'{"schema_version":1}']
)
def test_json_that_is_no_trajectory(tmp_path: Path, line: bytes):
    """A whole line of other JSON is an error that names file and line."""
    path = tmp_path / "other.jsonl"
    exporter = JsonlTrajectoryExporter(path)
    exporter.export(some(1))
    exporter.shutdown()
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    reading = JsonlTrajectoryExporter.read(path)
    assert next(reading).id == "t0"
    with pytest.raises(SpanFormatError, match=r"other.jsonl, line 3: .*Trajectory"):
        next(reading)


@pytest.mark.parametrize("content", [b"hello\nworld\n", b"\x89PNG\r\n\x1a\n", b"a,b\n1,2\n"])
def test_a_file_that_is_no_json_lines(tmp_path: Path, content: bytes):
    """A file of something else is an error at its first line, and does not read as empty."""
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(SpanFormatError, match=r"other, line 1: "):
        list(JsonlTrajectoryExporter.read(path))


def test_an_empty_file_has_no_trajectories(tmp_path: Path):
    """A file in which nothing was written yet reads as empty; one that is not there does not."""
    (tmp_path / "empty").touch()
    assert list(JsonlTrajectoryExporter.read(tmp_path / "empty")) == []
    with pytest.raises(FileNotFoundError):
        list(JsonlTrajectoryExporter.read(tmp_path / "missing"))


def test_a_missing_folder_is_said_at_once(tmp_path: Path):
    """A folder that is not there is an error when the exporter is made, not when a run ends."""
    with pytest.raises(ConfigurationError, match="does not exist: create it first") as caught:
        JsonlTrajectoryExporter(tmp_path / "no" / "t.jsonl")
    assert repr(str(tmp_path / "no")) in str(caught.value)


def test_several_threads_write_whole_lines(tmp_path: Path):
    """Lines that threads write at once do not run into each other."""
    path = tmp_path / "trajectories.jsonl"
    exporter = JsonlTrajectoryExporter(path)
    long = [Trajectory(id=f"t{n}", logs=["x" * 10_000]) for n in range(100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda trajectory: exporter.export([trajectory]), long))
    exporter.shutdown()
    assert sorted(ids(list(JsonlTrajectoryExporter.read(path)))) == sorted(ids(long))


@pytest.mark.slow
def test_a_program_that_just_ends_has_written_all(tmp_path: Path):
    """Without a word about shutdown, what has finished is in the file when the program ends."""
    path = tmp_path / "trajectories.jsonl"
    program = (
        "import sys, otel_rollout\n"
        "exporter = otel_rollout.JsonlTrajectoryExporter(sys.argv[1])\n"
        "otel_rollout.configure('x', [exporter], instrumentor=None)\n"
        "for number in range(100):\n"
        "    with otel_rollout.rollout('x', sample_index=number): pass\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, env=environment)
    written = list(JsonlTrajectoryExporter.read(path))
    assert [trajectory.sample_index for trajectory in written] == list(range(100))


# --- an exporter of the user's own


class CountingExporter:
    """As short as one can be."""

    blocking = True

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: set[int] = set()
        self.calls: list[str] = []

    def export(self, trajectories: Sequence[Trajectory]) -> None:
        self.names += [trajectory.name for trajectory in trajectories]
        self.threads.add(threading.get_ident())

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self.calls.append("force_flush")
        return True

    def shutdown(self) -> None:
        self.calls.append("shutdown")


async def test_an_exporter_of_ones_own(clients: Clients):
    """Four lines of contract are enough to get every trajectory, then a flush and a shutdown."""
    exporter = CountingExporter()
    otel_rollout.configure("x", [exporter])

    @rollout
    async def agent() -> None:
        pass

    for _ in range(3):
        await gather_trajectory(agent())
    assert otel_rollout.shutdown()
    assert exporter.names == ["agent"] * 3
    assert threading.get_ident() not in exporter.threads
    assert len(exporter.threads) == 1
    assert exporter.calls[-1] == "shutdown"
    assert "force_flush" in exporter.calls
    assert exporter.calls.count("shutdown") == 1


@pytest.mark.parametrize("make", [CountingExporter, InMemoryTrajectoryExporter])
def test_the_protocol_is_checked_at_run_time(make: type, tmp_path: Path):
    """`isinstance` tells what has the methods of an exporter from what has not."""
    assert isinstance(make(), TrajectoryExporter)
    assert isinstance(JsonlTrajectoryExporter(tmp_path / "x"), TrajectoryExporter)

    class Incomplete:
        blocking = True

        def export(self, trajectories: Sequence[Trajectory]) -> None: ...

    assert not isinstance(Incomplete(), TrajectoryExporter)
    assert not isinstance(object(), TrajectoryExporter)


def test_a_late_reward_reaches_what_is_held(recording: Recording):
    """What an in-memory exporter holds is the object that the reward is set on."""
    with rollout("x") as trajectory:
        pass
    trajectory.reward = 0.5
    assert recording.exporter.take(1)[0].reward == 0.5
