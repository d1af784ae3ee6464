"""The cost of rebuilding: CPU time and peak memory of `reconstruct`, against parsing the content.

    python benchmarks/rebuild.py [--repetitions 5] [--turns 100 1000 10000] [--bytes 200 2000]

One conversation of so many turns: so many bytes from the user, as many from the model, with or
without the ids of the prompt and of the sampled tokens (one for four bytes). `reconstruct` is timed
until completions, histories and warnings have been read. The yardstick is `json.loads` of the same
unique content: each message once, each response once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter

LARGEST = 3_000_000


def _span(number: int, attributes: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        name="span",
        trace_id="1" * 32,
        span_id=f"{number:016x}",
        parent_span_id=None,
        start_time_ns=number,
        end_time_ns=10**9 + number,
        attributes=with_lengths({sc.ROLLOUT_ID: "r", **attributes}),
    )


def played(turns: int, size: int, *, tokens: bool) -> tuple[list[SpanRecord], str]:
    """The spans of a conversation, and its unique content as one JSON text."""
    writer, unique = ExchangeWriter(), []
    # Bodies are put together as text: to write each anew would take longer than all the rest.
    messages, prompt_ids = "", ""
    words = "word " * (size // 5)
    root = {
        sc.ROLLOUT_SCHEMA_VERSION: 1,
        sc.ROLLOUT_STATUS: "complete",
        sc.ROLLOUT_PROCESS: "p",
        sc.ROLLOUT_EXCHANGE_COUNT: turns,
        sc.ROLLOUT_OPEN_COUNT: 0,
    }
    spans = [_span(0, root)]
    for turn in range(turns):
        user = {"role": "user", "content": f"{turn} {words}"}
        answer = {"role": "assistant", "content": f"answer {turn} {words}"}
        ids = [10_000 + (turn * 31 + i * 7919) % 90_000 for i in range(size // 4)]
        text = json.dumps(ids)[1:-1]
        messages += f"{', ' if turn else ''}{json.dumps(user)}"
        prompt_ids += f"{', ' if turn else ''}{text}"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": answer}
        response: dict[str, Any] = {"id": f"c{turn}", "model": "m", "choices": [choice]}
        if tokens:
            choice["token_ids"] = ids
        own = {"prompt_token_ids": ids} if tokens else {}
        unique.append({"request": user, "response": {**response, **own}})
        reply = json.dumps(response)
        if tokens:
            reply = f'{reply[:-1]}, "prompt_token_ids": [{prompt_ids}]}}'
        attributes: dict[str, Any] = {
            sc.EXCHANGE_VERSION: 1,
            sc.EXCHANGE_STATUS: "complete",
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: turn + 1,
            sc.EXCHANGE_ENDED: turn + 1,
            sc.REQUEST_PATH: "/chat/completions",
            **writer.request(f'{{"messages": [{messages}], "model": "m"}}'.encode()),
            **writer.response(reply.encode()),
        }
        spans.append(_span(turn + 1, attributes))
        messages += f", {json.dumps(answer)}"
        prompt_ids += f", {text}"
    return spans, json.dumps(unique)


def rebuild(spans: list[SpanRecord]) -> Trajectory:
    """Rebuild, and read completions and histories, which are made on demand."""
    (trajectory,) = reconstruct(spans)
    assert trajectory.warnings == []
    assert len(trajectory.histories) == 1
    return trajectory


def cpu(function: Callable[[], object], repetitions: int) -> float:
    """Median CPU seconds of a call."""
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description="What rebuilding costs.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--turns", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--bytes", type=int, nargs="*", default=[200, 2000])
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, medians of {options.repetitions}")
    columns = ("turns", "bytes", "ids", "content MB", "spans MB", "rebuild ms", "us/turn")
    print(*(f"{name:>11}" for name in (*columns, "loads ms", "ratio", "peak MB")))
    for tokens, size_of_message in itertools.product((False, True), options.bytes):
        for turns in options.turns:
            if turns * size_of_message > LARGEST or (tokens and turns > 1000):
                continue  # each request has all of it: making them would take minutes
            spans, unique = played(turns, size_of_message, tokens=tokens)
            size = sum(len(v) for s in spans for v in s.attributes.values() if isinstance(v, str))
            took = cpu(lambda: rebuild(spans), options.repetitions)  # noqa: B023 - called here
            yardstick = cpu(lambda: json.loads(unique), options.repetitions)  # noqa: B023
            tracemalloc.start()
            trajectory = rebuild(spans)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert len(trajectory.completions) == turns
            row = [
                str(turns),
                str(size_of_message),
                "yes" if tokens else "no",
                f"{len(unique) / 1e6:.2f}",
                f"{size / 1e6:.2f}",
                f"{took * 1e3:.1f}",
                f"{took * 1e6 / turns:.0f}",
                f"{yardstick * 1e3:.2f}",
                f"{took / yardstick:.1f}",
                f"{peak / 1e6:.1f}",
            ]
            print(*(f"{cell:>11}" for cell in row))


if __name__ == "__main__":
    main()
