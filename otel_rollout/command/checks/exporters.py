"""The exporters of spans: their queues, batches and addresses, and the content that they get."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout.command.checks.finding import Finding
from otel_rollout.command.checks.provider import flat
from otel_rollout.otlp import SplittingSpanExporter
from otel_rollout.record import process_state, switched_off

T = TypeVar("T")
_SMALL_QUEUE = 16_384
"""A rollout of 1,000 calls ends two or three thousand spans, and several may end at once."""
_CONNECT_SECONDS = 2.0


def span_exporters(provider: TracerProvider) -> Iterator[Finding]:
    """The exporters of spans for people, and whether they keep up and can be reached."""
    found = [
        (processor, exporter)
        for processor in flat(provider._active_span_processor)
        if (exporter := _exporter(processor)) is not None
    ]
    if not found:
        yield Finding.warning(
            "span exporters",
            "there are none: no trace to look at, and nothing to rebuild from later. Set "
            "OTEL_EXPORTER_OTLP_ENDPOINT, or pass configure(span_exporters=[...])",
        )
    for processor, exporter in found:
        inner = exporter.exporter if isinstance(exporter, SplittingSpanExporter) else exporter
        name, address = type(inner).__name__, getattr(inner, "_endpoint", None)
        if not isinstance(address, str):
            address = None
        yield Finding.ok("span exporter", name if address is None else f"{name} {address}")
        yield from _queue(processor, name, is_network=address is not None)
        if address is not None:
            yield from _network(exporter, name, address)


def _queue(processor: SpanProcessor, name: str, *, is_network: bool) -> Iterator[Finding]:
    size = _queue_size(processor)
    if size is not None and size < _SMALL_QUEUE:
        yield Finding.warning(
            "span queue",
            f"the queue to {name} holds {size} spans, and a rollout of 1,000 calls ends more than "
            f"2,000: what finds it full is dropped from traces (not from trajectories). Raise "
            f"max_queue_size or OTEL_BSP_MAX_QUEUE_SIZE to {_SMALL_QUEUE} or more, or pass the "
            f"exporter as configure(span_exporters=[...])",
        )
    if size is None and is_network:
        yield Finding.warning(
            "span exporter",
            f"{name} is on a {type(processor).__name__}: each span that ends waits for the "
            f"network. Use a BatchSpanProcessor",
        )


def _network(exporter: SpanExporter, name: str, address: str) -> Iterator[Finding]:
    if not isinstance(exporter, SplittingSpanExporter):
        yield Finding.warning(
            "size of batches",
            f"{name} sends a batch whatever its size, and receivers refuse it above 4 MiB "
            f"(gRPC) or 20 MiB (HTTP) with all that is in it. Wrap it: "
            f"otel_rollout.otlp.SplittingSpanExporter",
        )
    if error := _unreachable(address):
        yield Finding.warning(
            "span exporter",
            f"{address} cannot be reached ({error}): spans will be dropped. Start the "
            f"collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
        )


def _exporter(processor: SpanProcessor) -> SpanExporter | None:
    return _attribute(processor, ("span_exporter", "_exporter"), SpanExporter)


def _queue_size(processor: SpanProcessor) -> int | None:
    queue = _attribute(processor, ("_queue",), deque)
    size = _attribute(processor, ("max_queue_size", "_max_queue_size"), int)
    return size if queue is None or size is not None else queue.maxlen


def _attribute(processor: SpanProcessor, names: Iterable[str], kind: type[T]) -> T | None:
    """The first of these attributes of a batch or simple processor of any version of the SDK."""
    for owner in (processor, getattr(processor, "_batch_processor", None)):
        for name in names:
            found = getattr(owner, name, None)
            if isinstance(found, kind):
                return found
    return None


def _unreachable(address: str) -> str | None:
    """The error of a connection to this address; None if it can be reached."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), _CONNECT_SECONDS):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def content() -> Iterator[Finding]:
    """Where prompts and replies go."""
    rule, off = process_state.content, switched_off()
    if not rule.exported:
        yield Finding.ok(
            "content",
            "prompts and replies are in the trajectories of this process and on no span that is "
            "exported: trajectories cannot be rebuilt from the spans",
        )
    elif off is not None and rule.is_whole:
        yield Finding.warning(
            "content",
            f"{off} keeps prompts and replies off LLM spans, but exchange spans have them. "
            f"configure(content='none') keeps them off all spans that are exported",
        )
    elif rule.redact is not None:
        yield Finding.ok(
            "content",
            "exchange spans have prompts and replies, redacted; LLM spans have none. Calls that "
            "are changed do not train",
        )
    else:
        yield Finding.ok(
            "content",
            "prompts and replies are on LLM spans and on exchange spans, which go to every span "
            "exporter, and in trajectories" + _SHOWS[rule.shows],
        )


_SHOWS = {
    "new": ". In a rollout each LLM span shows what is new in its call; configure(content='full') "
    "shows whole conversations",
    "full": ". Each LLM span shows a whole conversation",
}
