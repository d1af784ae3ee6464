"""The tracer provider: processors, span limits, sampler; exporters of spans, and what they get."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from otel_rollout.command.checks.finding import Finding
from otel_rollout.providers import cutting_limits
from otel_rollout.record import (
    Outlet,
    Sender,
    TrajectorySpanProcessor,
    process_state,
    switched_off,
)

T = TypeVar("T")
_SMALL_QUEUE = 16_384
"""A rollout of 1,000 calls ends two or three thousand spans, and several may end at once."""
_CONNECT_SECONDS = 2.0


def sdk_provider(provider: trace.TracerProvider) -> TracerProvider | None:
    """The SDK's provider; some libraries wrap it."""
    while not isinstance(provider, TracerProvider):
        provider = getattr(provider, "provider", None)  # type: ignore[assignment]
        if provider is None:
            return None
    return provider


def tracer_provider(provider: trace.TracerProvider) -> Iterator[Finding]:
    """The provider that rollouts are recorded on."""
    name = f"{type(provider).__module__}.{type(provider).__qualname__}"
    if sdk_provider(provider) is None:
        unset = isinstance(provider, trace.ProxyTracerProvider)
        yield Finding.problem(
            "tracer provider",
            ("none is set" if unset else f"{name} is not the SDK's and takes no span processors")
            + ": nothing is recorded. Call otel_rollout.configure() at start-up, before others "
            "set a provider or with theirs",
        )
        return
    yield Finding.ok("tracer provider", name)
    if trace.get_tracer_provider() is not provider:
        yield Finding.warning(
            "global provider",
            "rollouts are recorded on another provider than the global one: spans of other "
            "libraries are not in their traces. Make it global: trace.set_tracer_provider()",
        )


def flat(processor: Any) -> Iterator[SpanProcessor]:
    """The processors of one that only calls others, in the order in which they are called."""
    inner = getattr(processor, "_span_processors", None)
    if inner is None:
        yield processor
        return
    for each in inner:
        yield from flat(each)


def processors(provider: TracerProvider) -> Iterator[Finding]:
    """Our processor on the provider, and those that are called before it."""
    processors = list(flat(provider._active_span_processor))
    ours = [p for p in processors if isinstance(p, TrajectorySpanProcessor)]
    if not ours:
        yield Finding.problem(
            "TrajectorySpanProcessor",
            "there is none on the provider: no trajectories. Call "
            "otel_rollout.configure(tracer_provider=...), or add one",
        )
        return
    if len(ours) > 1:
        yield Finding.warning(
            "TrajectorySpanProcessor",
            f"there are {len(ours)} on the provider: each hands over every trajectory. Give all "
            f"exporters to one: configure(exporters=[...])",
        )
    else:
        exporters = ", ".join(type(exporter).__name__ for exporter in ours[0].exporters)
        yield Finding.ok(
            "TrajectorySpanProcessor",
            f"trajectories go to {exporters}" if exporters else "gathered trajectories only",
        )
    before = [
        type(processor).__name__
        for processor in processors[: processors.index(ours[0])]
        if not type(processor).__module__.startswith("opentelemetry.sdk.")
    ]
    if before:
        yield Finding.warning(
            "order of processors",
            f"{', '.join(before)} is called before ours: what it changes or removes on spans is "
            f"not in trajectories either. Call configure() before it is added",
        )


def limits(provider: TracerProvider) -> Iterator[Finding]:
    """Span limits that would truncate or drop attributes."""
    warnings = list(cutting_limits(provider))
    for warning in warnings:
        yield Finding.problem("span limits", warning)
    if not warnings:
        yield Finding.ok("span limits", "none that cuts")


def sampler(provider: TracerProvider) -> Iterator[Finding]:
    """The sampler of traces."""
    found: Sampler = provider.sampler
    root = getattr(found, "_root", found) if isinstance(found, ParentBased) else found
    description = root.get_description()
    if root is ALWAYS_ON:
        yield Finding.ok("sampler", description)
    else:
        yield Finding.warning(
            "sampler",
            f"{description}: what it drops is not in traces for people. Rollouts are recorded and "
            f"sent all the same",
        )


def span_exporters(provider: TracerProvider) -> Iterator[Finding]:
    """The exporters of spans, and whether they keep up and can be reached."""
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
        inner = exporter.exporter if isinstance(exporter, Outlet) else exporter
        name, address = type(inner).__name__, getattr(inner, "_endpoint", None)
        if not isinstance(address, str):
            address = None
        lane = "train lane" if isinstance(processor, Sender) else "span exporter"
        yield Finding.ok(lane, name if address is None else f"{name} {address}")
        yield from _queue(processor, name, is_network=address is not None)
        if address is not None and not isinstance(exporter, Outlet):
            yield Finding.warning(
                "size of batches",
                f"{name} sends a batch whatever its size, and receivers refuse it above 4 MiB "
                f"(gRPC) or 20 MiB (HTTP) with all that is in it. Pass it as "
                f"configure(span_exporters=[...])",
            )
        if address is not None and (error := _unreachable(address)):
            yield Finding.warning(
                lane,
                f"{address} cannot be reached ({error}): no span arrives. Start the collector, or "
                f"correct the address",
            )


def _queue(processor: SpanProcessor, name: str, *, is_network: bool) -> Iterator[Finding]:
    size = _queue_size(processor)
    if size is not None and size < _SMALL_QUEUE:
        yield Finding.warning(
            "span queue",
            f"the queue to {name} holds {size} spans, and a rollout of 1,000 calls ends more than "
            f"2,000: what finds it full is dropped. Raise "
            f"max_queue_size or OTEL_BSP_MAX_QUEUE_SIZE to {_SMALL_QUEUE} or more, or pass the "
            f"exporter as configure(span_exporters=[...])",
        )
    if size is None and is_network and not isinstance(processor, Sender):
        yield Finding.warning(
            "span exporter",
            f"{name} is on a {type(processor).__name__}: each span that ends waits for the "
            f"network. Use a BatchSpanProcessor",
        )


def _exporter(processor: SpanProcessor) -> SpanExporter | None:
    names = ("outlet", "span_exporter", "_exporter")
    return _attribute(processor, names, SpanExporter)


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
