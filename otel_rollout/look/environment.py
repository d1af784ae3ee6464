"""The OTLP exporters that the environment asks for, as any OpenTelemetry program reads it.

Metrics are sent only where the environment names them: an endpoint for all signals is often a
backend of traces alone, which would refuse them every minute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_PROTOCOL,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_HEADERS,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.util.re import parse_env_headers

from otel_rollout.errors import ConfigurationError
from otel_rollout.otlp import try_once

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

_TRAIN_HEADERS = "OTEL_ROLLOUT_TRAIN_HEADERS"


def otlp_exporter() -> SpanExporter | None:
    """The OTLP exporter of spans that the OTEL_* variables ask for; None if they do not."""
    if not _names_otlp(os.environ.get("OTEL_TRACES_EXPORTER", "otlp")):
        return None
    own = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
    if not (own or os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)):
        return None
    return _span_exporter()()


def train_exporter(endpoint: str | None) -> SpanExporter | None:
    """An OTLP exporter of its own for the spans that rollouts are rebuilt from.

    It sends each request once: whoever calls it sends again.

    endpoint: the address of a receiver, which gets the headers of OTEL_ROLLOUT_TRAIN_HEADERS, and
        not those of the environment's endpoint, which may be keys. None: that endpoint.
    None is returned if there is neither.
    """
    if endpoint is None:
        exporter = otlp_exporter()
    else:
        made = _span_exporter()
        is_http = "proto.http" in made.__module__
        if is_http and "://" not in endpoint:
            raise ConfigurationError(
                f"configure(train_endpoint=...): expected an address such as "
                f"'http://127.0.0.1:4318', got {endpoint!r}"
            )
        if is_http and urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        headers = parse_env_headers(os.environ.get(_TRAIN_HEADERS, ""), liberal=True)
        with _hidden(OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TRACES_HEADERS):
            exporter = made(endpoint=endpoint, headers=headers or None)
    if exporter is not None:
        if hasattr(exporter, "_max_request_size"):
            exporter._max_request_size = 0  # it would drop what is larger
        try_once(exporter)
    return exporter


@contextmanager
def _hidden(*variables: str) -> Iterator[None]:
    """Take variables out of the environment for a while."""
    found = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(found)


def _span_exporter() -> Callable[..., SpanExporter]:
    module = _module(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "trace_exporter")
    made: Callable[..., SpanExporter] = module.OTLPSpanExporter
    return made


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
