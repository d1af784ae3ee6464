"""How late everything else is while calls are recorded: in an agent's loop, and at a gateway.

    python benchmarks/lateness.py [--parts loop long burst gateway throughput] [--seconds 20]
        [--variants bare capture spans otlp trajectories "default, both"] [--rounds 3] [--unfrozen]

loop: how late a sleep of 2 ms is in the loop of an agent's process: 16 rollouts of ten turns at
once, with 40 KB of conversation at their end, about 40 calls a second. Each variant is a process of
its own, whose start-up objects are frozen (`gc.freeze`); the variants take turns.
long: the longest of such delays from when a rollout ends whose reply is long, streamed or not.
burst: 256 rollouts of ten such calls that end together: how long after the last call is the file
complete.
gateway: latency of a small request through a proxy that is sent every 20 ms, beside 100 calls a
second with 40 KB of conversation, or 6 with 1.6 MB, in rollouts of ten.
throughput: calls per second, and CPU for each, of 16 agents that call through a proxy as fast as
they can; replies of 50 KB.

The model server, the receiver of OTLP and the proxies are processes of their own, which share the
cores with the one that is measured: compare with `bare`, which is measured beside the others.
Where others use the cores too, compare the best rounds, without the loop's waiting for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import gateway as proxies  # type: ignore[import-not-found]  # those beside this script
import openai
from opentelemetry.sdk.trace import TracerProvider
from overhead import one_rollout, server  # type: ignore[import-not-found]

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, JsonlTrajectoryExporter, rollout
from otel_rollout.look import train_exporter
from otel_rollout.otlp import JsonLinesSpanExporter

VARIANTS = ("bare", "capture", "spans", "otlp", "trajectories", "default, both")
SLEEP = 0.002
AGENTS, TURNS, CALLS_A_SECOND = 16, 10, 40
PROXIES = {
    "bare proxy": ("bare",),
    "gateway": ("gateway",),
    "--out": ("gateway", "--out", "{}/out.jsonl"),
    "--spans": ("gateway", "--spans", "{}/spans.jsonl"),
    "both": ("gateway", "--out", "{}/out.jsonl", "--spans", "{}/spans.jsonl"),
}
"""What is in the middle: the part of `gateway.py`, and the gateway's options."""
BURST = 256
LONG = (4_000, 32_000)
"""Tokens of long replies."""
LONG_ROLLOUTS, LONG_SECONDS = 3, 3.0
UNFROZEN = "LATENESS_UNFROZEN"
PROBE, SMALL_KB = 0.02, 2


# --- the process of an agent, which is measured


def configured(variant: str, folder: str) -> type[rollout | nullcontext[Any]]:
    """Set the process up as the variant says; the scope of a rollout."""
    if variant == "bare":
        return nullcontext
    is_default = variant.startswith("default")
    to_file = variant == "trajectories" or is_default
    otel_rollout.configure(
        "lateness",
        exporters=[
            JsonlTrajectoryExporter(f"{folder}/out.jsonl")
            if to_file
            else InMemoryTrajectoryExporter(max_trajectories=1)
        ],
        span_exporters=[
            *([JsonLinesSpanExporter(f"{folder}/spans.jsonl")] if variant == "spans" else ()),
            *([exporter] if variant == "otlp" and (exporter := train_exporter(None)) else ()),
        ],
        tracer_provider=None if is_default else TracerProvider(),
        instrumentor="openai" if is_default else None,
    )
    return rollout


def freeze() -> None:
    """Let collections skip what start-up made, unless the collector is to be left as it is."""
    if UNFROZEN not in os.environ:
        gc.collect()
        gc.freeze()


