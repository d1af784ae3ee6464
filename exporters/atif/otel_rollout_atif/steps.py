"""The steps of one conversation: messages as ATIF has them."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import groupby
from typing import Any, NoReturn

from otel_rollout import Completion, History, HistoryItem
from otel_rollout.export import (
    Json,
    Media,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    counts_of,
    is_of_model,
    message_parts,
)

Call = tuple[str, int]
"""The span id of a call, and the choice."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MEDIA = {
    "image": ("jpeg", "png", "gif", "webp"),
    "audio": ("wav", "mpeg", "mp4", "aac", "ogg", "flac", "webm", "aiff"),
}
"""The types of media that ATIF has."""


def call_of(completion: Completion) -> Call:
    return completion.span_id, completion.choice_index


def steps_of(
    history: History, seen: set[Call], counted: set[str], *, prompt_token_ids: bool
) -> list[dict[str, Json]]:
    """The steps of a conversation.

    seen: the calls in earlier conversations; what is up to the last of them here was copied from
    there. Those of this one are added. counted: the calls whose usage was written.
    """
    items = history.items
    known = [
        n for n, item in enumerate(items) if item.completion and call_of(item.completion) in seen
    ]
    copied = known[-1] + 1 if known else 0
    steps = _Steps()
    first = history.completions[0] if history.completions else None
    for message in first.api.instructions_of(first.exchange.params) if first else ():
        steps.add_message(message)
    position = 0
    for _, group in groupby(items, _run):
        run = list(group)
        completion = run[0].completion
        is_copy = position < copied
        position += len(run)
        if completion is None:
            steps.add_message(run[0].message, is_copy=is_copy)
            continue
        metrics = None if is_copy else _metrics(completion, counted, prompt_token_ids)
        steps.add_reply(run, completion, metrics, is_copy=is_copy)
        seen.add(call_of(completion))
    return steps.steps


def _run(item: HistoryItem) -> object:
    """Equal for the items of one completion; those that no model sampled are alone."""
    return id(item) if item.completion is None else call_of(item.completion)


class _Steps:
    def __init__(self) -> None:
        self.steps: list[dict[str, Json]] = []
        self._call_ids = set[str]()
        """Ids of the tool calls of the last step."""

    def add_message(self, message: Json, *, is_copy: bool = False) -> None:
        """Add a message that no model sampled in this conversation."""
        parts = message_parts(message)
        if is_of_model(message):  # of another model, or words that the agent put into its mouth
            self._add_step("agent", parts, is_copied_context=True)
            return
        results = [part for part in parts if isinstance(part, ToolResult)]
        for result in results:
            self._add_result(result, is_copy)
        rest = [part for part in parts if not isinstance(part, ToolResult)]
        if rest or not results:
            role = message.get("role") if isinstance(message, Mapping) else None
            source = "system" if role in ("system", "developer") else "user"
            more = {} if role in (source, None) else {"role": role}
            self._add_step(source, rest, extra=more, is_copied_context=is_copy or None)

    def add_reply(
        self,
        items: Sequence[HistoryItem],
        completion: Completion,
        metrics: Json,
        *,
        is_copy: bool,
    ) -> None:
        """Add what a model sampled, in one step."""
        parts = [part for item in items for part in message_parts(item.message)]
        effort = completion.sampling.get("reasoning_effort")
        self._add_step(
            "agent",
            parts,
            timestamp=_time(completion.start_time_ns),
            model_name=completion.model or completion.request_model,
            reasoning_effort=effort if isinstance(effort, str) else None,
            metrics=metrics,
            llm_call_count=1,
            is_copied_context=is_copy or None,
            extra={} if is_copy else _facts(completion, any(item.trainable for item in items)),
        )

    def _add_step(self, source: str, parts: Sequence[Part], **members: Json) -> None:
        calls = [part for part in parts if isinstance(part, ToolCall) and source == "agent"]
        thoughts = [part.text for part in parts if isinstance(part, Reasoning)]
        others = [part for part in parts if part not in calls and not isinstance(part, Reasoning)]
        number = len(self.steps) + 1
        made = [_tool_call(call, f"{number}.{place}") for place, call in enumerate(calls, 1)]
        self._call_ids = {call["tool_call_id"] for call in made}
        extra = members.pop("extra", None)
        step = {
            "step_id": number,
            "source": source,
            "message": _content(others),
            "reasoning_content": "\n\n".join(thoughts) if thoughts and source == "agent" else None,
            "tool_calls": made or None,
            **members,
            "extra": {"otel_rollout": extra} if extra else None,
        }
        self.steps.append(present(step))

    def _add_result(self, result: ToolResult, is_copy: bool) -> None:
        """Add a tool's result to the step before it, which is the agent's, or to one of its own."""
        if not self.steps or self.steps[-1]["source"] != "agent":
            self._add_step("user", (), is_copied_context=is_copy or None)
        is_known = result.id in self._call_ids
        more = {"failed": result.failed or None, "name": result.name}
        more["tool_call_id"] = None if is_known else result.id
        row = {
            "source_call_id": result.id if is_known else None,
            "content": _content(result.parts),
            "extra": {"otel_rollout": kept} if (kept := present(more)) else None,
        }
        self.steps[-1].setdefault("observation", {"results": []})["results"].append(present(row))


