"""Google's `generateContent`: contents with parts are asked with, candidates are sampled.

The model and the method are in the path, at the Gemini API's address and at Vertex AI's. A stream
is a list of replies, each with the next parts of its candidates; it comes as events (`alt=sse`), or
as one JSON array.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from otel_rollout.wire.api import Events, Framing, ModelApi, Sampled
from otel_rollout.wire.contents import camel_case, joined_parts
from otel_rollout.wire.json import Choice, Chunk, Json, Message, Params, Reply, dumps
from otel_rollout.wire.messages import MessagePath

_STREAMED = ":streamGenerateContent"
_CHAINED = ("chosenCandidates", "topCandidates")
"""Members of `logprobsResult` of which each chunk of a stream has its own tokens."""

_path = re.compile(r"((?:/publishers/[^/]+)?/[^/]+/[^/:]+):(?:g|streamG)enerateContent$").search


class GenerateContent(ModelApi):
    """`models/{model}:generateContent` and `:streamGenerateContent`."""

    provider = "gcp.gemini"
    conversation = "contents"
    text = "contents"
    context = ("tools", "systemInstruction", "system_instruction", "cachedContent")
    finish_names = ("finishReason",)
    stop_names = ()
    settings = ("generationConfig", "generation_config")
    id_name = "responseId"
    model_name = "modelVersion"
    usage_name = "usageMetadata"
    delta_name = "text"

    def path_of(self, path: str) -> str | None:
        found = _path(path)
        return found[0] if found else None

    def framing(self, path: str) -> Framing | None:
        return "array" if path.endswith(_STREAMED) else None

    def provider_of(self, path: str) -> str | None:
        is_vertex = "/publishers/" in path or "/endpoints/" in path
        return "gcp.vertex_ai" if is_vertex else self.provider

    def choices_asked(self, params: Params) -> int:
        count = self.sampling(params).get("candidateCount")
        return count if isinstance(count, int) else 1

    def request_model(self, path: str, params: Params) -> str | None:
        found = _path(path.partition("?")[0])
        return unquote(found[1].rpartition("/")[2]) if found else None

    def recognises(self, chunks: Sequence[Chunk]) -> bool:
        return any(
            isinstance(chunk.get("candidates"), list) or "promptFeedback" in chunk
            for chunk in chunks
        )

    def merge(self, chunks: Sequence[Chunk]) -> Json:
        return _merge_replies(chunks)

    def is_whole(self, events: Events, body: Json, choices: int) -> bool:
        if body is None or events.error is not None:
            return False
        ended = sum(bool(one.get("finishReason")) for _, one in _candidates(body))
        return ended >= max(1, choices) or _blocked(body) is not None

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
        said = reply.get("usageMetadata")
        if not isinstance(said, Mapping):
            return None
        sampled = [said.get("candidatesTokenCount"), said.get("thoughtsTokenCount")]
        known = [count for count in sampled if isinstance(count, int)]
        return {
            "prompt_tokens": said.get("promptTokenCount"),
            "completion_tokens": sum(known) if known else None,
            "total_tokens": said.get("totalTokenCount"),
        }

    def shown_part(self, part: Message) -> str | Message | None:
        seen = camel_case(part)
        if "type" in seen:
            return None
        for name, value in seen.items():
            if not isinstance(value, Mapping):
                continue
            if name == "functionCall":
                return f"→ {value.get('name')}({dumps(value.get('args') or {})})"
            if name == "functionResponse":
                return f"{value.get('name')}: {dumps(value.get('response'))}"
            if name in ("inlineData", "fileData"):
                return f"<{name} {camel_case(value).get('mimeType')}>"
            if name in ("executableCode", "codeExecutionResult"):
                return str(value.get("code", value.get("output")))
        return f"({seen.get('text')})" if seen.get("thought") is True else None

    def tool_name(self, tool: Message) -> str | None:
        declared = camel_case(tool).get("functionDeclarations")
        if not isinstance(declared, list):
            return None
        return ", ".join(str(one.get("name")) for one in declared if isinstance(one, Mapping))


def _candidates(reply: Reply) -> Iterator[tuple[int, Choice]]:
    """`(index, candidate)` of each; its position where the server gave no index."""
    candidates = reply.get("candidates")
    for position, one in enumerate(candidates if isinstance(candidates, list) else ()):
        if isinstance(one, Mapping):
            index = one.get("index")
            yield index if isinstance(index, int) and index >= 0 else position, one


def _blocked(reply: Reply) -> Json:
    """Why the server did not take the prompt; None if it did."""
    feedback = reply.get("promptFeedback")
    return feedback.get("blockReason") if isinstance(feedback, Mapping) else None


def _merge_replies(chunks: Sequence[Chunk]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    candidates: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key != "candidates" and (value is not None or key not in body):
                body[key] = value
        for index, candidate in _candidates(chunk):
            _merge_candidate(candidates.setdefault(index, {}), candidate)
    for candidate in candidates.values():
        content = candidate.get("content")
        if isinstance(content, dict) and isinstance(content.get("parts"), list):
            content["parts"] = joined_parts(content["parts"])
    if candidates:
        body["candidates"] = [candidates[index] for index in sorted(candidates)]
    return body


def _merge_candidate(merged: dict[str, Any], candidate: Choice) -> None:
    for key, value in candidate.items():
        known = merged.get(key)
        if key == "content" and isinstance(value, Mapping):
            parts = [*((known or {}).get("parts") or ()), *(value.get("parts") or ())]
            merged[key] = {**(known or {}), **value}
            if parts:
                merged[key]["parts"] = parts
        elif key == "logprobsResult" and isinstance(known, Mapping) and isinstance(value, Mapping):
            chained = {
                name: [*(known.get(name) or ()), *(value.get(name) or ())] for name in _CHAINED
            }
            merged[key] = {**known, **value, **{k: v for k, v in chained.items() if v}}
        elif value is not None or key not in merged:
            merged[key] = value
