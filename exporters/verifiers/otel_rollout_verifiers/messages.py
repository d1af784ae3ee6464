"""Messages and tools of /chat/completions in the words of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_rollout import Completion, ExportError
from otel_rollout.export import Json, copy_json


def message_of(message: Json, completion: Completion) -> dict[str, Json]:
    """A message of a conversation. ExportError for one that verifiers has no words for."""
    role = message.get("role") if isinstance(message, Mapping) else None
    api = completion.exchange.path.split("?")[0]
    if not api.endswith("/chat/completions") or role not in _KNOWN:
        raise ExportError(
            f"completion {completion.id!r}: verifiers keeps messages of /chat/completions by "
            f"{', '.join(_KNOWN)}, got one of {api!r} by {role!r}; call that API, or leave the "
            f"trajectory out"
        )
    content = message.get("content")
    if role == "assistant":
        return _assistant(message, completion)
    made: dict[str, Json] = {
        "role": "system" if role == "developer" else role,
        "content": _content(content, completion),
    }
    if role == "tool":
        made |= {"tool_call_id": message.get("tool_call_id") or "", "name": message.get("name")}
    return made


_KNOWN = ("system", "developer", "user", "assistant", "tool")


def _assistant(message: Mapping[str, Any], completion: Completion) -> dict[str, Json]:
    for field in ("function_call", "audio"):
        if message.get(field):
            raise ExportError(
                f"completion {completion.id!r}: a reply has {field!r}, for which verifiers has no "
                f"place; leave the trajectory out"
            )
    content = _content(message.get("content"), completion)
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    details = message.get("reasoning_details")
    return {
        "role": "assistant",
        "content": content or message.get("refusal"),
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": [_call(call) for call in message.get("tool_calls") or ()] or None,
        "provider_state": copy_json(details) if isinstance(details, list) and details else None,
    }


def _call(call: Mapping[str, Any]) -> dict[str, Json]:
    kind = call.get("type") or "function"
    what = call.get(kind) or {}
    return {
        "id": call.get("id") or "",
        "type": kind,
        "name": what.get("name") or "",
        "arguments": what.get("input" if kind == "custom" else "arguments") or "",
    }


def _content(content: Json, completion: Completion) -> str | list[Json]:
    if not isinstance(content, list):
        return str(content or "")
    parts: list[Json] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "refusal"):
            parts.append({"type": "text", "text": part.get(kind) or ""})
        elif kind == "image_url":
            image = part["image_url"]
            url = image.get("url") if isinstance(image, Mapping) else image
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            raise ExportError(
                f"completion {completion.id!r}: a message holds a part of type {kind!r}, and "
                f"verifiers keeps text and images only; leave the trajectory out"
            )
    return parts


def tools_of(completion: Completion) -> list[Json]:
    """The tools of the request, their definitions flat."""
    found: list[Json] = []
    for tool in completion.tools or ():
        kind = tool.get("type") or "function"
        definition = tool.get(kind)
        definition = definition if isinstance(definition, Mapping) else tool
        fields = {k: copy_json(v) for k, v in definition.items() if v is not None}
        found.append({**fields, "type": kind, "name": fields.get("name") or kind})
    return found
