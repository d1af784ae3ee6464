"""A check of a set-up: what of a rollout would be lost here, and what to do about it.

It looks at the process as it is: a program calls `check()` behind its own set-up. What it cannot
know by looking it tries: a rollout with one call, through the provider that is there, to a model
server of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import platform
import runpy
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import openai
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler
from packaging.requirements import InvalidRequirement, Requirement

from otel_rollout.errors import ConfigurationError
from otel_rollout.otlp import SplittingSpanExporter
from otel_rollout.rebuild import reconstruct
from otel_rollout.record import TrajectorySpanProcessor, capture, rollout, rollout_provider
from otel_rollout.testing import ModelServer
from otel_rollout.trajectory import Trajectory
from otel_rollout.wiring import configure, cutting_limits, remove_processor

Level = Literal["ok", "warning", "problem"]

_PACKAGES = (
    "otel-rollout",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-instrumentation",
    "opentelemetry-instrumentation-openai",
    "opentelemetry-instrumentation-threading",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-otlp-proto-grpc",
    "openai",
    "anthropic",
)
_SMALL_QUEUE = 2048
_CONNECT_SECONDS = 2.0
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    """`problem`: training data is, or would be, lost. `warning`: something else is."""
    subject: str
    """What was looked at, in a word or two."""
    text: str
    """What was found, what it costs, and what to do."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.subject}: {self.text}"


def check(*, self_test: bool = True) -> list[Finding]:
    """What a look at this process finds; nothing but a `problem` costs training data.

    `self_test`: also run a rollout with one call to a model server on this host. Its spans go
    where all spans go, its trajectory to no exporter.
    """
    findings = [*_versions(), *_environment()]
    provider = rollout_provider()
    found = list(_provider(provider))
    findings += found
    sdk = _sdk_provider(provider)
    if sdk is not None:
        findings += [*_processors(sdk), *_exporters(sdk), *_limits(sdk), *_sampler(sdk)]
    findings += [*_instrumentors(), *_capture()]
    if self_test and sdk is not None:
        findings += _self_test(sdk)
    return findings


