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

from otel_rollout.wire.depth import check_depth
from otel_rollout.wire.json import Json

_REASONING_KEYS = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")

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
    if not is_reasoning(message):
        digest = blake2b(key, digest_size=16)
        digest.update(visible_key(message))
        key = digest.digest()
    return MessagePath(path, message, length + 1, key)


def path_messages(path: MessagePath | None) -> list[Json]:
    """The wire messages on the path, first to last; the caller owns the list, not the messages."""
    messages = [node.message for node in path] if path else []
    messages.reverse()
    return messages


def visible_key(message: Json) -> bytes:
    """Bytes that are equal for messages that a model sees as the same."""
    return json.dumps(_visible(message), sort_keys=True, separators=(",", ":")).encode()


def reasoning_of(message: Json) -> Json:
    """The reasoning in a message, under whichever name the server gave it; None if it has none."""
    if isinstance(message, Mapping):
        for key in _REASONING_KEYS:
            if message.get(key):
                return message[key]
        content = [message] if is_reasoning(message) else message.get("content")
        if isinstance(content, list):
            blocks = [_present(b, without=("id", "status")) for b in content if is_reasoning(b)]
            return [block for block in blocks if block.keys() != {"type"}] or None
    return None


def is_reasoning(block: Json) -> bool:
    """True if a part of a message, or an item of the Responses API, is only reasoning."""
    return isinstance(block, Mapping) and block.get("type") in _REASONING_BLOCKS


def is_said(message: Json) -> bool:
    """True if a message, or an item of the Responses API, is what a model says, not only thinks."""
    if not isinstance(message, Mapping) or is_reasoning(message):
        return False
    role, kind = message.get("role"), message.get("type")
    return role == "assistant" or (role is None and str(kind).endswith("_call"))


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
            if isinstance(kind, str) and kind in _MEDIA:
                found.append(kind)
            else:  # a tool's result may hold parts of its own
                unfinished += [part.get("output"), part.get("content")]
    return list(dict.fromkeys(found))


def _visible(message: Json) -> Json:
    if not isinstance(message, Mapping):
        return message
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
    # Only members that a client must replay: clients drop the others that servers send.
    visible: dict[str, Json] = {
        "role": role,
        "content": visible_content(message.get("content")),
        "tool_calls": [_visible_tool_call(call) for call in message.get("tool_calls") or ()],
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
    return present


def _visible_tool_call(call: Json) -> Json:
    if not isinstance(call, Mapping):
        return call
    kind = call.get("type") or "function"
    body = call.get(kind)
    if isinstance(body, Mapping) and kind == "function":
        body = _visible_function(body)
    return [call.get("id"), kind, body]


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
