"""The agents of `agent*.py`, run under somebody else's instrumentation; see `record.py`.

It runs in the environment of that instrumentation: it needs the client, the OpenTelemetry SDK and
the instrumentation, and nothing of this project. Each scenario is one trace whose root span has
its name.

    python -m tests.dialects.instrumented DIALECT SPANS.jsonl '{"scenario": "http://...", ...}'
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

UNREAD = ("code.", "logfire.json_schema", "logfire.msg")


class LinesExporter(SpanExporter):
    """OTLP/JSON lines, one for each span, as a collector's file exporter writes them."""

    def __init__(self, path: str) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(self._path, "a", encoding="utf-8") as file:
            for span in spans:
                scope = span.instrumentation_scope
                scopes = [{"scope": {"name": scope.name if scope else ""}, "spans": [row(span)]}]
                line = {"resourceSpans": [{"resource": {}, "scopeSpans": scopes}]}
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        return SpanExportResult.SUCCESS


def row(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    made: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": pairs(span.attributes or {}),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent:
        made["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.status.description:
        made["status"]["message"] = span.status.description
    if span.status.status_code.name == "UNSET":
        del made["status"]
    if span.dropped_attributes:
        made["droppedAttributesCount"] = span.dropped_attributes
    # What only Logfire's own pages need is large too.
    made["attributes"] = [a for a in made["attributes"] if not a["key"].startswith(UNREAD)]
    # Events of single chunks and stack traces are large, and nothing is read from them.
    events = [event for event in span.events if event.attributes]
    if events:
        made["events"] = [
            {
                "name": event.name,
                "timeUnixNano": str(event.timestamp),
                "attributes": [
                    pair
                    for pair in pairs(event.attributes or {})
                    if pair["key"] != "exception.stacktrace"
                ],
            }
            for event in events
        ]
    return made


def pairs(attributes: Any) -> list[dict[str, Any]]:
    return [{"key": key, "value": otlp(value)} for key, value in attributes.items()]


def otlp(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [otlp(item) for item in value]}}


def by_client(processor: SimpleSpanProcessor) -> None:
    """The client writes spans itself, to the global provider."""
    provider = TracerProvider()
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)


def by_library(module: str) -> Callable[[SimpleSpanProcessor], None]:
    def instrument(processor: SimpleSpanProcessor) -> None:
        provider = TracerProvider()
        provider.add_span_processor(processor)
        trace.set_tracer_provider(provider)
        importlib.import_module(module).OpenAIInstrumentor().instrument(tracer_provider=provider)

    return instrument


def by_both(processor: SimpleSpanProcessor) -> None:
    """Two instrumentations of the same client, as people have who send to two places."""
    by_library("opentelemetry.instrumentation.openai")(processor)
    module = importlib.import_module("openinference.instrumentation.openai")
    module.OpenAIInstrumentor().instrument(tracer_provider=trace.get_tracer_provider())


def by_logfire(version: int) -> Callable[[SimpleSpanProcessor], None]:
    def instrument(processor: SimpleSpanProcessor) -> None:
        logfire = importlib.import_module("logfire")
        logfire.configure(
            send_to_logfire=False, console=False, additional_span_processors=[processor]
        )

        def on_client(client: Any) -> None:
            logfire.instrument_openai(client, version=version)

        importlib.import_module("tests.dialects.agent").instrument_client = on_client  # type: ignore[attr-defined]

    return instrument


DIALECTS: dict[str, Callable[[SimpleSpanProcessor], None]] = {
    "openllmetry": by_library("opentelemetry.instrumentation.openai"),
    "openllmetry-flat": by_library("opentelemetry.instrumentation.openai"),
    "openinference": by_library("openinference.instrumentation.openai"),
    "logfire": by_logfire(2),
    "logfire-v1": by_logfire(1),
    "both": by_both,
    "genai": by_library("opentelemetry.instrumentation.genai.openai"),
    "openai-v2": by_library("opentelemetry.instrumentation.openai_v2"),
    "anthropic": by_client,
}
AGENTS = {"anthropic": "tests.dialects.agent_anthropic"}
"""Modules of the agents of other clients than OpenAI's."""


def main(dialect: str, path: str, servers: str) -> None:
    DIALECTS[dialect](SimpleSpanProcessor(LinesExporter(path)))
    tracer = trace.get_tracer("agent")
    run = importlib.import_module(AGENTS.get(dialect, "tests.dialects.agent_kinds")).run
    for name, url in json.loads(servers).items():
        with tracer.start_as_current_span(name):
            run(name, url)


if __name__ == "__main__":
    main(*sys.argv[1:])
