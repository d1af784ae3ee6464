"""What a receiver costs: CPU of its processes for each rollout, against servers that do less.

    python benchmarks/receiving.py [--rollouts 200] [--collector .tools/otelcol] [--folder DISK]

A rollout has 20 turns of 500 sampled tokens with log-probabilities: 1.3 MB of OTLP. Its spans are
sent in two requests over gRPC, by this process, four at a time, to (a) a bare handler, which
answers and does nothing; (b) the collector, which writes them into a file, in protobuf and not
synced; (c) the receiver, which is to rebuild nothing, since no rollout is whole; (d) handler and
receiver with bodies that are gzipped; (e) the receiver, which rebuilds in a process of its own,
into trajectories and into rows. CPU is that of the server's process, and of its worker apart; each
is also given as a multiple of what the bare handler took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[1]))

from otel_rollout import semconv as sc
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter
from tests.kit.sending import Span, request

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
TURNS, TOKENS = 20, 500
WARM = 4
"""Rollouts that are sent before those that are counted."""
ROWS = "tokens"
OPTIONS = [("grpc.max_send_message_length", 1 << 26)]


def rollout(number: int, pieces: list[str], *, whole: bool) -> list[bytes]:
    """The two requests of a rollout."""
    id_, writer, messages = f"{number:032x}", ExchangeWriter(), list[Any]()
    spans, ids = list[Span](), [1, 2, 3]
    for turn in range(1, TURNS + 1):
        messages = [*messages, {"role": "user", "content": f"{number} {turn} " + "word " * 100}]
        body = {"model": "m", "messages": messages}
        text = f"reply {number} {turn} " + "text " * TOKENS
        sampled = [(number * 31 + turn * 7 + at) % 150_000 for at in range(TOKENS)]
        head = {"id": f"r{turn}", "prompt_token_ids": ids, "choices": []}
        message = {"role": "assistant", "content": text}
        reply = (
            json.dumps(head)[:-2]
            + f'{{"index": 0, "finish_reason": "stop", "message": {json.dumps(message)}'
            + f', "token_ids": {sampled}'
            + f', "logprobs": {{"content": {pieces[turn % len(pieces)]}}}}}]}}'
        )
        call = {
            sc.EXCHANGE_VERSION: 1,
            sc.ROLLOUT_ID: id_,
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: turn,
            sc.REQUEST_PATH: "/chat/completions",
            **writer.request(json.dumps(body).encode()),
            sc.EXCHANGE_ENDED: turn,
            sc.EXCHANGE_STATUS: "complete",
            **writer.response(reply.encode()),
        }
        spans.append((f"{number:08x}{turn:08x}", with_lengths(call)))
        messages = [*messages, message]
        ids = [*ids, *sampled, 7, 8, 9]
    own = {
        sc.ROLLOUT_SCHEMA_VERSION: 1,
        sc.ROLLOUT_ID: id_,
        sc.ROLLOUT_PROCESS: "p",
        sc.ROLLOUT_STATUS: "complete",
        sc.ROLLOUT_TRAINABLE: True,
        sc.ROLLOUT_EXCHANGE_COUNT: TURNS if whole else TURNS + 1,
        sc.ROLLOUT_OPEN_COUNT: 0,
    }
    spans.append((f"{number:08x}{0:08x}", with_lengths(own)))
    return [request(spans[: TURNS // 2]), request(spans[TURNS // 2 :])]


def logprobs() -> list[str]:
    """Texts of the log-probabilities of some replies."""
    order = random.Random(1)
    return [
        json.dumps([
            {"token": f"t{order.randint(0, 9999)}", "logprob": -order.random(), "bytes": [116],
             "top_logprobs": []}
            for _ in range(TOKENS)
        ])
        for _ in range(7)
    ]  # fmt: skip


# --- the servers


async def bare() -> None:
    """A gRPC server that answers, in a process of its own."""

    async def export(_body: bytes, _context: Any) -> bytes:
        return b""

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 26)])
    handler = grpc.method_handlers_generic_handler(
        METHOD[1:].partition("/")[0], {"Export": grpc.unary_unary_rpc_method_handler(export)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"grpc 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The processes that a process has begun."""
    found = [n for p in Path(f"/proc/{pid}/task").glob("*/children") for n in p.read_text().split()]
    return [int(each) for each in found] + [c for each in found for c in children(int(each))]


