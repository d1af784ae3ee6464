"""Copies of arguments and replies in shapes that an instrumentor of the OpenAI client can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai

_UNSEEN = {"logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "routed_experts"} | {
    "response_token_ids",
    "meta_info",
    "sglext",
}
"""Parts of a reply that the instrumentor does not read; they are large."""
UNSET = tuple(kind for name in ("NotGiven", "Omit") if (kind := getattr(openai, name, None)))


def plain(value: Any) -> Any:
    """A copy, in JSON's types, of a caller's argument; iterators in it are not consumed."""
    if value is None or isinstance(value, str | int | float | type):
        return value
    if isinstance(value, Mapping):
        return {
            str(name): plain(item) for name, item in value.items() if not isinstance(item, UNSET)
        }
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True, warnings=False)
    return str(value)


def dumped(reply: Any) -> dict[str, Any]:
    """A reply, or a chunk of one, as JSON without what no instrumentor reads."""
    exclude: dict[str, Any] = dict.fromkeys(_UNSEEN, True)
    if isinstance(getattr(reply, "choices", None), list):
        exclude["choices"] = {"__all__": _UNSEEN}
    data = reply.model_dump(mode="json", exclude_none=True, warnings=False, exclude=exclude)
    return data if isinstance(data, dict) else {}


def shown_message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with all its parts in `content` and `tool_calls`, where they are looked for."""
    message = dict(message)
    content = message.get("content")
    blocks = content if isinstance(content, list) else [content] if content else []
    blocks = [
        _block(block) if isinstance(block, dict) else {"type": "text", "text": str(block)}
        for block in blocks
    ]
    reasoning = message.pop("reasoning_content", None) or message.pop("reasoning", None)
    for kind, said in (("reasoning", reasoning), ("refusal", message.pop("refusal", None))):
        if said:
            blocks.append({"type": kind, "content": said})
    audio = message.pop("audio", None)
    if isinstance(audio, dict):
        blocks.append({"type": "audio", "id": audio.get("id"), "content": audio.get("transcript")})
    name, call = message.get("name"), message.pop("function_call", None)
    calls = message.get("tool_calls") or []
    if isinstance(call, dict):
        calls = [*calls, {"id": call.get("name"), "function": call}]
    message["tool_calls"] = [as_function_call(call) for call in calls if isinstance(call, dict)]
    if message.get("role") == "function":
        message |= {"role": "tool", "tool_call_id": name}
    plain = isinstance(content, str) and len(blocks) == 1
    message["content"] = content if plain or message.get("role") == "tool" else blocks
    return message


def _block(block: dict[str, Any]) -> dict[str, Any]:
    image = block.get("image_url")
    if block.get("type") == "image_url" and not (
        isinstance(image, dict) and isinstance(image.get("url"), str)
    ):
        return {**block, "image_url": {"url": image if isinstance(image, str) else ""}}
    return block


def as_function_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call of any kind as that of a function."""
    body = call.get("function") or call.get("custom") or {}
    arguments = body.get("arguments", body.get("input"))
    function = {"name": body.get("name"), "arguments": arguments}
    return {**call, "id": call.get("id"), "function": function}
