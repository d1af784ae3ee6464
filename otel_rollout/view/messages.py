"""The readable parts of a message of any API: text, reasoning, tool calls, images. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from otel_rollout.wire import (
    Json,
    Media,
    Other,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    dumps,
    media_in,
    message_parts,
    reasoning_of,
    tool_name,
)

_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp|bmp|avif);base64,[A-Za-z0-9+/=\s]*\Z")
_LARGEST_IMAGE = 2_000_000
"""Characters of the address of an image that is shown; a larger one is named."""
_LONGEST_LINK = 2_000


@dataclass(frozen=True, slots=True)
class MessageRow:
    """The readable parts of one message."""

    role: str
    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    call_id: str | None
    """The call that it answers, where it is a tool's result."""
    images: tuple[str, ...]
    """Images in it, as `data:` addresses."""
    links: tuple[str, ...]
    """Addresses of other media in it, and of images that are too large or are elsewhere."""
    parts: tuple[str, ...] | None
    """Kinds of the parts that are not text. None: there are none."""


def message_row(message: Json) -> MessageRow:
    """The readable parts of a message of any API."""
    if not isinstance(message, Mapping):
        text = message if isinstance(message, str) else dumps(message)
        return MessageRow("text", text, None, (), None, (), (), None)
    parts = message_parts(message)
    media = list(media_in(parts))
    addresses = [each.address for each in media if each.address]
    return MessageRow(
        role=_role(message, parts),
        text="\n\n".join(filter(None, _texts(parts))),
        reasoning=_reasoning(message, parts),
        calls=tuple(part for part in parts if isinstance(part, ToolCall)),
        call_id=next((part.id for part in parts if isinstance(part, ToolResult) and part.id), None),
        images=tuple(filter(_is_shown, addresses)),
        links=tuple(_link(each) for each in addresses if not _is_shown(each)),
        parts=tuple(dict.fromkeys(each.kind for each in media)) or None,
    )


def name_of_tool(tool: Json) -> str:
    """The name of a tool that a request offers, or what is in its place."""
    return tool_name(tool) if isinstance(tool, dict) else str(tool)


def _role(message: Mapping[str, Json], parts: list[Part]) -> str:
    role = message.get("role")
    if isinstance(role, str):
        return role
    return "tool" if any(isinstance(part, ToolResult) for part in parts) else "assistant"


def _reasoning(message: Json, parts: list[Part]) -> str | None:
    thought = reasoning_of(message)
    if thought is None:
        return None
    texts = (part.text for part in parts if isinstance(part, Reasoning))
    return "\n\n".join(filter(None, texts)) or dumps(thought)


def _texts(parts: Iterable[Part]) -> Iterable[str]:
    """The texts of parts, those of tool results included."""
    for part in parts:
        match part:
            case Text(text=text):
                yield text
            case ToolResult():
                yield from _texts(part.parts)
            case Other(text=text, wire=wire):
                yield dumps(wire) if text is None else text
            case Reasoning() | ToolCall() | Media():
                pass


def _is_shown(address: str) -> bool:
    return len(address) <= _LARGEST_IMAGE and _IMAGE.match(address) is not None


def _link(address: str) -> str:
    """An address that is no image to show: cut, without the bytes of a `data:` one."""
    if address.startswith("data:"):
        return f"{address[: address.find(',')][:100]} ({len(address)} characters)"
    return address[:_LONGEST_LINK]
