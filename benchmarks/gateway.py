"""The cost of a gateway: added latency, CPU for each call, and memory over many calls.

    python benchmarks/gateway.py [--streams 512] [--calls 4000] [--soak 100000]

Calls go to a model server through (a) nothing, (b) a bare proxy on the same libraries, which does
no more than pass bytes on, and (c) the gateway. Server, proxy and gateway are processes of their
own; this one is the client. Latency is that of a whole call; of streams also that of each event,
from when the server sent it (it says when) to when it came. CPU is that of the process in the
middle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import uvicorn
from server import reply  # type: ignore[import-not-found]  # the one beside this script

ASK = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are a helpful agent. " * 40},
        {"role": "user", "content": "What is the weather like in Paris today? " * 5},
    ],
}
EVENTS, PAUSE = 20, 0.25
LARGE = reply({"messages": []}).body
"""The reply to a request that asks for log-probabilities: 50 KB."""
SECRET = "benchmark"
AUTHORIZATION = {"authorization": f"Bearer {SECRET}"}
"""What the control API of the gateway asks for."""
_stamp = re.compile(rb'"sent":(\d+)').findall


# --- the processes


def uvicorn_serves(application: Any, port: int) -> None:
    """Serve until this process is killed."""
    uvicorn.run(
        application, port=port, http="httptools", ws="none", lifespan="off", log_level="critical",
        access_log=False, backlog=4096, timeout_keep_alive=300,
    )  # fmt: skip


async def model(_: Any, receive: Any, send: Any) -> None:
    """A model server: a reply of some hundred bytes, or `LARGE`, or a stream of events."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    if b'"stream":' not in body:
        message = {"role": "assistant", "content": "It is sunny. " * 10}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        small = json.dumps({**head, "choices": [choice], "usage": {"total_tokens": 30}}).encode()
        sent = LARGE if b'"logprobs":true' in body else small
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(sent))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": sent})
        return
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number in range(EVENTS):
        await asyncio.sleep(PAUSE)
        last = number == EVENTS - 1
        delta = {} if last else {"content": "word "}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop" if last else None}
        text = json.dumps({**head, "choices": [choice], "sent": time.monotonic_ns()})
        event = f"data: {text}\n\n".replace('"sent": ', '"sent":').encode()
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class Bare:
    """A proxy on the gateway's libraries that does no more than a proxy has to."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        task = asyncio.current_task()
        assert task is not None
        gone = asyncio.create_task(receive())  # a client that leaves aborts the call
        gone.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
        headers = [
            (name.decode(), value.decode())
            for name, value in scope["headers"]
            if name not in (b"host", b"content-length", b"connection")
        ]
        url = self._upstream + scope["path"][scope["path"].index("/v1") :]
        try:
            async with self._session.request(
                scope["method"], url, headers=headers, data=body, allow_redirects=False
            ) as response:
                kept = [
                    (name, value)
                    for name, value in response.raw_headers
                    if name.lower() not in (b"transfer-encoding", b"connection")
                ]
                start = {"type": "http.response.start", "status": response.status, "headers": kept}
                await send(start)
                while piece := await response.content.readany():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()


def run_part(part: str, port: int, upstream: str, options: list[str]) -> None:
    """One of the processes. options: those of the gateway."""
    if part == "model":
        uvicorn_serves(model, port)
    elif part == "bare":
        uvicorn_serves(Bare(upstream), port)
    else:
        from otel_rollout.command import main

        sys.exit(main(["gateway", "--upstream", upstream, "--port", str(port), *options]))


@contextmanager
def process(
    part: str, port: int, upstream: str = "-", *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this file while the block runs. options: those of the gateway."""
    arguments = [sys.executable, __file__, "--part", part, str(port), upstream, *options]
    quiet = subprocess.DEVNULL
    environment = {**os.environ, "OTEL_ROLLOUT_SECRET": SECRET}
    with subprocess.Popen(arguments, stdout=quiet, stderr=quiet, env=environment) as running:
        try:
            yield running
        finally:
            running.kill()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


# --- the client


