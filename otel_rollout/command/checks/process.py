"""The process as it is: packages, the tracer provider, and what is hooked in."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from otel_rollout.providers import cutting_limits
from otel_rollout.record import TrajectorySpanProcessor, capture

_PACKAGES = (
    *("otel-rollout", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-instrumentation"),
    *("opentelemetry-instrumentation-openai", "opentelemetry-instrumentation-threading"),
    *("opentelemetry-exporter-otlp-proto-http", "openai", "anthropic"),
)
_CAPTURED = (
    *("openai", "anthropic", "groq", "together", "cerebras-cloud-sdk", "httpx", "httpx2"),
    *("aiohttp", "requests", "litellm", "google-genai", "ollama", "mistralai", "cohere"),
)
"""Clients whose model calls are captured, by hooks of their own or where they send."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warning", "problem"]
    """`problem`: training data is, or would be, lost. `warning`: something else is."""
    subject: str
    """The thing that was looked at, in a word or two."""
    text: str
    """The finding itself, what it costs, and what to do."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.subject}: {self.text}"


def versions() -> Iterator[Finding]:
    """The installed packages, and whether the SDK is switched off."""
    yield Finding("ok", "versions", f"python {platform.python_version()}, {_listed(_PACKAGES)}")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        text = "it is true: nothing is recorded at all. Unset it"
        yield Finding("problem", "OTEL_SDK_DISABLED", text)


def _listed(names: Iterable[str]) -> str:
    """Those that are installed, with their versions."""
    there = []
    for name in names:
        with suppress(PackageNotFoundError):
            there.append(f"{name} {version(name)}")
    return ", ".join(there)


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
        is_set = not isinstance(provider, trace.ProxyTracerProvider)
        why = f"{name} is not the SDK's and takes no span processors" if is_set else "none is set"
        cure = "Call otel_rollout.configure() at start-up"
        yield Finding("problem", "tracer provider", f"{why}: nothing is recorded. {cure}")
    else:
        yield Finding("ok", "tracer provider", name)


def flat(processor: Any) -> Iterator[SpanProcessor]:
    """The processors of one that only calls others, in the order in which they are called."""
    inner = getattr(processor, "_span_processors", None)
    if inner is None:
        yield processor
        return
    for each in inner:
        yield from flat(each)


def processors(provider: TracerProvider) -> Iterator[Finding]:
    """Our processor on the provider, those that are called before it, and what cuts spans."""
    found = list(flat(provider._active_span_processor))
    ours = [p for p in found if isinstance(p, TrajectorySpanProcessor)]
    subject = "TrajectorySpanProcessor"
    if len(ours) == 1:
        exporters = ", ".join(type(exporter).__name__ for exporter in ours[0].exporters)
        text = f"trajectories go to {exporters}" if exporters else "gathered trajectories only"
        yield Finding("ok", subject, text)
    else:
        what = (
            f"there are {len(ours)}: each hands over every trajectory" if ours else "there is none"
        )
        cure = "Call otel_rollout.configure(tracer_provider=..., exporters=[...]) once"
        yield Finding("warning" if ours else "problem", subject, f"{what}. {cure}")
    ahead = found[: found.index(ours[0])] if ours else []
    own = "opentelemetry.sdk."
    before = [type(p).__name__ for p in ahead if not type(p).__module__.startswith(own)]
    if before:
        text = f"{', '.join(before)} is called before ours, and may change what is recorded"
        yield Finding(
            "warning", "order of processors", f"{text}. Call configure() before it is added"
        )
    warnings = list(cutting_limits(provider))
    yield from (Finding("problem", "span limits", warning) for warning in warnings)
    if not warnings:
        yield Finding("ok", "span limits", "none that cuts")


def hooks() -> Iterator[Finding]:
    """The hooks on clients, without which model calls are not captured, and on threads."""
    active = sorted(
        kind.__module__
        for kind in _subclasses(BaseInstrumentor)
        if getattr(getattr(kind, "_instance", None), "_is_instrumented_by_opentelemetry", False)
    )
    if any(name.endswith(".threading") for name in active):
        yield Finding("ok", "threads", "work that is given to threads and pools keeps its rollout")
    else:
        text = "opentelemetry-instrumentation-threading is not active: calls from threads and pools"
        yield Finding("problem", "threads", f"{text} are in no rollout. Call configure()")
    missing = capture.not_hooked()
    replaced = [] if missing else capture.libraries_not_hooked()
    again = "Call otel_rollout.configure() after whatever replaces the methods of clients"
    if missing:
        text = f"model calls are not captured: {', '.join(missing)} is not hooked. {again}"
        yield Finding("problem", "capture", text)
    elif replaced:
        text = f"methods of {', '.join(replaced)} were replaced: their calls may be lost. {again}"
        yield Finding("warning", "clients", text)
    yield Finding("ok", "clients", f"captured: {_listed(_CAPTURED)}")


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in type.__subclasses__(kind):
        yield each
        yield from _subclasses(each)
