"""Logfire: one span for the call, and for a stream a second, later span with the reply.

The second span does not name the first. They have the same parent and the same request; among equal
requests it does not matter which reply belongs to which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import (
    KEPT_BY_NONE,
    Dialect,
    Fact,
    ForeignCall,
    check_whole,
    completion_reply,
    object_rows,
    objects,
    structure,
)
from otel_rollout.rebuild.dialects.parts import (
    LOST_BY_CONVENTIONS,
    as_turns,
    joined,
    lost_of_other_api,
    parameters,
    read_call,
    usage_of,
)
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json

_REQUEST = "request_data"
_RESPONSE = "response_data"
_EVENTS = "events"
_SPAN_TYPE = "logfire.span_type"
_EVENT_KEYS = ("role", "content", "tool_calls")
_RESPONSES = "Responses API"
_SCRUBBED = "[Scrubbed due to"


def is_logfire(span: SpanRecord) -> bool:
    """True for any span of a model client, also for one with the reply of a stream."""
    return _REQUEST in span.attributes and (
        _SPAN_TYPE in span.attributes or span.scope.startswith("logfire")
    )


def recognises(span: SpanRecord) -> bool:
    return is_logfire(span) and span.text(_SPAN_TYPE) in ("span", None)


def recognises_v1(span: SpanRecord) -> bool:
    request = span.text(_REQUEST) or ""
    return recognises(span) and (
        _EVENTS in span.attributes
        or any(f'"{key}":' in request for key in ("messages", "prompt", "input"))
    )


def read(span: SpanRecord, trace: Sequence[SpanRecord]) -> ForeignCall:
    output = _output_of(span, trace)
    call = read_call(
        span,
        output or span,
        stream=output is not None,
        is_responses=span.name.startswith(_RESPONSES),
    )
    _note_end(call, span, output)
    if call.path == "/completions" and not call.request.get("prompt"):
        call.miss("its prompt was not written down", prompt=True)
        call.also_loses |= {Fact.FINISH_REASON} if call.stream else set()
    if isinstance(call.reply, dict):
        call.reply["usage"] = _usage(output or span, call) or call.reply.get("usage")
    return call


def _usage(span: SpanRecord, call: ForeignCall) -> dict[str, Json] | None:
    """Usage as the server sent it, with the chat API's names. None: it was not recorded."""
    raw = structure(span, sc.GEN_AI_USAGE_RAW, call)
    if not isinstance(raw, Mapping):
        return None
    return {_USAGE_NAMES.get(str(key), str(key)): value for key, value in raw.items()}


_USAGE_NAMES = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "input_tokens_details": "prompt_tokens_details",
    "output_tokens_details": "completion_tokens_details",
}


def read_v1(span: SpanRecord, trace: Sequence[SpanRecord]) -> ForeignCall:
    output = _output_of(span, trace)
    call = ForeignCall("/chat/completions", {})
    call.also_loses |= lost_of_other_api(span)
    check_whole(span, call)
    check_whole(output or span, call)
    request = structure(span, _REQUEST, call, prompt=True)
    call.request = dict(request) if isinstance(request, Mapping) else {}
    if _EVENTS in span.attributes:
        _read_events(call, span, output or span)
        _note_end(call, span, output)
        return call
    if "prompt" in call.request:
        call.path = "/completions"
    elif "messages" not in call.request:
        call.path = "/embeddings" if "input" in call.request else call.path
        if call.path == "/embeddings":
            return call
        call.miss_messages()
    call.stream = bool(call.request.get("stream"))
    _read_v1_reply(call, span, output or span)
    _note_end(call, span, output)
    return call


def _read_v1_reply(call: ForeignCall, span: SpanRecord, output: SpanRecord) -> None:
    data = structure(output, _RESPONSE, call)
    reasons = structure(span, sc.GEN_AI_RESPONSE_FINISH_REASONS, call)
    if isinstance(data, Mapping):
        message = data.get("message")
        if message is None and "text" in data:
            message = {"role": "assistant", "content": data["text"]}
        if message is None and "combined_chunk_content" in data:
            message = {"role": "assistant", "content": data["combined_chunk_content"]}
        reason = reasons[0] if isinstance(reasons, list) and reasons else None
        choice = {"index": 0, "finish_reason": reason, "message": message}
        choices = [choice] if message is not None else []
        is_text = call.path == "/completions"
        call.reply = completion_reply(span, choices, data.get("usage"), is_text=is_text)


