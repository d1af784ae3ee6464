"""Merging the pieces of a stream: texts are joined, lists chained, objects merged.

Texts grow in messages alone: one beside them (a version, a rating) is a whole one in each chunk.

Pure. While a stream is merged a text is a list of `GrowingText` pieces, joined once at the end by
`finish`: to join at every piece would cost the square of the text's length.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from otel_rollout.wire.json import Json, try_loads

_WHOLE = ("role", "id", "type")
"""Texts that a server may repeat, but never sends in pieces."""
SO_FAR = ("policy_token_spans", "weight_versions")
"""Lists that a chunk has whole, as far as they came."""
_GROWING = ("text", "thinking")
"""Types of parts that a stream sends in pieces."""


class GrowingText(str):
    """A piece of a text that is still growing."""

    __slots__ = ()


class GrowingParts(list[Json]):
    """The parts of a content, of which the last one may still be growing."""


def merge_whole(target: dict[str, Any], key: str, value: Json) -> None:
    """Add a value to a member: lists grow, objects are merged, texts and the rest are replaced."""
    old = target.get(key)
    if isinstance(value, dict):
        members = target[key] = old if isinstance(old, dict) else {}
        for name, part in value.items():
            merge_whole(members, name, part)
    elif isinstance(value, list) and isinstance(old, list) and key not in SO_FAR:
        old.extend(value)
    elif value is not None or key not in target:
        target[key] = list(value) if isinstance(value, list) else value


def merge_field(target: dict[str, Any], key: str, value: Json) -> None:
    """Add a value to a member: texts and lists grow, objects are merged, the rest is replaced."""
    old = target.get(key)
    if old is None:
        if value is not None or key not in target:
            target[key] = _first_piece(key, value)
    elif (
        isinstance(value, str) and isinstance(old, list) and old and isinstance(old[0], GrowingText)
    ):
        old.append(GrowingText(value))
    elif isinstance(value, list) and isinstance(old, list):
        old.extend(value)
    elif isinstance(value, dict) and isinstance(old, dict):
        for name, part in value.items():
            merge_field(old, name, part)
    elif value is not None:
        target[key] = value


def _first_piece(key: str, value: Json) -> Json:
    if isinstance(value, str):
        return value if key in _WHOLE else [GrowingText(value)]
    if isinstance(value, dict):
        return {name: _first_piece(name, part) for name, part in value.items()}
    return list(value) if isinstance(value, list) else value


def add_text(target: dict[str, Any], key: str, piece: Json) -> None:
    """Add a piece to a text that may have begun as a whole one."""
    if not isinstance(piece, str):
        raise TypeError(f"expected a piece of text, got {piece!r}")
    if isinstance(target.get(key), str):
        target[key] = [GrowingText(target[key])]
    merge_field(target, key, piece)


def merge_members(
    target: dict[str, Any], members: Mapping[str, Json], growing: Container[str] = ()
) -> None:
    """Add the members of an object: of each the last value that is not null counts.

    growing: members that a stream sends in pieces, which are added by `merge_field`.
    """
    for key, value in members.items():
        if key in growing:
            merge_field(target, key, value)
        elif value is not None or key not in target:
            target[key] = value


def merge_parts(target: dict[str, Any], key: str, value: Json) -> None:
    """Add to a content that is a list of parts; a text, before or after them, is a part, too."""
    parts = target.get(key)
    if not isinstance(parts, GrowingParts):
        before, parts = finish(parts), GrowingParts()
        if before:
            parts.append({"type": "text", "text": [GrowingText(before)]})
        target[key] = parts
    if isinstance(value, str):
        value = [{"type": "text", "text": value}] if value else []
    for part in value or ():
        kind = part.get("type")
        if not parts or kind not in _GROWING or parts[-1].get("type") != kind:
            parts.append({"type": kind})
        for name, inner in part.items():
            if name == kind and isinstance(inner, list):
                merge_parts(parts[-1], name, inner)
            elif name != "type":
                merge_field(parts[-1], name, inner)


def finish(value: Json) -> Json:
    """The merged value with its texts joined and its tool calls in a list, by index."""
    if isinstance(value, dict):
        return {
            key: [_finished_call(part[index]) for index in sorted(part)]
            if key == "tool_calls" and isinstance(part, dict)
            else finish(part)
            for key, part in value.items()
        }
    if isinstance(value, GrowingParts):
        return [finish(part) for part in value]
    if isinstance(value, list) and value and isinstance(value[0], GrowingText):
        return "".join(value)
    return value


def _finished_call(call: Json) -> Json:
    """A tool call, whose arguments are a text also where the stream ended before they came."""
    call = finish(call)
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and "name" in function:
        function.setdefault("arguments", "")
    return call


def finished_json(text: str) -> Json:
    """What a text that came in pieces is as JSON; a truncated one stays the text that it is."""
    parsed = try_loads(text)
    return text if parsed is None else parsed
