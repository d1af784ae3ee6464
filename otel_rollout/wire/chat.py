"""OpenAI's chat completions: a list of messages is asked with, a message is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.choices import (
    finished_choices,
    has_choices,
    indexed_choices,
    merge_choices,
)
from otel_rollout.wire.json import Chunk, Json, Message, Params, Reply
from otel_rollout.wire.messages import MessagePath


class ChatCompletions(ModelApi):
    """`/chat/completions`, as OpenAI, vLLM, SGLang, llama.cpp and many others serve it."""

    provider = "openai"
    paths = ("/chat/completions",)

    def token_id_params(self, path: str) -> Params:
        return {"return_token_ids": True, "logprobs": True}

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return has_choices(chunks)

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        return merge_choices(chunks)

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        finished = body is not None and finished_choices(body) >= choices
        return (events.done or finished) and events.error is None

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        for index, choice in indexed_choices(reply):
            message = choice.get("message")
            yield Sampled(index, choice, (message,) if isinstance(message, dict) else (), prompt)

    def shown_calls(self, message: Message) -> list[str]:
        shown = [f"refusal: {message['refusal']}"] if message.get("refusal") else []
        for call in message.get("tool_calls") or ():
            body = call.get(call.get("type") or "function") or {}
            shown.append(f"→ {body.get('name')}({body.get('arguments', body.get('input', ''))})")
        return shown

    def tool_name(self, tool: Message) -> str | None:
        body = tool.get(tool.get("type", "function"))
        return str(body.get("name", tool.get("type"))) if isinstance(body, dict) else None
