"""OpenAI's chat completions: a list of messages is asked with, a message is sampled.

vLLM takes several conversations at once at `/chat/completions/batch`: each choice answers one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from otel_rollout.wire.api import Events, ModelApi, Sampled
from otel_rollout.wire.choices import (
    finished_choices,
    has_choices,
    indexed_choices,
    merge_choices,
)
from otel_rollout.wire.json import Chunk, Json, Message, Params, Reply, dumps
from otel_rollout.wire.messages import MessagePath, extend, visible_content

_BATCH = "/chat/completions/batch"


class ChatCompletions(ModelApi):
    """`/chat/completions`, as OpenAI, vLLM, SGLang, llama.cpp and many others serve it."""

    provider = "openai"
    paths = ("/chat/completions", _BATCH)
    delta_name = "content"

    def choices_asked(self, params: Params) -> int:
        conversations = _conversations(params)
        return super().choices_asked(params) * (1 if conversations is None else len(conversations))

    def token_id_params(self, path: str) -> Params | None:
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
        conversations, n = _conversations(params), max(1, super().choices_asked(params))
        for index, choice in indexed_choices(reply):
            message = choice.get("message")
            if conversations is not None:
                asked = conversations[index // n : index // n + 1]
                prompt = _path(asked[0]) if asked else None
            if params.get("echo") and isinstance(message, dict) and prompt is not None:
                message = _without_echo(message, prompt.message)
                choice = {**choice, "message": message}
            yield Sampled(index, choice, (message,) if isinstance(message, dict) else (), prompt)

    def shown_calls(self, message: Message) -> list[str]:
        shown = [f"refusal: {message['refusal']}"] if message.get("refusal") else []
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            kind = call.get("type") or "function" if isinstance(call, Mapping) else None
            body = call.get(kind) if isinstance(kind, str) else None
            if not isinstance(body, Mapping):
                shown.append(f"→ {call}")
                continue
            given = body.get("arguments", body.get("input", ""))
            text = given if isinstance(given, str) else dumps(given)
            shown.append(f"→ {body.get('name')}({text})")
        return shown

    def tool_name(self, tool: Message) -> str | None:
        kind = tool.get("type", "function")
        body = tool.get(kind) if isinstance(kind, str) else None
        return str(body.get("name", tool.get("type"))) if isinstance(body, dict) else None


def _without_echo(message: Message, last: Json) -> Message:
    """The message without the text of the request's last one, which vLLM's `echo` puts before it.

    It does so where the reply goes on from a message of the same role.
    """
    if not isinstance(last, Mapping) or last.get("role") != message.get("role"):
        return message
    text, echoed = message.get("content"), visible_content(last.get("content"))
    if not (isinstance(text, str) and isinstance(echoed, str)):
        return message
    return {**message, "content": text.removeprefix(echoed)}


def _conversations(params: Params) -> list[Json] | None:
    """The conversations of a request that has several; None if it has one."""
    messages = params.get("messages")
    several = isinstance(messages, list) and set(map(type, messages)) == {list}
    return messages if several else None


def _path(conversation: list[Json]) -> MessagePath | None:
    path: MessagePath | None = None
    for message in conversation:
        path = extend(path, message)
    return path
