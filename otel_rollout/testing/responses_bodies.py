"""A reply in the shape of OpenAI's Responses API: one response, or the events of its stream. Pure.

The stream is made from the response, item by item, so both have the same content.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Final

from otel_rollout.testing.bodies import (
    TOKENIZER,
    Json,
    ModelCall,
    completion_ids,
    dump,
    input_messages,
    split,
)

_FUNCTION_CALL: Final = ("function_call", "fc")


def _output_items(call: ModelCall) -> list[Json]:
    reply, number = call.reply, f"{call.sequence:06d}"
    items, parts = list[Json](), list[Json]()
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        item: Json = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content}
        if "reasoning.encrypted_content" in (call.body.get("include") or ()):
            item["encrypted_content"] = base64.b64encode(reply.reasoning.encode()).decode()
        items.append(item)
    if reply.content is not None:
        text = {"type": "output_text", "text": reply.content}
        parts.append({**text, "annotations": [], "logprobs": []})
    if reply.refusal is not None:
        parts.append({"type": "refusal", "refusal": reply.refusal})
    if parts:
        message = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        items.append({**message, "status": "completed", "content": parts, **reply.message_extra})
    for index, tool_call in enumerate(call.tool_calls(reply, 0)):
        kind, prefix = ("custom_tool_call", "ctc") if "custom" in tool_call else _FUNCTION_CALL
        item = {"id": f"{prefix}_{number}_{index}", "type": kind, "status": "completed"}
        called = tool_call[tool_call["type"]]
        items.append({**item, "call_id": tool_call["id"], **called})
    return items


def response_body(call: ModelCall) -> Json:
    body, reply = call.body, call.reply
    truncated = reply.finish_reason == "length"
    head = call.head("response", "resp_")
    echoed = ("instructions", "previous_response_id", "temperature", "top_p")
    response = {
        **head,
        "created_at": head.pop("created"),
        "status": "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": _output_items(call),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
        **{name: body.get(name) for name in echoed},
    }
    if conversation := body.get("conversation"):
        named = isinstance(conversation, str)
        response["conversation"] = {"id": conversation} if named else conversation
    if body.get("background"):
        response["background"] = True
    if reply.usage:
        input_tokens = len(TOKENIZER.encode_messages(input_messages(body)))
        output_tokens = len(completion_ids(reply))
        reasoning_tokens = len(TOKENIZER.encode(reply.reasoning or ""))
        response["usage"] = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": input_tokens + output_tokens,
        }
    return {**response, **reply.extra}


def unfinished(response: Json, status: str) -> Json:
    """The response before it is complete: without output and usage."""
    nothing: Json = {"output": [], "usage": None, "error": None, "incomplete_details": None}
    return {**response, "status": status, **nothing}


def response_events(call: ModelCall) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(_named_events(call)):
        event = {"type": f"response.{name}", "sequence_number": number, **fields}
        yield b"event: response.%b\ndata: %b\n\n" % (name.encode(), dump(event))


def _named_events(call: ModelCall) -> Iterator[tuple[str, Json]]:
    final = response_body(call)
    opened = unfinished(final, "in_progress")
    yield "created", {"response": opened}
    yield "in_progress", {"response": opened}
    for output_index, item in enumerate(final["output"]):
        at = {"item_id": item["id"], "output_index": output_index}
        argument = _ARGUMENTS.get(item["type"])
        empty: Json = {argument: ""} if argument else {"content": []}
        added = {**item, **empty, "status": "in_progress"}
        yield "output_item.added", {"output_index": output_index, "item": added}
        for content_index, part in enumerate(item.get("content", ())):
            here, kind = {**at, "content_index": content_index}, part["type"]
            name = "refusal" if kind == "refusal" else "text"
            logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
            yield "content_part.added", {**here, "part": {**part, name: ""}}
            for piece in split(part[name], call.chunk_size):
                yield f"{kind}.delta", {**here, "delta": piece, **logprobs}
            yield f"{kind}.done", {**here, name: part[name], **logprobs}
            yield "content_part.done", {**here, "part": part}
        if argument:
            event = f"{item['type']}_{argument}"
            for piece in split(item[argument], call.chunk_size):
                yield f"{event}.delta", {**at, "delta": piece}
            named = {"name": item["name"]} if argument == "arguments" else {}
            yield f"{event}.done", {**at, **named, argument: item[argument]}
        yield "output_item.done", {"output_index": output_index, "item": item}
    yield final["status"], {"response": final}


_ARGUMENTS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
