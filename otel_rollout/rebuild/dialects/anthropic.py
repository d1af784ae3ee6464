"""Spans that Anthropic's client writes itself (since 2.10): parts of the conventions, as blocks.

Of each block it keeps what the conventions have a part for; of the others only the type. A stream
that is read without the client's helper has no reply on its span. `anthropic.content.truncated`
says that content was left out (`reader` takes any such flag for damage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import (
    KEPT_BY_NONE,
    Dialect,
    Fact,
    ForeignCall,
    check_tool_call,
    check_whole,
    is_true,
    object_rows,
    objects,
    structure,
    without_none,
)
from otel_rollout.rebuild.dialects.parts import first_integer, parameters
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json

SCOPE = "com.anthropic.sdk"
_STOP_REASON = "anthropic.message.stop_reason"
_THINKING = {"type": "anthropic.thinking.type", "budget_tokens": "anthropic.thinking.budget_tokens"}
_TEXTS = {"text": "text", "reasoning": "thinking"}
"""Types of parts that are texts, and of their blocks."""
_OTHER_BLOCK = "anthropic_"
_SERVER_TOOL = "srvtoolu_"
_SERVER_NAME = "anthropic_mcp_server_name"


def recognises(span: SpanRecord) -> bool:
    return (
        span.scope.startswith(SCOPE) and span.text(sc.GEN_AI_OPERATION_NAME) in sc.MODEL_OPERATIONS
    )


def read(span: SpanRecord, _: Sequence[SpanRecord]) -> ForeignCall:
    stream = is_true(span, sc.GEN_AI_REQUEST_STREAM)
    call = ForeignCall("/v1/messages", _parameters(span), stream=stream)
    check_whole(span, call)
    rows = object_rows(span, sc.GEN_AI_INPUT_MESSAGES, call, prompt=True)
    if rows is None and call.prompt_is_known:
        call.miss_messages()
    call.request["messages"] = [
        {"role": row.get("role"), "content": _content(row.get("parts"), call, prompt=True)}
        for row in rows or ()
    ]
    instructions = structure(span, sc.GEN_AI_SYSTEM_INSTRUCTIONS, call, prompt=True)
    if instructions:
        call.request["system"] = _content(instructions, call, prompt=True)
    call.reply = _reply(span, call)
    return call


def _parameters(span: SpanRecord) -> dict[str, Json]:
    found = parameters(span)
    if "stop" in found:
        found["stop_sequences"] = found.pop("stop")
    kind, budget = (span.attributes.get(key) for key in _THINKING.values())
    if kind is not None:
        budget = span.integer(_THINKING["budget_tokens"])
        found["thinking"] = without_none({"type": kind, "budget_tokens": budget})
    return found


def _reply(span: SpanRecord, call: ForeignCall) -> dict[str, Json] | None:
    """The message. None: the span has no content of it, so there is nothing to train on."""
    rows = object_rows(span, sc.GEN_AI_OUTPUT_MESSAGES, call)
    if not rows:
        if span.status_error is None:
            call.miss("its span has no reply: it was not recorded, or not kept")
        return None
    if len(rows) > 1 or rows[0].get("role", "assistant") != "assistant":
        call.miss("its reply is not one message of the assistant")
    return without_none(
        {
            "id": span.text(sc.GEN_AI_RESPONSE_ID),
            "type": "message",
            "role": "assistant",
            "model": span.text(sc.GEN_AI_RESPONSE_MODEL),
            "content": _content(rows[0].get("parts"), call, prompt=False),
            "stop_reason": span.text(_STOP_REASON) or _reported(span, call),
            "usage": _usage(span),
        }
    )


def _reported(span: SpanRecord, call: ForeignCall) -> str | None:
    reasons = structure(span, sc.GEN_AI_RESPONSE_FINISH_REASONS, call)
    reason = reasons[0] if isinstance(reasons, list) and reasons else None
    return reason if isinstance(reason, str) else None


def _usage(span: SpanRecord) -> dict[str, Json] | None:
    """Usage in the shape of this API, whose input tokens leave out those of the cache."""
    total = span.integer(sc.GEN_AI_USAGE_INPUT_TOKENS)
    written = first_integer(span, sc.GEN_AI_USAGE_CACHE_WRITE)
    cached = first_integer(span, sc.GEN_AI_USAGE_CACHE_READ)
    usage = {
        "input_tokens": None if total is None else total - (written or 0) - (cached or 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": span.integer(sc.GEN_AI_USAGE_OUTPUT_TOKENS),
    }
    return without_none(usage) or None


# --- blocks


def _content(parts: Json, call: ForeignCall, *, prompt: bool) -> Json:
    """Content blocks of parts; a single part of text as its text."""
    if not isinstance(parts, list) or len(objects(parts)) < len(parts):
        call.miss("a message has parts that are no list of JSON objects", prompt=prompt)
    blocks = [_block(part, call, prompt=prompt) for part in objects(parts)]
    if not blocks:
        call.miss("a message has nothing in it: what it held was not written down", prompt=prompt)
    return blocks


def _block(part: Mapping[str, Json], call: ForeignCall, *, prompt: bool) -> dict[str, Json]:
    kind = str(part.get("type"))
    if kind in _TEXTS:
        if not isinstance(part.get("content"), str):
            call.miss(f"a part of type {kind!r} has no text", prompt=prompt)
        return {"type": _TEXTS[kind], _TEXTS[kind]: part.get("content")}
    if kind == "tool_call":
        named = {"id": part.get("id"), "name": part.get("name"), "input": part.get("arguments")}
        check_tool_call(named["name"], named["input"], call, prompt=prompt)
        if _SERVER_NAME in part:
            return {"type": "mcp_tool_use", **named, "server_name": part[_SERVER_NAME]}
        is_servers = str(part.get("id")).startswith(_SERVER_TOOL)
        return {"type": "server_tool_use" if is_servers else "tool_use", **named}
    if kind == "tool_call_response":
        return _tool_result(part, call, prompt=prompt)
    kind = kind.removeprefix(_OTHER_BLOCK)
    call.miss(f"of a block of type {kind!r} only the type was written down", prompt=prompt)
    return {"type": kind}


def _tool_result(part: Mapping[str, Json], call: ForeignCall, *, prompt: bool) -> dict[str, Json]:
    """A tool's result; of a result that a server made the kind is not written down."""
    content = part.get("response")
    blocks = objects(content)
    if str(part.get("id")).startswith(_SERVER_TOOL):
        call.miss("the kind of a server tool's result was not written down", prompt=prompt)
    if any(block.keys() == {"type"} for block in blocks):
        call.miss("of blocks in a tool's result only the type was written down", prompt=prompt)
    return {"type": "tool_result", "tool_use_id": part.get("id"), "content": content}


DIALECT = Dialect(
    "anthropic",
    recognises,
    read,
    loses=KEPT_BY_NONE
    | {
        Fact.PARAMETERS,
        Fact.TOOLS,
        Fact.BLOCK_FIELDS,
        Fact.IMAGES,
        Fact.USAGE_DETAILS,
        Fact.RESPONSE_FIELDS,
    },
)
