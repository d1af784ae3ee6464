"""Many rollouts in one process: memory, lateness and rate; and how soon a trainer has them.

    python benchmarks/many.py [--parts open arrival] [--rollouts 16384] [--variants bare capture]
        [--ways memory file receiver collector kafka transferqueue] [--rate 16]

open: so many rollouts are open at once, and each makes ten calls, 64 calls at a time; none ends
before all are done. Printed: calls a second, how late a sleep of 2 ms is (ms), and by how much the
process grew for each rollout (KB; what the bare client holds is its conversation). Replies have 64
sampled tokens with ids and log-probabilities. The variants are processes of their own.
arrival: seconds from the last byte of a rollout's last reply until a trainer has it, in groups of
eight rollouts of ten calls, so many rollouts a second: `memory` is an exporter in the process, for
a `file` the trainer reads its new lines every 20 ms. By the others it has a group when that is
whole: `receiver` is spans over OTLP to `otel-rollout receive`, which writes such a file;
`collector` has one with deploy/collector-agent.yaml in between; `kafka` is one with
deploy/collector-kafka.yaml, a broker, a rebuilder and `KafkaGroups` (make scale-backends);
`transferqueue` is verl's rows of a whole group in a TransferQueue, which the trainer asks every
20 ms; it needs the packages of .venv-trainers, so it is not among the default ways.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
from lateness import be_late, freeze  # type: ignore[import-not-found]  # the one beside this script
from opentelemetry.sdk.trace import TracerProvider
from overhead import server  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[1]))

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, JsonlTrajectoryExporter, rollout
from otel_rollout.kafka import KafkaGroups
from tests.backends.deployed import (
    TOKEN,
    agents_collector,
    endpoint,
    here,
    kafka_collector,
    rebuilder,
    receiver,
)
from tests.backends.hosts import Program
from tests.backends.kafka_broker import broker

TURNS, AT_ONCE, GROUP = 10, 64, 8
TEXT = "word " * 40
LOOK = 0.02
WAYS = ("memory", "file", "receiver", "collector", "kafka")
QUEUE = "transferqueue"
DELAY_MS = "200"
"""OTEL_BSP_SCHEDULE_DELAY: spans are sent so often."""


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def turns(client: openai.AsyncOpenAI, gate: asyncio.Semaphore) -> list[Any]:
    """The calls of one rollout; its conversation."""
    messages: list[Any] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": TEXT})
        async with gate:
            reply = await client.chat.completions.create(
                model="m", messages=messages, logprobs=True, max_tokens=64
            )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return messages


async def all_open(variant: str, rollouts: int) -> dict[str, Any]:
    """What the first table has of a variant."""
    if variant == "capture":
        otel_rollout.configure(
            exporters=[InMemoryTrajectoryExporter(max_trajectories=1)],
            tracer_provider=TracerProvider(),
            instrumentor=None,
            max_bytes=1 << 40,
        )
    scope: Any = rollout if variant == "capture" else nullcontext
    done, gate, left = asyncio.Event(), asyncio.Semaphore(AT_ONCE), rollouts

    async def agent(client: openai.AsyncOpenAI) -> None:
        nonlocal left
        with scope("bench"):
            held = await turns(client, gate)
            left -= 1
            if not left:
                done.set()
            await done.wait()
            del held

    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none") as client:
        with scope("bench"):
            await turns(client, gate)
        freeze()
        before, began, cpu = resident(), time.monotonic(), time.process_time()
        late = asyncio.create_task(be_late(done))
        agents = asyncio.gather(*(agent(client) for _ in range(rollouts)))
        agents.add_done_callback(lambda _: done.set())  # before all are open if one fails
        await done.wait()
        if agents.done():
            await agents
        calls, seconds = rollouts * TURNS, time.monotonic() - began
        found = {
            "rate": calls / seconds,
            "cpu": (time.process_time() - cpu) / calls,
            "kb": (resident() - before) / rollouts / 1024,
            "late": sorted(each for each, _ in await late),
        }
        await agents
    return found


def in_own_process(*arguments: str, **environment: str) -> Any:
    command = [sys.executable, __file__, "--here", *arguments]
    every = {**os.environ, **environment}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=every).stdout)


def percentiles(values: Sequence[float], *shares: float) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(len(ordered) * share)] for share in shares]


def open_at_once(variants: Sequence[str], rollouts: int) -> None:
    """Print the first table."""
    print(f"{rollouts} open rollouts of {TURNS} calls, {AT_ONCE} calls at a time")
    print(f"{'':<10}{'calls/s':>9}{'CPU ms':>9}{'late p50':>10}{'p99':>8}{'KB each':>9}")
    with server() as base_url:
        os.environ["BASE_URL"] = base_url
        for variant in variants:
            found = in_own_process("open", variant, str(rollouts))
            p50, p99 = percentiles(found["late"], 0.5, 0.99)
            print(
                f"{variant:<10}{found['rate']:>9.0f}{1e3 * found['cpu']:>9.2f}"
                f"{1e3 * p50:>10.1f}{1e3 * p99:>8.1f}{found['kb']:>9.0f}",
                flush=True,
            )


# --- how soon a trainer has them


class Arrivals:
    """When trajectories came to the trainer, by id."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def export(self, trajectories: Sequence[Any]) -> None:
        """As an exporter in the process."""
        for each in trajectories:
            self.times[each.id] = time.monotonic()

    blocking = True

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        pass

    def wait_for(self, count: int) -> None:
        """Until so many have come, a minute at most."""
        end = time.monotonic() + 60
        while len(self.times) < count and time.monotonic() < end:
            time.sleep(LOOK)

    def consume(self, brokers: str, done: threading.Event) -> None:
        """As a trainer at Kafka."""
        with KafkaGroups(brokers, idle_seconds=LOOK) as groups:
            while not done.is_set():
                for each in groups:
                    self.export(each.group.trajectories)

    def poll(self, queue: Queue, done: threading.Event) -> None:
        """As a trainer at TransferQueue: the rows of a prompt that is finished."""
        seen = set[str]()
        while not done.is_set():
            tags = queue.client.kv_list("train").get("train", {})
            for uid in {key for key, tag in tags.items() if tag.get("is_prompt")} - seen:
                seen.add(uid)
                keys = [key for key in tags if key.startswith(f"{uid}_")]
                queue.client.kv_batch_get(keys, partition_id="train")
                self.export(queue.groups[uid])
            time.sleep(LOOK)

    def follow(self, path: Path, done: threading.Event) -> None:
        """As a reader of a file's new lines."""
        while not path.exists() and not done.is_set():
            time.sleep(LOOK)
        with open(path, "rb") as file:
            rest = b""
            while not done.is_set():
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in lines:
                    self.times[json.loads(line)["id"]] = time.monotonic()
                time.sleep(LOOK)


