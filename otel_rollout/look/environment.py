"""The OTLP exporters that the environment asks for, as any OpenTelemetry program reads it.

Metrics are sent only where the environment names them: an endpoint for all signals is often a
backend of traces alone, which would refuse them every minute.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_PROTOCOL,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

_CODES_VARIABLE = "OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES"
_CODES = ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS")
"""The codes after which the exporter sends again, less RESOURCE_EXHAUSTED: it was too large."""


def otlp_exporters() -> list[SpanExporter]:
    """The OTLP exporter that the OTEL_* variables ask for; [] if none."""
    own = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
    if not _names_otlp(os.environ.get("OTEL_TRACES_EXPORTER", "otlp")):
        return []
    if not (own or os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)):
        return []
    module = _module(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "trace_exporter")
    made: Callable[..., SpanExporter] = module.OTLPSpanExporter
    return [made(**_retries(made))]


def otlp_metric_exporters() -> list[MetricExporter]:
    """The OTLP exporter of metrics that the OTEL_* variables ask for; [] if none."""
    named = os.environ.get("OTEL_METRICS_EXPORTER", "")
    own = os.environ.get(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT)
    if not (_names_otlp(named) or (own and not named)):
        return []
    module = _module(OTEL_EXPORTER_OTLP_METRICS_PROTOCOL, "metric_exporter")
    made: Callable[[], MetricExporter] = module.OTLPMetricExporter
    return [made()]


def _names_otlp(exporters: str) -> bool:
    return "otlp" in [name.strip() for name in exporters.split(",")]


def _module(variable: str, name: str) -> ModuleType:
    """The module of the OTLP exporter of one signal. variable: the one that has its protocol."""
    protocol = (
        os.environ.get(variable) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL) or "http/protobuf"
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
        return import_module(f"{package}.{name}")
    except ImportError:
        raise ConfigurationError(
            f"{OTEL_EXPORTER_OTLP_PROTOCOL}={protocol} needs the package "
            f"opentelemetry-exporter-otlp-proto-grpc: install it, or use http/protobuf"
        ) from None


def _retries(made: Callable[..., SpanExporter]) -> dict[str, Any]:
    """Keeps an OTLP exporter over gRPC from sending again what was too large.

    It would try for ten seconds, with all other spans behind it. Older ones have no such option.
    """
    if "retryable_error_codes" not in signature(made).parameters or os.environ.get(_CODES_VARIABLE):
        return {}
    codes = import_module("grpc").StatusCode
    return {"retryable_error_codes": [codes[name] for name in _CODES]}
