"""Cohere's chat, version 2: messages much like OpenAI's, the content of a reply as blocks.

A stream opens each block and each tool call, sends its pieces by index, and ends with the finish
reason and the usage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import ModelApi
from otel_rollout.wire.columns import PIECES, columns_of_pieces, reply_partly_read
from otel_rollout.wire.json import Bounded, Chunk, Json, JsonText, Reply, member_of, struct_of
from otel_rollout.wire.merging import Elements, Merging, finish
from otel_rollout.wire.message import Shapes

_LISTS = {"content": "content", "tool": "tool_calls", "citation": "citations"}
"""Members of a message that are lists, by the first word of the events about their elements."""


_REPLY = struct_of(
    "Reply",
    {
        **dict.fromkeys(("id", "finish_reason", "message", "usage", "meta", "prompt"), Any),
        "logprobs": PIECES,
    },
)


class CohereChat(ModelApi):
    """`/v2/chat`."""

    provider = "cohere"
    paths = ("/v2/chat",)
    shapes = Shapes(reasoning=("tool_plan",))
    context = ("tools", "documents")
    choices_name = None
    usual = Bounded(_REPLY, is_read=False)

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        pieces = found.logprobs  # it may be UNSET
        columns = {"logprobs": columns_of_pieces(pieces)} if pieces else {}
        return reply_partly_read(found, whole, columns)

    def is_own(self, chunk: Chunk) -> bool:
        return chunk.get("type") == "message-start"

    def ends(self, chunk: Chunk) -> bool:
        return chunk.get("type") == "message-end"

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        body: dict[str, Any] = {}
        message: dict[str, Any] = {}
        lists = {name: Elements() for name in _LISTS.values()}
        for chunk in chunks:
            if self.is_own(chunk) and chunk.get("id"):
                merging.same("id", chunk["id"])
                body.setdefault("id", chunk["id"])
            if chunk.get("logprobs"):
                body.setdefault("logprobs", []).append(chunk["logprobs"])
            if self.ends(chunk):
                body |= chunk.get("delta") or {}
            else:
                _merge_event(message, lists, chunk, merging)
        merging.check_calls(lists["tool_calls"].in_order())
        merging.check_repeats()
        merging.check_end(chunks, self.ends, "-start", "-delta")
        message |= {name: elements for name, elements in lists.items() if len(elements)}
        return {**body, "message": finish(message)}

    def sampled_items(self, reply: Reply) -> tuple[Json, ...] | None:
        message = reply.get("message")
        return ({"role": "assistant", **message},) if isinstance(message, dict) else None

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        counts = member_of(reply, "usage", "tokens")
        if not isinstance(counts, Mapping):
            return None
        found = [counts.get(name) for name in ("input_tokens", "output_tokens")]
        whole = [int(n) if isinstance(n, float) and n.is_integer() else n for n in found]
        return {"prompt_tokens": whole[0], "completion_tokens": whole[1]}


def _merge_event(
    message: dict[str, Any], lists: dict[str, Elements], event: Chunk, merging: Merging
) -> None:
    """Add an event to a message, and to the elements of its lists, by their names and indexes."""
    kind = str(event.get("type"))
    members = (event.get("delta") or {}).get("message") or {}
    name = _LISTS.get(kind.partition("-")[0])
    if kind == "message-start":
        message |= {k: v for k, v in members.items() if v not in ([], "")}
    elif kind == "tool-plan-delta":
        merging.field(message, "tool_plan", members.get("tool_plan"))
    elif name is not None and isinstance(members.get(name), Mapping):
        index, key = event.get("index"), members[name].get("id")
        element = None if kind.endswith("-start") else lists[name].find(index, key)
        if element is None:
            element = lists[name].open(index, key)
        for member, value in members[name].items():
            merging.field(element, member, value, is_sure=element.key is not None)