class Queue:
    """An exporter of whole groups to TransferQueue, on a Ray of this machine."""

    blocking = True

    def __init__(self) -> None:
        names = "transfer_queue", "otel_rollout_transferqueue", "exporters.kit.cluster"
        self.client, self.rows, cluster = map(importlib.import_module, names)
        cluster.start()
        self.client.init()
        self.groups = defaultdict[str, list[Any]](list)

    def export(self, trajectories: Sequence[Any]) -> None:
        """Put the rows of groups that are whole."""
        for each in trajectories:
            members = self.groups[each.group_id]
            members.append(each)
            if len(members) == GROUP:
                group = otel_rollout.TrajectoryGroup.of(members)
                self.rows.put(self.rows.to_verl_rows(group, global_steps=0))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        pass


@contextmanager
def served(way: str, folder: Path) -> Iterator[dict[str, str]]:
    """What is between an agent and its trainer; where the agent sends, and the trainer reads."""
    with ExitStack() as stack:

        def started(program: Program) -> Program:
            stack.callback(program.kill)
            return program.start()

        if way == "kafka":
            kafka = broker(folder / "kafka")
            stack.callback(kafka.program.kill)
            kafka.start().create("spans", "trajectories")
            started(rebuilder(folder / "rebuilder", kafka.address))
            front = started(kafka_collector(here(), folder / "collector", kafka.address))
            yield {"OTEL_ROLLOUT_TRAIN_ENDPOINT": endpoint(front), "FROM": kafka.address}
            return
        if way not in ("receiver", "collector"):
            yield {"FROM": str(folder / "out.jsonl")}
            return
        last = started(receiver(here(), folder / "receiver"))
        sent = {"OTEL_ROLLOUT_TRAIN_ENDPOINT": f"http://{last.command[-3]}"}
        if way == "collector":
            front = agents_collector(here(), folder / "collector", [last.command[-1]])
            sent["OTEL_ROLLOUT_TRAIN_ENDPOINT"] = endpoint(started(front))
        headers = f"authorization=Bearer {TOKEN}".replace(" ", "%20")
        yield {
            **sent,
            "OTEL_ROLLOUT_TRAIN_HEADERS": headers,
            "FROM": str(last.folder / "trajectories.jsonl"),
        }


