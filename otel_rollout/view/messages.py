"""A message as people read it: text, reasoning, tool calls, images, from any API. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from otel_rollout.wire import (
    Json,
    dumps,
    is_reasoning,
    media_of,
    reasoning_of,
    tool_calls,
    tool_results,
)

_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp|bmp|avif);base64,[A-Za-z0-9+/=\s]*\Z")
_LARGEST_IMAGE = 2_000_000
"""Characters of the address of an image that is shown; a larger one is named."""
_LONGEST_LINK = 2_000


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model asked for."""

    id: str | None
    name: str
    arguments: str
    """JSON as the model wrote it, or as the API has it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What stands in one message."""

    role: str
    text: str
    reasoning: str | None
    calls: tuple[Call, ...]
    call_id: str | None
    """The call that it answers, where it is a tool's result."""
    images: tuple[str, ...]
    """Images in it, as `data:` addresses."""
    links: tuple[str, ...]
    """Addresses of other media in it, and of images that are too large or are elsewhere."""
    parts: tuple[str, ...] | None
    """Kinds of the parts that are not text. None: there are none."""


def said(message: Json) -> Said:
    """What a message says, in whichever API it was sent."""
    if not isinstance(message, Mapping):
        text = message if isinstance(message, str) else dumps(message)
        return Said("text", text, None, (), None, (), (), None)
    results = list(tool_results(message))
    thought = reasoning_of(message)
    found = list(_images(message))
    images = tuple(each for each in found if _is_shown(each))
    links = tuple(_link(each) for each in found if not _is_shown(each))
    return Said(
        role=_role(message),
        text="\n\n".join(filter(None, _texts(message))),
        reasoning=None if thought is None else "\n\n".join(_reasoning(thought)) or dumps(thought),
        calls=tuple(_calls(message)),
        call_id=results[0].id if results else None,
        images=images,
        links=links,
        parts=tuple(media_of(message)) or None,
    )


def _role(message: Mapping[str, Json]) -> str:
    role, kind = message.get("role"), str(message.get("type"))
    if isinstance(role, str):
        return role
    return "tool" if kind.endswith("_output") else "assistant"


def _texts(message: Mapping[str, Json]) -> Iterator[str]:
    """The texts of a message, its tool results included."""
    kind = str(message.get("type"))
    if "role" not in message and kind.endswith("_output"):
        yield from _content(message.get("output"))
    elif "role" in message or "content" in message or "parts" in message:
        yield from _content(message.get("parts", message.get("content")))
        yield from _content(message.get("refusal"))
    elif not is_reasoning(message) and not kind.endswith("_call"):
        yield dumps(message)


def _content(content: Json) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from _part(part)
    elif content is not None:
        yield dumps(content)


def _part(part: Json) -> Iterator[str]:
    if not isinstance(part, Mapping):
        yield str(part)
    elif is_reasoning(part) or _is_call(part) or media_of({"content": [part]}):
        return
    elif isinstance(part.get("text"), str):
        yield part["text"]
    elif part.get("type") == "tool_result" or isinstance(part.get("toolResult"), Mapping):
        yield from _content((part.get("toolResult") or part).get("content"))
    elif (answer := part.get("functionResponse", part.get("function_response"))) is not None:
        yield dumps(answer.get("response") if isinstance(answer, Mapping) else answer)
    elif isinstance(part.get("refusal"), str):
        yield part["refusal"]
    else:
        yield dumps(part)


def _is_call(part: Mapping[str, Json]) -> bool:
    names = ("toolUse", "functionCall", "function_call")
    return part.get("type") == "tool_use" or any(name in part for name in names)


def _calls(message: Mapping[str, Json]) -> Iterator[Call]:
    known = list(tool_calls(message))
    yield from (Call(call.id, call.name, _arguments(call.arguments)) for call in known)
    if not known:  # those without an id
        for each in _rows(message.get("tool_calls")):
            yield from _unnamed(each.get("function"))
        yield from _unnamed(message.get("function_call"))
        for part in _rows(message.get("parts")):
            yield from _unnamed(part.get("functionCall", part.get("function_call")))


def _unnamed(function: Json) -> Iterator[Call]:
    if isinstance(function, Mapping):
        arguments = function.get("arguments", function.get("args"))
        yield Call(None, str(function.get("name") or ""), _arguments(arguments))


def _arguments(arguments: Json) -> str:
    return (
        arguments if isinstance(arguments, str) else "" if arguments is None else dumps(arguments)
    )


def _reasoning(value: Json) -> Iterator[str]:
    """The texts in reasoning of any shape."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _reasoning(each)
    elif isinstance(value, Mapping):
        names = ("text", "thinking", "reasoning", "summary", "content", "reasoningContent")
        for name in (*names, "reasoningText"):
            if value.get(name):
                yield from _reasoning(value[name])


def _images(message: Mapping[str, Json]) -> Iterator[str]:
    """Addresses of the images, sounds and files of a message, of those that have one."""
    unfinished: list[Json] = [message.get("parts", message.get("content")), message.get("output")]
    for image in message.get("images") or () if isinstance(message.get("images"), list) else ():
        if isinstance(image, str):  # Ollama's
            yield _data("image/png", image)
    while unfinished:
        part = unfinished.pop(0)
        if isinstance(part, list):
            unfinished[:0] = part
        elif isinstance(part, Mapping):
            address = _address(part)
            if address:
                yield address
            else:
                unfinished[:0] = [part.get(name) for name in ("content", "toolResult", "output")]


def _address(part: Mapping[str, Json]) -> str | None:
    """The address of an image or file: `data:` where its bytes are in the part."""
    for name in ("image_url", "file_url", "audio_url", "video_url"):
        value = part.get(name)
        if isinstance(value, Mapping):
            value = value.get("url")
        if isinstance(value, str):
            return value
    source = part.get("source")
    if isinstance(source, Mapping):  # Anthropic's
        if isinstance(source.get("data"), str):
            return _data(source.get("media_type"), source["data"])
        return source["url"] if isinstance(source.get("url"), str) else None
    image = part.get("image")
    if isinstance(image, Mapping) and isinstance(image.get("source"), Mapping):  # Bedrock's
        data = image["source"].get("bytes")
        return _data(f"image/{image.get('format')}", data) if isinstance(data, str) else None
    inline = part.get("inlineData", part.get("inline_data"))
    if isinstance(inline, Mapping) and isinstance(inline.get("data"), str):  # Gemini's
        return _data(inline.get("mimeType", inline.get("mime_type")), inline["data"])
    file = part.get("fileData", part.get("file_data"))
    if isinstance(file, Mapping):
        file = file.get("fileUri", file.get("file_uri"))
    return file if isinstance(file, str) else None


def _data(media_type: Json, data: str) -> str:
    return f"data:{media_type};base64,{data}"


def _is_shown(address: str) -> bool:
    return len(address) <= _LARGEST_IMAGE and _IMAGE.match(address) is not None


def _link(address: str) -> str:
    """An address that is no image to show: cut, without the bytes of a `data:` one."""
    if address.startswith("data:"):
        return f"{address[: address.find(',')][:100]} ({len(address)} characters)"
    return address[:_LONGEST_LINK]


def _rows(value: Json) -> Iterator[Mapping[str, Json]]:
    return (row for row in (value if isinstance(value, list) else ()) if isinstance(row, Mapping))