def _read_events(call: ForeignCall, span: SpanRecord, output: SpanRecord) -> None:
    """The Responses API in version 1: request and reply are one list of events."""
    call.is_responses = True
    call.request = {**parameters(span), **call.request}
    rows = object_rows(output, _EVENTS, call, prompt=True) or []
    messages = [found for row in rows if (found := _event_message(row, call)) is not None]
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":
        end -= 1
    reply = messages[end:]
    if len(reply) > 1:
        call.also_loses |= {Fact.REPLY_START}
    if len([message for message in reply if message.get("content")]) > 1:
        call.miss("where its request ends and its reply begins was not recorded", prompt=True)
    choices: list[dict[str, Json]] = []
    if reply:
        choices = [{"index": 0, "finish_reason": None, "message": joined(reply)}]
    messages = as_turns(messages[:end])
    call.request["messages"] = messages
    tools = object_rows(span, sc.GEN_AI_TOOL_DEFINITIONS, call)
    if tools:
        call.request["tools"] = tools
    call.stream = output is not span or call.request.get("stream") is True
    call.reply = completion_reply(span, choices, _usage(output, call) or usage_of(output))


def _event_message(row: dict[str, Json], call: ForeignCall) -> dict[str, Json] | None:
    """The chat message of an event. None: it is an item that chat has no message for."""
    item = row.get("data")
    if not isinstance(item, dict):
        message: dict[str, Json] = {key: row[key] for key in _EVENT_KEYS if key in row}
        if message.get("role") == "tool":
            message["tool_call_id"] = row.get("id")
        return message
    if item.get("type") == "reasoning":
        texts = [part.get("text") for part in objects(item.get("content") or item.get("summary"))]
        return {"role": "assistant", "reasoning_content": "".join(map(str, texts))}
    if item.get("type") == "custom_tool_call":
        custom = {key: item.get(key) for key in ("name", "input")}
        made = {"id": item.get("call_id"), "type": "custom", "custom": custom}
        return {"role": "assistant", "content": None, "tool_calls": [made]}
    if item.get("type") == "custom_tool_call_output":
        result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        return {"role": "tool", **result}
    call.miss(f"an item of type {item.get('type')!r} is not read", prompt=True)
    return None


def _note_end(call: ForeignCall, span: SpanRecord, output: SpanRecord | None) -> None:
    """Note when the reply of a stream ended, and a reply that is missing or was scrubbed."""
    if output is not None:
        call.stream = True
        call.ended_ns = output.end_time_ns or output.start_time_ns
    elif call.reply is None and span.status_error is None and call.path != "/embeddings":
        call.miss("its reply is on a span that did not come, or was not recorded")
    for record in (span, output):
        for key, value in (record.attributes if record else {}).items():
            if isinstance(value, str) and _SCRUBBED in value:
                call.miss(f"something in its {key} was scrubbed", prompt=True)


def _output_of(span: SpanRecord, trace: Sequence[SpanRecord]) -> SpanRecord | None:
    """The span with the streamed reply of this call. None: there is none."""
    calls = [other for other in trace if recognises(other) and _same_request(other, span)]
    calls = sorted((c for c in calls if not _has_reply(c)), key=lambda c: (_end(c), c.span_id))
    outputs = [
        other
        for other in trace
        if is_logfire(other) and not recognises(other) and _same_request(other, span)
    ]
    for output in sorted(outputs, key=lambda o: (o.start_time_ns, o.span_id)):
        found = next((c for c in calls if _end(c) <= output.start_time_ns), None)
        if found is span:
            return output
        if found is not None:
            calls.remove(found)
    return None


def _end(span: SpanRecord) -> int:
    return span.end_time_ns or span.start_time_ns


def _has_reply(span: SpanRecord) -> bool:
    return (
        span.status_error is not None
        or sc.GEN_AI_OUTPUT_MESSAGES in span.attributes
        or _RESPONSE in span.attributes
    )


def _same_request(one: SpanRecord, two: SpanRecord) -> bool:
    if one.parent_span_id != two.parent_span_id:
        return False
    keys = (_REQUEST, sc.GEN_AI_INPUT_MESSAGES, sc.GEN_AI_SYSTEM_INSTRUCTIONS)
    if any(one.attributes.get(key) != two.attributes.get(key) for key in keys):
        return False
    # The second span has the same events, followed by the reply.
    events = [(span.text(_EVENTS) or "").removesuffix("]") for span in (one, two)]
    return events[0].startswith(events[1]) or events[1].startswith(events[0])


DIALECT = Dialect(
    "logfire",
    recognises,
    read,
    loses=LOST_BY_CONVENTIONS | {Fact.REPLY_REFUSAL, Fact.FILES, Fact.ITEMS, Fact.PREVIOUS},
    loses_in_streams=frozenset((Fact.RESPONSE_ID, Fact.RESPONSE_MODEL)),
)
DIALECT_V1 = Dialect(
    "logfire-v1",
    recognises_v1,
    read_v1,
    loses=KEPT_BY_NONE | {Fact.CHOICES, Fact.RESPONSE_FIELDS, Fact.ITEMS, Fact.PREVIOUS},
    loses_in_streams=frozenset((Fact.RESPONSE_ID, Fact.RESPONSE_MODEL, Fact.FINISH_REASON)),
)