async def arrival(way: str, rate: float, seconds: float) -> list[float]:
    """Seconds from the last byte of each rollout until the trainer has it."""
    arrivals, done, ended = Arrivals(), threading.Event(), dict[str, float]()
    place = os.environ["FROM"]
    exporters: list[Any] = [arrivals] if way == "memory" else []
    exporters += [JsonlTrajectoryExporter(place)] if way == "file" else []
    exporters += [Queue()] if way == QUEUE else []
    otel_rollout.configure("arrival", exporters=exporters, instrumentor=None)
    if way == QUEUE:
        threading.Thread(target=arrivals.poll, args=(exporters[0], done)).start()
    elif way == "kafka":
        threading.Thread(target=arrivals.consume, args=(place, done)).start()
    elif way != "memory":
        threading.Thread(target=arrivals.follow, args=(Path(place), done)).start()

    async def agent(client: openai.AsyncOpenAI, number: int) -> None:
        await asyncio.sleep(number / rate)
        group, sample = divmod(number, GROUP)
        place: Any = {"group_id": f"g{group}", "group_size": GROUP, "sample_index": sample}
        with rollout("bench", **place) as trajectory:
            await turns(client, asyncio.Semaphore(AT_ONCE))
            ended[trajectory.id] = time.monotonic()

    count = int(rate * seconds) // GROUP * GROUP
    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none") as client:
        await asyncio.gather(*(agent(client, number) for number in range(count)))
    otel_rollout.shutdown(60_000)
    arrivals.wait_for(count)
    done.set()
    assert len(arrivals.times) == count, f"{len(arrivals.times)} of {count} came"
    return [arrivals.times[id_] - when for id_, when in ended.items()]


def arrivals(ways: Sequence[str], rate: float, seconds: float) -> None:
    """Print the second table."""
    print(f"From the last byte of a rollout until a trainer has it, {rate:g} rollouts a second")
    print(f"{'seconds':<14}{'p50':>8}{'p99':>8}")
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = DELAY_MS
    with server() as base_url:
        os.environ["BASE_URL"] = base_url
        for way in ways:
            with tempfile.TemporaryDirectory() as folder, served(way, Path(folder)) as environment:
                late = in_own_process("arrival", way, str(rate), str(seconds), **environment)
            p50, p99 = percentiles(late, 0.5, 0.99)
            print(f"{way:<14}{p50:>8.2f}{p99:>8.2f}", flush=True)


def measured(part: str, name: str, *more: str) -> Any:
    """What is measured in a process of its own."""
    random.seed(0)
    if part == "open":
        return asyncio.run(all_open(name, int(more[0])))
    return asyncio.run(arrival(name, float(more[0]), float(more[1])))


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(measured(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["open", "arrival"])
    parser.add_argument("--rollouts", type=int, default=16_384)
    parser.add_argument("--variants", nargs="+", default=["bare", "capture"])
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, QUEUE), default=[*WAYS])
    parser.add_argument("--rate", type=float, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "open": lambda: open_at_once(options.variants, options.rollouts),
        "arrival": lambda: arrivals(options.ways, options.rate, options.seconds),
    }
    for part in options.parts:
        parts[part]()


if __name__ == "__main__":
    main()
