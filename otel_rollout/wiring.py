"""Start-up: the only module that connects providers, instrumentors and processors."""

from __future__ import annotations

import atexit
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from opentelemetry import trace
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from otel_rollout.errors import ConfigurationError
from otel_rollout.export import TrajectoryExporter
from otel_rollout.look import instrumentors
from otel_rollout.otlp import SplittingSpanExporter
from otel_rollout.record import (
    ActiveRollout,
    TrajectorySpanProcessor,
    capture,
    check_exporter,
    continue_environment,
    leave_environment,
    process_state,
)

logger = logging.getLogger("otel_rollout")


_MIN_ATTRIBUTES = 40
"""More attributes than any of our spans has."""


class TruncationWarning(UserWarning):
    """A limit is set that will truncate or drop attributes that training needs."""


@dataclass(slots=True)
class _Setup:
    """State that `configure` set up, for `shutdown` to undo."""

    provider: TracerProvider
    own_provider: bool
    """True if `configure` made the provider."""
    processor: TrajectorySpanProcessor
    processors: list[SpanProcessor] = field(default_factory=list)
    """The batch processors that were added for `span_exporters` and OTLP."""
    span_exporters: list[SpanExporter] = field(default_factory=list)
    """The exporters that the user passed."""
    part: ActiveRollout | None = None
    """The rollout that this process continues, from its environment. None: there is none."""
    uninstrument: Callable[[], None] | None = None
    """Removes the instrumentor. None: `configure` added none."""
    threads: bool = False
    """True if `configure` instrumented threads."""


def _done_before() -> _Setup | None:
    """The set-up of an earlier `configure`. None: there was none, or `shutdown` has undone it."""
    setup = process_state.setup
    return setup if isinstance(setup, _Setup) else None


def configure(
    service_name: str | None = None,
    exporters: Iterable[TrajectoryExporter] = (),
    *,
    span_exporters: Iterable[SpanExporter] = (),
    tracer_provider: TracerProvider | None = None,
    instrumentor: Literal["openai", "genai"] | None = "openai",
    request_token_ids: bool = False,
    rollout_secret: str | None = None,
    max_bytes: int = 4 << 30,
) -> TracerProvider:
    """Record rollouts from now on; call it once, at start-up.

    It uses the given tracer provider, else the global one, else it creates one and makes it the
    global one. To this provider it adds a `TrajectorySpanProcessor` with `exporters`. It
    instruments the OpenAI client (with our capture, and with an instrumentor that writes LLM
    spans), and threads, so that work in a thread pool belongs to the rollout that submitted it.

    A provider that it creates reads the `OTEL_*` variables as any OpenTelemetry program does: spans
    go out over OTLP if an endpoint is set, and nowhere otherwise. A provider of yours keeps its own
    exporters; only `span_exporters` are added. With `OTEL_SDK_DISABLED=true` nothing is recorded.

    service_name: the `service.name` of a provider that it creates; overrides OTEL_SERVICE_NAME.
    exporters: receive finished trajectories (`InMemoryTrajectoryExporter()`, ...).
    span_exporters: receive the spans, besides OTLP.
    instrumentor: writes the LLM spans that people look at; trajectories do not depend on it.
        "openai" is `opentelemetry-instrumentation-openai`, "genai" is
        `opentelemetry-instrumentation-genai-openai` (`pip install --pre 'otel-rollout[genai]'`),
        None is no LLM spans. If one is active already, it stays, and none is added.
    request_token_ids: ask the server for token ids with every call of a rollout; see the function
        `request_token_ids`.
    rollout_secret: a text that all processes of a rollout share. `propagate` then adds a proof
        to its headers, and `continue_rollout` continues no rollout without it. None (default): the
        environment variable OTEL_ROLLOUT_SECRET, else any header may name a rollout.
    max_bytes: limit, in bytes, of the span text that running rollouts may hold in memory.

    Calling it again adds the exporters that are new and returns the same provider.
    ConfigurationError for a wrong argument or a provider that is not the SDK's;
    TruncationWarning for attribute limits that would truncate training data.
    """
    exporters, span_exporters = _checked(exporters, span_exporters)
    if service_name is not None and (not isinstance(service_name, str) or not service_name):
        raise ConfigurationError(
            f"configure(service_name=...): expected a name, got {service_name!r}"
        )
    if rollout_secret is not None and (not isinstance(rollout_secret, str) or not rollout_secret):
        raise ConfigurationError(
            f"configure(rollout_secret=...): expected a text that is not empty, got "
            f"{'an empty one' if rollout_secret == '' else type(rollout_secret)}"
        )
    instrumentors.check(instrumentor)
    with process_state.configuring:
        before = _done_before()
        if before is not None:
            _again(before, service_name, exporters, span_exporters, tracer_provider)
            if request_token_ids:
                process_state.request_fields = {}
            process_state.rollout_secret = rollout_secret or process_state.rollout_secret
            return before.provider
        provider, own = _provider(tracer_provider, service_name)
        processor = TrajectorySpanProcessor(*exporters, max_bytes=max_bytes)
        setup = _Setup(provider, own, processor, span_exporters=list(span_exporters))
        look = [SplittingSpanExporter(exporter) for exporter in span_exporters]
        if own:
            look += [SplittingSpanExporter(exporter) for exporter in _otlp_exporters()]
        _warn_of_limits(provider)
        capture.instrument()
        process_state.request_fields = {} if request_token_ids else None
        process_state.rollout_secret = rollout_secret
        provider.add_span_processor(processor)
        for exporter in look:
            setup.processors.append(BatchSpanProcessor(exporter))
            provider.add_span_processor(setup.processors[-1])
        setup.uninstrument = instrumentors.instrument(instrumentor, provider)
        threads = ThreadingInstrumentor()
        if not threads.is_instrumented_by_opentelemetry:
            threads.instrument()
            setup.threads = True
        process_state.provider = provider
        if own:
            trace.set_tracer_provider(provider)
        setup.part = continue_environment()
        if setup.part is not None:
            # The provider's own exit handler was registered before, so it runs after this one.
            atexit.register(leave_environment, setup.part)
        process_state.setup = setup
        return provider


