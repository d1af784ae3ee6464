"""A reply in the shape of Anthropic's Messages API: one message, or the events of its stream. Pure.

The stream is made from the message, block by block, so both have the same content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from otel_rollout.testing.bodies import (
    MODEL,
    TOKENIZER,
    Json,
    ModelCall,
    completion_ids,
    content_text,
    dump,
    split,
)


def message_body(call: ModelCall) -> Json:
    """The message: thinking, text and tool uses as content blocks.

    `Reply.message_extra` may give other blocks as `content`.
    """
    reply, number = call.reply, f"{call.sequence:06d}"
    content = list[Json]()
    if reply.reasoning is not None:
        signature = f"signature-{number}"
        thinking = {"type": "thinking", "thinking": reply.reasoning, "signature": signature}
        content.append(thinking)
    if reply.content is not None:
        content.append({"type": "text", "text": reply.content})
    for index, tool_call in enumerate(reply.tool_calls):
        name = tool_call.id or f"toolu_{number}_{index}"
        use = {"type": "tool_use", "id": name, "name": tool_call.name}
        content.append({**use, "input": _input(tool_call.arguments)})
    default = "tool_use" if reply.tool_calls else "end_turn"
    message = {
        "id": f"msg_{number}" if reply.id is None else reply.id,
        "type": "message",
        "role": "assistant",
        "model": call.body.get("model", MODEL),
        "content": content,
        "stop_reason": reply.finish_reason or default,
        "stop_sequence": None,
    }
    if reply.usage:
        message["usage"] = {
            "input_tokens": count_tokens(call.body)["input_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(completion_ids(reply)),
            "service_tier": "standard",
        }
    return {**message, **reply.message_extra, **reply.extra}


def _input(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def count_tokens(body: Json) -> Json:
    system = body.get("system")
    before = [{"role": "system", "content": content_text(system)}] if system else []
    return {"input_tokens": len(TOKENIZER.encode_messages([*before, *body["messages"]]))}


def message_events(call: ModelCall) -> list[bytes]:
    return [
        b"event: %b\ndata: %b\n\n" % (name.encode(), dump({"type": name, **fields}))
        for name, fields in _named_events(call)
    ]


def _named_events(call: ModelCall) -> Iterator[tuple[str, Json]]:
    message = message_body(call)
    opened = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    usage = message.get("usage")
    if usage:
        opened["usage"] = {**usage, "output_tokens": 1}
    yield "message_start", {"message": opened}
    arguments = [tool_call.arguments for tool_call in call.reply.tool_calls]
    for index, block in enumerate(message["content"]):
        start, deltas = _pieces(block, arguments, call.chunk_size)
        yield "content_block_start", {"index": index, "content_block": start}
        if index == 0:
            yield "ping", {}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    stopped = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    counted = {"usage": {"output_tokens": usage["output_tokens"]}} if usage else {}
    yield "message_delta", {"delta": stopped, **counted}
    yield "message_stop", {}


def _pieces(block: Json, arguments: list[str], size: int) -> tuple[Json, list[Json]]:
    """A content block as it starts, and the deltas that follow.

    `arguments` are the verbatim inputs of the remaining tool uses.
    """
    kind = block["type"]
    if kind == "text":
        citations = block.get("citations")
        deltas = [{"type": "text_delta", "text": text} for text in split(block["text"], size)]
        deltas += [{"type": "citations_delta", "citation": each} for each in citations or ()]
        return {**block, "text": "", **({"citations": []} if citations else {})}, deltas
    if kind == "thinking":
        thoughts = split(block["thinking"], size)
        deltas = [{"type": "thinking_delta", "thinking": text} for text in thoughts]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    if kind == "tool_use":
        text = arguments.pop(0) if arguments else json.dumps(block["input"])
        pieces = ["", *split(text, size)]
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        return {**block, "input": {}}, deltas
    return block, []
