"""OpenAI's Responses API: items are asked with, items are sampled; the server may keep them.

A stream has an event for every change of an item, and its last event holds the whole response. A
request may continue an earlier response by id, and a response may be made in the background: then
the reply has only a status, and the content comes to whoever retrieves it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET

from otel_rollout.wire.api import TRUNCATED, ModelApi
from otel_rollout.wire.columns import columns_in
from otel_rollout.wire.conversation import Items
from otel_rollout.wire.json import (
    PASSED,
    Bounded,
    Choice,
    Chunk,
    Cut,
    Json,
    JsonText,
    PartlyRead,
    Reply,
    as_objects,
    dumps,
    list_of,
    loads,
    loads_bounded,
    member_of,
    struct_of,
    try_loads,
)
from otel_rollout.wire.merging import Element, Elements, GrowingParts, Merging, finish
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

_SAID = frozenset(
    (
        *("type", "role", "call_id", "name", "content", "summary"),
        *("text", "refusal", "action", "arguments", "input", "code"),
    )
)
"""Members of an item, and of its parts, that an agent goes on with."""
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

_Scalar = str | int | float | bool | None
_ITEM = dict[str, _Scalar | dict[str, Any] | list[_Scalar | list[Any] | dict[str, Cut]]]
"""An item, of whose parts each member is cut out."""
_REPLY = struct_of(
    "Reply",
    {
        **dict.fromkeys(("id", "object", "created_at", "completed_at", "status"), Any),
        **dict.fromkeys(("background", "billing", "error", "incomplete_details"), Any),
        **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "model"), Any),
        **dict.fromkeys(("parallel_tool_calls", "previous_response_id", "prompt"), Any),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "reasoning"), Any),
        **dict.fromkeys(("safety_identifier", "service_tier", "store", "temperature"), Any),
        **dict.fromkeys(("text", "tool_choice", "tools", "top_logprobs", "top_p"), Any),
        **dict.fromkeys(("truncation", "usage", "user", "metadata", "conversation"), Any),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "content_filters"), Any),
        **dict.fromkeys(("input_messages", "output_messages", "kv_transfer_params"), Any),
        "output": list_of(_ITEM),
    },
)
_TEXT = b'"output_text"'
"""The type of the parts of which log-probabilities are cut out: no model sees these."""
_NULL = Cut(b"null")
_ITEMS = "items()"
"""What is known of a reply that is partly read: its items."""
_has_logprobs = re.compile(r'"logprobs"\s*:\s*\[\s*\{').search

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
    usual = Bounded(_REPLY, is_read=False)

    def read(self, text: str, *, tokens: bool = False) -> Json:
        return super().read(text, tokens=tokens) if _has_logprobs(text) else loads_bounded(text)

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        if not found.output:  # it may be UNSET
            return None
        texts, cuts = list[JsonText](), list[Cut]()
        for item in found.output:
            found_cuts = _read_but_logprobs(item)
            if found_cuts is None:
                return None
            cuts += found_cuts.values()
            texts.append(_Item(item, found_cuts) if found_cuts else JsonText(None, item))
        known = {"output": partial(columns_in, cuts), _ITEMS: Items(texts)}
        found.output = UNSET
        return PartlyRead({**as_objects(found), "output": PASSED}, whole, known=known)

    def is_own(self, chunk: Chunk) -> bool:
        return isinstance(chunk.get("response"), dict) or self.ends(chunk)

    def ends(self, chunk: Chunk) -> bool:
        return chunk.get("type") in _LAST_EVENTS

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        items = Elements()
        response: dict[str, Any] = {}
        for chunk in chunks:
            if isinstance(chunk.get("response"), dict):
                response = chunk["response"]
                merging.same("id", response.get("id"))
                merging.same("model", response.get("model"))
            else:
                _merge_event(items, chunk, merging)
        came = [finish(item) for item in items.in_order()]
        listed = response.get("output")
        if came and isinstance(listed, list) and listed and any(map(self.ends, chunks)):
            came = _agreed(came, listed, merging)
        if not all(item.get("type") for item in came):
            merging.contradicts("a piece is of an output item that nothing began")
        return {**response, "output": came or listed}

    def sampled_items(self, reply: Reply) -> Sequence[Json] | None:
        if isinstance(reply, PartlyRead):
            items: Items = reply.known[_ITEMS]
            return items
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


class _Item(JsonText):
    """An item of which the log-probabilities are cut out, until somebody asks for it."""

    __slots__ = ("_cuts", "_seen")

    def __init__(self, seen: dict[str, Json], cuts: dict[int, Cut]) -> None:
        """cuts: the log-probabilities by the places of their parts."""
        super().__init__(None, UNSET)
        self._seen, self._cuts = seen, cuts

    @property
    def value(self) -> Json:
        """The item as it was sent, one object however often it is asked for."""
        if self._value is UNSET:
            parts = [*self._seen["content"]]
            for place, cut in self._cuts.items():
                parts[place] = {**parts[place], "logprobs": loads(bytes(cut))}
            self._value = {**self._seen, "content": parts}
        return self._value

    @property
    def seen(self) -> Json:
        """The item with null in the place of log-probabilities."""
        return self._seen


def _read_but_logprobs(item: dict[str, Json]) -> dict[int, Cut] | None:
    """Read the parts of an `_ITEM`; the log-probabilities stay cut out: they are returned by the
    places of their parts.

    None: a part has some that a model may see, so that they have to be read.
    """
    cuts: dict[int, Cut] = {}
    for name, parts in item.items():
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            if not isinstance(part, dict):
                continue
            if name == "content" and "logprobs" in part:
                kind = bytes(part.get("type", _NULL))
                if item.get("role") != "assistant" or kind != _TEXT:
                    return None
                cuts[place], part["logprobs"] = part["logprobs"], _NULL
            parts[place] = {key: loads(bytes(cut)) for key, cut in part.items()}
    return cuts


def _merge_event(items: Elements, event: Chunk, merging: Merging) -> None:
    """Add an event to the output item that it is about."""
    kind, _, verb = str(event.get("type")).removeprefix("response.").rpartition(".")
    item, index = event.get("item"), event.get("output_index")
    if not isinstance(item, dict):
        found = items.find(index, event.get("item_id"))
        if found is None and kind in _DELTAS:
            found = items.open(index, event.get("item_id"))
        if found is not None and (kind in _DELTAS or kind.endswith("_part")):
            _merge_part(found, event, kind, verb, merging)
        return
    found = items.find(index, item.get("id")) if verb == "done" else None
    if found is None or found.ends:
        found = items.open(index, item.get("id"))
    found.ends += verb == "done"
    whole = _either(finish(found), item, merging)
    found.clear()
    found.update(whole)


def _merge_part(item: Element, event: Chunk, kind: str, verb: str, merging: Merging) -> None:
    """Add an event to the part of an output item that it is about, or to the item itself."""
    target: dict[str, Any] = item
    for key, position in _PARTS.items():
        place = event.get(position)
        if isinstance(place, int):
            parts = item.get(key)
            if not isinstance(parts, GrowingParts):
                parts = item[key] = GrowingParts(parts if isinstance(parts, list) else ())
            if place >= len(parts):
                parts.append({})
            place = min(place, len(parts) - 1)
            if isinstance(event.get("part"), dict):
                parts[place] = _either(finish(parts[place]), event["part"], merging)
            target = parts[place]
    name = _DELTAS.get(kind)
    if name is not None and verb == "delta" and isinstance(event.get("delta"), str):
        merging.text(target, name, event["delta"])
    elif name is not None and verb == "done" and event.get(name):
        target[name] = _either(finish(target.get(name)), event.get(name), merging)


def _same_json(one: Json, other: Json) -> bool:
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    value = try_loads(one)
    return value is not None and value == try_loads(other)


_EMPTY: tuple[Json, ...] = (None, "", [], {})


def _either(one: Json, other: Json, merging: Merging) -> Json:
    """What a stream says twice: what is empty in one is as in the other, which counts.

    Where they contradict each other, that is noted, and what came first counts.
    """
    if other in _EMPTY or one == other:
        return one
    if one in _EMPTY or _same_json(one, other):
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        said = {name: one[name] for name in one if name in _SAID and one[name] not in _EMPTY}
        return other | {k: _either(v, other.get(k), merging) for k, v in said.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_either(*pair, merging) for pair in zip(one, other, strict=True)]
    merging.contradicts(
        f"the stream says first {str(one)!r:.60} and then {str(other)!r:.60} of the same"
    )
    return one


def _agreed(came: list[Json], listed: list[Json], merging: Merging) -> list[Json]:
    """The items of the last event, with what they lack of those that came before."""
    found = [*listed]
    places = [*range(len(found))]
    for item in came:
        for place in places:
            trial = Merging()
            both = _either(item, found[place], trial)
            if not trial.contradictions:
                places.remove(place)
                found[place] = both
                break
        else:
            merging.contradicts(
                f"an item that came, {dumps(item)!r:.100}, is not in the response at the end"
            )
            return came
    return found