def shutdown(timeout_millis: int = 30_000) -> bool:
    """Flush trajectories and spans, and undo `configure`.

    The hooks are removed from the clients. A provider that `configure` created is shut down; one
    of yours is flushed and keeps running without our processors. False if something could not be
    flushed within `timeout_millis`. Without `configure` it does nothing and returns True.
    """
    with process_state.configuring:
        setup, process_state.setup = _done_before(), None
        if setup is None:
            return True
        if setup.part is not None:
            leave_environment(setup.part)
        capture.uninstrument()
        process_state.request_fields = process_state.rollout_secret = None
        if setup.uninstrument is not None:
            setup.uninstrument()
        if setup.threads:
            ThreadingInstrumentor().uninstrument()
        deadline = time.monotonic() + timeout_millis / 1000
        flushed = setup.provider.force_flush(timeout_millis)
        setup.processor.shutdown(max(0, int((deadline - time.monotonic()) * 1000)))
        process_state.provider = None
        if setup.own_provider:
            setup.provider.shutdown()
            _forget_global(setup.provider)
        else:
            for processor in (setup.processor, *setup.processors):
                remove_processor(setup.provider, processor)
                processor.shutdown()
        return flushed


def _checked(
    exporters: Iterable[TrajectoryExporter], span_exporters: Iterable[SpanExporter]
) -> tuple[list[TrajectoryExporter], list[SpanExporter]]:
    for argument, value in (("exporters", exporters), ("span_exporters", span_exporters)):
        if isinstance(value, str | TrajectoryExporter) or not isinstance(value, Iterable):
            # An in-memory exporter is iterable too, and list() of it would block.
            raise ConfigurationError(
                f"configure({argument}=...): expected a list, got {value!r}; write [exporter]"
            )
    exporters, span_exporters = list(exporters), list(span_exporters)
    for exporter in exporters:
        if isinstance(exporter, SpanExporter):
            raise ConfigurationError(
                f"configure(exporters=...): {exporter!r} exports spans, not trajectories; pass it "
                f"as configure(span_exporters=[...])"
            )
        check_exporter(exporter)
    for item in span_exporters:
        if not isinstance(item, SpanExporter):
            raise ConfigurationError(
                f"configure(span_exporters=...): expected SpanExporters, got {item!r}"
            )
    return exporters, span_exporters


