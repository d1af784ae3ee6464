"""Trajectories of mini-swe-agent (`.traj.json`): chat messages, each with what is known in `extra`.

Its first releases wrote the messages alone, as many programs do: such a list is a document, too.

The reply of a call is as the server sent it, where the agent kept it (from 1.1 on), also one that
the agent could not read and did not go on with. The request is what was said before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from otel_rollout.wire import Json

_PREFIX = "mini-swe-agent-"
_LOSES = KEPT_BY_NONE - {Fact.LOGPROBS, Fact.TOKEN_IDS} | frozenset((Fact.PARAMETERS, Fact.TOOLS))
_WITHOUT_REPLY = frozenset(
    (Fact.USAGE, Fact.FINISH_REASON, Fact.RESPONSE_ID, Fact.RESPONSE_FIELDS, Fact.LOGPROBS)
) | {Fact.TOKEN_IDS}
_ENDED = ("Submitted", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError")
"""Exit statuses of runs that ended as they may."""


MESSAGES = "chat_messages"
"""The member under which a list of messages alone is a document."""


def is_messages(data: Json) -> bool:
    """True if a list is chat messages."""
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in data)
    )


def _recognises(data: Members) -> bool:
    format_ = data.get("trajectory_format")
    return isinstance(format_, str) and format_.startswith(_PREFIX)


def _read_messages(data: Members) -> Iterator[Trajectory]:
    yield from _read({"messages": data[MESSAGES]}, name="chat")


def _read(data: Members, name: str = "mini-swe-agent") -> Iterator[Trajectory]:
    info = data.get("info") or {}
    config = info.get("config") or {}
    model = text((config.get("model") or {}).get("model_name"))
    id_ = text(data.get("instance_id")) or digest(data)
    calls = Calls(name, _LOSES, id_)
    earlier: list[Json] = []
    extra: Members = {}
    for message in data["messages"]:
        extra = message.get("extra") or {}
        if message.get("role") == "exit":
            continue
        items, reply = _items_of(message), _reply(message)
        if reply is not None:
            calls.add(_call(earlier, items, reply, model), nanoseconds(extra.get("timestamp")))
        if reply is None or message.get("role") == "user":  # not what the call of it sampled
            calls.follow(items)
        earlier = [*earlier, *items]
    yield calls.trajectory(name=name, **_end(info, extra, config))


def _end(info: Members, extra: Members, config: Members) -> dict[str, Any]:
    """How a run ended, and what was counted. extra: of its last message."""
    exit_status, stats = text(info.get("exit_status")), info.get("model_stats") or {}
    kept = {"exit_status": exit_status, "config": config, "mini_version": info.get("mini_version")}
    found: dict[str, Any] = {
        "status": "complete" if exit_status else "unknown",
        "output": info.get("submission"),
        "metrics": {n: v for n, v in stats.items() if isinstance(v, int | float)},
        "metadata": {name: value for name, value in kept.items() if value is not None},
    }
    if exit_status is not None and exit_status not in _ENDED:
        error = {"type": exit_status, "message": str(extra.get("exception_str") or "")}
        error["traceback"] = str(extra.get("traceback") or "")
        found |= {"status": "error", "termination_reason": "error", "error": error}
    return found


def _items_of(message: Members) -> list[Json]:
    """The messages, or items of the Responses API, as they were sent to the model later."""
    if message.get("object") == "response":
        return [_sent(item) for item in message["output"]]
    return [_sent(message)]


def _sent(message: Members) -> dict[str, Json]:
    return {name: value for name, value in message.items() if name != "extra"}


def _reply(message: Members) -> Mapping[str, Json] | None:
    """The reply that a message is of; {} where it was not kept, None where no model was called."""
    if message.get("object") == "response":
        return _sent(message)
    response = (message.get("extra") or {}).get("response")
    if isinstance(response, dict) and (response.get("choices") or response.get("output")):
        return response
    return {} if message.get("role") == "assistant" else None


def _call(
    earlier: list[Json], items: list[Json], reply: Mapping[str, Json], model: str | None
) -> ForeignCall:
    request: dict[str, Json] = {"model": model} if model else {}
    if "output" in reply:
        call = ForeignCall("/responses", {**request, "input": earlier}, dict(reply))
        call.is_responses = True
        return call
    call = ForeignCall("/chat/completions", {**request, "messages": earlier}, dict(reply))
    if not reply:
        call.reply = chat_reply(sampled(items[0]), model=model, usage=None, prompt=None)
        call.also_loses |= _WITHOUT_REPLY
    return call


FORMAT = Format(
    "mini-swe-agent",
    _recognises,
    _read,
)
FORMAT_OF_MESSAGES = Format(
    "chat",
    lambda data: is_messages(data.get(MESSAGES)),
    _read_messages,
    is_messages,
    MESSAGES,
)
