"""Messages as the GenAI conventions write them (lists of parts), to and from chat's wire form.

Shared by the dialects that follow the conventions. Their parts differ, so a part is read by the
keys that it has. A part of an unknown type is kept unchanged; that of a generic one is its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import groupby

from otel_rollout import semconv as sc
from otel_rollout.rebuild.dialects.call import (
    KEPT_BY_NONE,
    Fact,
    ForeignCall,
    chat_tool_call,
    check_not_empty,
    check_tool_call,
    check_whole,
    completion_reply,
    object_rows,
    objects,
    structure,
    usage,
    without_none,
)
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import Json, dumps, loads

LOST_BY_CONVENTIONS = KEPT_BY_NONE | frozenset(
    (
        Fact.PARAMETERS,
        Fact.ARGUMENTS,
        Fact.REQUEST_REASONING,
        Fact.REPLY_REASONING,
        Fact.REQUEST_REFUSAL,
        Fact.DETAIL,
        Fact.RESPONSE_FIELDS,
        Fact.CUSTOM_TOOLS,
        Fact.FUNCTION_CALL,
    )
)
"""Facts that no instrumentation which follows the conventions records."""
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
_RESULT = "tool_call_response"
_VALUES = {"uri": "uri", "blob": "content"}
"""The members without which parts of these types say nothing."""
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


def read_call(
    span: SpanRecord, output: SpanRecord, *, stream: bool, is_responses: bool = False
) -> ForeignCall:
    """The call of a span that follows the conventions; `output` is the span with its reply.

    is_responses: it is of the Responses API; else that is seen by the span, if it shows at all.
    """
    call = ForeignCall("/chat/completions", parameters(span), stream=stream)
    if span.text(sc.GEN_AI_OPERATION_NAME) == sc.OPERATION_EMBEDDINGS:
        call.path = "/embeddings"
        return call
    call.is_responses = (
        is_responses
        or span.text(sc.OPENAI_API_TYPE) == "responses"
        or span.name == "openai.response"
        or (span.text(sc.GEN_AI_RESPONSE_ID) or "").startswith("resp_")
    )
    tools = object_rows(span, sc.GEN_AI_TOOL_DEFINITIONS, call)
    if tools:
        call.request["tools"] = [_tool(tool) for tool in tools]
    call.also_loses |= lost_of_other_api(span)
    check_whole(span, call)
    check_whole(output, call)
    _read_request(span, call)
    _read_reply(span, output, call)
    check_not_empty(call)
    return call


def _read_request(span: SpanRecord, call: ForeignCall) -> None:
    rows = object_rows(span, sc.GEN_AI_INPUT_MESSAGES, call, prompt=True)
    if rows is None and call.prompt_is_known:
        call.miss_messages()
    instructions = object_rows(span, sc.GEN_AI_SYSTEM_INSTRUCTIONS, call, prompt=True)
    system = [{"role": "system", "parts": instructions}] if instructions else []
    messages = to_messages([*system, *(rows or [])], call, prompt=True)
    if span.text(sc.GEN_AI_OPERATION_NAME) == sc.OPERATION_TEXT_COMPLETION:
        call.path = "/completions"
        prompts = [message.get("content") for message in messages]
        call.request["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    else:
        call.request["messages"] = messages


def _read_reply(span: SpanRecord, output: SpanRecord, call: ForeignCall) -> None:
    rows = object_rows(output, sc.GEN_AI_OUTPUT_MESSAGES, call) or []
    reasons = structure(output, sc.GEN_AI_RESPONSE_FINISH_REASONS, call)
    named = reasons if isinstance(reasons, list) and len(reasons) == len(rows) else []
    ends = [row.get("finish_reason") for row in rows]
    ends = [end or other for end, other in zip(ends, named or [None] * len(rows), strict=True)]
    messages = [joined(to_messages([row], call, prompt=False)) for row in rows]
    call.also_loses |= _lost_of_reply(span, call, ends, reasons)
    if call.is_responses and rows:  # its items are one reply
        messages, ends = [joined(messages)], [next(filter(None, reversed(ends)), None)]
    choices = [
        {"index": index, "finish_reason": _finish_reason(end), "message": message}
        for index, (message, end) in enumerate(zip(messages, ends, strict=True))
    ]
    is_text = call.path == "/completions"
    call.reply = completion_reply(span, choices, usage_of(output), is_text=is_text)
    if "error" in ends:
        call.stream = True  # only a stream can break off with part of its reply


def _lost_of_reply(
    span: SpanRecord, call: ForeignCall, ends: Sequence[Json], reasons: Json
) -> set[Fact]:
    """What this span does not say of the reply that it has."""
    is_short = isinstance(reasons, list) and len(ends) < len(reasons) and not call.is_responses
    lost = {
        Fact.CHOICES: is_short,
        Fact.RESPONSE_ID: span.text(sc.GEN_AI_RESPONSE_ID) is None,
        Fact.RESPONSE_MODEL: span.text(sc.GEN_AI_RESPONSE_MODEL) is None,
    }
    return {fact for fact, is_lost in lost.items() if ends and is_lost}


def lost_of_other_api(span: SpanRecord) -> frozenset[Fact]:
    """What is lost of a call of another API than OpenAI's, which is read as chat all the same."""
    provider = next(filter(None, map(span.text, _PROVIDERS)), "")
    if not provider or "openai" in provider.lower():
        return frozenset()
    return frozenset((Fact.SHAPE, Fact.BLOCK_FIELDS, Fact.FINISH_REASON, Fact.USAGE))


