"""Reads a message of any API into parts, and answers what is asked of messages by them. Pure.

The keys of histories, tool spans, LLM spans, search and the page are made from these parts. What is
special to an API is in its own module, as its `Shapes`, which `wire.apis` adds; no module but
those of APIs knows the members of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from otel_rollout.wire.json import OBJECT, Json, dumps
from otel_rollout.wire.parts import (
    Media,
    Members,
    Other,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    present_members,
    seen_of,
)

_IDENTITY = ("id", "status")
"""What servers name and finish items with; clients drop it again."""
_PARSED = ("parsed", "parsed_arguments", "parsed_output")
"""What clients add to a reply that they have parsed."""


PartReader: TypeAlias = Callable[[Members], Part | None]
"""Reads a part, or an item of a conversation. None: it only looked like one of its shape."""
MemberReader: TypeAlias = Callable[[Json], Iterable[Part]]
"""Reads the value of a member of a message."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of parts that an API has."""

    types: Mapping[str, PartReader] = field(default_factory=dict)
    """Parts and items by their `type`, or the end of it: `_call`."""
    blocks: Mapping[str, PartReader] = field(default_factory=dict)
    """Parts that have no type, by the member that makes them what they are."""
    members: Mapping[str, MemberReader] = field(default_factory=dict)
    """Members of messages that hold parts."""
    reasoning: Sequence[str] = ()
    """Members of messages that are reasoning."""
    roles: Mapping[str, PartReader] = field(default_factory=dict)
    """Messages that are one part, by their role."""
    pieces: Sequence[str] = ()
    """Members of messages that are pieces: those of the model that follow each other are one."""
    result_marks: Sequence[bytes] = ()
    """Texts without one of which no request has a tool's result."""
    references: Sequence[str] = ()
    """Types of items that stand for an earlier item, which their id names."""


TYPES: dict[str, PartReader] = {}
"""The readers of all APIs, as in `Shapes`."""
BLOCKS: dict[str, PartReader] = {}
MEMBERS: dict[str, MemberReader] = {}
ROLES: dict[str, PartReader] = {}
PIECES: dict[str, None] = {}
RESULT_MARKS: dict[bytes, None] = {}
REFERENCES: dict[str, None] = {}


def add_shapes(shapes: Shapes) -> None:
    """Add the shapes of an API; the first that was added for a name stays."""
    TYPES.update({**shapes.types, **TYPES})
    BLOCKS.update({**shapes.blocks, **BLOCKS})
    MEMBERS.update({**shapes.members, **dict.fromkeys(shapes.reasoning, _reasoning), **MEMBERS})
    ROLES.update({**shapes.roles, **ROLES})
    PIECES.update(dict.fromkeys(shapes.pieces))
    RESULT_MARKS.update(dict.fromkeys(shapes.result_marks))
    REFERENCES.update(dict.fromkeys(shapes.references))


# --- parts


def message_parts(message: Json) -> list[Part]:
    """The parts of a message, or of an item of the Responses API: reasoning first, calls last."""
    return read_message(message)[0]


def content_parts(content: Json) -> list[Part]:
    """The parts of a message's content, or of a tool's result."""
    if isinstance(content, str):
        return [Text(content)] if content else []
    if isinstance(content, list):
        return list(map(part_of, content))
    if content is None:
        return []
    part = part_of(content)
    return [Other(part.kind, content, dumps(content)) if isinstance(part, Other) else part]


def part_of(part: Json) -> Part:
    """An element of a message's content, or an item of the Responses API."""
    if not isinstance(part, Mapping):
        return Text(part) if isinstance(part, str) else Other("text", part, str(part))
    kind = part.get("type")
    found: Part | None = None
    if isinstance(kind, str):
        read = TYPES.get(kind) or TYPES.get(kind[kind.rfind("_") :])
        found = read(part) if read is not None else None
    elif kind is None:
        name = next((name for name in part if name in BLOCKS), None)
        found = text_part(part) if name is None else BLOCKS[name](part)
    if found is None:
        text = part.get("text")
        named = str(next(iter(part), None) if kind is None else kind)
        found = Other(named, part, text if isinstance(text, str) else None)
    return found


def read_message(message: Json) -> tuple[list[Part], dict[str, Json]]:
    """The parts of a message, and its members that hold none."""
    if not isinstance(message, OBJECT):
        return content_parts(message), {}
    role = message.get("role")
    if role is None:
        identity = _IDENTITY if reference_of(message) is None else ()
        message = present_members(message, without=(*identity, *_PARSED))
        if "type" in message:
            return [part_of(message)], {}
    found: list[tuple[bool, str, Iterable[Part]]] = []
    others: dict[str, Json] = {}
    read_role = ROLES.get(role) if isinstance(role, str) else None
    result = None if read_role is None else read_role(message)
    if result is not None:
        found.append((True, "", [result]))
    for name, value in message.items():
        read = MEMBERS.get(name)
        if read is None:
            others[name] = value
        elif value and result is None:
            found.append((read is not _reasoning, name, read(value)))
    if len(found) == 1:
        return list(found[0][2]), others
    return _in_order(found), others


def reference_of(item: Json) -> str | None:
    """The id of the earlier item that an item of a request stands for; None: it is an item itself.

    A client may leave out the type of a reference.
    """
    if not isinstance(item, Mapping) or (id_ := text_of(item.get("id"))) is None:
        return None
    kind = item.get("type")
    alone = kind is None and present_members(item).keys() == {"id"}
    return id_ if alone or (isinstance(kind, str) and kind in REFERENCES) else None


