"""Documents of ATIF 1.0 to 1.8, whoever wrote them, as trajectories.

A step of the agent is a model call whose request is taken to be all steps before it, from the last
compaction that replaced them on. Steps that were copied for context, and those that no model made,
are in requests only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from otel_rollout.errors import SpanFormatError
from otel_rollout.rebuild.dialects import KEPT_BY_NONE, Fact, ForeignCall, objects, usage
from otel_rollout.rebuild.documents import (
    Calls,
    Format,
    Members,
    chat_reply,
    digest,
    list_of,
    nanoseconds,
    sampled,
    text,
)
from otel_rollout.trajectory import Trajectory
from otel_rollout.wire import Json, dumps

_LOSES = KEPT_BY_NONE - {Fact.LOGPROBS, Fact.TOKEN_IDS} | frozenset(
    (
        Fact.PARAMETERS,
        Fact.ARGUMENTS,
        Fact.NAMES,
        Fact.CHOICES,
        Fact.FINISH_REASON,
        Fact.RESPONSE_ID,
        Fact.RESPONSE_FIELDS,
        Fact.REQUEST,
    )
)
_PREFIX = "ATIF-v"
_OLDEST = "ATIF-v1."
_DEEPEST = 50
"""Documents inside each other."""


def _recognises(data: Members) -> bool:
    version = data.get("schema_version")
    return isinstance(version, str) and version.startswith(_PREFIX)


def _read(data: Members) -> Iterator[Trajectory]:
    return _trajectories(data, None, 0)


def _trajectories(data: Members, around: Trajectory | None, depth: int) -> Iterator[Trajectory]:
    """The trajectory of a document, then those of the documents in it."""
    if not data["schema_version"].startswith(_OLDEST):
        raise SpanFormatError(
            f"expected ATIF 1, got schema_version {data['schema_version']!r}: update otel-rollout"
        )
    own = _own(data)
    record = own.get("trajectory")
    if isinstance(record, str):
        trajectory = Trajectory.from_json(record)
        yield trajectory
    elif isinstance(own.get("history"), int) and around is not None:
        return  # a further conversation of that one, which has it
    else:
        trajectory = _foreign(data, around)
        yield trajectory
    inside = objects(data.get("subagent_trajectories"))
    if inside and depth == _DEEPEST:
        raise SpanFormatError(f"it has documents inside each other, more than {_DEEPEST}")
    for document in inside:
        yield from _trajectories(document, trajectory, depth + 1)


def _own(data: Members) -> Members:
    """What we wrote into `extra`; empty where another program wrote the document."""
    own = (data.get("extra") or {}).get("otel_rollout")
    return own if isinstance(own, dict) else {}


def _foreign(data: Members, around: Trajectory | None) -> Trajectory:
    agent = data["agent"]
    session = text(data.get("session_id"))
    content = digest(data)
    # Parts of one session share its id.
    id_ = text(data.get("trajectory_id")) or (f"{session}-{content[:8]}" if session else content)
    calls = Calls("atif", _LOSES, id_)
    messages: list[Json] = []
    for step in data["steps"]:
        if _is_boundary(step):
            messages = []
        sampled_message = _message(step)
        if _is_call(step):
            call = _call(step, agent, messages, sampled_message, calls)
            calls.add(call, nanoseconds(step.get("timestamp")))
        else:
            calls.follow([sampled_message])
        results = list(_results(step))
        calls.follow(results)
        messages = [*messages, sampled_message, *results]
    kept = {name: data.get(name) for name in ("session_id", "notes", "continued_trajectory_ref")}
    kept |= {f"agent_{name}": agent.get(name) for name in ("version", "extra")}
    kept["extra"] = data.get("extra")
    return calls.trajectory(
        name=str(agent.get("name") or ""),
        parent_id=None if around is None else around.id,
        metrics=_numbers(data.get("final_metrics")),
        metadata={name: value for name, value in kept.items() if value is not None},
    )


def _is_boundary(step: Members) -> bool:
    managed = (step.get("extra") or {}).get("context_management")
    return isinstance(managed, dict) and managed.get("boundary") == "replace"


def _is_call(step: Members) -> bool:
    is_model = step["source"] == "agent" and step.get("llm_call_count") != 0
    return is_model and step.get("is_copied_context") is not True


def _message(step: Members) -> dict[str, Json]:
    """The message of a step, as chat has it."""
    content = _content(step["message"])
    if step["source"] != "agent":
        return {"role": "system" if step["source"] == "system" else "user", "content": content}
    tool_calls = [
        {
            "id": call["tool_call_id"],
            "type": "function",
            "function": {"name": call["function_name"], "arguments": dumps(call["arguments"])},
        }
        for call in step.get("tool_calls") or ()
    ]
    sampled_message: dict[str, Json] = {"role": "assistant", "content": content}
    if step.get("reasoning_content") is not None:
        sampled_message["reasoning_content"] = step["reasoning_content"]
    if tool_calls:
        sampled_message |= {"content": content or None, "tool_calls": tool_calls}
    return sampled_message


def _results(step: Members) -> Iterator[dict[str, Json]]:
    """What was observed after a step; a result of no tool call is a message to the agent."""
    for result in (step.get("observation") or {}).get("results") or ():
        call_id, content = result.get("source_call_id"), _content(result.get("content"))
        if call_id is not None:
            yield {"role": "tool", "tool_call_id": call_id, "content": content or ""}
        elif content is not None:
            yield {"role": "user", "content": content}


def _content(content: Json) -> Json:
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(part: Any) -> Json:
    kind = part["type"]
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": part["source"]["path"]}}


def _call(
    step: Members, agent: Members, messages: list[Json], sampled_message: Json, calls: Calls
) -> ForeignCall:
    metrics = step.get("metrics") or {}
    model = text(step.get("model_name")) or text(agent.get("model_name"))
    request: dict[str, Json] = {"model": model} if model else {}
    call = ForeignCall("/chat/completions", {**request, "messages": messages})
    if tools := agent.get("tool_definitions"):
        call.request["tools"] = tools
    else:
        call.also_loses |= {Fact.TOOLS}
    ids = list_of(metrics.get("completion_token_ids"), int)
    logprobs = list_of(metrics.get("logprobs"), int, float)
    prompt_ids = list_of(metrics.get("prompt_token_ids"), int)
    prompt = calls.prompt_path(prompt_ids) if prompt_ids else None
    if prompt:
        call.prompts.append(prompt)
    count = step.get("llm_call_count")
    if isinstance(count, int) and count > 1:
        call.miss(f"its step stands for {count} model calls")
    call.also_loses |= {Fact.TOKEN_IDS} if not ids or not prompt_ids else set()
    call.also_loses |= {Fact.LOGPROBS} if not logprobs else set()
    counted = usage(
        metrics.get("prompt_tokens"),
        metrics.get("completion_tokens"),
        cached=metrics.get("cached_tokens"),
    )
    call.also_loses |= {Fact.USAGE} if counted is None else set()
    choice = sampled(sampled_message, ids=ids, logprobs=logprobs)
    call.reply = chat_reply(choice, model=model, usage=counted, prompt=prompt)
    return call


def _numbers(metrics: Json) -> dict[str, float]:
    found = metrics.items() if isinstance(metrics, dict) else ()
    is_number = {name: isinstance(value, int | float) for name, value in found}
    return {name: value for name, value in found if is_number[name]}


FORMAT = Format("atif", _recognises, _read)