_PROVIDERS = (sc.GEN_AI_PROVIDER_NAME, sc.GEN_AI_SYSTEM, "llm.system", "llm.provider")


def usage_of(span: SpanRecord) -> dict[str, Json] | None:
    """Usage by the names of the conventions, in the shape of the chat API."""
    return usage(
        span.integer(sc.GEN_AI_USAGE_INPUT_TOKENS),
        span.integer(sc.GEN_AI_USAGE_OUTPUT_TOKENS),
        cached=first_integer(span, sc.GEN_AI_USAGE_CACHE_READ),
        written=first_integer(span, sc.GEN_AI_USAGE_CACHE_WRITE),
        reasoning=first_integer(span, sc.GEN_AI_USAGE_REASONING),
    )


def first_integer(span: SpanRecord, keys: Sequence[str]) -> int | None:
    """The first of these attributes that is an integer. None: none of them is."""
    return next((found for key in keys if (found := span.integer(key)) is not None), None)


def _finish_reason(reason: Json) -> str | None:
    return _FINISH_REASONS.get(reason, reason) if isinstance(reason, str) else None


def _tool(tool: dict[str, Json]) -> Json:
    """A tool definition as chat has it: some writers take it out of its `function`."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {
        "type": "function",
        "function": without_none({key: tool[key] for key in tool if key != "type"}),
    }


def to_messages(
    rows: Sequence[dict[str, Json]], call: ForeignCall, *, prompt: bool
) -> list[dict[str, Json]]:
    """Chat messages of the conventions' messages; several tool results in one become several.

    `prompt`: they are the request's, so what is missing in them is missing there. Items of the
    Responses API that were sampled one after the other are one message.
    """
    messages: list[dict[str, Json]] = []
    for row in rows:
        parts = _parts_of(row, call, prompt=prompt)
        for is_result, run in groupby(parts, lambda part: part.get("type") == _RESULT):
            if is_result:
                messages += [_tool_result(row, part, call, prompt=prompt) for part in run]
            else:
                messages.append(_message(row, list(run), call, prompt=prompt))
        if not parts:
            messages.append(_message(row, [], call, prompt=prompt))
    return as_turns(messages) if call.is_responses else messages


def as_turns(messages: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """The messages, each run of the assistant's as one: items of one reply."""
    turns: list[dict[str, Json]] = []
    for message in messages:
        if turns and turns[-1].get("role") == message.get("role") == "assistant":
            message = joined([turns.pop(), message])
        turns.append(message)
    return turns


def _parts_of(row: Mapping[str, Json], call: ForeignCall, *, prompt: bool) -> list[dict[str, Json]]:
    """The parts of a message; a text for a part, or for all of them, is a part of text."""
    parts = row.get("parts")
    if parts is None:
        parts = row.get("content") or []
    parts = parts if isinstance(parts, list) else [parts]
    parts = [{"type": "text", "content": p} if isinstance(p, str) else p for p in parts]
    if not all(isinstance(part, dict) for part in parts):
        call.miss("a message has a part that is neither a text nor an object", prompt=prompt)
    return [_of_own_type(part) for part in objects(parts)]


def _of_own_type(part: dict[str, Json]) -> dict[str, Json]:
    """The part; a generic one as what it says that it holds."""
    own = part.get("generic_type") if part.get("type") == "generic" else None
    if not isinstance(own, str):
        return part
    return {"type": own, **{k: v for k, v in part.items() if k not in ("type", "generic_type")}}