@contextmanager
def server(*command: str) -> Iterator[tuple[int, str]]:
    """A server's process id and its address for gRPC."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE)
    assert process.stdout is not None
    address = process.stdout.readline().decode().split()[1]
    try:
        yield process.pid, address
    finally:
        process.terminate()
        process.wait(60)


COLLECTOR = """
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "{address}", max_recv_msg_size_mib: 64}}}}}}}}
exporters: {{file: {{path: "{folder}/collected", format: proto}}}}
service:
  pipelines: {{traces: {{receivers: [otlp], exporters: [file]}}}}
  telemetry: {{metrics: {{level: none}}, logs: {{level: error}}}}
"""


@contextmanager
def collector(binary: Path, folder: Path) -> Iterator[tuple[int, str]]:
    """The same of a collector that writes a file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    config = folder / "collector.yaml"
    config.write_text(COLLECTOR.format(address=address, folder=folder))
    process = subprocess.Popen([str(binary), "--config", str(config)])
    try:
        yield process.pid, address
    finally:
        process.terminate()
        process.wait(60)


async def send(address: str, bodies: list[bytes], compression: grpc.Compression) -> float:
    """Send all, four at a time; the seconds that it took."""
    began, waiting = time.monotonic(), iter(bodies)
    async with grpc.aio.insecure_channel(address, OPTIONS, compression=compression) as channel:
        call = channel.unary_unary(METHOD)

        async def some() -> None:
            for body in waiting:
                await call(body, wait_for_ready=True)

        await asyncio.gather(*(some() for _ in range(4)))
    return time.monotonic() - began


def measure(
    name: str,
    bodies: list[bytes],
    process: AbstractContextManager[tuple[int, str]],
    *,
    compression: grpc.Compression = grpc.Compression.NoCompression,
    out: Path | None = None,
    bare: float | None = None,
) -> float:
    """Print and return what a server costs for each rollout, in ms.

    out: a line comes there for each rollout. bare: what the bare handler costs.
    """

    def wait(lines: int) -> None:
        while out is not None and (not out.exists() or out.read_bytes().count(b"\n") < lines):
            time.sleep(0.1)

    with process as (pid, address):
        asyncio.run(send(address, bodies[: 2 * WARM], compression))
        wait(WARM)
        before, of_children = cpu(pid), sum(map(cpu, children(pid)))
        seconds = asyncio.run(send(address, bodies[2 * WARM :], compression))
        counted = len(bodies) // 2 - WARM
        wait(counted + WARM)
        own = (cpu(pid) - before) * 1000 / counted
        line = f"{name:<34} {own:6.2f} ms, {1000 / own:5.0f}/s and core"
        line += f", {own / bare:4.1f} x bare" if bare else ""
        if out is not None:
            worker = (sum(map(cpu, children(pid))) - of_children) * 1000 / counted
            line += f"; {worker:6.2f} ms of its worker, {1000 / worker:5.0f}/s and core"
    print(f"{line}; {counted / seconds:.0f}/s sent", flush=True)
    return own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--collector", type=Path, default=Path(".tools/otelcol"))
    parser.add_argument("--folder", help="where journals are, for another disk")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        asyncio.run(bare())
        return
    texts, count = logprobs(), options.rollouts
    open_ones = [b for n in range(count) for b in rollout(n, texts, whole=False)]
    whole = [b for n in range(count) for b in rollout(n, texts, whole=True)]
    print(f"{count} rollouts of {sum(map(len, whole)) / count / 1e6:.2f} MB", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def receiver(name: str, *more: str) -> AbstractContextManager[tuple[int, str]]:
            main = "import sys; from otel_rollout.command import main; sys.exit(main())"
            at = f"{folder}/{name}"
            places = ("--out", f"{at}.jsonl", "--journal", at, *more)
            free = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
            return server("-c", main, "receive", *places, *free)

        gzip, bare_one = grpc.Compression.Gzip, (__file__, "--bare")
        base = measure("bare handler", open_ones, server(*bare_one))
        if options.collector.is_file():
            to_file = collector(options.collector, Path(folder))
            measure("collector, into a file", open_ones, to_file, bare=base)
        else:
            print(f"collector: no {options.collector} (make backends)")
        measure("receiver, journalled and judged", open_ones, receiver("a"), bare=base)
        measure("bare handler, gzip", open_ones, server(*bare_one), compression=gzip, bare=base)
        measure("receiver, gzip", open_ones, receiver("b"), compression=gzip, bare=base)
        out = Path(folder, "c.jsonl")
        measure("receiver, into trajectories", whole, receiver("c"), out=out, bare=base)
        rows, out = receiver("d", "--to", ROWS), Path(folder, "d.jsonl")
        measure("receiver, into rows", whole, rows, out=out, bare=base)


if __name__ == "__main__":
    main()
