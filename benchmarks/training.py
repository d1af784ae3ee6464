"""Time until a trainer has its rows: token sequences, rows, exporters, against parsing the data.

    python benchmarks/training.py [--trajectories 1000] [--turns 20] [--tokens 500]

Trajectories of so many turns, each with so many sampled tokens, their log-probabilities and the ids
of the prompt, as vLLM sends them. The yardstick is `json.loads` of the line that
`JsonlTrajectoryExporter` writes for each. Figures are CPU time: the median of the trajectories
times their number. Each step is measured on trajectories that were just read. Peak memory is that
of one trajectory, on top of the trajectory itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from otel_rollout import ExportError, Trajectory, TrajectoryGroup, reconstruct, to_token_rows
from otel_rollout import semconv as sc
from otel_rollout.export import RowExporter, row_exporter, row_exporters
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter

DIFFERENT = 5
"""Texts that the trajectories are read from in turn."""


def _span(number: int, attributes: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        name="invoke_agent agent",
        trace_id="1" * 32,
        span_id=f"{number:016x}",
        parent_span_id=None,
        start_time_ns=number,
        end_time_ns=10**9 + number,
        attributes=with_lengths({sc.ROLLOUT_ID: "r", **attributes}),
    )


def played(turns: int, tokens: int, seed: int) -> Trajectory:
    """A conversation in which every second message is sampled."""
    chance, writer = random.Random(seed), ExchangeWriter()
    messages: list[dict[str, Any]] = []
    prompt: list[int] = []
    root = {
        sc.GEN_AI_AGENT_NAME: "agent",
        sc.ROLLOUT_SCHEMA_VERSION: 1,
        sc.ROLLOUT_STATUS: "complete",
        sc.ROLLOUT_PROCESS: "p",
        sc.ROLLOUT_EXCHANGE_COUNT: turns,
        sc.ROLLOUT_OPEN_COUNT: 0,
        sc.ROLLOUT_REWARDS: json.dumps([{"value": 1.0}]),
    }
    spans = [_span(0, root)]
    for turn in range(1, turns + 1):
        ids = [chance.randrange(150_000) for _ in range(tokens)]
        messages.append({"role": "user", "content": f"question {turn} " + "word " * 20})
        prompt += [chance.randrange(150_000) for _ in range(25)]
        entries: list[dict[str, Any]] = [
            {"token": f"{id_} ", "logprob": -chance.random(), "bytes": None, "top_logprobs": []}
            for id_ in ids
        ]
        answer = {"role": "assistant", "content": "".join(f"{id_} " for id_ in ids)}
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": answer,
            "token_ids": ids,
            "logprobs": {"content": entries},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        reply = {"id": f"c{turn}", "model": "m", "choices": [choice], "usage": usage}
        body = {"model": "m", "messages": messages}
        attributes = {
            sc.EXCHANGE_VERSION: 1,
            sc.EXCHANGE_STATUS: "complete",
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: turn,
            sc.EXCHANGE_ENDED: turn,
            sc.REQUEST_PATH: "/chat/completions",
            **writer.request(json.dumps(body).encode()),
            **writer.response(json.dumps({**reply, "prompt_token_ids": prompt}).encode()),
        }
        spans.append(_span(turn, attributes))
        messages.append(answer)
        prompt += ids
    (trajectory,) = reconstruct(spans)
    return trajectory


def exporters() -> dict[str, RowExporter]:
    """The installed exporters that can be loaded without options."""
    found: dict[str, RowExporter] = {}
    for entry in row_exporters():
        try:
            found[entry.name] = row_exporter(entry.name)
        except Exception as error:  # such as a trainer that is not installed
            print(f"{entry.name}: not measured: {error}", file=sys.stderr)
    return found


def steps() -> dict[str, Callable[[Trajectory], int]]:
    """The functions to measure; each returns its number of rows."""

    def rows_of(exporter: RowExporter) -> Callable[[Trajectory], int]:
        return lambda trajectory: sum(1 for _ in exporter.rows(TrajectoryGroup.of([trajectory])))

    return {
        "token_sequences": lambda trajectory: len(trajectory.token_sequences()),
        "to_token_rows": lambda trajectory: len(to_token_rows([trajectory])),
        **{f"--to {name}": rows_of(exporter) for name, exporter in exporters().items()},
    }


def main() -> None:
    """Print a row for each step."""
    parser = argparse.ArgumentParser(description="What a trainer waits for.")
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=500)
    options = parser.parse_args()
    texts = [
        json.dumps(played(options.turns, options.tokens, seed).to_dict())
        for seed in range(DIFFERENT)
    ]
    tokens = options.trajectories * options.turns * options.tokens
    print(
        f"Python {sys.version.split()[0]}, {options.trajectories} trajectories of {options.turns} "
        f"turns with {options.tokens} sampled tokens, {len(texts[0]) / 1e6:.2f} MB of JSON each"
    )
    print(f"{'':<20}{'seconds':>10}{'ratio':>8}{'tokens/s':>12}{'peak MB':>9}")

    def measured(step: Callable[[Any], object], given: Callable[[str], Any]) -> float:
        times: list[float] = []
        for number in range(options.trajectories):
            argument = given(texts[number % DIFFERENT])
            start = time.process_time()
            result = step(argument)
            times.append(time.process_time() - start)
            del argument, result
        return statistics.median(times) * len(times)

    def peak(step: Callable[[Any], object], given: Callable[[str], Any]) -> float:
        argument = given(texts[0])
        tracemalloc.start()
        kept = step(argument)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del kept
        return most / 1e6

    def read(text: str) -> Trajectory:
        return Trajectory.from_dict(json.loads(text))

    yardstick = 0.0
    rows: list[tuple[str, Callable[[Any], object], Callable[[str], Any]]] = [
        ("json.loads", json.loads, str),
        ("from_dict", Trajectory.from_dict, json.loads),
        *((name, step, read) for name, step in steps().items()),
    ]
    for name, step, given in rows:
        try:
            assert step(given(texts[0])), f"{name} gave nothing"
            took = measured(step, given)
        except ExportError as error:
            print(f"{name:<20} {error}")
            continue
        yardstick = yardstick or took
        cells = f"{took:>10.2f}{took / yardstick:>8.2f}{tokens / took:>12,.0f}"
        print(f"{name:<20}{cells}{peak(step, given):>9.2f}")


if __name__ == "__main__":
    main()
