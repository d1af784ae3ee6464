"""Requests of spans, as the process of an agent sends them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_rollout import Reward
from otel_rollout import semconv as sc
from otel_rollout.receive import TrajectoryReceiver
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter

A, B, C = "a" * 32, "b" * 32, "c" * 32
"""Ids of rollouts."""
BINARY = {"Content-Type": "application/x-protobuf"}
Span = tuple[str, dict[str, Any]]
"""The id of a span, and its attributes."""


class Receive(Protocol):
    """Begins a receiver, which ends with the test."""

    def __call__(self, **options: Any) -> TrajectoryReceiver: ...


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def spans_of(rollout: str, calls: int = 2, *, text: str = "hello", **attributes: Any) -> list[Span]:
    """The spans of a rollout with so many calls; its own is the last one.

    rollout: 32 hex digits. attributes: of all of them, by the names of `semconv`.
    """
    every = {getattr(sc, name): value for name, value in attributes.items()}
    writer, messages, found, ids_ = ExchangeWriter(), list[Any](), list[Span](), list[int]()
    for number in range(1, calls + 1):
        messages = [*messages, {"role": "user", "content": f"{text} {number}"}]
        reply = {"role": "assistant", "content": f"{text} back {number}"}
        scores = {"content": [{"token": "t", "logprob": -0.5, "top_logprobs": []}] * 2}
        choice = {"index": 0, "message": reply, "finish_reason": "stop", "logprobs": scores}
        choice |= {"token_ids": [number, 9]}
        whole = {"id": f"r{number}", "prompt_token_ids": [*ids_, number], "choices": [choice]}
        ids_ = [*ids_, number, number, 9]
        body = {"model": "m", "messages": messages}
        call = {
            **every,
            sc.EXCHANGE_VERSION: 1,
            sc.ROLLOUT_ID: rollout,
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: number,
            sc.REQUEST_PATH: "/chat/completions",
            **writer.request(json.dumps(body).encode()),
            sc.EXCHANGE_ENDED: number,
            sc.EXCHANGE_STATUS: "complete",
            **writer.response(json.dumps(whole).encode()),
        }
        messages = [*messages, reply]
        found.append((f"{rollout[:8]}{number:08x}", with_lengths(call)))
    own = {
        **every,
        sc.ROLLOUT_SCHEMA_VERSION: 1,
        sc.ROLLOUT_ID: rollout,
        sc.ROLLOUT_PROCESS: "p",
        sc.ROLLOUT_STATUS: "complete",
        sc.ROLLOUT_TRAINABLE: True,
        sc.ROLLOUT_EXCHANGE_COUNT: calls,
        sc.ROLLOUT_OPEN_COUNT: 0,
    }
    return [*found, (f"{rollout[:8]}{0:08x}", with_lengths(own))]


def start_of(rollout: str, **attributes: Any) -> Span:
    """The span of a rollout's start."""
    every = {getattr(sc, name): value for name, value in attributes.items()}
    return f"{rollout[:8]}ffffffff", {**every, sc.ROLLOUT_STARTED: rollout}


def reward_of(rollout: str, value: float = 1.0) -> Span:
    """The span of a reward that came after its rollout."""
    row = json.dumps(Reward(value).to_dict())
    every = with_lengths({sc.ROLLOUT_ID: rollout, sc.REWARD: row, sc.REWARD_NUMBER: 0})
    return f"{rollout[:8]}eeeeeeee", every


def request(spans: Iterable[Span], scope: str = sc.SCOPE) -> bytes:
    """The request with these spans, as protobuf."""
    found = ExportTraceServiceRequest()
    scoped = found.resource_spans.add().scope_spans.add()
    scoped.scope.name = scope
    for span_id, attributes in spans:
        span = scoped.spans.add()
        span.name, span.trace_id, span.span_id = "s", b"\1" * 16, bytes.fromhex(span_id)
        span.start_time_unix_nano, span.end_time_unix_nano = 10**9, 2 * 10**9
        for name, value in attributes.items():
            row = span.attributes.add()
            row.key = name
            if isinstance(value, bool):
                row.value.bool_value = value
            elif isinstance(value, int):
                row.value.int_value = value
            else:
                row.value.string_value = value
    return found.SerializeToString()


def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes, Any]:
    """Send a body; the status, the body and the headers of the answer."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    try:
        connection.request("POST", "/v1/traces", body, BINARY | (headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """The trajectories in a file that is written, as JSON."""
    found = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in found if line.endswith(b"\n")]


def ids(path: Path) -> list[str]:
    """The ids of the trajectories in a file."""
    return [line["id"] for line in lines(path)]