def _in_order(found: list[tuple[bool, str, Iterable[Part]]]) -> list[Part]:
    """The parts of all members, whatever their order: reasoning, content, calls."""
    found.sort(key=lambda member: member[:2])
    thoughts = [parts for is_not, _, parts in found if not is_not][:1]  # others repeat the first
    rest = [parts for is_not, _, parts in found if is_not]
    return [part for parts in (*thoughts, *rest) for part in parts]


def text_part(part: Members) -> Part | None:
    """A part that is a text; None for another one."""
    text = part.get("text")
    if not isinstance(text, str):
        return None
    return Text(text)


def _reasoning(value: Json) -> Iterable[Part]:
    return (Reasoning(value, value),)


def reasoning_block(part: Members, content: Json) -> Reasoning:
    """A part, or an item, that is only reasoning with these texts."""
    return Reasoning(present_members(part, without=_IDENTITY), content)


def media_reader(kind: str, *names: str) -> PartReader:
    """Reads media of this type, whose address is under one of these names."""

    def read(part: Members) -> Part:
        for name in names:
            value = part.get(name)
            url = value.get("url") if isinstance(value, Mapping) else value
            if isinstance(url, str):
                return Media(kind, part, url)
        return Media(kind, part)

    return read


def text_of(value: Json) -> str | None:
    """An id or a name: a text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None


# --- what makes no difference


def normalised_content(content: Json) -> Json:
    """Content of a message, or a context such as tools, without what makes no difference.

    A text equals a list with that text as its only part; no content equals an empty text.
    """
    if not content:
        return ""
    if not isinstance(content, list):
        return content
    found: list[Json] = []
    for wire, part in zip(content, map(part_of, content), strict=True):
        if isinstance(part, Text) and part.others is None:
            found += [part.text] if part.text else []
        elif not isinstance(part, Reasoning):
            found.append(seen_of(wire))
    return (found[0] if len(found) == 1 and isinstance(found[0], str) else found) or ""


# --- what a message contains


def reasoning_of(message: Json) -> Json:
    """The reasoning in a message, under whichever name the server gave it; None if it has none."""
    found = [part.wire for part in message_parts(message) if isinstance(part, Reasoning)]
    member = next((wire for wire in found if not isinstance(wire, Mapping)), None)
    return member or [wire for wire in found if wire.keys() != {"type"}] or None


def is_reasoning(block: Json) -> bool:
    """True if a part of a message, or an item of the Responses API, is only reasoning."""
    if not isinstance(block, Mapping) or "role" in block:
        return False
    return isinstance(part_of(block), Reasoning)


def is_of_model(message: Json) -> bool:
    """True if a message, or an item of the Responses API, is the model's, not only reasoning."""
    if not isinstance(message, OBJECT):
        return False
    role = message.get("role")
    if role is not None:
        return role in ("assistant", "model")
    return "type" in message and isinstance(part_of(message), ToolCall | Media)


def tool_calls(message: Json) -> list[ToolCall]:
    """The calls in a message of the model that have an id, which their results name."""
    calls = [part for part in message_parts(message) if isinstance(part, ToolCall)]
    return [call for call in calls if call.id and call.name]


def tool_results(message: Json) -> Iterator[tuple[str, ToolResult]]:
    """The results in a message of a request, each with the id of its call; not those without."""
    for part in message_parts(message):
        if isinstance(part, ToolResult) and part.id:
            yield part.id, part


def may_have_results(messages: bytes) -> bool:
    """False if no result of a tool is in these messages, as JSON."""
    for mark in RESULT_MARKS:  # noqa: SIM110 - asked for each request
        if mark in messages:
            return True
    return False


def media_of(message: Json) -> list[str]:
    """Types of the parts of a message that are images, sound or files; each once, often []."""
    return list(dict.fromkeys(part.kind for part in media_in(message_parts(message))))


def media_in(parts: Iterable[Part]) -> Iterator[Media]:
    """The media among parts, and in the results of tools."""
    for part in parts:
        if isinstance(part, Media):
            yield part
        elif isinstance(part, ToolResult):
            yield from media_in(part.parts)


def texts_of(message: Json) -> list[str]:
    """The texts of a message, but a refusal."""
    parts = message_parts(message)
    return [part.text for part in parts if isinstance(part, Text) and part.others != "refusal"]


def without_reasoning(message: Json) -> Json:
    """A message as it was sent, but its reasoning."""
    if not isinstance(message, OBJECT):
        return message
    found = {name: value for name, value in message.items() if MEMBERS.get(name) is not _reasoning}
    if isinstance(content := found.get("content"), list):
        found["content"] = [part for part in content if not is_reasoning(part)]
    return found


def author_of(message: Json) -> Json:
    """The name of who said a message; None without one.

    It is no part of the normalised form of a reply: a client adds the name of its agent when it
    replays one. Nearly no chat template renders it (Kimi's does), so it may change the tokens.
    """
    return (message.get("name") or None) if isinstance(message, Mapping) else None


def shown_message(message: Json, *, reasoning: bool = True) -> str:
    """The text of a message: its texts, its tool calls, its reasoning in parentheses.

    A part that is no text, such as an image, is named: `<image_url>`. reasoning: False leaves
    reasoning out where the message says anything else.
    """
    if not isinstance(message, dict):
        return str(message)
    texts: list[str] = []
    thoughts: list[str] = []
    for part in message_parts(message):
        if text := part.shown:
            is_apart = not reasoning and isinstance(part, Reasoning)
            (thoughts if is_apart else texts).append(text)
    if texts or thoughts:
        return " ".join(texts or thoughts)
    return dumps({k: v for k, v in message.items() if k != "role" and v is not None})


add_shapes(Shapes(types={"text": text_part}, members={"content": content_parts}))
