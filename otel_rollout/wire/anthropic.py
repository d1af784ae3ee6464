"""Anthropic's Messages API: messages of content blocks, the system prompt beside them.

A stream opens each block, sends its deltas by index, and at last the stop reason and usage. The
input of a tool comes as pieces of JSON text; truncated input stays the text that it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import ModelApi
from otel_rollout.wire.json import Chunk, Json, Params, Reply, member_of
from otel_rollout.wire.merging import Elements, Merging, finish, finished_json
from otel_rollout.wire.message import Shapes, content_parts, reasoning_block, text_of
from otel_rollout.wire.parts import Media, Members, Part, Text, ToolCall, ToolResult

_ends_with_stop = re.compile(rb'\ndata: ?\{\s*"type":\s*"message_stop"\s*\}').search


def _thinking(part: Members) -> Part:
    thinking = part.get("thinking")
    if isinstance(thinking, list):  # Mistral's, in pieces
        thinking = "".join(part.text for part in content_parts(thinking) if isinstance(part, Text))
    return reasoning_block(part, thinking)


def _tool_use(part: Members) -> Part:
    others = ["tool_use", part.get("id")]
    return ToolCall(text_of(part.get("id")), str(part.get("name")), part.get("input"), others)


def _tool_result(part: Members) -> Part:
    failed = part.get("is_error") is True
    content = part.get("content")
    return ToolResult(text_of(part.get("tool_use_id")), content, content_parts(content), failed)


def _media(part: Members) -> Part:
    kind, source = str(part["type"]), part.get("source")
    if not isinstance(source, Mapping):
        return Media(kind, part)
    url, data = text_of(source.get("url")), source.get("data")
    if not isinstance(data, str):
        return Media(kind, part, url)
    return Media(kind, part, data=data, media_type=source.get("media_type"))


_SHAPES = Shapes(
    types={
        "thinking": _thinking,
        "redacted_thinking": _thinking,
        "tool_use": _tool_use,
        "tool_result": _tool_result,
        "image": _media,
        "document": _media,
    },
    result_marks=(b'"tool_result"',),
)


class Messages(ModelApi):
    """`/v1/messages`, as Anthropic serves it, and vLLM, SGLang and llama.cpp beside their own."""

    provider = "anthropic"
    paths = ("/v1/messages",)  # with the version: OpenAI's `/threads/{id}/messages` is no call
    shapes = _SHAPES
    instructions = ("system",)
    context = ("tools", "system")
    delta_name = "text"
    finish_names = ("stop_reason",)
    stop_names = ("stop_sequence", "stopping_word")
    choices_name = None
    keeps_tools = True
    last_marks = (b"message_stop", b"[DONE]")

    def previous_reply(self, params: Params) -> Json:
        return member_of(params, "thread", "previous_message_id")

    def is_last(self, tail: bytes) -> bool:
        # Proxies send OpenAI's last event.
        return _ends_with_stop(tail) is not None or super().is_last(tail)

    def is_own(self, chunk: Chunk) -> bool:
        return chunk.get("type") == "message_start"

    def ends(self, chunk: Chunk) -> bool:
        # Some clients read no further than the stop reason.
        if chunk.get("type") == "message_delta":
            return bool(text_of(member_of(chunk, "delta", "stop_reason")))
        return chunk.get("type") == "message_stop"

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        message: dict[str, Any] = {}
        blocks = Elements()
        for chunk in chunks:
            kind = chunk.get("type")
            if kind == "message_start":
                message = message or chunk["message"]
                merging.same("id", chunk["message"].get("id"))
                merging.same("model", chunk["message"].get("model"))
            elif kind == "content_block_start":
                blocks.open(chunk.get("index")).update(chunk["content_block"])
            elif kind == "content_block_delta":
                _merge_delta(blocks, chunk, merging)
            elif kind == "message_delta":
                _merge_message_delta(message, chunk, merging)
        merging.check_calls(block for block in blocks.in_order() if block.get("type") == "tool_use")
        merging.check_end(chunks, self.ends, "message_start", "_block_start", "_block_delta")
        if len(blocks):
            message["content"] = [_finished(block) for block in blocks.in_order()]
        return message

    def sampled_items(self, reply: Reply) -> tuple[Json, ...] | None:
        content = reply.get("content")
        if not isinstance(content, list):
            return None
        return ({"role": reply.get("role") or "assistant", "content": content},)


def _merge_message_delta(message: dict[str, Any], chunk: Chunk, merging: Merging) -> None:
    members = {key: value for key, value in chunk.items() if key not in ("type", "delta")}
    if isinstance(usage := members.get("usage"), dict):
        members["usage"] = dict(message.get("usage") or {})
        merging.members(members["usage"], usage)
    merging.members(message, members)
    merging.members(message, chunk.get("delta") or {})


_TYPES = {
    "text": "text",
    **dict.fromkeys(("thinking", "signature"), "thinking"),
    "partial_json": "tool_use",
}
"""The type of the block that a delta is of, by the member that grows."""


def _merge_delta(blocks: Elements, chunk: Chunk, merging: Merging) -> None:
    delta: dict[str, Json] = chunk["delta"]
    block = blocks.find(chunk.get("index"))
    kind = next((_TYPES[name] for name in delta if name in _TYPES), None)
    if block is None:
        block = blocks.open(chunk.get("index"))
        block["type"] = kind
        if kind not in ("text", "thinking"):
            merging.contradicts("a piece is of a content block that nothing began")
    elif kind not in (None, block.get("type")) and {"text", "thinking"} & {kind, block.get("type")}:
        merging.contradicts(f"a piece of type {kind!r} is in a block of type {block['type']!r}")
    for key, value in delta.items():
        if key in ("text", "thinking", "partial_json"):
            merging.text(block, key, value)
        elif key == "citation":
            block["citations"] = [*(block.get("citations") or ()), value]
        elif key != "type" and value is not None:
            block[key] = value


def _finished(block: dict[str, Any]) -> Json:
    """The block with its texts joined; the input of a tool is JSON, where it came whole."""
    found = {
        key: finish(value) if isinstance(value, list) else value for key, value in block.items()
    }
    if text := found.pop("partial_json", ""):
        found["input"] = finished_json(text)
    return found
