"""An agent for each scenario, run under somebody else's instrumentation; see `record.py`.

It runs in the environment of that instrumentation: it needs the OpenAI client, the OpenTelemetry
SDK and the instrumentation, and nothing of this project. Each scenario is one trace whose root
span has its name.

    python agent.py DIALECT SPANS.jsonl '{"scenario": "http://127.0.0.1:PORT/v1", ...}'
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pydantic
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

MODEL = "org/test-model"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5"
    "ErkJggg=="
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
            "strict": False,
        },
    }
]
RESPONSES_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": False,
    }
]


class Answer(pydantic.BaseModel):
    city: str


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def create(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    """One call, streamed or not; the reply as a client replays it."""
    made = client.chat.completions.create(model=MODEL, messages=messages, **options)
    if not options.get("stream"):
        return made.choices[0].message.model_dump(exclude_none=True)
    text, calls = "", list[dict[str, Any]]()
    for chunk in made:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    function = {"name": call.function.name, "arguments": ""}
                    calls.append({"id": call.id, "type": "function", "function": function})
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    reply = {"role": "assistant", "content": text}
    return {**reply, "tool_calls": calls} if calls else reply


def chat(client: openai.OpenAI, **options: Any) -> None:
    messages = [{"role": "system", "content": "Be terse.\n“ü”"}, user("capital of France?")]
    sampling = {"temperature": 0.7, "max_completion_tokens": 64, "seed": 7, **options}
    messages.append(create(client, messages, **sampling))
    create(client, [*messages, user("and of Peru?")], **sampling)


def stream(client: openai.OpenAI) -> None:
    chat(client, stream=True, stream_options={"include_usage": True})


def tools(client: openai.OpenAI, **options: Any) -> None:
    messages = [user("1.50 + 2?")]
    while True:
        reply = create(client, messages, tools=TOOLS, **options)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3.50"}
            messages.append(result)


def stream_tools(client: openai.OpenAI) -> None:
    tools(client, stream=True)


def choices(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=[user("a or b?")], n=2)
    reply = made.choices[1].message.model_dump(exclude_none=True)
    create(client, [user("a or b?"), reply, user("sure?")])


def image(client: openai.OpenAI) -> None:
    urls = ["https://example.com/cat.png", f"data:image/png;base64,{PIXEL}"]
    parts: list[Any] = [{"type": "text", "text": "what is it?"}]
    parts += [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages.append(create(client, messages))
    create(client, [*messages, user("sure?")])


def remote_image(client: openai.OpenAI) -> None:
    url = {"url": "https://example.com/cat.png", "detail": "low"}
    parts = [{"type": "text", "text": "and?"}, {"type": "image_url", "image_url": url}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages.append(create(client, messages))
    create(client, [*messages, user("sure?")])


def structured(client: openai.OpenAI) -> None:
    client.chat.completions.parse(
        model=MODEL, messages=[user("capital of Peru?")], response_format=Answer
    )


def streamed_talk(client: openai.OpenAI) -> None:
    create(client, [user("hm?")], stream=True, stream_options={"include_usage": True})


def talk(client: openai.OpenAI) -> None:
    """Two turns; what the replies hold is the server's to say."""
    messages = [{**user("hm?"), "name": "ann"}]
    messages.append(create(client, messages))
    create(client, [*messages, user("so?")])


def part_list(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages.append(create(client, messages))
    create(client, [*messages, {"role": "user", "content": [{"type": "text", "text": "so?"}]}])


def tokens(client: openai.OpenAI) -> None:
    extra = {"top_k": 20, "return_token_ids": True}
    create(client, [user("hi")], logprobs=True, extra_body=extra)
    create(client, [user("hi there")], stream=True, logprobs=True, extra_body=extra)


def error(client: openai.OpenAI) -> None:
    with contextlib.suppress(openai.BadRequestError):
        create(client, [user("too long")])
    create(client, [user("shorter")])


def cut(client: openai.OpenAI) -> None:
    with contextlib.suppress(Exception):  # which one depends on the client's version
        create(client, [user("go on")], stream=True)
    gc.collect()


def abandoned(client: openai.OpenAI) -> None:
    messages = [user("go on")]
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True) as made:
        next(iter(made))
    del made
    gc.collect()


def cancelled(client: openai.OpenAI) -> None:
    async def call() -> None:
        slow = openai.AsyncOpenAI(base_url=client.base_url, api_key="k", max_retries=0)
        instrument_client(slow)
        await slow.chat.completions.create(model=MODEL, messages=[user("are you there?")])

    async def run() -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(call(), 2)

    asyncio.run(run())
    create(client, [user("hello?")])


def long(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Count."}]
    for number in range(70):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": f"number {number}"})
    messages.append(user("next?"))
    messages.append(create(client, messages, temperature=0.5))
    create(client, [*messages, user("next?")], temperature=0.5)


def value_limit(client: openai.OpenAI) -> None:
    messages = [user("x" * 150)]
    messages.append(create(client, messages))
    create(client, [*messages, user("y" * 170)])


def responses(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be terse.",
        "tools": RESPONSES_TOOLS,
    }
    items: list[Any] = [user("1.50 + 2?")]
    made = client.responses.create(input=items, **options)
    items += [item.model_dump(exclude_none=True) for item in made.output]
    calls = [item for item in made.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3.50"}
        for call in calls
    ]
    made = client.responses.create(input=items, **options)
    client.responses.create(input="and 1?", previous_response_id=made.id, **options)


def responses_stream(client: openai.OpenAI) -> None:
    for _ in client.responses.create(model=MODEL, input="hi", stream=True):
        pass


def completions(client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8)
    for _ in client.completions.create(model=MODEL, prompt="a time", max_tokens=8, stream=True):
        pass


def embeddings(client: openai.OpenAI) -> None:
    client.embeddings.create(model=MODEL, input="embed this")


SCENARIOS: dict[str, Callable[[openai.OpenAI], None]] = {
    "abandoned": abandoned,
    "cancelled": cancelled,
    "chat": chat,
    "choices": choices,
    "completions": completions,
    "cut": cut,
    "embeddings": embeddings,
    "error": error,
    "image": image,
    "long": long,
    "parallel_tools": tools,
    "part_list": part_list,
    "reasoning": talk,
    "refusal": talk,
    "remote_image": remote_image,
    "responses": responses,
    "responses_stream": responses_stream,
    "stream": stream,
    "stream_reasoning": streamed_talk,
    "stream_refusal": streamed_talk,
    "stream_tools": stream_tools,
    "structured": structured,
    "tokens": tokens,
    "tools": tools,
    "value_limit": value_limit,
}


# --- the instrumentations

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


def instrument_client(client: Any) -> None:
    """Some instrumentations are put on a client rather than on the library."""


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
        global instrument_client
        logfire = importlib.import_module("logfire")
        logfire.configure(
            send_to_logfire=False, console=False, additional_span_processors=[processor]
        )

        def on_client(client: Any) -> None:
            logfire.instrument_openai(client, version=version)

        instrument_client = on_client

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
}


def main(dialect: str, path: str, servers: str) -> None:
    DIALECTS[dialect](SimpleSpanProcessor(LinesExporter(path)))
    tracer = trace.get_tracer("agent")
    for name, url in json.loads(servers).items():
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        instrument_client(client)
        with tracer.start_as_current_span(name):
            SCENARIOS[name](client)


if __name__ == "__main__":
    main(*sys.argv[1:])
