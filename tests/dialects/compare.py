"""What a dialect kept of a recorded run: what was read, held against what was on the wire.

`python -m tests.dialects.compare` prints the table of docs/dialects.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from otel_rollout import Completion, Trajectory, reconstruct
from otel_rollout.otlp import read_json_lines
from otel_rollout.rebuild.dialects import DIALECTS, Dialect, Fact
from otel_rollout.spans.exchange import Exchange
from otel_rollout.spans.record import SpanRecord
from otel_rollout.wire import merge

RECORDED = Path(__file__).parent / "recorded"
NAMES = [dialect.name for dialect in DIALECTS]
UNKNOWN_PARAMETERS = ("top_k", "return_token_ids")
"""What the recorded agents put into `extra_body`."""
_NO_PARAMETERS = {
    *("messages", "tools", "input", "prompt", "model", "stream", "stream_options"),
    *("instructions", "previous_response_id", "encoding_format"),
    *UNKNOWN_PARAMETERS,
}
LIMITED = ("long", "value_limit")
"""Scenarios in which limits of the SDK do their damage."""


@dataclass(frozen=True)
class Wire:
    """One request and its response as our server saw and sent them."""

    scenario: str
    path: str
    request: dict[str, Any]
    status: int
    response: str

    @property
    def reply(self) -> Any:
        """The response as JSON, a stream in unstreamed shape."""
        if not self.request.get("stream"):
            return json.loads(self.response)
        return merge(self.response).body


@cache
def spans_of(name: str) -> list[SpanRecord]:
    return list(read_json_lines(RECORDED / f"{name}.jsonl"))


@cache
def wire_of(name: str) -> list[Wire]:
    lines = (RECORDED / f"{name}.wire.jsonl").read_text().splitlines()
    return [Wire(**json.loads(line)) for line in lines]


@cache
def trajectories_of(name: str) -> dict[str, Trajectory]:
    """By scenario; one without any span of a model call is not there."""
    trajectories = reconstruct(spans_of(name), infer_rollouts=True)
    found = {trajectory.name: trajectory for trajectory in trajectories}
    assert len(found) == len(trajectories)
    return found


def pairs(name: str) -> Iterator[tuple[Wire, Exchange, list[Completion]]]:
    """Each recorded call with what was read of it; calls without a span are left out."""
    for scenario, trajectory in trajectories_of(name).items():
        wires = [wire for wire in wire_of(name) if wire.scenario == scenario]
        if scenario == "cancelled":  # the late reply is recorded last, or not at all
            wires = [wire for wire in wires if "late" not in wire.response]
            exchanges = [e for e in trajectory.exchanges if e.status != "cancelled"]
        else:
            exchanges = trajectory.exchanges
        assert len(exchanges) in (0, len(wires)), (name, scenario)
        for wire, exchange in zip(wires, exchanges, strict=True):
            yield wire, exchange, [c for c in trajectory.completions if c.exchange is exchange]


def lost_in(wire: Wire, exchange: Exchange, completions: list[Completion]) -> set[Fact]:
    """The facts of this call that were on the wire and are not in what was read."""
    lost = _lost_of_request(wire.request, exchange)
    if wire.path.endswith("/responses"):
        lost |= {Fact.ITEMS} if exchange.path != "/responses" else set()
    elif (
        wire.status == 200
        and not wire.path.endswith("/embeddings")
        and wire.scenario not in ("cut", "abandoned")
    ):
        lost |= _lost_of_reply(wire, exchange, completions)
    return lost


def _lost_of_request(sent: dict[str, Any], exchange: Exchange) -> set[Fact]:
    read = exchange.request()
    lost = set[Fact]()
    for key, value in sent.items():
        if key in UNKNOWN_PARAMETERS and read.get(key) != value:
            lost.add(Fact.EXTRA_BODY)
        if key not in _NO_PARAMETERS and read.get(key) != value:
            lost.add(Fact.PARAMETERS)
    if sent.get("previous_response_id") != read.get("previous_response_id"):
        lost.add(Fact.PREVIOUS)
    if "tools" in sent and not read.get("tools"):
        lost |= {Fact.TOOLS, Fact.STRICT}
    elif "tools" in sent and "messages" in sent and read["tools"] != sent["tools"]:
        lost.add(Fact.STRICT)
        tools = json.loads(json.dumps(sent["tools"]))
        for tool in tools:
            tool["function"].pop("strict")
        assert read["tools"] == tools  # nothing but this was lost of them
    nothing: dict[str, Any] = {}
    there = read.get("messages", ())
    for before, after in zip_longest(sent.get("messages", ()), there, fillvalue=nothing):
        lost |= _lost_of_message(before, after, in_request=True)
    return lost


def _lost_of_message(
    before: Mapping[str, Any], after: Mapping[str, Any], *, in_request: bool
) -> set[Fact]:
    lost = set[Fact]()
    calls = zip(before.get("tool_calls") or (), after.get("tool_calls") or (), strict=False)
    for one, two in calls:
        if one["function"]["arguments"] != two["function"]["arguments"]:
            lost.add(Fact.ARGUMENTS)
    if before.get("reasoning_content") != after.get("reasoning_content"):
        lost.add(Fact.REQUEST_REASONING if in_request else Fact.REPLY_REASONING)
    if (before.get("refusal") or None) != (after.get("refusal") or None):
        lost.add(Fact.REQUEST_REFUSAL if in_request else Fact.REPLY_REFUSAL)
    if before.get("name") != after.get("name"):
        lost.add(Fact.NAMES)
    if isinstance(before.get("content"), list):
        sent, read = _images(before), _images(after)
        data = {image["url"] for image in sent if image["url"].startswith("data:")}
        if not data <= {image["url"] for image in read}:
            lost.add(Fact.IMAGES)
        elif sent != read:
            lost.add(Fact.DETAIL)
    return lost


def _images(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part["image_url"] for part in parts if part.get("type") == "image_url"]


def _lost_of_reply(wire: Wire, exchange: Exchange, completions: list[Completion]) -> set[Fact]:
    sent = wire.reply
    read = exchange.reply or {}
    lost = set[Fact]()
    if read.get("id") != sent["id"]:
        lost.add(Fact.RESPONSE_ID)
    if read.get("model") != sent["model"]:
        lost.add(Fact.RESPONSE_MODEL)
    if sent.get("system_fingerprint") != read.get("system_fingerprint"):
        lost.add(Fact.RESPONSE_FIELDS)
    usage = exchange.reply and {k: v for k, v in (read.get("usage") or {}).items() if v is not None}
    if sent.get("usage") and usage != sent["usage"]:
        lost.add(Fact.USAGE)
    prompt_ids = sent.get("prompt_token_ids")
    if prompt_ids and any(c.prompt_token_ids != prompt_ids for c in completions):
        lost.add(Fact.TOKEN_IDS)
    by_index = {completion.choice_index: completion for completion in completions}
    for choice in sent["choices"]:
        completion = by_index.get(choice["index"])
        if completion is None:
            lost.add(Fact.CHOICES)
            continue
        if completion.finish_reason != choice["finish_reason"]:
            lost.add(Fact.FINISH_REASON)
        if choice.get("token_ids") and completion.token_ids != choice["token_ids"]:
            lost.add(Fact.TOKEN_IDS)
        scored = (choice.get("logprobs") or {}).get("content")
        if scored and completion.logprobs != [entry["logprob"] for entry in scored]:
            lost.add(Fact.LOGPROBS)
        if "message" in choice:
            message = completion.message or {}
            lost |= _lost_of_message(choice["message"], message, in_request=False)
    return lost


def is_limited(name: str, scenario: str) -> bool:
    """Whether something other than the dialect as such took something away."""
    return scenario in LIMITED or (name, scenario) == ("openinference", "image")


def observed(dialect: Dialect, *, stream: bool) -> set[Fact]:
    """Every fact that some recorded call of this dialect lost."""
    lost = set[Fact]()
    for wire, exchange, completions in pairs(dialect.name):
        if not is_limited(dialect.name, wire.scenario) and (
            bool(wire.request.get("stream")) == stream
        ):
            lost |= lost_in(wire, exchange, completions)
    return lost


# --- the table


UNSEEN = {
    "calls that were cancelled": "cancelled",
    "chat.completions.parse": "structured",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
}


def table() -> str:
    """The markdown table of what each dialect keeps, as the recordings show it."""
    head = ["", *(f"`{name}`" for name in NAMES)]
    rows = [head, ["---"] + [":-:"] * len(NAMES)]
    for what, scenario in UNSEEN.items():
        rows.append([what, *(_seen(name, scenario) for name in NAMES)])
    for fact in Fact:
        rows.append([fact.value, *(_kept(dialect, fact) for dialect in DIALECTS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _seen(name: str, scenario: str) -> str:
    trajectory = trajectories_of(name).get(scenario)
    if trajectory is None or (
        scenario == "cancelled" and all(e.status != "cancelled" for e in trajectory.exchanges)
    ):
        return "no span"
    damaged = [exchange for exchange in trajectory.exchanges if exchange.damage]
    return "damaged" if len(damaged) == len(trajectory.exchanges) else "yes"


def _kept(dialect: Dialect, fact: Fact) -> str:
    if fact in (Fact.ITEMS, Fact.PREVIOUS) and _seen(dialect.name, "responses") == "no span":
        return "no span"
    if fact in dialect.loses:
        return "lost"
    return "lost in streams" if fact in dialect.loses_in_streams else "yes"


if __name__ == "__main__":
    print(table(), end="")