def run_setup(target: str | None) -> None:
    """Set this process up as `target` does: a module, `module:function`, or a Python file.

    A function may be async. A file does not run as `__main__`. None is `configure()` without
    arguments. ConfigurationError if there is no such thing; what the set-up raises goes on.
    """
    if target is None:
        configure()
        return
    name, _, function = target.partition(":")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ConfigurationError(f"there is no file {name!r}")
        found: Any = runpy.run_path(name, run_name="otel_rollout_setup")
    else:
        sys.path.insert(0, os.getcwd())
        try:
            found = vars(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ConfigurationError(
                f"there is no module {name!r} here or in what is installed; expected "
                f"package.module:function, package.module or a file.py"
            ) from None
    if function:
        if not callable(found.get(function)):
            raise ConfigurationError(f"{name!r} has no function {function!r}")
        result = found[function]()
        if inspect.iscoroutine(result):
            asyncio.run(result)


# --- what is installed


def _versions() -> Iterator[Finding]:
    there: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            there[package] = version(package)
        except PackageNotFoundError:
            continue
    wrong = list(_conflicts(there))
    for package, asked, got in wrong:
        yield Finding(
            "problem",
            package,
            f"it asks for {asked}, but {got}: install versions that go together "
            f"(pip install -U otel-rollout, and what pip check says)",
        )
    if not wrong:
        numbers = ", ".join(f"{package} {number}" for package, number in there.items())
        yield Finding("ok", "versions", f"python {platform.python_version()}, {numbers}")


def _conflicts(there: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(package, what it asks for, what is there instead) of what does not go together."""
    for package in there:
        for text in requires(package) or ():
            try:
                asked = Requirement(text)
            except InvalidRequirement:
                continue
            if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
                continue
            try:
                got = version(asked.name)
            except PackageNotFoundError:
                yield package, str(asked), "it is not installed"
                continue
            if not asked.specifier.contains(got, prereleases=True):
                yield package, f"{asked.name}{asked.specifier}", f"{got} is installed"


def _environment() -> Iterator[Finding]:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding(
            "problem", "OTEL_SDK_DISABLED", "it is true: nothing is recorded at all. Unset it"
        )
    if os.environ.get("TRACELOOP_TRACE_CONTENT", "").strip().lower() in _FALSE:
        yield Finding(
            "warning",
            "TRACELOOP_TRACE_CONTENT",
            "it is off: LLM spans have no texts, so nobody can read them in a trace backend. "
            "Trajectories have them all the same",
        )


# --- the provider and what is on it


def _sdk_provider(provider: trace.TracerProvider) -> TracerProvider | None:
    """The SDK's provider; some libraries wrap it."""
    while not isinstance(provider, TracerProvider):
        provider = getattr(provider, "provider", None)  # type: ignore[assignment]
        if provider is None:
            return None
    return provider


def _provider(provider: trace.TracerProvider) -> Iterator[Finding]:
    name = f"{type(provider).__module__}.{type(provider).__qualname__}"
    if _sdk_provider(provider) is None:
        unset = isinstance(provider, trace.ProxyTracerProvider)
        yield Finding(
            "problem",
            "tracer provider",
            ("none is set" if unset else f"{name} is not the SDK's and takes no span processors")
            + ": nothing is recorded. Call otel_rollout.configure() at start-up, before others "
            "set a provider or with theirs",
        )
        return
    yield Finding("ok", "tracer provider", name)
    if trace.get_tracer_provider() is not provider:
        yield Finding(
            "warning",
            "global provider",
            "rollouts are recorded on another provider than the global one: spans of other "
            "libraries are not in their traces. Make it global: trace.set_tracer_provider()",
        )


def _flat(processor: Any) -> Iterator[SpanProcessor]:
    """The processors of one that only calls others, in the order in which they are called."""
    inner = getattr(processor, "_span_processors", None)
    if inner is None:
        yield processor
        return
    for each in inner:
        yield from _flat(each)


def _processors(provider: TracerProvider) -> Iterator[Finding]:
    processors = list(_flat(provider._active_span_processor))
    ours = [p for p in processors if isinstance(p, TrajectorySpanProcessor)]
    if not ours:
        yield Finding(
            "problem",
            "TrajectorySpanProcessor",
            "there is none on the provider: no trajectories. Call "
            "otel_rollout.configure(tracer_provider=...), or add one",
        )
        return
    if len(ours) > 1:
        yield Finding(
            "warning",
            "TrajectorySpanProcessor",
            f"there are {len(ours)} on the provider: each hands over every trajectory. Give all "
            f"exporters to one: configure(exporters=[...])",
        )
    else:
        exporters = ", ".join(type(exporter).__name__ for exporter in ours[0].exporters)
        yield Finding(
            "ok",
            "TrajectorySpanProcessor",
            f"trajectories go to {exporters}" if exporters else "gathered trajectories only",
        )
    before = [
        type(processor).__name__
        for processor in processors[: processors.index(ours[0])]
        if not type(processor).__module__.startswith("opentelemetry.sdk.")
    ]
    if before:
        yield Finding(
            "warning",
            "order of processors",
            f"{', '.join(before)} is called before ours: what it changes or removes on spans is "
            f"not in trajectories either. Call configure() before it is added",
        )


def _exporters(provider: TracerProvider) -> Iterator[Finding]:
    looking = [
        (processor, exporter)
        for processor in _flat(provider._active_span_processor)
        if (exporter := _exporter(processor)) is not None
    ]
    if not looking:
        yield Finding(
            "warning",
            "span exporters",
            "there are none: no trace to look at, and nothing to rebuild from later. Set "
            "OTEL_EXPORTER_OTLP_ENDPOINT, or pass configure(span_exporters=[...])",
        )
    for processor, exporter in looking:
        inner = getattr(exporter, "_exporter", exporter)
        name, address = type(inner).__name__, getattr(inner, "_endpoint", None)
        network = isinstance(address, str)
        yield Finding("ok", "span exporter", f"{name} {address}" if network else name)
        queue = _queue_size(processor)
        if queue is not None and queue < _SMALL_QUEUE:
            yield Finding(
                "warning",
                "span queue",
                f"the queue to {name} holds {queue} spans; when more come, the oldest are "
                f"dropped from traces (not from trajectories). Raise max_queue_size or "
                f"OTEL_BSP_MAX_QUEUE_SIZE to {_SMALL_QUEUE} or more",
            )
        if queue is None and network:
            yield Finding(
                "warning",
                "span exporter",
                f"{name} is on a {type(processor).__name__}: each span that ends waits for the "
                f"network. Use a BatchSpanProcessor",
            )
        if network and not isinstance(exporter, SplittingSpanExporter):
            yield Finding(
                "warning",
                "size of batches",
                f"{name} sends a batch whatever its size, and receivers refuse it above 4 MiB "
                f"(gRPC) or 20 MiB (HTTP) with all that is in it. Wrap it: "
                f"otel_rollout.otlp.SplittingSpanExporter",
            )
        if isinstance(address, str) and (error := _unreachable(address)):
            yield Finding(
                "warning",
                "span exporter",
                f"{address} cannot be reached ({error}): spans will be dropped. Start the "
                f"collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
            )


def _exporter(processor: Any) -> SpanExporter | None:
    """The exporter of a batch or simple processor of any version of the SDK."""
    for owner in (processor, getattr(processor, "_batch_processor", None)):
        for name in ("span_exporter", "_exporter"):
            exporter = getattr(owner, name, None)
            if isinstance(exporter, SpanExporter):
                return exporter
    return None


def _queue_size(processor: Any) -> int | None:
    for owner in (processor, getattr(processor, "_batch_processor", None)):
        for name in ("max_queue_size", "_max_queue_size"):
            size = getattr(owner, name, None)
            if isinstance(size, int):
                return size
        size = getattr(getattr(owner, "_queue", None), "maxlen", None)
        if isinstance(size, int):
            return size
    return None


def _unreachable(address: str) -> str | None:
    """Why nobody answers at this address; None if somebody does."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), _CONNECT_SECONDS):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def _limits(provider: TracerProvider) -> Iterator[Finding]:
    cut = list(cutting_limits(provider))
    for sentence in cut:
        yield Finding("problem", "span limits", sentence)
    if not cut:
        yield Finding("ok", "span limits", "none that cuts")


def _sampler(provider: TracerProvider) -> Iterator[Finding]:
    sampler: Sampler = provider.sampler
    root = getattr(sampler, "_root", sampler) if isinstance(sampler, ParentBased) else sampler
    description = root.get_description()
    if root is ALWAYS_ON:
        yield Finding("ok", "sampler", description)
    else:
        yield Finding(
            "warning",
            "sampler",
            f"{description}: what it drops is in trajectories of this process, but not in traces, "
            f"so it cannot be rebuilt later. Sample in the collector, behind the file",
        )


# --- what is hooked into clients


def _instrumentors() -> Iterator[Finding]:
    active = {
        kind.__module__
        for kind in _subclasses(BaseInstrumentor)
        if getattr(getattr(kind, "_instance", None), "_is_instrumented_by_opentelemetry", False)
    }
    drawing = [
        name
        for name in sorted(active)
        if "openai" in name
        and "agents" not in name
        and not any(name.startswith(f"{other}.") for other in active)  # a part of the other one
    ]
    if len(drawing) > 1:
        yield Finding(
            "warning",
            "LLM spans",
            f"{len(drawing)} instrumentations are active: {', '.join(drawing)}. Each call has a "
            f"span of each in traces (once in trajectories). Use one: configure(instrumentor=None) "
            f"adds none",
        )
    elif drawing:
        yield Finding("ok", "LLM spans", drawing[0])
    else:
        yield Finding(
            "warning",
            "LLM spans",
            "no instrumentation of OpenAI is active: traces show no prompts or replies to "
            "people. Use configure(instrumentor='openai')",
        )
    genai = [name for name in drawing if "genai" in name or "openai_v2" in name]
    content = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    if genai and not os.environ.get(content):
        yield Finding(
            "warning",
            content,
            f"it is not set, and {genai[0]} records texts only if it is: nobody can read them in "
            f"a trace backend. Trajectories have them. Set it to SPAN_ONLY",
        )
    for name in sorted(active):
        if ".httpx" in name:
            yield Finding(
                "warning", "HTTP spans", f"{name} is active: each call has a further span in traces"
            )
    if any(name.endswith(".threading") for name in active):
        yield Finding("ok", "threads", "work that is given to threads and pools keeps its rollout")
    else:
        yield Finding(
            "problem",
            "threads",
            "opentelemetry-instrumentation-threading is not active: calls from threads and pools "
            "are in no rollout. ThreadingInstrumentor().instrument(), or configure()",
        )


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in type.__subclasses__(kind):
        yield each
        yield from _subclasses(each)


def _capture() -> Iterator[Finding]:
    missing = capture.not_hooked()
    if missing:
        yield Finding(
            "problem",
            "capture",
            f"model calls are not captured: {', '.join(missing)} is not hooked. Call "
            f"otel_rollout.configure(), after whatever replaces the client's methods",
        )
    else:
        yield Finding("ok", "capture", "the methods of the OpenAI client are hooked")


# --- trying it


class _Collecting(SpanProcessor):
    """What a backend that loses nothing would have of one trace."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _self_test(provider: TracerProvider) -> Iterator[Finding]:
    collecting = _Collecting()
    provider.add_span_processor(collecting)
    try:
        trajectory = _one_call(provider)
        rebuilt = [t for t in reconstruct(collecting.spans) if t.id == trajectory.id]
        yield from _judge(trajectory, rebuilt)
    except Exception as error:
        yield Finding(
            "problem",
            "self-test",
            f"a rollout with one call raised {type(error).__name__}: {error}",
        )
    finally:
        remove_processor(provider, collecting)


def _one_call(provider: TracerProvider) -> Trajectory:
    with (
        ModelServer("I am well.") as server,
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
        rollout("otel-rollout doctor", trainable=False) as trajectory,
    ):
        client.chat.completions.create(
            model="self-test",
            messages=[{"role": "user", "content": "How are you?"}],
            extra_body={"return_token_ids": True},
            logprobs=True,
        )
        for processor in _flat(provider._active_span_processor):
            if isinstance(processor, TrajectorySpanProcessor):
                processor.withhold(trajectory.id)
    return trajectory


def _judge(trajectory: Trajectory, rebuilt: list[Trajectory]) -> Iterator[Finding]:
    wrong: list[str] = []
    texts = [message.get("content") for message in trajectory.messages()]
    if texts != ["How are you?", "I am well."]:
        wrong.append(f"the trajectory of a call has the messages {texts!r}")
    elif trajectory.completions[0].token_ids is None:
        wrong.append("the token ids that the server sent are not in the trajectory")
    if trajectory.warnings:
        wrong.append(f"the trajectory says: {'; '.join(trajectory.warnings)}")
    for sentence in wrong:
        yield Finding("problem", "self-test", sentence)
    if rebuilt != [trajectory]:
        yield Finding(
            "warning" if rebuilt else "problem",
            "self-test",
            "the trajectory that is rebuilt from the spans is not the one that was recorded: a "
            "processor or limit changes spans"
            if rebuilt
            else "no trajectory can be rebuilt from the spans of a rollout",
        )
    elif not wrong:
        yield Finding(
            "ok",
            "self-test",
            f"a call was recorded whole, and is rebuilt from its spans (trace "
            f"{trajectory.trace_id})",
        )