def _tool_result(
    row: Mapping[str, Json], part: Mapping[str, Json], call: ForeignCall, *, prompt: bool
) -> dict[str, Json]:
    """The message of a tool's result: a text, or a list of parts; anything else is JSON text."""
    if not prompt:
        call.miss("its reply has the result of a tool in it")
    if part.keys().isdisjoint(("response", "result")):
        call.miss("a tool's result has no content: it was not written down", prompt=prompt)
    content = part.get("response", part.get("result"))
    if isinstance(content, list) and content and all(_is_part(item) for item in content):
        content = [_content_part(item, call, prompt=prompt) for item in content]
    elif not isinstance(content, str):
        content = "" if content is None else dumps(content)
    result = {"role": "tool", "tool_call_id": part.get("id"), "content": content}
    return without_none({**result, "name": row.get("name")})


def _is_part(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def joined(messages: Sequence[dict[str, Json]]) -> dict[str, Json]:
    """One message of several that were sampled one after the other."""
    whole = dict(messages[0])
    for message in messages[1:]:
        for key, value in message.items():
            if value is None or key == "role":
                continue
            before = whole.get(key)
            if not before:
                whole[key] = value
            elif isinstance(before, str) and isinstance(value, str):
                whole[key] = value if key == "name" else before + value
            else:
                whole[key] = [*_as_list(before), *_as_list(value)]
    return whole


def _as_list(content: Json) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _message(
    row: Mapping[str, Json], parts: list[dict[str, Json]], call: ForeignCall, *, prompt: bool
) -> dict[str, Json]:
    role = row.get("role") or (None if prompt else "assistant")
    message: dict[str, Json] = {"role": role, "content": None}
    content: list[Json] = []
    calls: list[Json] = []
    for part in parts:
        kind = part.get("type")
        if kind == "tool_call":
            calls.append(_tool_call(part, call, prompt=prompt))
        elif kind in ("reasoning", "thinking", "refusal"):
            key = "refusal" if kind == "refusal" else "reasoning_content"
            text = part.get("content") or part.get(kind)
            message[key] = (message.get(key) or "") + (text if isinstance(text, str) else "")
        else:
            content.append(_content_part(part, call, prompt=prompt))
    if len(content) == 1 and content[0].keys() == {"type", "text"}:
        message["content"] = content[0]["text"]
    elif content:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    if row.get("name"):
        message["name"] = row["name"]
    return message


def _tool_call(part: Mapping[str, Json], call: ForeignCall, *, prompt: bool) -> Json:
    name, arguments = part.get("name"), part.get("arguments")
    check_tool_call(name, arguments, call, prompt=prompt)
    if isinstance(arguments, str) and name in _custom_tools(call):
        custom = {"name": name, "input": arguments}
        return {"id": part.get("id"), "type": "custom", "custom": custom}
    if arguments is not None and not isinstance(arguments, str):
        arguments = dumps(arguments)
    return chat_tool_call(part.get("id"), name, arguments, call, prompt=prompt)


def _custom_tools(call: ForeignCall) -> list[Json]:
    """Names of the custom tools that the request defines, where that was written down."""
    tools = [tool for tool in objects(call.request.get("tools")) if tool.get("type") == "custom"]
    return [(tool.get("custom") or tool).get("name") for tool in tools]


def _content_part(part: Mapping[str, Json], call: ForeignCall, *, prompt: bool) -> dict[str, Json]:
    kind = part.get("type")
    if kind == "text":
        text = part.get("text") if part.get("content") is None else part["content"]
        if not isinstance(text, str):
            call.miss("a part of text has no text: it was not written down", prompt=prompt)
        return {"type": "text", "text": dumps(text) if isinstance(text, list | dict) else text}
    if kind in _VALUES and not isinstance(part.get(_VALUES[kind]), str):
        call.miss(f"a part of type {kind!r} has no {_VALUES[kind]}", prompt=prompt)
        return dict(part)
    if kind == "uri" and (part.get("modality") or "image") == "image":
        return {"type": "image_url", "image_url": {"url": part.get("uri")}}
    found = _blob(part) if kind == "blob" else None
    if found is None and (kind in _VALUES or kind not in part):
        # Chat's own parts have a member of that name.
        call.also_loses |= {Fact.OTHER_PARTS}
    return found or dict(part)


def _blob(part: Mapping[str, Json]) -> dict[str, Json] | None:
    """A part that is data; None if chat has no name for it."""
    modality, mime, content = (
        part.get("modality") or "image",
        part.get("mime_type") or "",
        part["content"],
    )
    data = f"data:{mime};base64,{content}"
    if mime.startswith("audio/") or modality == "audio":
        audio = without_none({"data": content, "format": mime.partition("/")[2] or None})
        return {"type": "input_audio", "input_audio": audio}
    if modality == "image":
        return {"type": "image_url", "image_url": {"url": data}}
    if modality == "document":
        return {"type": "file", "file": {"file_data": data}}
    return None
