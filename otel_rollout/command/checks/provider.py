"""The tracer provider: our processor on it, its span limits and its sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from otel_rollout.command.checks.finding import Finding
from otel_rollout.providers import cutting_limits
from otel_rollout.record import TrajectorySpanProcessor


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
            f"{description}: what it drops is in trajectories of this process, but not in traces, "
            f"so it cannot be rebuilt later. Sample in the collector, after the file",
        )
