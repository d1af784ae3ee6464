"""Tool calls in what a model said, and the results that answer them, in the shape of every API.

A call and its result have the same id. One without an id is not listed: nothing tells which result
is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from otel_rollout.wire.json import Json
from otel_rollout.wire.messages import visible_content

RESULT_MARKS = (b'"tool_call_id"', b'"tool_result"', b'_output"', b'"toolResult"')
"""Texts without one of which no request has a tool's result."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model asked for."""

    id: str
    """The id by which the result names it."""
    name: str
    """Name of the tool."""
    arguments: Json
    """JSON text as the model wrote it, or JSON, as the API has it."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered."""

    id: str
    """The id of the call that it answers."""
    content: Json
    """Its content: a text, or parts."""
    failed: bool = False
    """True if the API says that the tool failed; few have a place for that."""


def tool_calls(message: Json) -> Iterator[ToolCall]:
    """The calls in a message of the model, or in an output item of the Responses API."""
    if not isinstance(message, Mapping):
        return
    kind = message.get("type")
    if isinstance(kind, str) and kind.endswith("_call") and "role" not in message:
        # function_call, custom_tool_call, and tools of the API's own, such as computer_call
        name = message.get("name") or kind.removesuffix("_call")
        given = (message.get(key) for key in ("arguments", "input", "action"))
        arguments = next((value for value in given if value is not None), None)
        yield from _call(message.get("call_id"), name, arguments)
    for call in _rows(message.get("tool_calls")):
        kind = call.get("type") or "function"
        body = call.get(kind) if isinstance(kind, str) else None
        if isinstance(body, Mapping):
            yield from _call(
                call.get("id"), body.get("name"), body.get("arguments", body.get("input"))
            )
    for part in _rows(message.get("content")):
        if part.get("type") == "tool_use":
            yield from _call(part.get("id"), part.get("name"), part.get("input"))
        elif isinstance(use := part.get("toolUse"), Mapping):
            yield from _call(use.get("toolUseId"), use.get("name"), use.get("input"))


def tool_results(message: Json) -> Iterator[ToolResult]:
    """The results in a message of a request, or in an input item of the Responses API."""
    if not isinstance(message, Mapping):
        return
    kind = message.get("type")
    if isinstance(kind, str) and kind.endswith("_output"):
        yield from _result(message.get("call_id"), message.get("output"), False)
    elif message.get("role") == "tool" and "tool_call_id" in message:
        yield from _result(message["tool_call_id"], message.get("content"), _has_failed(message))
    for part in _rows(message.get("content")):
        if part.get("type") == "tool_result":
            yield from _result(part.get("tool_use_id"), part.get("content"), _has_failed(part))
        elif isinstance(result := part.get("toolResult"), Mapping):
            failed = result.get("status") == "error"
            yield from _result(result.get("toolUseId"), result.get("content"), failed)


def _call(id_: Json, name: Json, arguments: Json) -> Iterator[ToolCall]:
    if isinstance(id_, str) and id_ and isinstance(name, str) and name:
        yield ToolCall(id_, name, arguments)


def _result(id_: Json, content: Json, failed: bool) -> Iterator[ToolResult]:
    if isinstance(id_, str) and id_:
        yield ToolResult(id_, visible_content(content), failed)


def _has_failed(message: Mapping[str, Json]) -> bool:
    return message.get("is_error") is True


def _rows(value: Json) -> Iterator[Mapping[str, Json]]:
    return (row for row in (value if isinstance(value, list) else ()) if isinstance(row, Mapping))
