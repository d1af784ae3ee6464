"""OpenAI's Responses API: items are asked with, items are sampled; the server may keep them.

A stream has an event for every change of an item, and its last event holds the whole response. A
request may continue an earlier response by id, and a response may be made in the background: then
the reply has only a status, and the content comes to whoever retrieves it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from otel_rollout.wire.api import TRUNCATED, ModelApi
from otel_rollout.wire.json import Choice, Chunk, Json, Reply, member_of
from otel_rollout.wire.merging import GrowingParts, add_text, finish
from otel_rollout.wire.message import (
    Shapes,
    content_parts,
    media_reader,
    reasoning_block,
    text_of,
    text_part,
)
from otel_rollout.wire.parts import Media, Members, Part, ToolCall, ToolResult

_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")

_FINAL = ("completed", "incomplete", "failed", "cancelled")

_STATUSES = {
    "queued": "abandoned",
    "in_progress": "abandoned",
    "cancelled": "cancelled",
    "failed": "error",
}
"""`Completion.status` of a response with this `status`; `complete` for any other."""

_PARTS = {"content": "content_index", "summary": "summary_index"}
"""Members of an item that are lists of parts, and the member of an event that is an index there."""
_DELTAS = {
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "reasoning_summary_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
    "mcp_call_arguments": "arguments",
    "code_interpreter_call_code": "code",
}
"""The member that the deltas of a kind of event are pieces of."""

_NAMED = ("type", "call_id", "name", "namespace")
_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "function_call": (*_NAMED, "arguments"),
    "custom_tool_call": (*_NAMED, "input"),
    **dict.fromkeys(("local_shell_call", "shell_call"), (*_NAMED, "action")),
    "apply_patch_call": (*_NAMED, "operation"),
    "computer_call": (*_NAMED, "action", "actions", "pending_safety_checks"),
    "web_search_call": ("type", "action", "results"),
    "file_search_call": ("type", "queries", "results"),
    "code_interpreter_call": ("type", "code", "container_id", "outputs"),
    "mcp_call": (*_NAMED, "arguments", "server_label", "output", "error"),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), (*_NAMED, "output")),
    **dict.fromkeys(("local_shell_call_output", "shell_call_output"), (*_NAMED, "output")),
}
"""Members that a template can show, by the type of the item; its id and status are none."""

_retrieval = re.compile(r"(?:.*/)?responses/([^/?]+)(?:/cancel)?(?:\?.*)?$").match


def _reasoning(item: Members) -> Part:
    return reasoning_block(item, [item.get("summary"), item.get("content")])


def _call(item: Members) -> Part:
    """function_call, custom_tool_call, and tools of the API's own, such as computer_call."""
    name = item.get("name") or str(item["type"]).removesuffix("_call")
    given = (item.get(key) for key in ("arguments", "input", "action"))
    arguments = next((value for value in given if value is not None), None)
    others = _shown(item, "name", "arguments")
    return ToolCall(text_of(item.get("call_id")), str(name), arguments, others)


def _output(item: Members) -> Part:
    others = _shown(item, "output")
    content = item.get("output")
    return ToolResult(text_of(item.get("call_id")), content, content_parts(content), others=others)


def _shown(item: Members, *without: str) -> dict[str, Json]:
    """What else of an item a template can show: clients add members of their own when they replay.

    Of a type that is not known, all that it has.
    """
    known = _MEMBERS.get(str(item.get("type")), item)
    return {key: value for key, value in item.items() if key in known and key not in without}


def _made_image(item: Members) -> Part:
    data = item.get("result")
    is_data = isinstance(data, str)
    return Media(
        "image_generation_call", item, data=data if is_data else None, media_type="image/png"
    )


_SHAPES = Shapes(
    types={
        "reasoning": _reasoning,
        "input_text": text_part,
        "output_text": text_part,
        "input_image": media_reader("input_image", "image_url"),
        "input_file": media_reader("input_file", "file_url", "file_data"),
        "input_audio": media_reader("input_audio"),
        "input_video": media_reader("input_video", "video_url"),
        "computer_screenshot": media_reader("computer_screenshot", "image_url"),
        "image_generation_call": _made_image,
        "_call": _call,
        "_output": _output,
    },
    result_marks=(b'_output"',),
    references=("item_reference",),
)


class Responses(ModelApi):
    """`/responses`, as OpenAI and vLLM serve it."""

    provider = "openai"
    paths = ("/responses",)
    conversation = "input"
    text = "input"  # its `prompt` is the name of a template
    shapes = _SHAPES
    instructions = ("instructions",)
    context = ("tools", "instructions")
    finish_names = ("status",)
    choices_name = None

    def is_own(self, chunk: Chunk) -> bool:
        return isinstance(chunk.get("response"), dict) or self.ends(chunk)

    def ends(self, chunk: Chunk) -> bool:
        return chunk.get("type") in _LAST_EVENTS

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        last = next(filter(self.ends, reversed(chunks)), None)
        return _merge_items(chunks) if last is None else last.get("response")

    def sampled_items(self, reply: Reply) -> tuple[Json, ...] | None:
        output = reply.get("output")
        return tuple(output) if isinstance(output, list) else None

    def is_truncated(self, choice: Choice, reply: Reply) -> bool:
        return member_of(reply, "incomplete_details", "reason") in TRUNCATED

    def is_stopped(self, choice: Choice, reply: Reply) -> bool:
        # An unfinished or failed response has a status of its own.
        details = reply.get("incomplete_details")
        is_incomplete = choice.get("status") == "incomplete" or isinstance(details, Mapping)
        return is_incomplete and not self.is_truncated(choice, reply)

    def is_aborted(self, choice: Choice) -> bool:
        return super().is_aborted({"status": member_of(choice, "incomplete_details", "reason")})

    def outcome(self, reply: Json) -> str | None:
        return _STATUSES.get(str(member_of(reply, "status")), "complete")

    def retrieved_id(self, path: str) -> str | None:
        found = _retrieval(path) if "responses/" in path else None
        return found[1] if found else None

    def is_unfinished(self, reply: Reply) -> bool:
        return reply.get("status") not in _FINAL


def _merge_items(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """The response as far as it came, of a stream that did not end."""
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if isinstance(chunk.get("response"), dict):
            response = chunk["response"]
        index = chunk.get("output_index")
        if not isinstance(index, int):
            continue
        if isinstance(chunk.get("item"), dict):
            items[index] = chunk["item"]
        elif index in items:
            _merge_part(items[index], chunk)
    output = [finish(items[index]) for index in sorted(items)]
    return {**response, "output": output or response.get("output")}


def _merge_part(item: dict[str, Any], event: Chunk) -> None:
    """Add an event to the part of an output item that it is about, or to the item itself."""
    target = item
    for key, position in _PARTS.items():
        place = event.get(position)
        if isinstance(place, int):
            parts = item.get(key)
            if not isinstance(parts, GrowingParts):
                parts = item[key] = GrowingParts(parts if isinstance(parts, list) else ())
            if isinstance(event.get("part"), dict):
                parts[place : place + 1] = [event["part"]]
            elif place >= len(parts):
                parts.append({})
            target = parts[min(place, len(parts) - 1)]
    kind, _, verb = str(event.get("type")).removeprefix("response.").rpartition(".")
    name, text = _DELTAS.get(kind), event.get("delta")
    if name is not None and verb == "delta" and isinstance(text, str):
        add_text(target, name, text)
