"""The parts of messages: text, reasoning, calls of tools, their results, media. Pure.

`wire.message` and the modules of APIs create them. `normalised` is what of a part counts where two
messages are compared, `shown` is for people; how a part is written in an API is not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from otel_rollout.wire.json import Json, check_depth, dumps

Members: TypeAlias = Mapping[str, Json]

_UNSEEN = ("logprobs", "cache_control")
"""Members of parts that change nothing for a model."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the model, or of somebody who asked it."""

    text: str
    others: Json = None
    """What else the model sees of it: other members, or a word for what it is. None: nothing."""

    @property
    def normalised(self) -> Json:
        return self.text if self.others is None else [self.others, self.text]

    @property
    def shown(self) -> str:
        return f"{self.others}: {self.text}" if isinstance(self.others, str) else self.text


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of the model; a replay may leave it out."""

    wire: Json
    """As it was sent, but its id."""
    content: Json
    """The texts in it: one, a list of them, or parts that have texts."""

    @property
    def text(self) -> str:
        return "\n\n".join(_texts_in(self.content))

    @property
    def shown(self) -> str:
        return f"({text})" if (text := self.text) else ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model asked for."""

    id: str | None
    """The id by which the result names it. None: its result cannot be found by an id."""
    name: str
    arguments: Json
    """JSON text as the model wrote it, or JSON, as the API has it."""
    others: Json
    """What else the model sees of it: its kind, and its id where clients keep that."""

    @property
    def normalised(self) -> Json:
        return [self.others, self.name, _normalised_arguments(self.arguments)]

    @property
    def text(self) -> str:
        """The arguments as text; empty for none."""
        given = self.arguments
        return given if isinstance(given, str) else "" if given is None else dumps(given)

    @property
    def shown(self) -> str:
        return f"→ {self.name}({self.readable})"

    @property
    def readable(self) -> str:
        """`text` with letters in place of their escapes in JSON."""
        if "\\u" not in self.text:
            return self.text
        found = _escape.sub(_letter, self.text)
        return found.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


_escape = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_FIRST_LETTER = 0xA0


def _letter(escape: re.Match[str]) -> str:
    code = int(escape[0][2:] or "0", 16)
    return chr(code) if code >= _FIRST_LETTER else escape[0]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered."""

    id: str | None
    """The id of the call that it answers. None: it names none."""
    content: Json
    """Its content as it was sent: a text, parts, or JSON."""
    parts: list[Part]
    """The parts in it."""
    failed: bool = False
    """True if the message marks the tool as failed; few APIs have a member for that."""
    name: str | None = None
    """The name of the tool, in APIs that have no ids."""
    others: Json = None
    """What else the model sees of it."""

    @property
    def normalised(self) -> Json:
        return [self.others, self.id, self.name, self.failed, normalised_parts(self.parts)]

    @property
    def shown(self) -> str:
        text = " ".join(filter(None, (part.shown for part in self.parts)))
        return text if self.name is None else f"{self.name}: {text}"


@dataclass(frozen=True, slots=True)
class Media:
    """An image, sound, or a file."""

    kind: str
    """Its type, in the API's word."""
    wire: Json
    url: str | None = None
    """Where it is; None where its bytes are in the message, and where it is unknown."""
    data: str | None = None
    """Its bytes in base64."""
    media_type: Json = None

    @property
    def normalised(self) -> Json:
        return seen_of(self.wire)

    @property
    def address(self) -> str | None:
        """Where it is: `data:` for bytes in the message. None: unknown."""
        return self.url if self.data is None else f"data:{self.media_type};base64,{self.data}"

    @property
    def shown(self) -> str:
        return f"<{self.kind} {self.media_type}>" if self.media_type else f"<{self.kind}>"


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else: what no API here has a word for, or only one has."""

    kind: str
    wire: Json
    text: str | None = None
    """What people read of it; None: it is named."""

    @property
    def normalised(self) -> Json:
        return seen_of(self.wire)

    @property
    def shown(self) -> str:
        return f"<{self.kind}>" if self.text is None else self.text


Part: TypeAlias = Text | Reasoning | ToolCall | ToolResult | Media | Other


def normalised_parts(parts: Iterable[Part]) -> list[Json]:
    """What of parts counts where two messages are compared."""
    normalised = [part.normalised for part in parts if not isinstance(part, Reasoning)]
    return [each for each in normalised if each != ""]


def seen_of(wire: Json) -> Json:
    """A part as it was sent, but what makes no difference."""
    return present_members(wire, without=_UNSEEN) if isinstance(wire, Mapping) else wire


def present_members(message: Members, without: tuple[str, ...] = ()) -> dict[str, Json]:
    """The members that are set, but these."""
    return {
        key: value
        for key, value in message.items()
        if key not in without and value is not None and value != []
    }


def _normalised_arguments(arguments: Json) -> Json:
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


def _texts_in(content: Json) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for one in content:
            yield from _texts_in(one)
    elif isinstance(content, Mapping):
        for name in ("text", "thinking", "summary"):
            yield from _texts_in(content.get(name))
