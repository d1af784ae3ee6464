"""Histories of Pydantic AI (`result.all_messages_json()`): messages of parts, one list a document.

A request of the history has what is new in it; the call of a reply has all that was said before.
Instructions are those of the last request, and come after the system prompts, as OpenAI's models
get them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from otel_rollout.rebuild.dialects import KEPT_BY_NONE, Fact, ForeignCall
from otel_rollout.rebuild.documents import (
    Calls,
    Format,
    Members,
    chat_reply,
    digest,
    nanoseconds,
    sampled,
    text,
)
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps

HISTORY = "all_messages"
"""The member under which a list of messages is a document."""
_LOSES = KEPT_BY_NONE | {
    Fact.PARAMETERS,
    Fact.TOOLS,
    Fact.ARGUMENTS,
    Fact.CHOICES,
    Fact.DETAIL,
    Fact.USAGE_DETAILS,
    Fact.RESPONSE_FIELDS,
}
_REASONS = {"tool_call": "tool_calls"}
"""Finish reasons of its own, by those of chat."""


def is_history(data: Json) -> bool:
    """True if a list is the messages of a history."""
    return (
        isinstance(data, list)
        and bool(data)
        and isinstance(data[0], dict)
        and data[0].get("kind") in ("request", "response")
        and isinstance(data[0].get("parts"), list)
    )


def _read(data: Members) -> Iterator[Trajectory]:
    messages = data[HISTORY]
    runs = [text(message.get("run_id")) for message in messages]
    calls = Calls("pydantic-ai", _LOSES, next(filter(None, reversed(runs)), digest(messages)))
    earlier: list[Json] = []
    problems: list[str] = []
    instructions: str | None = None
    for message in messages:
        if message["kind"] == "request":
            instructions = text(message.get("instructions")) or instructions
            new = [_asked(part, problems) for part in message["parts"]]
            calls.follow(new)
        else:
            call = _call(message, _with(instructions, earlier), problems)
            calls.add(call, nanoseconds(message.get("timestamp")))
            new = [call.choices[0]["message"]]
        earlier = [*earlier, *new]
    yield calls.trajectory(name="pydantic-ai")


def _with(instructions: str | None, earlier: Sequence[Any]) -> list[Json]:
    """The messages with the instructions, after the system prompts that they begin with."""
    if instructions is None:
        return list(earlier)
    first = next((n for n, each in enumerate(earlier) if each["role"] != "system"), len(earlier))
    return [*earlier[:first], {"role": "system", "content": instructions}, *earlier[first:]]


def _asked(part: Members, problems: list[str]) -> Json:
    """The message of a part of a request; what cannot be known of it is a problem."""
    kind, content = part["part_kind"], part.get("content")
    if kind == "system-prompt":
        return {"role": "system", "content": content}
    if kind == "user-prompt":
        return {"role": "user", "content": _content(content, problems)}
    if kind == "tool-return":
        result = content if isinstance(content, str) else dumps(content)
        return {"role": "tool", "tool_call_id": part["tool_call_id"], "content": result}
    problems.append(f"the text of a part of kind {kind!r} was not kept")
    if part.get("tool_name"):
        return {"role": "tool", "tool_call_id": part["tool_call_id"], "content": dumps(content)}
    return {"role": "user", "content": dumps(content)}


def _content(content: Json, problems: list[str]) -> Json:
    if not isinstance(content, list):
        return content
    parts: list[Json] = []
    for item in content:
        members = {} if isinstance(item, str) else item
        kind, media = members.get("kind"), str(members.get("media_type"))
        if isinstance(item, str):
            parts.append({"type": "text", "text": item})
        elif kind == "image-url":
            parts.append({"type": "image_url", "image_url": {"url": members["url"]}})
        elif kind == "binary" and media.startswith("image/"):
            url = f"data:{media};base64,{members['data']}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            problems.append(f"a part of kind {kind!r} in a prompt is not read")
            parts.append({"type": str(kind)})
    return parts


def _call(message: Members, asked: list[Json], problems: list[str]) -> ForeignCall:
    """The call of a reply."""
    model = text(message.get("model_name"))
    call = ForeignCall("/chat/completions", {"model": model, "messages": asked})
    for problem in problems:
        call.miss(problem, prompt=True)
    choice = sampled(_sampled(message["parts"], call))
    details = message.get("provider_details")
    reason = (details if isinstance(details, dict) else {}).get("finish_reason")
    reason = reason or message.get("finish_reason")
    choice["finish_reason"] = _REASONS.get(str(reason), reason)
    counted = message.get("usage") or {}
    usage = {
        "prompt_tokens": counted.get("input_tokens"),
        "completion_tokens": counted.get("output_tokens"),
    }
    reply = chat_reply(choice, model=model, usage=usage, prompt=None)
    if response_id := text(message.get("provider_response_id")):
        reply["id"] = response_id
    if message.get("provider_name") not in (None, "openai"):
        call.also_loses |= {Fact.SHAPE}
    if message.get("state") not in (None, "complete"):
        call.miss(f"its reply is {message['state']!r}")
    call.reply = reply
    return call


def _sampled(parts: Sequence[Members], call: ForeignCall) -> dict[str, Json]:
    """The message that was sampled."""
    texts, thoughts, tools = list[str](), list[str](), list[Json]()
    for part in parts:
        kind = part["part_kind"]
        if kind == "text":
            texts.append(part["content"])
        elif kind == "thinking":
            thoughts.append(part["content"])
        elif kind == "tool-call":
            arguments = part.get("args")
            written = arguments if isinstance(arguments, str) else dumps(arguments or {})
            function = {"name": part["tool_name"], "arguments": written}
            tools.append({"id": part["tool_call_id"], "type": "function", "function": function})
        else:
            call.miss(f"a part of kind {kind!r} in its reply is not read")
    message: dict[str, Json] = {"role": "assistant", "content": "\n\n".join(texts) or None}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    return message | ({"tool_calls": tools} if tools else {})


FORMAT = Format(
    "pydantic-ai",
    lambda data: is_history(data.get(HISTORY)),
    _read,
    is_history,
    HISTORY,
)
