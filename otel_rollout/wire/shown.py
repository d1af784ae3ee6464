"""Messages as text for people, in the shape of every API."""

from __future__ import annotations

from otel_rollout.wire.apis import shown_calls, shown_part
from otel_rollout.wire.json import Json, dumps
from otel_rollout.wire.messages import is_reasoning, reasoning_of


def shown_message(message: Json, *, reasoning: bool = True) -> str:
    """The text of a message: what it says, its tool calls, its reasoning in parentheses.

    A part that is no text, such as an image, is named: `<image_url>`. reasoning: False leaves
    reasoning out where the message says anything else.
    """
    if not isinstance(message, dict):
        return str(message)
    parts: list[str] = []
    content = message.get("parts", message.get("content"))
    thought = reasoning_of({**message, "content": None, "parts": None})
    if thought and reasoning:
        parts.append(f"({thought})")
    if isinstance(content, list):
        parts += map(_part, content if reasoning else _said(content))
    elif content:
        parts.append(str(content))
    parts += shown_calls(message)
    if not parts and thought and not reasoning:
        return f"({thought})"
    if not parts:
        parts.append(dumps({k: v for k, v in message.items() if k != "role" and v is not None}))
    return " ".join(parts)


def _said(parts: list[Json]) -> list[Json]:
    return [part for part in parts if not is_reasoning(part)] or parts


def _part(part: Json) -> str:
    if not isinstance(part, dict):
        return str(part)
    shown = shown_part(part)
    if shown is None:
        kind = part.get("type", next(iter(part), None))
        return str(part.get("text", f"<{kind}>"))
    return shown if isinstance(shown, str) else shown_message(shown)
