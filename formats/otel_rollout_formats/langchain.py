"""LangChain's messages and generations, which several products keep as it serialises them."""

from __future__ import annotations

from collections.abc import Mapping

from otel_rollout.rebuild.dialects import (
    Fact,
    ForeignCall,
    chat_tool_call,
    objects,
    without_none,
)
from otel_rollout.wire import Json, dumps
from otel_rollout_formats.products import an_object, usage_by_kind

_ROLES = {
    "human": "user",
    "HumanMessage": "user",
    "HumanMessageChunk": "user",
    "ai": "assistant",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "system": "system",
    "SystemMessage": "system",
    "tool": "tool",
    "ToolMessage": "tool",
    "function": "function",
    "FunctionMessage": "function",
}
"""Roles of chat by LangChain's types and classes."""
_NO_PARAMETERS = ("_type", "model_name", "messages", "ls_structured_output_format")
LOST = frozenset(
    (
        Fact.TOKEN_IDS,
        Fact.EXTRA_BODY,
        Fact.PARAMETERS,
        Fact.ARGUMENTS,
        Fact.REQUEST_REASONING,
        Fact.REPLY_REASONING,
        Fact.RESPONSE_FIELDS,
    )
)
"""What LangChain's messages do not keep of the client's."""


def holds(inputs: Json, outputs: Json) -> bool:
    """True if a call's input or output has LangChain's form."""
    asked = inputs.get("messages") if isinstance(inputs, dict) else None
    return (
        (isinstance(asked, list) and bool(asked) and isinstance(asked[0], list))
        or (isinstance(outputs, dict) and "generations" in outputs)
        or (isinstance(inputs, dict) and isinstance(inputs.get("prompts"), list))
    )


def read(inputs: Json, outputs: Json, parameters: Mapping[str, Json], call: ForeignCall) -> None:
    """Read a call of a chat model, or of one that continues texts."""
    call.also_loses |= LOST
    call.request = {k: v for k, v in parameters.items() if k not in _NO_PARAMETERS}
    call.stream = call.request.get("stream") is True
    inputs, outputs = an_object(inputs), an_object(outputs)
    asked = inputs.get("messages")
    if asked is None and isinstance(prompts := inputs.get("prompts"), list):
        call.path = "/completions"
        call.request["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    else:
        batch = asked if isinstance(asked, list) else []
        if len(batch) > 1 and all(isinstance(each, list) for each in batch):
            call.miss(f"it is a batch of {len(batch)} conversations", prompt=True)
        rows = batch[0] if batch and isinstance(batch[0], list) else batch
        call.request["messages"] = [message(row, call, prompt=True) for row in objects(rows)]
        if len(call.request["messages"]) < len(rows):
            call.miss("a message of its request is no object", prompt=True)
    _read_reply(outputs, call)


def _read_reply(outputs: dict[str, Json], call: ForeignCall) -> None:
    batch = outputs.get("generations")
    rows = objects(batch[0] if isinstance(batch, list) and batch else None)
    made = [(row, _parts(row.get("message"))) for row in rows]
    about = an_object(outputs.get("llm_output"))
    for _, first in made[:1]:
        about = {**an_object(first.get("response_metadata")), **without_none(about)}
        about.setdefault("usage", an_object(first.get("usage_metadata")) or None)
    choices: list[dict[str, Json]] = []
    for index, (row, _) in enumerate(made):
        info = an_object(row.get("generation_info"))
        choice: dict[str, Json] = {"index": index, "finish_reason": info.get("finish_reason")}
        if info.get("logprobs"):
            choice["logprobs"] = info["logprobs"]
        if call.path == "/completions":
            choices.append({**choice, "text": row.get("text")})
        else:
            choices.append({**choice, "message": message(row.get("message"), call, prompt=False)})
    if choices:
        counted = an_object(about.get("token_usage")) or usage_by_kind(
            an_object(about.get("usage")), call
        )
        call.reply = without_none(
            {
                "id": about.get("id"),
                "model": about.get("model_name") or about.get("model"),
                "system_fingerprint": about.get("system_fingerprint"),
                "object": "chat.completion",
                "choices": choices,
                "usage": counted,
            }
        )


def message(row: Json, call: ForeignCall, *, prompt: bool) -> dict[str, Json]:
    """The chat message of one of LangChain, as a constructor, or as a plain object."""
    fields, name = _parts(row), None
    if isinstance(row, dict) and isinstance(row.get("id"), list) and row["id"]:
        name = row["id"][-1]
    kind = fields.get("type") or name
    role = _ROLES.get(str(kind)) or fields.get("role")
    more = an_object(fields.get("additional_kwargs"))
    found: dict[str, Json] = {"role": role, "content": fields.get("content")}
    if isinstance(content := fields.get("content"), list):
        found["content"] = _content(content, call)
    if role == "assistant" and not found["content"]:
        found["content"] = None
    calls = [
        chat_tool_call(
            made.get("id"), made.get("name"), _text(made.get("args")), call, prompt=prompt
        )
        for made in [*objects(fields.get("tool_calls")), *objects(fields.get("invalid_tool_calls"))]
    ]
    if made := objects(more.get("tool_calls")) or calls:
        found["tool_calls"] = made
    named = {key: more.get(key) for key in ("function_call", "refusal", "reasoning_content")}
    named |= {key: fields.get(key) for key in ("name", "tool_call_id")}
    return {**found, **without_none(named)}


def _parts(row: Json) -> dict[str, Json]:
    """The fields of a message, wherever its form has them."""
    if not isinstance(row, dict):
        return {}
    inner = row.get("kwargs") or row.get("data")
    return {"type": row.get("type"), **inner} if isinstance(inner, dict) else row


def _content(parts: list[Json], call: ForeignCall) -> list[Json]:
    """The parts, without calls of tools, which the message has beside them."""
    kept = [p for p in parts if not (isinstance(p, dict) and p.get("type") in _CALLS)]
    if not all(isinstance(p, str) or (isinstance(p, dict) and p.get("type") in p) for p in kept):
        call.also_loses |= {Fact.OTHER_PARTS}
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in kept]


_CALLS = ("tool_use", "tool_call", "function_call", "input_json_delta")


def _text(arguments: Json) -> Json:
    return arguments if isinstance(arguments, str | None) else dumps(arguments)