def _again(
    setup: _Setup,
    service_name: str | None,
    exporters: Sequence[TrajectoryExporter],
    span_exporters: Sequence[SpanExporter],
    tracer_provider: TracerProvider | None,
) -> None:
    if tracer_provider is not None and tracer_provider is not setup.provider:
        raise ConfigurationError(
            "configure(tracer_provider=...): configured already with another provider; call "
            "otel_rollout.shutdown() first"
        )
    if (
        service_name is not None
        and setup.provider.resource.attributes.get(SERVICE_NAME) != service_name
    ):
        logger.warning("configure(service_name=%r): configured already, not changed", service_name)
    for exporter in exporters:
        if exporter not in setup.processor.exporters:
            setup.processor.exporters.append(exporter)
    for span_exporter in span_exporters:
        if span_exporter in setup.span_exporters:
            continue
        setup.span_exporters.append(span_exporter)
        processor = BatchSpanProcessor(SplittingSpanExporter(span_exporter))
        setup.processors.append(processor)
        setup.provider.add_span_processor(processor)


def _provider(
    given: TracerProvider | None, service_name: str | None
) -> tuple[TracerProvider, bool]:
    """The provider to use, and True if it was created here."""
    found = trace.get_tracer_provider() if given is None else given
    if isinstance(found, TracerProvider):
        return found, False
    if given is not None or not isinstance(found, trace.ProxyTracerProvider):
        where = "configure(tracer_provider=...)" if given is not None else "configure()"
        raise ConfigurationError(
            f"{where}: expected a TracerProvider of the OpenTelemetry SDK "
            f"(opentelemetry.sdk.trace.TracerProvider), got {found!r}, which takes no span "
            f"processors; set an SDK provider first, or none"
        )
    resource = Resource.create({SERVICE_NAME: service_name} if service_name else {})
    return TracerProvider(resource=resource), True


def _otlp_exporters() -> list[SpanExporter]:
    """The OTLP exporter that the OTEL_* variables ask for; [] if none."""
    names = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    if "otlp" not in [name.strip() for name in names]:
        return []
    if not (
        os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)
        or os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
    ):
        return []
    protocol = (
        os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL)
        or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
        or "http/protobuf"
    ).strip()
    package = {
        "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
        "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    }.get(protocol)
    if package is None:
        raise ConfigurationError(
            f"{OTEL_EXPORTER_OTLP_PROTOCOL}: expected 'http/protobuf' or 'grpc', got {protocol!r}"
        )
    try:
        exporter: SpanExporter = import_module(f"{package}.trace_exporter").OTLPSpanExporter()
    except ImportError:
        raise ConfigurationError(
            f"{OTEL_EXPORTER_OTLP_PROTOCOL}={protocol} needs the package "
            f"opentelemetry-exporter-otlp-proto-grpc: install it, or use http/protobuf"
        ) from None
    return [exporter]


def _warn_of_limits(provider: TracerProvider) -> None:
    for sentence in cutting_limits(provider):
        warnings.warn(sentence, TruncationWarning, stacklevel=3)


def cutting_limits(provider: TracerProvider) -> Iterator[str]:
    """A sentence for each limit of the provider that will truncate or drop training data."""
    limits: SpanLimits | None = getattr(provider, "_span_limits", None)
    if limits is None:
        return
    for name in ("max_span_attribute_length", "max_attribute_length"):
        length = getattr(limits, name, None)
        if length is not None:
            yield (
                f"span attributes are cut at {length} characters (SpanLimits({name}={length}), or "
                f"OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT / OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT in "
                f"the environment): conversations will be incomplete and not trainable. Remove "
                f"the limit from this provider; limit what is stored in the collector instead"
            )
            break
    for name in ("max_span_attributes", "max_attributes"):
        count = getattr(limits, name, None)
        if count is not None and count < _MIN_ATTRIBUTES:
            yield (
                f"spans keep only {count} attributes (SpanLimits({name}={count}), or "
                f"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT / OTEL_ATTRIBUTE_COUNT_LIMIT in the "
                f"environment): exchange spans need up to {_MIN_ATTRIBUTES}, the first ones would "
                f"be lost. Raise the limit"
            )
            break


def remove_processor(provider: TracerProvider, processor: SpanProcessor) -> None:
    """Undo `add_span_processor`."""
    active = provider._active_span_processor
    with active._lock:
        active._span_processors = tuple(
            kept for kept in active._span_processors if kept is not processor
        )


def _forget_global(provider: TracerProvider) -> None:
    """Make the global provider unset again, so that a later `configure` can set one."""
    if trace.get_tracer_provider() is provider:
        trace._TRACER_PROVIDER = None
        trace._TRACER_PROVIDER_SET_ONCE = type(trace._TRACER_PROVIDER_SET_ONCE)()