async def until_up(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until a server takes connections."""
    for _ in range(600):
        try:
            async with session.get(url):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.05)
    raise TimeoutError(url)


async def base_url_of(session: aiohttp.ClientSession, root: str) -> str:
    """The base URL of a rollout that is begun at the gateway."""
    asked = session.post(f"{root}/rollouts", json={"name": "benchmark"}, headers=AUTHORIZATION)
    async with asked as response:
        return str((await response.json())["openai_base_url"])


async def end_rollout(session: aiohttp.ClientSession, root: str, base_url: str) -> None:
    """End the rollout that the token in a base URL names."""
    token = base_url.split("/r/")[1].split("/")[0]
    rollout_id = urlsafe_b64decode(token + "=" * (-len(token) % 4))[9:25].hex()
    asked = session.delete(f"{root}/rollouts/{rollout_id}", headers=AUTHORIZATION)
    async with asked as response:
        assert response.status == 200, response.status


async def call(session: aiohttp.ClientSession, url: str, data: bytes) -> float:
    """One call that is not streamed; seconds."""
    start = time.perf_counter()
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    async with session.post(f"{url}/chat/completions", data=data, headers=headers) as response:
        await response.read()
        assert response.status == 200, response.status
    return time.perf_counter() - start


async def stream(session: aiohttp.ClientSession, url: str, late: float) -> list[float]:
    """One stream that begins after `late` seconds; how late each of its events came, in seconds."""
    await asyncio.sleep(late)
    delays = list[float]()
    body = {**ASK, "stream": True}
    async with session.post(f"{url}/chat/completions", json=body) as response:
        while chunk := await response.content.readany():
            now = time.monotonic_ns()
            delays += [(now - int(sent)) / 1e9 for sent in _stamp(chunk)]
    assert len(delays) == EVENTS, len(delays)
    return delays


async def measured(pid: int, url: str, streams: int, calls: int) -> dict[str, float]:
    """Latencies, and CPU for each call, of one way."""
    found = dict[str, float]()
    data = json.dumps(ASK).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(200):
            await call(session, url, data)
        cpu = cpu_of(pid)
        latencies = [await call(session, url, data) for _ in range(calls)]
        found["call CPU us"] = (cpu_of(pid) - cpu) / calls * 1e6
        found["call median ms"], found["call p99 ms"] = _of(latencies)
        cpu = cpu_of(pid)
        late = EVENTS * PAUSE / streams
        all_streams = [stream(session, url, number * late) for number in range(streams)]
        delays = [each for of_one in await asyncio.gather(*all_streams) for each in of_one]
        found["stream CPU us"] = (cpu_of(pid) - cpu) / streams * 1e6
        found["event median ms"], found["event p99 ms"] = _of(delays)
    return found


def _of(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return statistics.median(seconds) * 1e3, cuts[98] * 1e3


async def compare(streams: int, calls: int, rounds: int) -> None:
    """Print a row for each way, and what is added."""
    results: dict[str, list[dict[str, float]]] = {"nothing": [], "bare": [], "gateway": []}
    server = "http://127.0.0.1:4501"
    with (
        process("model", 4501) as behind,
        process("bare", 4502, server) as bare,
        process("gateway", 4503, server) as gateway,
    ):
        async with aiohttp.ClientSession() as session:
            for port in (4501, 4502, 4503):
                await until_up(session, f"http://127.0.0.1:{port}/docs" if port > 4502 else
                               f"http://127.0.0.1:{port}/v1")  # fmt: skip
        for _ in range(rounds):
            async with aiohttp.ClientSession() as session:
                through = await base_url_of(session, "http://127.0.0.1:4503")
            ways = {
                "nothing": (behind.pid, f"{server}/v1"),
                "bare": (bare.pid, "http://127.0.0.1:4502/v1"),
                "gateway": (gateway.pid, through),
            }
            for name, (pid, url) in ways.items():
                results[name].append(await measured(pid, url, streams, calls))
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in results.items()
    }
    print(f"{streams} streams of {EVENTS} events at a time; {calls} calls, one after the other")
    print(f"{'':<18}" + "".join(f"{name:>10}" for name in medians) + f"{'added':>10}{'c/b':>8}")
    for key in medians["nothing"]:
        of_none, of_bare, of_gateway = (medians[name][key] for name in medians)
        added = of_gateway - (of_none if "ms" in key else of_bare)
        row = f"{key:<18}{of_none:>10.2f}{of_bare:>10.2f}{of_gateway:>10.2f}{added:>10.2f}"
        print(f"{row}{of_gateway / of_bare:>8.2f}")


async def soak(calls: int) -> None:
    """Print the memory of a gateway after each tenth of so many calls, of rollouts of 100 calls."""
    server = "http://127.0.0.1:4501"
    data = json.dumps(ASK).encode()
    with process("model", 4501), process("gateway", 4503, server) as gateway:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for port, path in ((4501, "/v1"), (4503, "/docs")):
                await until_up(session, f"http://127.0.0.1:{port}{path}")
            root = "http://127.0.0.1:4503"
            for tenth in range(1, 11):
                start = time.perf_counter()
                for _ in range(calls // 1000):
                    url = await base_url_of(session, root)
                    for _ in range(10):
                        await asyncio.gather(*(call(session, url, data) for _ in range(10)))
                    await end_rollout(session, root, url)
                rate = calls / 10 / (time.perf_counter() - start)
                done = tenth * calls // 10
                print(
                    f"{done:>8} calls {memory_of(gateway.pid):>8.1f} MiB {rate:>7.0f}/s", flush=True
                )


def main() -> None:
    """Measure, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, metavar="CALLS", help="measure memory instead")
    parser.add_argument("--part", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, port, upstream, *of_gateway = options.part
        run_part(part, int(port), upstream, of_gateway)
    elif options.soak:
        asyncio.run(soak(options.soak))
    else:
        asyncio.run(compare(options.streams, options.calls, options.rounds))


if __name__ == "__main__":
    main()