def present(members: Mapping[str, Json]) -> dict[str, Json]:
    """The members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


def _tool_call(call: ToolCall, name: str) -> dict[str, Any]:
    arguments = _object(call.arguments)
    more: dict[str, Json] = {"has_no_id": True} if call.id is None else {}
    if arguments is None and call.text.strip():
        more["arguments"] = call.text
    return {
        "tool_call_id": call.id or name,
        "function_name": call.name,
        "arguments": arguments or {},
        **({"extra": {"otel_rollout": more}} if more else {}),
    }


def _object(arguments: Json) -> dict[str, Json] | None:
    """Arguments as a JSON object; None where they are none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _content(parts: Iterable[Part]) -> str | list[Json]:
    """The content of a message: a text where it is one, else parts."""
    made: list[dict[str, Json]] = []
    for part in parts:
        source = _source(part) if isinstance(part, Media) else None
        if source is not None:
            made.append({"type": source["media_type"].partition("/")[0], "source": source})
        else:
            text = part.text if isinstance(part, Text) else _shown(part)
            made.append({"type": "text", "text": text})
    if len(made) == 1 and made[0]["type"] == "text":
        return str(made[0]["text"])
    return list(made) or ""


def _shown(part: Part) -> str:
    """A part that ATIF has no type for, as text."""
    address = part.address if isinstance(part, Media) else None
    return f"{part.shown} {address}" if address and not address.startswith("data:") else part.shown


def _source(part: Media) -> dict[str, str] | None:
    """Type and address of an image or of sound; None for a type that ATIF does not have."""
    address = part.address
    inner = part.wire.get(part.kind) if isinstance(part.wire, Mapping) else None
    if address is None and isinstance(inner, Mapping) and isinstance(inner.get("data"), str):
        address = f"data:audio/{inner.get('format')};base64,{inner['data']}"
    if address is None:
        return None
    if address.startswith("data:"):
        media_type = address[5:].partition(",")[0].partition(";")[0]
    else:
        media_type = mimetypes.guess_type(address.partition("?")[0])[0] or ""
    kind, _, form = media_type.lower().partition("/")
    form = {"mp3": "mpeg", "jpg": "jpeg", "x-wav": "wav"}.get(form, form)
    return (
        {"media_type": f"{kind}/{form}", "path": address} if form in _MEDIA.get(kind, ()) else None
    )


def _metrics(
    completion: Completion, counted: set[str], with_prompt: bool
) -> dict[str, Json] | None:
    counts = None if completion.span_id in counted else counts_of(completion.usage or {})
    counted.add(completion.span_id)
    logprobs = completion.logprobs
    metrics = {
        "prompt_tokens": counts and counts.input,
        "completion_tokens": counts and counts.output,
        "cached_tokens": counts and counts.cached,
        "prompt_token_ids": completion.prompt_token_ids if with_prompt else None,
        "completion_token_ids": completion.token_ids,
        "logprobs": None if logprobs is None or None in logprobs else list(logprobs),
    }
    return present(metrics) or None


def _facts(completion: Completion, trainable: bool) -> dict[str, Json]:
    """What a step has no place for, of those facts that are set."""
    unknown = (completion.logprobs or []).count(None)
    versions = [version for version in completion.policy_versions if version is not None]
    facts = {
        "completion_id": completion.id,
        "choice_index": completion.choice_index or None,
        "finish_reason": completion.finish_reason,
        "trainable": trainable,
        "status": None if completion.status == "complete" else completion.status,
        "side_call": completion.side_call,
        "policy_versions": versions or None,
        "sampling": dict(completion.sampling) or None,
        "reward": None if completion.reward is None else completion.reward.to_dict(),
        "unknown_logprobs": unknown or None,
    }
    return present(facts)


def _time(time_ns: int) -> str | None:
    """A time as ISO 8601 writes it; None for one that is unknown."""
    try:
        return (
            (_EPOCH + timedelta(microseconds=time_ns // 1000)).isoformat() if time_ns > 0 else None
        )
    except OverflowError:
        return None
