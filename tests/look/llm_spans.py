"""LLM spans of a recording, and bodies of replies that instrumentors have to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import openai
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter
from otel_rollout.testing import Raw
from tests.kit.recording import Recording

try:
    import_module("opentelemetry.instrumentation.genai.openai")
except ImportError:
    GENAI = False
else:
    GENAI = True
CHOICES: list[Any] = ["openai", *(["genai"] if GENAI else []), None]
DRAWS_RESPONSES = "service_tier" in openai.types.responses.Response.model_fields
"""With an older client the default instrumentor draws them only if they are streamed."""
USER: list[Any] = [{"role": "user", "content": "hi"}]
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def kept_responses() -> Any:
    """What the instrumentor keeps of responses; its module cannot be imported without a warning."""
    return sys.modules["opentelemetry.instrumentation.openai.v1.responses_wrappers"]


def recording_with(instrumentor: Any) -> Recording:
    exporter, spans = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = otel_rollout.configure("tests", [exporter], instrumentor=instrumentor)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Recording(provider, exporter, spans)


def sse(*events: Any, done: bool = True, typed: bool = False) -> Raw:
    """A reply of these events."""
    texts = [
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
        if typed
        else f"data: {json.dumps(event)}\n\n"
        for event in events
    ]
    texts += ["data: [DONE]\n\n"] if done else []
    return Raw(200, content_type="text/event-stream", chunks=[text.encode() for text in texts])


def chunk(*choices: Any, **fields: Any) -> dict[str, Any]:
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": list(choices),
        **fields,
    }


def says(index: int, text: str | None, reason: str | None = None, **delta: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"index": index, "delta": {**content, **delta}, "finish_reason": reason}


def chat_body(message: Any, **fields: Any) -> Raw:
    body = {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        **fields,
    }
    return Raw(200, json.dumps(body).encode())


def llm(recording: Recording) -> list[ReadableSpan]:
    """The spans that are not ours."""
    return [
        span
        for span in recording.spans
        if not span.name.startswith(("recording", "invoke_agent", "execute_tool"))
    ]


def attribute(recording: Recording, name: str) -> Any:
    (span,) = llm(recording)
    assert span.attributes is not None
    return span.attributes.get(name)


def parts(recording: Recording, name: str) -> list[Any]:
    """The parts of all messages that the only LLM span shows."""
    messages = json.loads(attribute(recording, name) or "[]")
    return [part for message in messages for part in message["parts"]]


def inputs(recording: Recording) -> list[Any]:
    return parts(recording, "gen_ai.input.messages")


def outputs(recording: Recording) -> list[Any]:
    return parts(recording, "gen_ai.output.messages")


EARLY = sse(
    chunk(says(1, "b1", role="assistant")),
    chunk(says(0, "a1", role="assistant")),
    chunk(says(1, "b2", "stop")),
    chunk(says(0, "a2", "stop")),
)
STREAMS: dict[str, Callable[[openai.OpenAI], Any]] = {
    "chat": lambda c: c.chat.completions.create(model="m", messages=USER, stream=True),
    "completions": lambda c: c.completions.create(model="m", prompt="p", stream=True),
    "responses": lambda c: c.responses.create(model="m", input="p", stream=True),
}
KEY = "sk-proj-very-secret-0001"
SECRETS = [KEY, "tok-secret-0002", "cookie-secret-0003", "proxysecret0004", "urlsecret0005"]


def echo(status: int) -> Raw:
    known = " ".join(set(SECRETS) - {SECRETS[4]})
    body = {"error": {"message": f"wrong {known}!", "type": "x", "code": KEY}}
    return Raw(status, json.dumps(body).encode())


ECHOES: dict[str, Raw] = {
    "plain": chat_body({"role": "assistant", "content": "ok"}),
    "401": echo(401),
    "500": echo(500),
    "200": echo(200),
    "not JSON": Raw(403, f"<html>{' '.join(SECRETS[:4])}</html>".encode(), "text/html"),
    "stream": sse(chunk(says(0, "a")), json.loads(echo(200).body)),
    "cut": Raw(200, b"", "text/event-stream", chunks=[b"data: {\n\n"]),
}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CUSTOM: Any = {"id": "c", "type": "custom", "custom": {"name": "code", "input": "print(1)"}}
IMAGE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": PIXEL}},
        ],
    }
]


def theirs(provider: TracerProvider | None = None) -> InMemorySpanExporter:
    """A user's own use of the instrumentor."""
    spans = InMemorySpanExporter()
    provider = provider or TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    return spans
