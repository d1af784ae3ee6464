"""Cohere's chat, version 2: messages much like OpenAI's, the content of a reply as blocks.

A stream opens each block and each tool call, sends its pieces by index, and ends with the finish
reason and the usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.conversation import MessagePath
from otel_rollout.wire.json import Chunk, Json, Params, Reply
from otel_rollout.wire.merging import finish, merge_field, merge_members
from otel_rollout.wire.message import Shapes

_LISTS = {"content": "content", "tool": "tool_calls", "citation": "citations"}
"""Members of a message that are lists, by the first word of the events about their elements."""


class CohereChat(ModelApi):
    """`/v2/chat`."""

    provider = "cohere"
    paths = ("/v2/chat",)
    shapes = Shapes(reasoning=("tool_plan",))
    context = ("tools", "documents")

    def choices_asked(self, params: Params) -> int:
        return 1

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return any(chunk.get("type") == "message-start" for chunk in chunks)

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        body: dict[str, Any] = {}
        message: dict[str, Any] = {}
        lists: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in _LISTS.values()}
        for chunk in chunks:
            kind, delta = str(chunk.get("type")), chunk.get("delta") or {}
            if chunk.get("id"):
                body.setdefault("id", chunk["id"])
            if chunk.get("logprobs"):
                body.setdefault("logprobs", []).append(chunk["logprobs"])
            members = delta.get("message") or {}
            name = _LISTS.get(kind.partition("-")[0])
            if kind == "message-start":
                message = {k: v for k, v in members.items() if v not in ([], "")}
            elif kind == "message-end":
                body |= delta
            elif kind == "tool-plan-delta":
                merge_field(message, "tool_plan", members.get("tool_plan"))
            elif name is not None and isinstance(members.get(name), Mapping):
                element = lists[name].setdefault(chunk.get("index") or 0, {})
                merge_members(element, members[name], growing=members[name])
        for name, elements in lists.items():
            if elements:
                message[name] = [finish(elements[index]) for index in sorted(elements)]
        return {**body, "message": finish(message)}

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        ended = any(chunk.get("type") == "message-end" for chunk in events.chunks)
        return ended and events.error is None

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        message = reply.get("message")
        if isinstance(message, dict):
            yield Sampled(0, reply, ({"role": "assistant", **message},), prompt)

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        said = reply.get("usage")
        counts = said.get("tokens") if isinstance(said, Mapping) else None
        if not isinstance(counts, Mapping):
            return None
        found = [counts.get(name) for name in ("input_tokens", "output_tokens")]
        whole = [int(n) if isinstance(n, float) and n.is_integer() else n for n in found]
        return {"prompt_tokens": whole[0], "completion_tokens": whole[1]}
