"""Ollama's own API: `/api/chat` with messages, `/api/generate` with a text.

A stream is one JSON object on each line; the last one says that it is done, why, and the counts.
Unless a request says `"stream": false`, the reply is a stream. Replies have no id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import Framing, ModelApi
from otel_rollout.wire.columns import ENTRIES, columns_of, reply_partly_read
from otel_rollout.wire.json import Bounded, Chunk, Json, JsonText, Reply, struct_of
from otel_rollout.wire.merging import Merging, finish
from otel_rollout.wire.message import Shapes
from otel_rollout.wire.parts import Media, Part

_PIECEWISE = ("message", "response", "thinking", "logprobs")
"""Members of a chunk of which each has its own piece."""


def _images(images: Json) -> Iterator[Part]:
    for image in images if isinstance(images, list) else [images]:
        is_data = isinstance(image, str)
        yield Media("image", image, data=image if is_data else None, media_type="image/png")


_COUNTS = ("prompt_eval_count", "eval_count")
_REPLY = struct_of(
    "Reply",
    {
        **dict.fromkeys(("model", "remote_model", "remote_host", "created_at"), Any),
        **dict.fromkeys(("message", "response", "thinking", "context"), Any),
        **dict.fromkeys(("done", "done_reason", "total_duration", "load_duration"), Any),
        **dict.fromkeys(("prompt_eval_duration", "eval_duration", *_COUNTS), Any),
        "logprobs": ENTRIES,
    },
)


class Ollama(ModelApi):
    """`/api/chat` and `/api/generate`."""

    paths = ("/api/chat", "/api/generate")
    shapes = Shapes(members={"images": _images}, reasoning=("thinking",))
    instructions = ("system",)
    context = ("tools", "system", "context")
    delta_name = "content"
    finish_names = ("done_reason",)
    settings = ("options",)
    choices_name = None
    id_name = None
    count_names = _COUNTS
    usual = Bounded(_REPLY, is_read=False)

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        entries = found.logprobs  # it may be UNSET
        return reply_partly_read(found, whole, {"logprobs": columns_of(entries)} if entries else {})

    def framing(self, path: str) -> Framing | None:
        return "lines"

    def is_own(self, chunk: Chunk) -> bool:
        has_reply = isinstance(chunk.get("message"), Mapping) or isinstance(
            chunk.get("response"), str
        )
        return has_reply and isinstance(chunk.get("done"), bool)

    def ends(self, chunk: Chunk) -> bool:
        return chunk.get("done") is True

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        body: dict[str, Any] = {}
        for chunk in chunks:
            merging.same("model", chunk.get("model"))
            merging.members(body, chunk, _PIECEWISE)
        merging.check_end(chunks, self.ends, "message", "response")
        return finish(body)

    def sampled_items(self, reply: Reply) -> tuple[Json, ...] | None:
        message = reply.get("message")
        if not isinstance(message, dict) and isinstance(reply.get("response"), str):
            thinking = {"thinking": reply["thinking"]} if reply.get("thinking") else {}
            message = {"role": "assistant", "content": reply["response"], **thinking}
        return (message,) if isinstance(message, dict) else None

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        counts = [reply.get(name) for name in self.count_names]
        if not any(isinstance(count, int) for count in counts):
            return None
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1]}
