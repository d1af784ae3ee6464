"""The bytes that a coding agent's trace takes on the wire, against its unique content.

    python benchmarks/wire.py [--turns 10 100 300]

Each turn has 4 KB of content that no other has: a reply with a tool call, and the tool's result.
Counted are bytes of OTLP protobuf, uncompressed: what an exporter sends. `look` is all spans but
exchange spans, for people; `rebuild` is the spans of this library, from which trajectories are
rebuilt; `both` is all spans. Beside them stand other instrumentations of the same agent, each in a
process of its own. Those that `.venv` has not are looked for in `.venv-frameworks`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

HALF = 2000
"""Characters of a tool's arguments, and of its result."""
ROOT = Path(__file__).parent.parent
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file of the repository",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "edit", "search", "run")
]
WORDS = ("def", "return", "self.value", "for", "in", "range(10):", "'text'", "+=", "None", "index")
PACKAGES = {
    "openinference": "openinference-instrumentation-openai==0.1.66",
    "logfire": "logfire==5.2.0",
}
"""Packages of the instrumentations that are no dependency of this library."""


def code(seed: str, size: int = HALF) -> str:
    """Lines that look like code, and differ with the seed."""
    dice, lines = random.Random(seed), list[str]()
    while sum(map(len, lines)) < size:
        lines.append(
            "    " + " ".join(dice.choices(WORDS, k=6)) + f"  # {dice.getrandbits(64):x}\n"
        )
    return "".join(lines)[:size]


def opening() -> list[Any]:
    """The messages that the conversation begins with."""
    return [
        {"role": "system", "content": "You are a careful engineer. " * 20},
        {"role": "user", "content": "Find the failing test and repair it. " * 5},
    ]


def call(turn: int) -> tuple[str, str]:
    """The arguments of a turn's tool call, and its result."""
    return json.dumps({"path": f"src/{turn}.py", "text": code(f"a{turn}")}), code(f"r{turn}")


def unique(turns: int) -> int:
    """Characters of content that the whole conversation has."""
    said = sum(len(part) for turn in range(turns) for part in call(turn))
    return said + sum(len(message["content"]) for message in opening()) + len(json.dumps(TOOLS))


def run_agent(client: openai.OpenAI, turns: int) -> None:
    """The agent: it asks, does what it is told, and asks again."""
    messages = opening()
    for turn in range(turns):
        tools: Any = TOOLS
        reply = client.chat.completions.create(model="coder", messages=messages, tools=tools)
        messages.append(reply.choices[0].message)
        for asked in reply.choices[0].message.tool_calls or ():
            result = {"role": "tool", "tool_call_id": asked.id, "content": call(turn)[1]}
            messages.append(result)


class Sizes(SpanExporter):
    """Adds up the bytes of spans, by what they are."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            self.bytes[_kind(span)] += len(encode_spans([span]).SerializeToString())
        return SpanExportResult.SUCCESS


def _kind(span: ReadableSpan) -> str:
    scope = span.instrumentation_scope
    if scope is None or scope.name != "otel_rollout":
        return "llm"
    kind = span.name.partition(" ")[0]
    is_exchange = any(name.startswith("rollout.exchange.") for name in span.attributes or ())
    return "exchange" if is_exchange else kind


# --- the instrumentations: each runs in a process of its own


def _ours(run: Callable[[], None], sizes: Sizes, **options: Any) -> None:
    import otel_rollout

    otel_rollout.configure("bench", span_exporters=[sizes], **options)
    with otel_rollout.rollout("coder"):
        run()
    assert otel_rollout.shutdown()


def _instrumentor(run: Callable[[], None], sizes: Sizes) -> None:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=_provider(sizes))
    run()


def _openinference(run: Callable[[], None], sizes: Sizes) -> None:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=_provider(sizes))
    run()


def _logfire(run: Callable[[], None], sizes: Sizes) -> None:
    import logfire  # type: ignore[import-not-found]

    logfire.configure(
        send_to_logfire=False,
        console=False,
        additional_span_processors=[SimpleSpanProcessor(sizes)],
    )
    logfire.instrument_openai()
    run()


def _provider(sizes: Sizes) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(sizes))
    return provider


ROWS: dict[str, Callable[[Callable[[], None], Sizes], None]] = {
    "new (default)": _ours,
    "full": lambda run, sizes: _ours(run, sizes, content="full"),
    "instrumentor": _instrumentor,
    "openinference": _openinference,
    "logfire": _logfire,
}


def measure(row: str, base_url: str, turns: int) -> None:
    """Run one instrumentation here, and print its bytes as JSON."""
    sizes = Sizes()
    with openai.OpenAI(base_url=base_url, api_key="none-needed") as client:
        ROWS[row](lambda: run_agent(client, turns), sizes)
    print(json.dumps(sizes.bytes))


def in_a_process(row: str, base_url: str, turns: int) -> dict[str, int] | str:
    """The bytes of a row, or a sentence why there are none."""
    for python in (sys.executable, str(ROOT / ".venv-frameworks/bin/python")):
        if not Path(python).exists():
            continue
        command = [python, __file__, "--row", row, "--at", base_url, "--turns", str(turns)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
            return found
        if "ModuleNotFoundError" not in done.stderr:
            return f"failed: {done.stderr.strip().splitlines()[-1]}"
    return f"is not installed: pip install {PACKAGES.get(row, row)}"


def table(base_url: str, turns: int) -> None:
    """Print the rows of one length."""
    content = unique(turns)
    print(f"\n{turns} turns, {content / 1e3:,.0f} KB of unique content", flush=True)
    print(f"{'':>22} {'KB':>10} {'times':>7}")
    for row in ROWS:
        found = in_a_process(row, base_url, turns)
        if isinstance(found, str):
            print(f"{row:>22} {found}", flush=True)
            continue
        whole, exchange, llm = sum(found.values()), found.get("exchange", 0), found.get("llm", 0)
        lanes = {row: whole}
        if exchange:
            lanes = {
                f"{row}: look": whole - exchange,
                "LLM spans": llm,
                "tool spans": found.get("execute_tool", 0),
                "rebuild": whole - llm,
                "both": whole,
            }
        for name, size in lanes.items():
            print(f"{name:>22} {size / 1e3:>10,.0f} {size / content:>7.2f}", flush=True)


def _reply(request: dict[str, Any]) -> Any:
    from otel_rollout.testing import Reply, ToolCall

    turn = sum(message["role"] == "assistant" for message in request["messages"])
    arguments = call(turn)[0]
    return Reply(tool_calls=[ToolCall("edit", arguments, f"call_{turn}")])


def main() -> None:
    """Print a table for each length, or measure one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, nargs="*", default=[10, 100, 300])
    parser.add_argument("--row", help="measure this one alone, in this process")
    parser.add_argument("--at", help="base URL of the model server")
    options = parser.parse_args()
    if options.row:
        measure(options.row, options.at, options.turns[0])
        return
    from otel_rollout.testing import ModelServer

    with ModelServer(_reply) as server:
        for turns in options.turns:
            table(server.base_url, turns)


if __name__ == "__main__":
    main()
