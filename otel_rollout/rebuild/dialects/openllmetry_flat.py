"""OpenLLMetry (Traceloop) up to 0.54: one attribute for each field of each message.

A span keeps 128 attributes by default and drops the first ones, so the first messages of a long
conversation are missing. The numbers of the remaining messages show it.
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
    is_true,
    numbered,
    usage,
    without_none,
)
from otel_rollout.rebuild.dialects.genai import LOST_BY_OPENLLMETRY
from otel_rollout.rebuild.dialects.parts import first_integer, lost_of_other_api, parameters
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json, loads

_KIND = sc.LLM_REQUEST_TYPE
_STREAMING = "llm.is_streaming"
_FUNCTIONS = "llm.request.functions."
_REASONING_TOKENS = "llm.usage.reasoning_tokens"
_PROMPTS_KEPT = ("role", "content", "tool_call_id")


def recognises(span: SpanRecord) -> bool:
    return sc.GEN_AI_INPUT_MESSAGES not in span.attributes and (
        span.text(_KIND) in ("chat", "completion", "embedding")
        or any(key.startswith((sc.GEN_AI_PROMPT, sc.GEN_AI_COMPLETION)) for key in span.attributes)
    )


def read(span: SpanRecord, trace: Sequence[SpanRecord]) -> ForeignCall:
    kind = span.text(_KIND)
    if kind is None and span.name.endswith(".completion"):
        kind = "completion"  # it is the first attribute to be dropped
    request = parameters(span)
    call = ForeignCall("/chat/completions", request, stream=is_true(span, _STREAMING))
    call.also_loses |= lost_of_other_api(span)
    prompts = numbered(span.attributes, sc.GEN_AI_PROMPT)
    if kind == "embedding":
        call.path = "/embeddings"
        return call
    _check_prompts(span, prompts, call)
    if kind == "completion":
        call.path = "/completions"
        texts = [row.get("user", row.get("content")) for row in prompts.values()]
        if texts:
            request["prompt"] = texts[0] if len(texts) == 1 else texts
    else:
        request["messages"] = [_message(row, call) for row in prompts.values()]
    tools = numbered(span.attributes, _FUNCTIONS)
    if tools:
        request["tools"] = [_tool(row, call) for row in tools.values()]
    _read_reply(span, call)
    call.is_responses = span.name == "openai.response"
    if call.is_responses:
        call.miss("of the Responses API this dialect leaves items of the request out", prompt=True)
    check_not_empty(call)
    check_not_cut(
        {
            key: value
            for key, value in span.attributes.items()
            if key.startswith((sc.GEN_AI_PROMPT, sc.GEN_AI_COMPLETION, _FUNCTIONS))
        },
        call,
        trace,
    )
    return call


def _check_prompts(span: SpanRecord, prompts: Mapping[int, Any], call: ForeignCall) -> None:
    """Note messages that are missing: the first ones, where the span had too many attributes."""
    if not prompts:
        call.miss_messages()
    elif list(prompts) != list(range(len(prompts))):
        missing = max(prompts) + 1 - len(prompts)
        call.miss(
            f"{missing} messages of its request are missing: its span had more attributes than "
            f"its limit",
            prompt=True,
        )
    elif span.dropped_attributes:
        call.miss(
            f"{span.dropped_attributes} attributes of its span were dropped by a limit", prompt=True
        )


def _read_reply(span: SpanRecord, call: ForeignCall) -> None:
    rows = numbered(span.attributes, sc.GEN_AI_COMPLETION)
    choices = [
        {
            "index": index,
            "finish_reason": row.get("finish_reason"),
            "message": _message({"role": "assistant", **row}, call, is_reply=True),
        }
        for index, row in rows.items()
    ]
    counted = usage(
        span.integer(sc.GEN_AI_USAGE_INPUT_TOKENS),
        span.integer(sc.GEN_AI_USAGE_OUTPUT_TOKENS),
        # It writes 0 where the server counted nothing.
        cached=first_integer(span, sc.GEN_AI_USAGE_CACHE_READ) or None,
        reasoning=span.integer(_REASONING_TOKENS) or None,
    )
    call.reply = completion_reply(span, choices, counted, is_text=call.path == "/completions")


def _message(
    row: Mapping[str, Any], call: ForeignCall, *, is_reply: bool = False
) -> dict[str, Json]:
    message = {key: row[key] for key in _PROMPTS_KEPT if key in row}
    message.setdefault("content", "" if row.get("role") == "tool" else None)
    if is_reply:
        filtered = ("FILTERED", "content_filter")
        if (message["content"], row.get("finish_reason")) == filtered:
            call.miss("a content filter ended its reply, and its text was replaced")
        if row.get("refusal"):
            message["refusal"] = row["refusal"]
    else:
        if "role" not in message:
            call.miss("the role of a message of its request is missing", prompt=True)
        message["content"] = _parts(message["content"], call)
    calls = [
        chat_tool_call(
            made.get("id"), made.get("name"), made.get("arguments"), call, prompt=not is_reply
        )
        for made in numbered(row, "tool_calls.").values()
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _parts(content: Json, call: ForeignCall) -> Json:
    """A content of the request: a list of parts is written as its JSON."""
    if not isinstance(content, str) or not content.startswith('[{"type": '):
        return content
    try:
        return loads(content)
    except ValueError:
        call.miss("a content cannot be read: was it cut by a length limit?", prompt=True)
        return content


def _tool(row: Mapping[str, Any], call: ForeignCall) -> Json:
    function = {key: row.get(key) for key in ("name", "description")}
    try:
        function["parameters"] = loads(row["parameters"]) if "parameters" in row else None
    except (ValueError, TypeError):
        call.miss("a tool definition cannot be read: was it cut by a length limit?")
    return {"type": "function", "function": without_none(function)}


DIALECT = Dialect(
    "openllmetry-flat",
    recognises,
    read,
    loses=LOST_BY_OPENLLMETRY - {Fact.ARGUMENTS, Fact.DETAIL} | {Fact.PARTS},
    loses_in_streams=frozenset((Fact.REPLY_REFUSAL,)),
)
