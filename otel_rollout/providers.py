"""Providers of the OpenTelemetry SDK: those that `configure` makes, checks, and takes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace
from opentelemetry.metrics._internal import _ProxyMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider

from otel_rollout.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter

_MIN_ATTRIBUTES = 40
"""More attributes than any of our spans has."""


def span_provider(
    given: TracerProvider | None, attributes: Mapping[str, str]
) -> tuple[TracerProvider, bool]:
    """The provider to use, and True if it was created here: its resource has these attributes."""
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
    return TracerProvider(resource=Resource.create(attributes)), True


def meter_provider(exporters: Sequence[MetricExporter], resource: Resource) -> MeterProvider | None:
    """A global meter provider for these exporters. None: there are none, or there is one."""
    if not exporters or not isinstance(metrics.get_meter_provider(), _ProxyMeterProvider):
        return None
    # Imported when it is needed: few programs ask for it.
    reader = import_module("opentelemetry.sdk.metrics.export").PeriodicExportingMetricReader
    made: MeterProvider = import_module("opentelemetry.sdk.metrics").MeterProvider(
        metric_readers=[reader(exporter) for exporter in exporters], resource=resource
    )
    metrics.set_meter_provider(made)
    return made


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


def forget_global(provider: TracerProvider) -> None:
    """Make the global provider unset again, so that a later `configure` can set one."""
    if trace.get_tracer_provider() is provider:
        trace._TRACER_PROVIDER = None
        trace._TRACER_PROVIDER_SET_ONCE = type(trace._TRACER_PROVIDER_SET_ONCE)()


def has_meter_provider() -> bool:
    """True if a meter provider is the global one; one that the environment names is by now."""
    return metrics._internal._METER_PROVIDER is not None


def forget_global_metrics(provider: MeterProvider) -> None:
    """Make the global meter provider unset again, and with it the proxy that stands for it."""
    if metrics.get_meter_provider() is provider:
        own = metrics._internal
        own._METER_PROVIDER, own._PROXY_METER_PROVIDER = None, _ProxyMeterProvider()
        own._METER_PROVIDER_SET_ONCE = type(own._METER_PROVIDER_SET_ONCE)()
