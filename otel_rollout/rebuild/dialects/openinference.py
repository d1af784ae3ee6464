"""OpenInference: request and response as whole JSON, and again field by field.

The JSON is read. If a span had more attributes than its limit, the oldest were dropped, the JSON
among them: then the remaining fields are read, and the call is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import (
    Dialect,
    Fact,
    ForeignCall,
    chat_tool_call,
    check_not_cut,
    check_not_empty,
    completion_reply,
    numbered,
    structure,
    usage,
    without_none,
)
from otel_rollout.rebuild.dialects.parts import lost_of_other_api
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json

_KIND = sc.OPENINFERENCE_KIND
_INPUT = sc.INPUT_VALUE
_OUTPUT = sc.OUTPUT_VALUE
_INPUT_MESSAGES = "llm.input_messages."
_OUTPUT_MESSAGES = "llm.output_messages."
_PARAMETERS = "llm.invocation_parameters"
_TOOLS = "llm.tools."
_MODEL = "llm.model_name"
_FINISH_REASON = "llm.finish_reason"
_PROMPT_TOKENS = "llm.token_count.prompt"
_COMPLETION_TOKENS = "llm.token_count.completion"
_REDACTED = "__REDACTED__"


def recognises(span: SpanRecord) -> bool:
    return span.text(_KIND) in ("LLM", "EMBEDDING")


def read(span: SpanRecord, trace: Sequence[SpanRecord]) -> ForeignCall:
    call = ForeignCall("/chat/completions", {})
    call.also_loses |= lost_of_other_api(span)
    if span.text(_KIND) == "EMBEDDING":
        call.path = "/embeddings"
    fields_read: list[str] = []
    if not _read_request(span, call):
        _read_request_fields(span, call)
        fields_read.append(_INPUT_MESSAGES)
    call.stream = call.request.get("stream") is True
    if not _read_reply(span, call):
        _read_reply_fields(span, call)
        fields_read.append(_OUTPUT_MESSAGES)
    if span.dropped_attributes and fields_read:
        call.miss(
            f"{span.dropped_attributes} attributes of its span were dropped by a limit, the "
            f"request or response as a whole among them",
            prompt=_INPUT_MESSAGES in fields_read,
        )
    for key in (_INPUT, _OUTPUT):
        if _REDACTED in (span.text(key) or ""):
            call.miss(f"something in its {key} was redacted", prompt=key == _INPUT)
            call.also_loses |= {Fact.IMAGES}  # long images are redacted by default
    texts = {k: v for k, v in span.attributes.items() if k.startswith(tuple(fields_read) or " ")}
    check_not_cut(texts, call, trace)
    _verify_token_ids(call)
    return call


def _read_request(span: SpanRecord, call: ForeignCall) -> bool:
    """Read the request as a whole; False if only its fields are to be read."""
    request = _whole(span, _INPUT, call)
    if call.path != "/embeddings":
        if request is None:
            return False
        if isinstance(request.get("prompt"), str | list):
            call.path = "/completions"
        elif "input" in request:
            call.path, call.is_responses = "/responses", True
        elif not _is_messages(request.get("messages")):
            return False  # another library's arguments, not a request of this API
    call.request = request or {}
    return True


def _read_reply(span: SpanRecord, call: ForeignCall) -> bool:
    """Read the reply as a whole; False if only its fields are to be read."""
    reply = _whole(span, _OUTPUT, call) or {}
    if reply.keys().isdisjoint(("choices", "output", "data")):
        return call.path == "/embeddings"
    if reply.get("object") == "chat.completion.chunk":
        reply["object"] = "chat.completion"
    call.reply = reply
    return True


def _whole(span: SpanRecord, key: str, call: ForeignCall) -> dict[str, Json] | None:
    text = span.text(key) or ""
    if not text.startswith("{"):
        return None
    value = structure(span, key, call, prompt=key == _INPUT)
    return value if isinstance(value, dict) else None


def _is_messages(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


def _read_request_fields(span: SpanRecord, call: ForeignCall) -> None:
    parameters = structure(span, _PARAMETERS, call)
    call.request = dict(parameters) if isinstance(parameters, dict) else {}
    if model := span.text(_MODEL):
        call.request.setdefault("model", model)
    rows = numbered(span.attributes, _INPUT_MESSAGES)
    call.request["messages"] = [_message(row, call, prompt=True) for row in rows.values()]
    tools = [
        structure(span, f"{_TOOLS}{number}.tool.json_schema", call)
        for number in numbered(span.attributes, _TOOLS)
    ]
    if tools:
        call.request["tools"] = tools
    if not rows or min(rows) > 1 or max(rows) - min(rows) >= len(rows):
        call.miss("messages of its request are missing", prompt=True)
    call.also_loses |= _LOST_IN_FIELDS
    check_not_empty(call)


def _read_reply_fields(span: SpanRecord, call: ForeignCall) -> None:
    rows = numbered(span.attributes, _OUTPUT_MESSAGES)
    reason = span.text(_FINISH_REASON)
    choices = [
        {"index": index, "finish_reason": reason, "message": _message(row, call, prompt=False)}
        for index, row in enumerate(rows.values())
    ]
    counted = usage(span.integer(_PROMPT_TOKENS), span.integer(_COMPLETION_TOKENS))
    call.reply = completion_reply(span, choices, counted, model=_MODEL)
    if call.path != "/chat/completions" and call.reply is not None:
        call.miss("its response as a whole is missing")
        call.reply = None
    if rows:
        call.also_loses |= _LOST_IN_REPLY_FIELDS
    if len(rows) > 1:  # one reason is that of all of them
        call.also_loses |= {Fact.FINISH_REASON}
    check_not_empty(call)


def _message(row: Mapping[str, Any], call: ForeignCall, *, prompt: bool) -> dict[str, Json]:
    fields = {key.removeprefix("message."): value for key, value in row.items()}
    role = fields.get("role") or (None if prompt else "assistant")
    message: dict[str, Json] = {"role": role, "content": fields.get("content")}
    parts = [_part(part, call, prompt=prompt) for part in numbered(fields, "contents.").values()]
    if parts:
        message["content"] = parts
    calls = []
    for made in numbered(fields, "tool_calls.").values():
        name, arguments = (made.get(f"tool_call.function.{key}") for key in ("name", "arguments"))
        calls.append(chat_tool_call(made.get("tool_call.id"), name, arguments, call, prompt=prompt))
    if calls:
        message["tool_calls"] = calls
    named = {key: fields.get(key) for key in ("name", "tool_call_id")}
    return {**message, **without_none(named)}


def _part(row: Mapping[str, Any], call: ForeignCall, *, prompt: bool) -> dict[str, Json]:
    fields = {key.removeprefix("message_content."): value for key, value in row.items()}
    url = fields.get("image.image.url")
    if url is not None:
        return {"type": "image_url", "image_url": {"url": url}}
    if not isinstance(fields.get("text"), str):
        call.miss(f"of a part of type {fields.get('type')!r} only the type is read", prompt=prompt)
    return {key: value for key, value in fields.items() if key in ("type", "text")}


def _verify_token_ids(call: ForeignCall) -> None:
    """Remove token ids if their number differs from the usage or the log-probabilities.

    Some servers leave tokens out of streams, and the instrumentation merged the chunks.
    """
    reply = call.reply
    if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
        return
    choices = [choice for choice in reply["choices"] if isinstance(choice, dict)]
    numbers, prompt = reply.get("usage") or {}, reply.get("prompt_token_ids")
    asked = numbers.get("prompt_tokens")
    is_prompt_wrong = bool(prompt and asked is not None and len(prompt) != asked)
    if is_prompt_wrong or _are_too_few(choices, numbers.get("completion_tokens")):
        for holder in (reply, *choices):
            for key in ("token_ids", "prompt_token_ids"):
                holder.pop(key, None)
        call.also_loses |= {Fact.TOKEN_IDS}


def _are_too_few(choices: list[dict[str, Json]], expected: int | None) -> bool:
    """True if there are token ids, of another number than was counted or has log-probabilities."""
    given = [len(choice.get("token_ids") or ()) for choice in choices]
    if expected is not None:
        return any(given) and sum(given) != expected
    scored = [len((c.get("logprobs") or {}).get("content") or ()) for c in choices]
    return any(given) and given != scored


_LOST_IN_FIELDS = frozenset(
    (
        Fact.PARAMETERS,
        Fact.ARGUMENTS,
        Fact.REQUEST_REASONING,
        Fact.REQUEST_REFUSAL,
        Fact.DETAIL,
        Fact.FUNCTION_CALL,
        Fact.CUSTOM_TOOLS,
    )
)
_LOST_IN_REPLY_FIELDS = frozenset(
    (
        Fact.LOGPROBS,
        Fact.TOKEN_IDS,
        Fact.ARGUMENTS,
        Fact.FUNCTION_CALL,
        Fact.CUSTOM_TOOLS,
        Fact.REPLY_REASONING,
        Fact.REPLY_REFUSAL,
        Fact.RESPONSE_ID,
        Fact.RESPONSE_FIELDS,
    )
)

DIALECT = Dialect("openinference", recognises, read, loses=frozenset((Fact.EXTRA_BODY,)))
