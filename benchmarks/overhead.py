"""The cost of capture: CPU time of this process per call, against the bare client in the same run.

    python benchmarks/overhead.py [--repetitions 12] [--turns 1 10 50 200]

A model server runs in a process of its own. The variants take turns in every repetition, each
block is timed with `time.process_time` (garbage collection on), and a second bare client is the
control: if its median is off by more than 3 %, the machine was too noisy and the row is marked.
Spans go to an exporter that counts them, through the queue of each set-up. Each variant is checked
to have captured its calls.

A block is a number of rollouts, each a conversation of so many turns; a message has 2 KB, a reply
is one of `server.py`. The second table tells where the time of capture goes: the recorder is fed
by hand with such requests and replies, without a client and a network.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from server import reply  # type: ignore[import-not-found]  # the one beside this script

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.record.current import current_rollout
from otel_rollout.record.recorder import ExchangeRecorder

TEXT = "word " * 400
TOKENS = 512
HEADERS = {"authorization": "Bearer sk-not-a-real-key", "content-type": "application/json"}


@contextmanager
def server() -> Iterator[str]:
    """The base URL of the model server, which runs in its own process."""
    command = [sys.executable, str(Path(__file__).with_name("server.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


class Counter(SpanExporter):
    """Counts the spans that are exported, but those of starts; keeps none."""

    count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.count += sum(span.name != "rollout started" for span in spans)
        return SpanExportResult.SUCCESS


class Variant:
    """One way to be instrumented; `open` sets it up, `check` asserts that it captured."""

    def __init__(self, name: str, *, ours: bool = False, llm: bool = False) -> None:
        self.name = name
        self.ours = ours
        self.llm = llm
        self.exporter = InMemoryTrajectoryExporter(max_trajectories=1)
        self.spans = Counter()

    @contextmanager
    def open(self) -> Iterator[None]:
        provider = TracerProvider(shutdown_on_exit=False)
        self.exporter = InMemoryTrajectoryExporter(max_trajectories=1)
        if self.ours:
            otel_rollout.configure(
                exporters=[self.exporter],
                span_exporters=[self.spans],
                tracer_provider=provider,
                instrumentor="openai" if self.llm else None,
            )
        elif self.llm:
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor

            provider.add_span_processor(BatchSpanProcessor(self.spans))
            instrumentor = OpenAIInstrumentor(upload_base64_image=None)
            instrumentor.instrument(tracer_provider=provider)
        yield
        otel_rollout.shutdown()
        provider.shutdown()
        if self.llm and not self.ours:
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor

            from otel_rollout.look.instrumentors import unwrap

            OpenAIInstrumentor().uninstrument()
            unwrap()

    def check(self, calls: int, rollouts: int) -> None:
        expected = calls * (self.ours + self.llm) + rollouts * self.ours
        assert self.spans.count == expected, (self.name, self.spans.count, expected)
        if self.ours:
            (trajectory,) = self.exporter.get_finished_trajectories()
            assert trajectory.warnings == []
            for completion in trajectory.completions:
                assert len(completion.token_ids or ()) == TOKENS, len(completion.token_ids or ())
                assert len(completion.logprobs or ()) == TOKENS
        self.spans.count = 0


async def one_rollout(
    client: openai.AsyncOpenAI, turns: int, *, stream: bool, pause: float = 0, model: str = "m"
) -> None:
    """A conversation that grows by a reply and a message of the user with each turn.

    pause: seconds after each turn. model: see `server.py`.
    """
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    for _ in range(turns):
        reply: Any = await client.chat.completions.create(
            model=model, messages=messages, stream=stream
        )
        if stream:
            text = ""
            async for chunk in reply:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        else:
            text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": TEXT}]
        if pause:
            await asyncio.sleep(pause)


async def measure(
    base_url: str,
    variants: list[Variant],
    turns: int,
    *,
    stream: bool,
    repetitions: int,
    calls: int,
) -> dict[str, list[float]]:
    """CPU seconds per call of each variant, one number for each repetition."""
    rollouts = max(1, calls // turns)
    figures: dict[str, list[float]] = {variant.name: [] for variant in variants}
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none-needed") as client:
        await one_rollout(client, min(turns, 10), stream=stream)
        for repetition in range(repetitions):
            # Rotated each time, so that no variant always follows the same other one.
            turn = repetition % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                scope: Callable[[], Any] = (
                    (lambda: rollout("bench")) if variant.ours else nullcontext
                )
                with variant.open():
                    gc.collect()  # each block begins alike; collections during it count
                    start = time.process_time()
                    for _ in range(rollouts):
                        with scope():
                            await one_rollout(client, turns, stream=stream)
                    figures[variant.name].append((time.process_time() - start) / rollouts / turns)
                variant.check(rollouts * turns, rollouts)
    return figures


PARTS = ("rollout", "opening", "request", "reply")
"""Opening and closing the rollout; opening the exchange; the request; the reply and the end."""


def conversation(turns: int) -> list[tuple[bytes, bytes]]:
    """The bodies of requests and replies of a conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
    bodies: list[tuple[bytes, bytes]] = []
    for _ in range(turns):
        request = {"messages": messages, "model": "m"}
        body = reply(request).body
        text = json.loads(body)["choices"][0]["message"]["content"]
        bodies.append((json.dumps(request, separators=(",", ":")).encode(), body))
        messages = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": TEXT},
        ]
    return bodies


