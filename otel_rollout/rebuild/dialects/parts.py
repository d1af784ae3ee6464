"""Messages as the GenAI conventions write them (lists of parts), to and from chat's wire form.

Shared by the dialects that follow the conventions. Their parts differ, so a part is read by the
keys that it has. A part of an unknown type is kept unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import (
    Call,
    check_not_empty,
    completion_reply,
    object_rows,
    objects,
    usage,
    without_none,
)
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json, dumps, loads

_PARAMETERS = {
    "model": sc.GEN_AI_REQUEST_MODEL,
    "temperature": sc.GEN_AI_REQUEST_TEMPERATURE,
    "top_p": sc.GEN_AI_REQUEST_TOP_P,
    "top_k": sc.GEN_AI_REQUEST_TOP_K,
    "max_tokens": sc.GEN_AI_REQUEST_MAX_TOKENS,
    "frequency_penalty": sc.GEN_AI_REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": sc.GEN_AI_REQUEST_PRESENCE_PENALTY,
    "seed": sc.GEN_AI_REQUEST_SEED,
    "n": sc.GEN_AI_REQUEST_CHOICE_COUNT,
    "stop": sc.GEN_AI_REQUEST_STOP_SEQUENCES,
}
_FINISH_REASONS = {"tool_call": "tool_calls", "error": None, "": None}
"""Finish reasons of the conventions as those of the API; a reply that broke off has none."""


def parameters(span: SpanRecord) -> dict[str, Json]:
    """The request's parameters as far as the conventions have names for them."""
    found: dict[str, Json] = {}
    for name, key in _PARAMETERS.items():
        value = span.attributes.get(key)
        if isinstance(value, str) and name != "model":  # a store that keeps only text
            with contextlib.suppress(ValueError):
                value = loads(value)
        if value is not None:
            found[name] = list(value) if isinstance(value, list | tuple) else value
    return found


def read_call(span: SpanRecord, output: SpanRecord, *, stream: bool) -> Call:
    """The call of a span that follows the conventions; `output` is the span with its reply."""
    operation = span.text(sc.GEN_AI_OPERATION_NAME)
    call = Call("/chat/completions", parameters(span), stream=stream)
    rows = object_rows(span, sc.GEN_AI_INPUT_MESSAGES, call, prompt=True)
    if operation == sc.OPERATION_EMBEDDINGS:
        call.path = "/embeddings"
        return call
    response_id = span.text(sc.GEN_AI_RESPONSE_ID)
    call.is_responses = (
        span.text(sc.OPENAI_API_TYPE) == "responses"
        or span.name == "openai.response"
        or (response_id or "").startswith("resp_")
    )
    if rows is None:
        if call.prompt_is_known:
            call.miss("its span has no messages: they were not recorded, or not kept", prompt=True)
        rows = []
    instructions = object_rows(span, sc.GEN_AI_SYSTEM_INSTRUCTIONS, call, prompt=True)
    if instructions:
        rows = [{"role": "system", "parts": instructions}, *rows]
    messages = to_messages(rows)
    if operation == sc.OPERATION_TEXT_COMPLETION:
        call.path = "/completions"
        prompts = [message.get("content") for message in messages]
        call.request["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    else:
        call.request["messages"] = messages
    tools = object_rows(span, sc.GEN_AI_TOOL_DEFINITIONS, call)
    if tools:
        call.request["tools"] = [_tool(tool) for tool in tools]
    rows = object_rows(output, sc.GEN_AI_OUTPUT_MESSAGES, call) or []
    choices = [_choice(index, row) for index, row in enumerate(rows)]
    call.reply = completion_reply(
        choices,
        is_text=call.path == "/completions",
        id=response_id,
        model=span.text(sc.GEN_AI_RESPONSE_MODEL) if choices else None,
        usage=usage(
            output.integer(sc.GEN_AI_USAGE_INPUT_TOKENS),
            output.integer(sc.GEN_AI_USAGE_OUTPUT_TOKENS),
        ),
    )
    if any(row.get("finish_reason") == "error" for row in rows):
        call.stream = True  # only a stream can break off with part of its reply
    check_not_empty(call)
    return call


def _choice(index: int, row: dict[str, Json]) -> dict[str, Json]:
    reason = row.get("finish_reason")
    messages = to_messages([row])
    return {
        "index": index,
        "finish_reason": _FINISH_REASONS.get(reason, reason) if isinstance(reason, str) else None,
        "message": messages[0] if messages else None,
    }


def _tool(tool: dict[str, Json]) -> Json:
    """A tool definition as chat has it: some writers take it out of its `function`."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {
        "type": "function",
        "function": without_none({key: tool[key] for key in tool if key != "type"}),
    }


def to_messages(rows: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Chat messages of the conventions' messages; several tool results in one become several."""
    messages: list[dict[str, Json]] = []
    for row in rows:
        parts = objects(row.get("parts"))
        results = [part for part in parts if part.get("type") == "tool_call_response"]
        for part in results:
            value = part.get("response", part.get("result"))
            content = value if isinstance(value, str) else dumps(value)
            result = {"role": "tool", "tool_call_id": part.get("id"), "content": content}
            messages.append(without_none({**result, "name": row.get("name")}))
        if not results:
            messages.append(_message(row, parts))
    return messages


def _message(row: Mapping[str, Json], parts: list[dict[str, Json]]) -> dict[str, Json]:
    message: dict[str, Json] = {"role": row.get("role"), "content": None}
    content: list[Json] = []
    calls: list[Json] = []
    for part in parts:
        kind = part.get("type")
        if kind == "tool_call":
            arguments = part.get("arguments")
            text = arguments if isinstance(arguments, str) else dumps(arguments)
            function = {"name": part.get("name"), "arguments": text}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "reasoning":
            message["reasoning_content"] = part.get("content")
        elif kind == "refusal":
            message["refusal"] = part.get("content") or part.get("refusal")
        else:
            content.append(_content_part(part))
    if len(content) == 1 and content[0].keys() == {"type", "text"}:
        message["content"] = content[0]["text"]
    elif content:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    if row.get("name"):
        message["name"] = row["name"]
    return message


def _content_part(part: Mapping[str, Json]) -> dict[str, Json]:
    kind, modality = part.get("type"), part.get("modality") or "image"
    mime = part.get("mime_type") or ""
    if kind == "text":
        return {"type": "text", "text": part.get("content")}
    if kind == "uri" and modality == "image":
        return {"type": "image_url", "image_url": {"url": part.get("uri")}}
    if kind == "blob" and (modality == "image" and not mime.startswith("audio/")):
        url = f"data:{mime};base64,{part.get('content')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "blob" and mime.startswith("audio/"):
        audio = {"data": part.get("content"), "format": mime.partition("/")[2]}
        return {"type": "input_audio", "input_audio": audio}
    return dict(part)
