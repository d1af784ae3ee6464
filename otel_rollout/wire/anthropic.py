"""Anthropic's Messages API: messages of content blocks, the system prompt beside them.

A stream opens each block, sends its deltas by index, and at last the stop reason and usage. The
input of a tool comes as pieces of JSON text; truncated input stays the text that it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.conversation import MessagePath
from otel_rollout.wire.json import Chunk, Json, Params, Reply
from otel_rollout.wire.merging import merge_members
from otel_rollout.wire.message import Shapes, content_parts, reasoning_block, text_of
from otel_rollout.wire.parts import Media, Members, Part, Text, ToolCall, ToolResult
from otel_rollout.wire.sse import try_loads

_ends_with_stop = re.compile(rb'\ndata: ?\{\s*"type":\s*"message_stop"\s*\}').search


def _thinking(part: Members) -> Part:
    said = part.get("thinking")
    if isinstance(said, list):  # Mistral's, in pieces
        said = "".join(part.text for part in content_parts(said) if isinstance(part, Text))
    return reasoning_block(part, said)


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
    keeps_tools = True
    last_marks = (b"message_stop", b"[DONE]")

    def choices_asked(self, params: Params) -> int:
        return 1

    def previous_reply(self, params: Params) -> Json:
        thread = params.get("thread")
        return thread.get("previous_message_id") if isinstance(thread, Mapping) else None

    def is_last(self, tail: bytes) -> bool:
        # Proxies send OpenAI's last event.
        return _ends_with_stop(tail) is not None or super().is_last(tail)

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return any(chunk.get("type") == "message_start" for chunk in chunks)

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        message: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        texts: dict[tuple[int, str], list[str]] = {}
        for chunk in chunks:
            kind = chunk.get("type")
            if kind == "message_start":
                message = chunk["message"]
            elif kind == "content_block_start":
                blocks[chunk["index"]] = chunk["content_block"]
            elif kind == "content_block_delta":
                block = blocks.setdefault(chunk["index"], {})
                _merge_delta(block, chunk["index"], chunk["delta"], texts)
            elif kind == "message_delta":
                _merge_message_delta(message, chunk)
        for (index, key), pieces in texts.items():
            _add_text(blocks[index], key, "".join(pieces))
        if blocks:
            message["content"] = [blocks[index] for index in sorted(blocks)]
        return message

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        return events.error is None and any(map(_ends_message, events.chunks))

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        content = reply.get("content")
        if isinstance(content, list):
            message = {"role": reply.get("role") or "assistant", "content": content}
            yield Sampled(0, reply, (message,), prompt)


def _ends_message(chunk: Chunk) -> bool:
    """True if the message is over; some clients read no further than the stop reason."""
    delta = chunk.get("delta") if chunk.get("type") == "message_delta" else None
    reason = delta.get("stop_reason") if isinstance(delta, dict) else None
    return chunk.get("type") == "message_stop" or reason is not None


def _merge_message_delta(message: dict[str, Any], chunk: Chunk) -> None:
    members = {key: value for key, value in chunk.items() if key not in ("type", "delta")}
    if isinstance(usage := members.get("usage"), dict):
        members["usage"] = dict(message.get("usage") or {})
        merge_members(members["usage"], usage)
    merge_members(message, members)
    merge_members(message, chunk.get("delta") or {})


def _add_text(block: dict[str, Any], key: str, text: str) -> None:
    """Add a text that came in pieces; the input of a tool is JSON, where it came whole."""
    if key != "input":
        block[key] = text
    elif text:
        parsed = try_loads(text)
        block[key] = text if parsed is None else parsed


def _merge_delta(
    block: dict[str, Any],
    index: int,
    delta: dict[str, Json],
    texts: dict[tuple[int, str], list[str]],
) -> None:
    """Add a delta to its block; `texts` has the pieces of texts by block index and member."""
    for key, value in delta.items():
        if key == "partial_json":
            texts.setdefault((index, "input"), []).append(value)
        elif key in ("text", "thinking"):
            texts.setdefault((index, key), [block.get(key) or ""]).append(value)
        elif key == "citation":
            block["citations"] = [*(block.get("citations") or ()), value]
        elif key != "type" and value is not None:
            block[key] = value
