"""Spans of every kind, and those of one rollout."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, StatusCode, TraceFlags

from otel_rollout import rollout
from tests.kit.recording import Clients, Recording
from tests.otlp.written import SCALARS, VALUES


@pytest.fixture
def spans() -> tuple[ReadableSpan, ...]:
    """Two spans with an attribute of every kind, an event, a link and an error."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a.scope")
    with tracer.start_as_current_span("outer", attributes=VALUES) as outer:
        outer.set_status(StatusCode.ERROR, "broken")
        outer.add_event("happened", SCALARS)
        link = Link(SpanContext(5, 6, is_remote=True, trace_flags=TraceFlags(1)))
        with tracer.start_as_current_span("inner", links=[link]):
            pass
    return exporter.get_finished_spans()


@pytest.fixture
def recorded(recording: Recording, clients: Clients) -> tuple[ReadableSpan, ...]:
    """The spans of two rollouts with a call each."""
    client = clients.sync(clients.serve())
    for name in ("first", "second"):
        with rollout(name):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
    return recording.spans
