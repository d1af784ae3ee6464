"""Google's `generateContent`: contents with parts are asked with, candidates are sampled.

The model and the method are in the path, at the Gemini API's address and at Vertex AI's. A stream
is a list of replies, each with the next parts of its candidates; it comes as events (`alt=sse`), or
as one JSON array.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from otel_rollout.wire.api import Events, Framing, ModelApi, Sampled
from otel_rollout.wire.choices import indexed_choices
from otel_rollout.wire.columns import LOGPROBS_RESULT, columns_of_result, partly_read
from otel_rollout.wire.conversation import MessagePath
from otel_rollout.wire.json import (
    Bounded,
    Choice,
    Chunk,
    Json,
    JsonText,
    Message,
    Params,
    Reply,
    list_of,
    member_of,
    struct_of,
)
from otel_rollout.wire.merging import Element, Elements, Merging, finish
from otel_rollout.wire.message import Shapes, content_parts, part_of, text_of
from otel_rollout.wire.parts import (
    Media,
    Members,
    Other,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)

_STREAMED = ":streamGenerateContent"
_GROWING = ("content", "logprobsResult")
"""Members of a candidate with lists, of which each chunk of a stream has its own part."""

_NO_REASON = "FINISH_REASON_UNSPECIFIED"
"""Says that a candidate has not ended, as the lack of a reason does."""
_UNSEEN = ("thoughtSignature", "partMetadata", "videoMetadata")
"""Members of a part that are no content."""
_camel = re.compile(r"_([a-z])").sub


def _camel_case(members: Members) -> dict[str, Any]:
    """The members, with their names in camel case, but those that are null."""
    return {
        _camel(lambda match: match[1].upper(), name): value
        for name, value in members.items()
        if value is not None
    }


def _is_thought(part: Json) -> bool:
    return isinstance(part, Mapping) and part.get("thought") is True


def _joined(parts: Iterable[Json]) -> list[Json]:
    """The parts with texts that follow each other in one; a text and a thought are two."""
    joined: list[Json] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            isinstance(part, dict)
            and isinstance(last, dict)
            and isinstance(part.get("text"), str)
            and isinstance(last.get("text"), str)
            and _is_thought(part) == _is_thought(last)
        ):
            joined[-1] = {**last, **part, "text": last["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _parts(parts: Json) -> Iterator[Part]:
    """The parts of a content; members may be written in camel case or in snake case."""
    for part in _joined(parts if isinstance(parts, list) else [parts]):
        if not isinstance(part, Mapping):
            yield part_of(part)
            continue
        present = _camel_case(part)
        signature = present.get("thoughtSignature")
        for name in _UNSEEN:
            present.pop(name, None)
        if present.get("thought") is False:
            del present["thought"]
        if present and (present.keys() != {"text", "thought"} or present["text"]):
            yield part_of(present)
        if signature:  # of reasoning that is hidden
            yield Reasoning({"thoughtSignature": signature}, None)


def _thought(part: Members) -> Part | None:
    text = text_of(part.get("text"))
    if part["thought"] is True:
        return Reasoning({"text": text or "", "thought": True}, text)
    return None if text is None else Text(text)


_NAMES = (
    *("functionCall", "functionResponse", "inlineData", "fileData"),
    *("executableCode", "codeExecutionResult"),
)


def _part(part: Members) -> Part | None:
    """A part that is no text."""
    name = next(name for name in _NAMES if name in part)
    if not isinstance(part[name], Mapping):
        return None
    value = _camel_case(part[name])
    present = {**part, name: value}
    named = str(value.get("name") or "")
    match name:
        case "functionCall":  # ids are added and dropped by clients
            return ToolCall(None, named, value.get("args") or {}, name)
        case "functionResponse":
            answer = value.get("response") or {}
            parts = [*content_parts(answer), *_parts(value.get("parts") or [])]
            return ToolResult(None, answer, parts, name=named, others=name)
        case "inlineData" | "fileData":
            url, data, kind = (value.get(key) for key in ("fileUri", "data", "mimeType"))
            return Media(name, present, text_of(url), text_of(data), kind)
    return Other("code", present, str(value.get("code", value.get("output"))))


_CANDIDATE = struct_of(
    "Candidate",
    {
        **dict.fromkeys(("index", "content", "finishReason", "finishMessage"), Any),
        **dict.fromkeys(("safetyRatings", "citationMetadata", "tokenCount"), Any),
        **dict.fromkeys(("groundingMetadata", "urlContextMetadata", "avgLogprobs"), Any),
        "logprobsResult": LOGPROBS_RESULT,
    },
)
_REPLY = struct_of(
    "Reply",
    {
        **dict.fromkeys(("usageMetadata", "modelVersion", "responseId", "createTime"), Any),
        **dict.fromkeys(("promptFeedback", "modelStatus"), Any),
        "candidates": list_of(_CANDIDATE),
    },
)


def _taken(candidate: Any) -> dict[str, Any]:
    """The arrays of a candidate by the name of their member, which is taken out of it."""
    result, candidate.logprobsResult = candidate.logprobsResult, UNSET
    return {} if result is UNSET else {"logprobsResult": columns_of_result(result)}


_SHAPES = Shapes(
    blocks={**dict.fromkeys(_NAMES, _part), "thought": _thought},
    members={"parts": _parts},
    pieces=("parts",),
)


class GenerateContent(ModelApi):
    """`models/{model}:generateContent` and `:streamGenerateContent`."""

    provider = "gcp.gemini"
    model_path = re.compile(
        r"(?:/publishers/[^/]+)?/[^/]+/(?P<model>[^/:]+):(?:g|streamG)enerateContent$"
    )
    conversation = "contents"
    text = "contents"
    shapes = _SHAPES
    instructions = ("systemInstruction", "system_instruction")
    context = ("tools", *instructions, "cachedContent")
    finish_names = ("finishReason",)
    stop_names = ()
    settings = ("generationConfig", "generation_config")
    choices_name = "candidateCount"
    choices_member = "candidates"
    id_name = "responseId"
    model_name = "modelVersion"
    usage_name = "usageMetadata"
    delta_name = "text"
    usual = Bounded(_REPLY, is_read=False)

    def reply_of(self, found: Any, whole: JsonText) -> Json:
        return partly_read(found, whole, "candidates", _taken)

    def framing(self, path: str) -> Framing | None:
        return "array" if path.endswith(_STREAMED) else None

    def provider_of(self, path: str) -> str | None:
        is_vertex = "/publishers/" in path or "/endpoints/" in path
        return "gcp.vertex_ai" if is_vertex else self.provider

    def is_own(self, chunk: Chunk) -> bool:
        return isinstance(chunk.get("candidates"), list) or "promptFeedback" in chunk

    def merge(self, chunks: Sequence[Chunk], merging: Merging) -> Json:
        body: dict[str, Any] = {}
        candidates = Elements()
        for chunk in chunks:
            merging.same("id", chunk.get("responseId"))
            merging.same("model", chunk.get("modelVersion"))
            merging.members(body, {k: v for k, v in chunk.items() if k != "candidates"})
            for found, piece in candidates.each(chunk.get("candidates")):
                _merge_candidate(found, piece, merging)
        if len(candidates):
            merging.check_choices(candidates)
            body["candidates"] = [_finished(each) for each in candidates.in_order()]
        return body

    def is_whole(self, events: Events, body: Json, merging: Merging) -> bool | None:
        if body is None or events.error is not None:
            return False
        ended = sum(self.finish_reason(one) is not None for _, one in _candidates(body))
        if ended < max(1, merging.asked):
            return _blocked(body) is not None
        return None if merging.proves_no_end else True

    def finish_reason(self, choice: Choice) -> str | None:
        reason = super().finish_reason(choice)
        return None if reason == _NO_REASON else reason

    def sampled(
        self, params: Params, prompt: MessagePath | None, reply: Reply
    ) -> Iterator[Sampled]:
        for index, candidate in _candidates(reply):
            content = candidate.get("content")
            items: tuple[Json, ...] = ()
            if isinstance(content, dict) and isinstance(content.get("parts"), list):
                items = ({"role": "model", **content},) if content["parts"] else ()
            yield Sampled(index, candidate, items, self.asked(params, prompt))

    def empty_because(self, reply: Reply) -> str | None:
        blocked = _blocked(reply)
        if blocked is not None:
            return f"the prompt was blocked: {blocked}"
        reasons = [one.get("finishReason") for _, one in _candidates(reply)]
        return f"finish reason {', '.join(map(str, reasons))}" if any(reasons) else None

    def usage(self, reply: Reply) -> dict[str, Json] | None:
        counts = reply.get("usageMetadata")
        if not isinstance(counts, Mapping):
            return None
        sampled = [counts.get("candidatesTokenCount"), counts.get("thoughtsTokenCount")]
        known = [count for count in sampled if isinstance(count, int)]
        return {
            "prompt_tokens": counts.get("promptTokenCount"),
            "completion_tokens": sum(known) if known else None,
            "total_tokens": counts.get("totalTokenCount"),
        }

    def tool_name(self, tool: Message) -> str | None:
        declared = _camel_case(tool).get("functionDeclarations")
        if not isinstance(declared, list):
            return None
        return ", ".join(str(one.get("name")) for one in declared if isinstance(one, Mapping))


def _candidates(reply: Reply) -> Iterator[tuple[int, Choice]]:
    return indexed_choices(reply, "candidates")


def _merge_candidate(found: Element, piece: Chunk, merging: Merging) -> None:
    reason = piece.get("finishReason")
    parts = member_of(piece, "content", "parts") or ()
    adds = found.ends > 0 and any(
        set(part) - {"text", "thoughtSignature"} or part.get("text") for part in parts
    )
    if adds:
        found["finishReason"] = None
    is_ended = merging.ended(found, None if reason == _NO_REASON else reason, adds=adds)
    rest = piece if is_ended else {k: v for k, v in piece.items() if k != "finishReason"}
    merging.members(found, rest, _GROWING)


def _blocked(reply: Reply) -> Json:
    """Why the server did not take the prompt; None if it did."""
    return member_of(reply, "promptFeedback", "blockReason")


def _finished(candidate: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = finish(candidate)
    content = found.get("content")
    if isinstance(content, dict) and isinstance(content.get("parts"), list):
        content["parts"] = _joined(content["parts"])
    return found
