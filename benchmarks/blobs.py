"""What large values cost on the spans and beside them: bytes, and CPU time of both ends.

    python benchmarks/blobs.py [TURNS] [IDS]

A rollout of TURNS calls that sample IDS tokens each, of a model with experts: each reply has those
of all tokens so far, 48 layers of 8, a byte each, in base64, as Qwen3-30B-A3B has them.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import openai
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import reconstruct, rollout
from otel_rollout.otlp import BlobSpanExporter
from otel_rollout.spans import BLOB_PLACES
from otel_rollout.testing import ModelServer, Reply

EXPERTS = 48 * 8
"""Bytes of the experts of a token."""
_T = TypeVar("_T")


def reply(request: dict[str, Any], ids: int) -> Reply:
    tokens = sum(len(str(message["content"])) for message in request["messages"]) + ids
    experts = base64.b64encode(os.urandom(tokens * EXPERTS)).decode()
    return Reply("a" * (ids - 1), extra={"routed_experts": experts})


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """What it returns, and the milliseconds of CPU that it took."""
    began = time.process_time()
    return work(), (time.process_time() - began) * 1e3


def recorded(turns: int, ids: int) -> list[Any]:
    """The spans of the rollout."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(instrumentor=None, request_token_ids=True)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with (
        ModelServer(lambda request: reply(request, ids), token_ids=True, logprobs=True) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        rollout("agent"),
    ):
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(turns):
            made = client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": made.choices[0].message.content})
            messages.append({"role": "user", "content": "on"})
    otel_rollout.shutdown()
    return list(spans.get_finished_spans())


def report(name: str, spans: list[Any]) -> None:
    size = len(encode_spans(spans).SerializeToString())
    (again,), rebuilding = timed(lambda: reconstruct(spans))
    _, tokens = timed(again.token_sequences)
    _, whole = timed(lambda: [completion.response for completion in again.completions])
    print(
        f"{name:<8} {size / 1e6:8.2f} MB of OTLP; reconstruct {rebuilding:6.1f} ms, "
        f"token_sequences {tokens:6.1f} ms, responses {whole:6.1f} ms"
    )


def main(turns: int = 10, ids: int = 500) -> None:
    spans = recorded(turns, ids)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[BLOB_PLACES] = folder
        inner = InMemorySpanExporter()
        _, writing = timed(lambda: BlobSpanExporter(inner, folder).export(spans))
        report("on spans", spans)
        report("beside", list(inner.get_finished_spans()))
        print(f"written beside in {writing:.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