def measure_parts(turns: int, repetitions: int) -> dict[str, float]:
    """Seconds of a call that each part takes."""
    bodies, rows = conversation(turns), list[dict[str, float]]()
    with Variant("ours", ours=True).open():
        for _ in range(max(5, repetitions * 20 // turns)):
            rows.append(dict.fromkeys(PARTS, 0.0))
            _record(bodies, rows[-1])
    middle = len(rows) // 5
    return {part: sorted(row[part] for row in rows)[middle] / turns for part in PARTS}


def _record(bodies: list[tuple[bytes, bytes]], spent: dict[str, float]) -> None:
    start = time.perf_counter()
    scope = rollout("bench")
    scope.__enter__()
    spent["rollout"] += time.perf_counter() - start
    active = current_rollout()
    assert active is not None
    for request, response in bodies:
        times = [time.perf_counter()]
        recorder = ExchangeRecorder(active, "/chat/completions")
        times.append(time.perf_counter())
        recorder.request(request, HEADERS, "http://host/v1/chat/completions")
        times.append(time.perf_counter())
        recorder.response(200, {"content-type": "application/json"}, response)
        recorder.end()
        times.append(time.perf_counter())
        for part, begin, end in zip(PARTS[1:], times[:-1], times[1:], strict=True):
            spent[part] += end - begin
    start = time.perf_counter()
    scope.__exit__(None, None, None)
    spent["rollout"] += time.perf_counter() - start


def main() -> None:
    """Print a row for each kind of call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--turns", type=int, nargs="*", default=[1, 10, 50, 200])
    parser.add_argument("--calls", type=int, default=150, help="of a block, or one rollout")
    parser.add_argument("--kinds", nargs="*", default=["plain", "stream"], help="kinds of calls")
    options = parser.parse_args()
    repetitions = options.repetitions
    variants = [
        Variant("bare"),
        Variant("control"),
        Variant("ours", ours=True),
        Variant("instrumentor", llm=True),
        Variant("both", ours=True, llm=True),
    ]
    print(
        f"Python {sys.version.split()[0]}, openai {openai.__version__}, {repetitions} repetitions"
    )
    print("CPU time per call as a ratio to bare: median (minimum to maximum)")
    print(
        f"{'turns':>6} {'kind':>7} {'bare ms':>8}",
        *(f"{v.name:>22}" for v in variants[1:]),
    )
    with server() as base_url:
        for stream in [kind == "stream" for kind in options.kinds]:
            for turns in options.turns:
                figures = asyncio.run(
                    measure(
                        base_url,
                        variants,
                        turns,
                        stream=stream,
                        repetitions=repetitions,
                        calls=options.calls,
                    )
                )
                bare = statistics.median(figures["bare"])
                row = [f"{turns:>6} {'stream' if stream else 'plain':>7} {bare * 1000:>8.2f}"]
                for variant in variants[1:]:
                    ratios = [
                        own / base
                        for own, base in zip(figures[variant.name], figures["bare"], strict=True)
                    ]
                    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
                    row.append(f"{f'{middle:.2f} ({low:.2f} to {high:.2f})':>22}")
                    if variant.name == "control" and not 0.97 <= middle <= 1.03:
                        row.append("NOISY")
                print(*row, flush=True)
    print("\nCapture alone, microseconds of a call: the best fifth of the rollouts")
    print(f"{'turns':>6}", *(f"{part:>10}" for part in PARTS))
    for turns in options.turns:
        parts = measure_parts(turns, repetitions)
        print(f"{turns:>6}", *(f"{parts[part] * 1e6:>10.0f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    main()