def waited() -> float:
    """Seconds that this thread has waited for a core so far, as Linux counts them."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def be_late(done: asyncio.Event) -> list[tuple[float, float]]:
    """How much longer sleeps took, in seconds, and what of it was waiting for a core."""
    late = []
    while not done.is_set():
        before, began = waited(), time.perf_counter()
        await asyncio.sleep(SLEEP)
        late.append((time.perf_counter() - began - SLEEP, waited() - before))
    return late


async def loop(scope: Any, seconds: float) -> dict[str, Any]:
    """What `be_late` found, and the number of calls."""
    done, calls = asyncio.Event(), 0
    pause = AGENTS / CALLS_A_SECOND

    async def agent(client: openai.AsyncOpenAI, number: int, end: float) -> None:
        nonlocal calls
        await asyncio.sleep(pause * number / AGENTS)
        while time.monotonic() < end:
            with scope("bench"):
                await one_rollout(client, TURNS, stream=False, pause=pause)
            calls += TURNS

    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none") as client:
        with scope("bench"):
            await one_rollout(client, TURNS, stream=False)
        freeze()
        sleeps = asyncio.create_task(be_late(done))
        end = time.monotonic() + seconds
        await asyncio.gather(*(agent(client, number, end) for number in range(AGENTS)))
        done.set()
        return {"late": await sleeps, "calls": calls}


async def long(scope: Any, tokens: int, *, stream: bool) -> dict[str, Any]:
    """What `be_late` found after replies of so many tokens, for three seconds after each."""
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    asked |= {"logprobs": True, "max_tokens": tokens, "stream": stream}
    late = list[tuple[float, float]]()
    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none") as client:
        for _ in range(LONG_ROLLOUTS):
            done = asyncio.Event()
            with scope("bench"):
                reply = await client.chat.completions.create(**asked)
                if stream:
                    async for _ in reply:
                        pass
                del reply
                freeze()
            sleeps = asyncio.create_task(be_late(done))
            await asyncio.sleep(LONG_SECONDS)
            done.set()
            late += await sleeps
    return {"late": late}


async def burst(scope: Any) -> dict[str, Any]:
    """Seconds from the last call until all rollouts are in the file, and calls per second."""
    left, together = BURST, asyncio.Event()

    async def agent(client: openai.AsyncOpenAI) -> None:
        nonlocal left
        with scope("bench"):
            await one_rollout(client, TURNS, stream=False)
            left -= 1
            if not left:
                together.set()
            await together.wait()

    async with openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none") as client:
        freeze()
        began = time.monotonic()
        agents = asyncio.gather(*(agent(client) for _ in range(BURST)))
        await together.wait()
        last = time.monotonic()
        await agents
        assert otel_rollout.shutdown(600_000)
        written = time.monotonic() - last
    return {"seconds": written, "rate": BURST * TURNS / (last - began)}


def measured(part: str, variant: str, seconds: float) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--here", part, variant, str(seconds)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def here(part: str, variant: str, seconds: float) -> None:
    """Be that process: print what was measured."""
    if part == "probe":
        found = asyncio.run(probe(variant, seconds))
    else:
        with tempfile.TemporaryDirectory() as folder:
            scope = configured(variant, folder)
            if part.startswith("long"):
                tokens, stream = int(part.split()[1]), part.endswith("streamed")
                found = asyncio.run(long(scope, tokens, stream=stream))
            else:
                found = asyncio.run(loop(scope, seconds) if part == "loop" else burst(scope))
            otel_rollout.shutdown()
            if part == "burst" and os.path.exists(f"{folder}/out.jsonl"):
                assert Path(folder, "out.jsonl").read_bytes().count(b"\n") == BURST
    print(json.dumps(found))


# --- beside it


@contextmanager
def receiver() -> Iterator[None]:
    """A receiver of OTLP over HTTP, which the environment names while the block runs."""

    class Sink(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    sink.daemon_threads = True
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{sink.server_port}"
    yield
    del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    sink.shutdown()


def row(name: str, seconds: Sequence[float], after: str) -> str:
    """Percentiles in milliseconds."""
    ordered = sorted(seconds)
    shown = [ordered[int(len(ordered) * share)] for share in (0.5, 0.99, 0.999)]
    return f"{name:<16}" + "".join(f"{1e3 * each:>8.1f}" for each in (*shown, ordered[-1])) + after


HEAD = f"{'ms':<16}" + "".join(f"{name:>8}" for name in ("p50", "p99", "p99.9", "worst"))


def loops(variants: Sequence[str], seconds: float, rounds: int) -> None:
    """Print two rows for each variant: all rounds, and the best without waiting for a core."""
    late: dict[str, list[list[tuple[float, float]]]] = {variant: [] for variant in variants}
    calls = dict.fromkeys(variants, 0)
    with server() as base_url, receiver():
        os.environ["BASE_URL"] = base_url
        for _ in range(rounds):
            for variant in variants:
                found = measured("loop", variant, seconds)
                late[variant].append(found["late"])
                calls[variant] += found["calls"]
    print(f"A sleep of 2 ms in the agent's loop, how late: all rounds\n{HEAD}   calls")
    for variant in variants:
        whole = [each for found in late[variant] for each, _ in found]
        print(row(variant, whole, f"{calls[variant]:>8}"), flush=True)
    print(f"The best of {rounds} rounds, without waiting for a core\n{HEAD}")
    for variant in variants:
        left = [sorted(each - core for each, core in found) for found in late[variant]]
        print(row(variant, min(left, key=p999), ""), flush=True)


def p999(ordered: Sequence[float]) -> float:
    return ordered[int(len(ordered) * 0.999)]


def longs(variants: Sequence[str]) -> None:
    """Print the longest delay of each variant, in milliseconds, for each kind of reply."""
    kinds = [f"{tokens}{how}" for tokens in LONG for how in ("", " streamed")]
    print("Worst delay after a long reply, ms, by its tokens")
    print(" " * 16 + "".join(f"{kind:>16}" for kind in kinds))
    with server() as base_url, receiver():
        os.environ["BASE_URL"] = base_url
        for variant in variants:
            shown = f"{variant:<16}"
            for kind in kinds:
                found = measured(f"long {kind}", variant, 0)["late"]
                shown += f"{1e3 * max(each - core for each, core in found):>16.1f}"
            print(shown, flush=True)


def bursts(variants: Sequence[str]) -> None:
    """Print a row for each variant."""
    print("256 rollouts that end together: seconds until all are written, calls per second before")
    with server() as base_url, receiver():
        os.environ["BASE_URL"] = base_url
        for variant in variants:
            found = measured("burst", variant, 0)
            print(f"{variant:<16}{found['seconds']:>8.2f}{found['rate']:>8.0f}", flush=True)


# --- at a proxy


async def agent(
    session: aiohttp.ClientSession, root: str, pauses: Iterator[float], *, is_gateway: bool, kb: int
) -> int:
    """Rollouts of ten calls, one after the other, with a pause before each call; the calls."""
    calls, url, messages = 0, f"{root}/v1", b""
    for pause in pauses:
        if calls % TURNS == 0:
            first = [{"role": "user", "content": f"{calls} " + "word " * (kb * 200)}]
            messages = json.dumps(first).encode()[:-1]
            if is_gateway:
                if calls:
                    await proxies.end_rollout(session, root, url)
                url = await proxies.base_url_of(session, root)
        await asyncio.sleep(pause)
        asks = b'"logprobs":true,' if kb == SMALL_KB else b""
        await proxies.call(session, url, b'{"model":"m",%b"messages":%b]}' % (asks, messages))
        messages += (
            b',{"role":"assistant","content":"It is sunny."},{"role":"user","content":"So?"}'
        )
        calls += 1
    if is_gateway and calls:
        await proxies.end_rollout(session, root, url)
    return calls


async def probe(url: str, seconds: float) -> dict[str, Any]:
    """Latencies, in seconds, of small requests that are sent every 20 ms."""

    async def one() -> float:
        began = time.perf_counter()
        async with session.get(f"{url}/models") as response:
            await response.read()
        return time.perf_counter() - began

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await one()
        freeze()
        tasks, end = list[asyncio.Task[float]](), time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(PROBE)
        return {"late": await asyncio.gather(*tasks)}


@asynccontextmanager
async def served(
    name: str, folder: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], aiohttp.ClientSession, str]]:
    """A model server and a proxy in front of it: its process, a client session, its address."""
    part, *options = PROXIES[name]
    behind, root = "http://127.0.0.1:4501", "http://127.0.0.1:4503"
    options = [option.format(folder) for option in options]
    with (
        proxies.process("model", 4501),
        proxies.process(part, 4503, behind, *options) as running,
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await proxies.until_up(session, f"{behind}/v1")
            await proxies.until_up(session, f"{root}/v1/models")
            yield running, session, root


async def at_proxy(name: str, kb: int, calls_a_second: float, seconds: float) -> list[float]:
    """Latencies of the probe, in seconds, while so many calls are made."""
    done, pause = threading.Event(), AGENTS / calls_a_second

    def pauses(number: int) -> Iterator[float]:
        due = time.monotonic() + pause * number / AGENTS
        while not done.is_set():
            yield max(0.0, due - time.monotonic())
            due += pause

    def measure(url: str) -> list[float]:
        try:
            return list(measured("probe", url, seconds)["late"])
        finally:
            done.set()

    with tempfile.TemporaryDirectory() as folder:
        async with served(name, folder) as (_, session, root):
            is_gateway = name != "bare proxy"
            url = await proxies.base_url_of(session, root) if is_gateway else f"{root}/v1"
            probing = asyncio.create_task(asyncio.to_thread(measure, url))
            await asyncio.gather(
                *(
                    agent(session, root, pauses(number), is_gateway=is_gateway, kb=kb)
                    for number in range(AGENTS)
                )
            )
            return await probing


async def through(name: str, seconds: float) -> tuple[float, float, float]:
    """Calls per second of agents that do not wait, CPU seconds of the proxy for each, and the
    seconds from a signal until it has written all and ended.
    """

    def no_pauses(end: float) -> Iterator[float]:
        while time.monotonic() < end:
            yield 0.0

    with tempfile.TemporaryDirectory() as folder:
        async with served(name, folder) as (running, session, root):
            cpu, began = proxies.cpu_of(running.pid), time.monotonic()
            is_gateway, end = name != "bare proxy", began + seconds
            calls = sum(
                await asyncio.gather(
                    *(
                        agent(session, root, no_pauses(end), is_gateway=is_gateway, kb=SMALL_KB)
                        for _ in range(AGENTS)
                    )
                )
            )
            stopped = time.monotonic()
            running.terminate()
            # It stays as it is until it is waited for, so what it has used can be read.
            ended = os.WEXITED | os.WNOWAIT
            await asyncio.to_thread(os.waitid, os.P_PID, running.pid, ended)
            cpu = proxies.cpu_of(running.pid) - cpu
            return calls / (stopped - began), cpu / calls, time.monotonic() - stopped


def gateways(seconds: float, rounds: int) -> None:
    """Print a row for each proxy and load: the best round."""
    for kb, calls_a_second in ((40, 100), (1600, 6)):
        found: dict[str, list[list[float]]] = {name: [] for name in PROXIES}
        for _ in range(rounds):
            for name in PROXIES:
                late = asyncio.run(at_proxy(name, kb, calls_a_second, seconds))
                found[name].append(sorted(late))
        print(f"A small request beside {calls_a_second} calls a second of {kb} KB\n{HEAD}")
        for name in PROXIES:
            print(row(name, min(found[name], key=p999), ""), flush=True)


def throughput(seconds: float, rounds: int) -> None:
    """Print a row for each proxy: the best round."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in PROXIES}
    for _ in range(rounds):
        for name in PROXIES:
            found[name].append(asyncio.run(through(name, seconds)))
    print(f"{AGENTS} agents that do not wait, replies of 50 KB")
    print(f"{'':<16}{'calls/s':>8}{'CPU ms':>8}{'s after':>8}")
    for name in PROXIES:
        rate, cpu, after = max(found[name])
        print(f"{name:<16}{rate:>8.0f}{1e3 * cpu:>8.2f}{after:>8.2f}", flush=True)


def main() -> None:
    """Measure and print, or be the process that is measured."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("loop", "long", "burst", "gateway", "throughput")
    parser.add_argument("--parts", nargs="*", default=names, choices=names)
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of each but burst")
    parser.add_argument("--unfrozen", action="store_true", help="without `gc.freeze`")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        here(options.here[0], options.here[1], float(options.here[2]))
        return
    if options.unfrozen:
        os.environ[UNFROZEN] = "1"
    if "loop" in options.parts:
        loops(options.variants, options.seconds, options.rounds)
    if "long" in options.parts:
        longs(options.variants)
    if "burst" in options.parts:
        bursts([name for name in options.variants if name not in ("spans", "otlp")])
    if "gateway" in options.parts:
        gateways(options.seconds, options.rounds)
    if "throughput" in options.parts:
        throughput(options.seconds, options.rounds)


if __name__ == "__main__":
    main()
