"""Wire messages, each stored once: conversations are paths that share their prefixes.

Two forms of a message never mix. The *wire* form is what was sent or received, verbatim: it is
what is stored and handed back. The *visible* form is normalised and serves only to decide whether
two messages are the same one. What clients change when they replay a reply (`None`, `""` or
absent; a string or one text part; the whitespace of tool arguments; dropped reasoning; the name of
an agent; what a client has parsed), and marks of where a prompt may be cached, make no difference
in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from otel_rollout.wire.contents import (
    is_content,
    is_sampled_content,
    is_thought,
    thoughts_in,
    visible_contents,
)
from otel_rollout.wire.depth import check_depth
from otel_rollout.wire.json import Json

_REASONING_KEYS = (
    *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"),
    *("thinking", "tool_plan"),  # Ollama's, Cohere's
)

_REASONING_BLOCKS = ("thinking", "redacted_thinking", "reasoning")

_PARSED = ("parsed", "parsed_arguments", "parsed_output")
"""What clients add to a reply that they have parsed."""

_TEXT_PARTS = ("text", "input_text", "output_text")

_MEDIA = frozenset(
    (
        *("image", "image_url", "input_image", "image_pil", "image_embeds"),
        *("audio", "audio_url", "input_audio", "video", "video_url", "input_video"),
        *("file", "input_file", "document", "computer_screenshot", "image_generation_call"),
    )
)

_MEDIA_MEMBERS = (
    *("image", "document", "video", "audio"),  # Bedrock's
    *("inlineData", "inline_data", "fileData", "file_data"),  # Gemini's
)
"""Members that make a part without a type an image, sound or a file."""
_HOLDERS = ("output", "content", "parts", "toolResult", "functionResponse", "function_response")
"""Members of messages and parts that may hold parts."""


@dataclass(frozen=True, slots=True, eq=False)
class MessagePath:
    """A conversation from its first message to `message`; longer ones point to it as `parent`."""

    parent: MessagePath | None
    message: Json
    """The wire form: almost always a dict."""
    length: int
    """Messages on the path, this one included."""
    key: bytes
    """16-byte digest of the visible forms on the path: equal keys, equal visible conversation.

    Empty for a path with nothing visible.
    """

    def __iter__(self) -> Iterator[MessagePath]:
        """The paths from this one up to the first message (deepest first)."""
        path: MessagePath | None = self
        while path is not None:
            yield path
            path = path.parent


def extend(path: MessagePath | None, message: Json) -> MessagePath:
    """The path that continues `path` (None is the empty one) with `message`.

    Reasoning that is an item of its own does not change the key: a replay may leave it out.
    """
    key, length = (path.key, path.length) if path else (b"", 0)
    if is_sampled_content(message):
        before, visible = _one_turn(path, message)
        key = _extended(before, visible)
    elif not is_reasoning(message):
        key = _extended(key, visible_key(message))
    return MessagePath(path, message, length + 1, key)


def _extended(key: bytes, visible: bytes) -> bytes:
    digest = blake2b(key, digest_size=16)
    digest.update(visible)
    return digest.digest()


def _one_turn(path: MessagePath | None, message: Json) -> tuple[bytes, bytes]:
    """The key before the contents of the model that end with `message`, and their visible key."""
    turn = [message]
    while path is not None and is_sampled_content(path.message):
        turn.append(path.message)
        path = path.parent
    turn.reverse()
    return path.key if path else b"", _as_key(visible_contents(turn))


def path_messages(path: MessagePath | None) -> list[Json]:
    """The wire messages on the path, first to last; the caller owns the list, not the messages."""
    messages = [node.message for node in path] if path else []
    messages.reverse()
    return messages


def visible_key(message: Json) -> bytes:
    """Bytes that are equal for messages that a model sees as the same."""
    return _as_key(_visible(message))


def _as_key(visible: Json) -> bytes:
    return json.dumps(visible, sort_keys=True, separators=(",", ":")).encode()


def reasoning_of(message: Json) -> Json:
    """The reasoning in a message, under whichever name the server gave it; None if it has none."""
    if isinstance(message, Mapping):
        for key in _REASONING_KEYS:
            if message.get(key):
                return message[key]
        if is_content(message):
            return thoughts_in(message["parts"]) or None
        content = [message] if is_reasoning(message) else message.get("content")
        if isinstance(content, list):
            blocks = [_present(b, without=("id", "status")) for b in content if is_reasoning(b)]
            return [block for block in blocks if block.keys() != {"type"}] or None
    return None


def is_reasoning(block: Json) -> bool:
    """True if a part of a message, or an item of the Responses API, is only reasoning."""
    if not isinstance(block, Mapping):
        return False
    return (
        block.get("type") in _REASONING_BLOCKS or "reasoningContent" in block or is_thought(block)
    )


def is_said(message: Json) -> bool:
    """True if a message, or an item of the Responses API, is what a model says, not only thinks."""
    if not isinstance(message, Mapping) or is_reasoning(message):
        return False
    role, kind = message.get("role"), message.get("type")
    return role in ("assistant", "model") or (role is None and str(kind).endswith("_call"))


def media_of(message: Json) -> list[str]:
    """Types of the parts of a message that are images, sound or files; each once, often []."""
    found: list[str] = []
    unfinished = [message]
    while unfinished:
        part = unfinished.pop()
        if isinstance(part, list):
            unfinished += reversed(part)
        elif isinstance(part, Mapping):
            kind = part.get("type")
            member = next((name for name in _MEDIA_MEMBERS if part.get(name)), None)
            if isinstance(kind, str) and kind in _MEDIA:
                found.append(kind)
            elif kind is None and member is not None and isinstance(part[member], Mapping):
                found.append(member)
            else:  # a tool's result may hold parts of its own
                unfinished += [part.get(name) for name in _HOLDERS]
                found += ["image"] if part.get("images") else []  # Ollama's
    return list(dict.fromkeys(found))


def _visible(message: Json) -> Json:
    if not isinstance(message, Mapping):
        return message
    if is_content(message):
        return visible_contents([message])
    role = message.get("role")
    if role is None:
        # An item of the Responses API: servers name and finish items, clients drop that again.
        item = _present(message, without=("id", "status", *_PARSED))
        if item.get("type") == "function_call":
            item["arguments"] = _visible_arguments(message.get("arguments"))
        return item
    if role != "assistant":
        rest = _present(message, without=("content", "cache_control", *_REASONING_KEYS))
        if rest.get("type") == "message":  # what the Responses API takes it for if it has no type
            del rest["type"]
        return {**rest, "content": visible_content(message.get("content"))}
    calls = message.get("tool_calls") or []
    # Only members that a client must replay: clients drop the others that servers send.
    visible: dict[str, Json] = {
        "role": role,
        "content": visible_content(message.get("content")),
        "tool_calls": list(map(_visible_tool_call, calls)) if isinstance(calls, list) else calls,
    }
    visible.update(_present({key: message.get(key) for key in ("refusal", "function_call")}))
    audio = message.get("audio")
    if isinstance(audio, Mapping):
        visible["audio"] = audio.get("id")
    call = visible.get("function_call")
    if isinstance(call, Mapping):
        visible["function_call"] = _visible_function(call)
    return visible


def _visible_function(call: Mapping[str, Json]) -> Json:
    """The call of a function: what a client has parsed, or adds, is nothing to the model."""
    return {
        **_present({"name": call.get("name")}),
        "arguments": _visible_arguments(call.get("arguments")),
    }


def name_of(message: Json) -> Json:
    """The name of who said a message; None without one.

    It is no part of the normalised form of a reply: a client adds the name of its agent when it
    replays one. Nearly no chat template renders it (Kimi's does), so it may change the tokens.
    """
    return (message.get("name") or None) if isinstance(message, Mapping) else None


def _present(message: Mapping[str, Json], without: tuple[str, ...] = ()) -> dict[str, Json]:
    return {
        key: value
        for key, value in message.items()
        if key not in without and value is not None and value != []
    }


def visible_content(content: Json) -> Json:
    """Content of a message, or a context such as tools, normalised.

    A text equals a list with that text as its only part; no content equals an empty text.
    """
    if not content:
        return ""
    if not isinstance(content, list):
        return content
    parts = [_visible_part(part) for part in content if not is_reasoning(part)]
    parts = [part for part in parts if part != ""]
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return parts or ""


def _visible_part(part: Json) -> Json:
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    present = _present(part, without=("logprobs", "cache_control"))
    if kind in _TEXT_PARTS:
        present = _present(present, without=("annotations", "citations", *_PARSED))
        if present.keys() == {"type", "text"}:
            return present["text"]
    elif kind == "tool_use":
        return {key: part.get(key) for key in ("type", "id", "name", "input")}
    elif kind == "tool_result":
        present["content"] = visible_content(part.get("content"))
        if not present.get("is_error"):
            present.pop("is_error", None)
    elif kind is None:
        return _visible_block(present)
    return present


def _visible_block(block: dict[str, Json]) -> Json:
    """A block that has no type: what it is, its only member says. Those of Bedrock."""
    if block.keys() == {"text"} or "cachePoint" in block:
        return block.get("text", "")
    call, result = block.get("toolUse"), block.get("toolResult")
    if isinstance(call, Mapping):
        return {"toolUse": [call.get(name) for name in ("toolUseId", "name", "input")]}
    if isinstance(result, Mapping):
        seen = {**result, "content": visible_content(result.get("content"))}
        if result.get("status") == "success":
            del seen["status"]
        return {"toolResult": _present(seen)}
    return block


def _visible_tool_call(call: Json) -> Json:
    if not isinstance(call, Mapping):
        return call
    kind = call.get("type") or "function"
    body, name = call.get(kind) if isinstance(kind, str) else None, call.get("id")
    if isinstance(body, Mapping) and kind == "function":
        if isinstance(body.get("arguments"), Mapping) and not call.get("type"):
            name = None  # Ollama's: its clients drop the id
        body = _visible_function(body)
    return [name, kind, body]


def _visible_arguments(arguments: Json) -> Json:
    """Arguments as JSON if they are a JSON object or list, else as their text; {} for none."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        check_depth(arguments)
        value = _arguments.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    # `"a"` and what is no JSON, `a`, are two texts.
    return value if isinstance(value, dict | list) else arguments


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


_arguments = json.JSONDecoder(parse_float=_number)
