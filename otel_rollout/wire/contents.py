"""Gemini's contents: messages that are lists of parts, in normalised form.

Pure. `{"role": "model", "parts": [{"text": "Hi"}]}`. Clients replay a streamed reply as one content
for each of its chunks, so contents of the model that follow each other are one message. Members of
parts are written in camel case or in snake case; ids of function calls are added and dropped by
clients, and count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from otel_rollout.wire.json import Json

_UNSEEN = ("thoughtSignature", "partMetadata", "videoMetadata")
"""Members of a part that are no content."""
_camel = re.compile(r"_([a-z])").sub


def is_content(message: Json) -> bool:
    """True if a message is a list of parts."""
    return isinstance(message, Mapping) and isinstance(message.get("parts"), list)


def is_sampled_content(message: Json) -> bool:
    """True if a message is a list of parts that the model said."""
    return is_content(message) and message.get("role") in ("model", "assistant")


def joined_parts(parts: Iterable[Json]) -> list[Json]:
    """The parts with texts that follow each other in one; a text and a thought are two."""
    joined: list[Json] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            isinstance(part, dict)
            and isinstance(last, dict)
            and isinstance(part.get("text"), str)
            and isinstance(last.get("text"), str)
            and is_thought(part) == is_thought(last)
        ):
            joined[-1] = {**last, **part, "text": last["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def joined_contents(messages: Iterable[Json]) -> list[Json]:
    """The messages; contents of the model that follow each other are one."""
    joined: list[Json] = []
    for message in messages:
        if joined and is_sampled_content(message) and is_sampled_content(joined[-1]):
            parts = [*joined[-1]["parts"], *message["parts"]]
            joined[-1] = {**joined[-1], "parts": joined_parts(parts)}
        else:
            joined.append(message)
    return joined


def is_thought(part: Json) -> bool:
    """True if a part is only reasoning."""
    return isinstance(part, Mapping) and part.get("thought") is True


def visible_contents(messages: list[Json]) -> Json:
    """Contents of one role in normalised form: no thoughts, signatures, ids and empty texts."""
    parts: list[Json] = [part for message in messages for part in message["parts"]]
    seen = [_visible_part(part) for part in parts if not is_thought(part)]
    seen = joined_parts(part for part in seen if part and part != {"text": ""})
    return {"role": "model" if is_sampled_content(messages[0]) else "user", "parts": seen}


def thoughts_in(parts: Iterable[Json]) -> list[Json]:
    """The reasoning in parts: thoughts, and the signatures that stand for hidden ones."""
    found: list[Json] = []
    for part in joined_parts(parts):
        if isinstance(part, Mapping):
            signature = part.get("thoughtSignature", part.get("thought_signature"))
            if is_thought(part) and part.get("text"):
                found.append({"text": part["text"], "thought": True})
            if signature:
                found.append({"thoughtSignature": signature})
    return found


def camel_case(members: Mapping[str, Json]) -> dict[str, Any]:
    """The members, with their names in camel case, but those that are null."""
    return {
        _camel(lambda match: match[1].upper(), name): value
        for name, value in members.items()
        if value is not None
    }


def _visible_part(part: Json) -> Json:
    if not isinstance(part, Mapping):
        return part
    present = camel_case(part)
    for name in _UNSEEN:
        present.pop(name, None)
    if present.get("thought") is False:
        del present["thought"]
    for name, value in present.items():
        if isinstance(value, Mapping):
            present[name] = camel_case(value)
            if name in ("functionCall", "functionResponse"):
                present[name].pop("id", None)
                present[name].setdefault("args" if name == "functionCall" else "response", {})
    return present
