"""OpenAI's chat completions: a list of messages is asked with, a message is sampled.

vLLM takes several conversations at once at `/chat/completions/batch`: each choice answers one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

from otel_rollout.wire.api import Sampled
from otel_rollout.wire.choices import ChoicesApi, indexed_choices
from otel_rollout.wire.conversation import MessagePath, extend
from otel_rollout.wire.json import Json, Message, Params, Reply
from otel_rollout.wire.message import (
    Shapes,
    content_parts,
    media_reader,
    normalised_content,
    text_of,
)
from otel_rollout.wire.parts import Media, Members, Other, Part, Text, ToolCall, ToolResult

_BATCH = "/chat/completions/batch"


def _tool_calls(calls: Json) -> Iterator[Part]:
    for call in calls if isinstance(calls, list) else [calls]:
        kind = call.get("type") or "function" if isinstance(call, Mapping) else None
        body = call.get(kind) if isinstance(kind, str) else None
        if not isinstance(body, Mapping):
            yield Other("tool_calls", call, f"→ {call}")
            continue
        name, arguments = str(body.get("name") or ""), body.get("arguments", body.get("input"))
        others = [kind, call.get("id")]
        if kind != "function":
            others.append(body)
        elif isinstance(arguments, Mapping) and not call.get("type"):
            others = [kind, None]  # Ollama's: its clients drop the id
        yield ToolCall(text_of(call.get("id")), name, arguments, others)


def _function_call(call: Json) -> Iterator[Part]:
    if isinstance(call, Mapping):
        yield ToolCall(None, str(call.get("name") or ""), call.get("arguments"), "function_call")
    else:
        yield Other("function_call", call)


def _refusal(refusal: Json) -> Iterator[Part]:
    yield Text(str(refusal), "refusal")


def _audio(audio: Json) -> Iterator[Part]:
    yield Media("audio", {"id": audio.get("id")} if isinstance(audio, Mapping) else audio)


def _result(message: Members) -> Part | None:
    if "tool_call_id" not in message:
        return None
    failed = message.get("is_error") is True
    content = message.get("content")
    return ToolResult(text_of(message["tool_call_id"]), content, content_parts(content), failed)


_MEDIA = {
    kind: media_reader(kind, kind)
    for kind in (
        *("image_url", "input_audio", "file", "audio_url", "video_url", "audio", "video"),
        *("image_pil", "image_embeds", "audio_embeds", "prompt_embeds"),  # vLLM's
    )
}
_SHAPES = Shapes(
    types={
        "refusal": lambda part: Text(str(part.get("refusal")), "refusal"),
        **_MEDIA,
    },
    blocks={kind: reader for kind, reader in _MEDIA.items() if "_" in kind},
    members={
        "refusal": _refusal,
        "tool_calls": _tool_calls,
        "function_call": _function_call,
        "audio": _audio,
    },
    reasoning=("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"),
    roles={"tool": _result},
    result_marks=(b'"tool_call_id"',),
)


class ChatCompletions(ChoicesApi):
    """`/chat/completions`, as OpenAI, vLLM, SGLang, llama.cpp and many others serve it."""

    provider = "openai"
    paths = ("/chat/completions", _BATCH)
    shapes = _SHAPES
    delta_name = "content"
    token_id_members: Mapping[str, Params] = {
        end: {"return_token_ids": True, "logprobs": True} for end in paths
    }

    def choices_asked(self, params: Params) -> int:
        conversations = _conversations(params)
        return super().choices_asked(params) * (1 if conversations is None else len(conversations))

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        conversations = _conversations(params)
        n = 1 if conversations is None else max(1, super().choices_asked(params))
        prompt = self.asked(params, prompt)
        for index, choice in indexed_choices(reply):
            message = choice.get("message")
            if conversations is not None:
                asked = conversations[index // n : index // n + 1]
                prompt = reduce(extend, asked[0], None) if asked else None
            if params.get("echo") and isinstance(message, dict) and prompt is not None:
                message = _without_echo(message, prompt.message)
                choice = {**choice, "message": message}
            yield Sampled(index, choice, (message,) if isinstance(message, dict) else (), prompt)

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
    text, echoed = message.get("content"), normalised_content(last.get("content"))
    if not (isinstance(text, str) and isinstance(echoed, str)):
        return message
    return {**message, "content": text.removeprefix(echoed)}


def _conversations(params: Params) -> list[Json] | None:
    """The conversations of a request that has several; None if it has one."""
    messages = params.get("messages")
    several = isinstance(messages, list) and set(map(type, messages)) == {list}
    return messages if several else None


class Mistral(ChatCompletions):
    """Mistral's `/fim/completions`, which is asked with a text, and `/agents/completions`.

    Replies are those of chats; a content may be a list there, with reasoning as `thinking` parts.
    """

    provider = "mistral_ai"
    paths = ("/fim/completions", "/agents/completions")
    context = ("tools", "suffix", "agent_id")
