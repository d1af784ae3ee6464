"""What a dialect kept of a recorded run: what was read, held against what was on the wire.

`python -m tests.dialects.compare` prints the table of docs/dialects.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from otel_rollout_formats.products import id_of

from otel_rollout import Completion, Trajectory, reconstruct
from otel_rollout.otlp import read_json_lines
from otel_rollout.rebuild.dialects.call import Dialect, Fact
from otel_rollout.rebuild.dialects.reader import dialects
from otel_rollout.spans.exchange import Exchange
from otel_rollout.spans.record import SpanRecord
from otel_rollout.wire import merge
from tests.dialects.differences import Difference, in_reply, in_request
from tests.dialects.record import RECORDED as RECORDED
from tests.dialects.record import REPLIES

ALL = [dialect.name for dialect in dialects()]
NAMES = [name for name in ALL if name != "anthropic"]
"""Dialects of which runs of the OpenAI client were recorded; the other has scenarios of its own."""
SAME_WIRE = {"langfuse": "langsmith", "weave": "langsmith"}
"""Recordings whose client sent and got the same bytes as another's."""
NAME_OF = {id_of(scenario, "trace"): scenario for scenario in REPLIES}
"""Scenarios by the ids of traces that have no root with their name."""
LIMITED = ("long", "value_limit", "truncated", "no_content")
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
    lines = (RECORDED / f"{SAME_WIRE.get(name, name)}.wire.jsonl").read_text().splitlines()
    return [Wire(**json.loads(line)) for line in lines]


@cache
def trajectories_of(name: str) -> dict[str, Trajectory]:
    """By scenario; one without any span of a model call is not there."""
    trajectories = reconstruct(spans_of(name), infer_rollouts=True)
    found = {NAME_OF.get(each.id, each.name): each for each in trajectories}
    assert len(found) == len(trajectories)
    return found


def pairs(name: str) -> Iterator[tuple[Wire, Exchange, list[Completion]]]:
    """Each recorded call with what was read of it; calls without a span are left out."""
    for scenario, trajectory in trajectories_of(name).items():
        wires = [wire for wire in wire_of(name) if wire.scenario == scenario]
        wires = [wire for wire in wires if not wire.path.endswith("count_tokens")]
        if scenario == "cancelled":  # the late reply is recorded last, or not at all
            wires = [wire for wire in wires if "late" not in wire.response]
            exchanges = [e for e in trajectory.exchanges if e.status != "cancelled"]
        else:
            exchanges = trajectory.exchanges
        if len(exchanges) != len(wires):  # calls without a span, or with several
            by_id = {wire.reply.get("id"): wire for wire in wires}
            exchanges = [e for e in exchanges if e.response_id in by_id]
            wires = [by_id[exchange.response_id] for exchange in exchanges]
        for wire, exchange in zip(wires, exchanges, strict=True):
            yield wire, exchange, [c for c in trajectory.completions if c.exchange is exchange]


def lost_in(wire: Wire, exchange: Exchange, completions: list[Completion]) -> set[Difference]:
    """The differences of this call on the wire from what was read; a text has no fact."""
    if wire.path.endswith("/embeddings"):
        return set()
    lost = in_request(wire.request, exchange)
    if wire.path.endswith("/responses") and exchange.path != "/responses":
        lost.add(Fact.ITEMS)
    is_there = not exchange.damage or any(c.message is not None for c in completions)
    if wire.status == 200 and is_there and wire.scenario not in ("cut", "abandoned"):
        lost |= in_reply(wire.reply, exchange, completions)
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
            found = lost_in(wire, exchange, completions)
            lost |= {fact for fact in found if isinstance(fact, Fact)}
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
    """The markdown table of what dialects do not keep; what the same ones lose is in one row."""
    rows: dict[str, list[str]] = {}
    for what, scenario in UNSEEN.items():
        rows.setdefault(_lost_by({name: _seen(name, scenario) for name in ALL}), []).append(what)
    declared = {fact for d in dialects() for fact in d.loses | d.loses_in_streams}
    for fact in filter(declared.__contains__, Fact):
        kept = _lost_by({dialect.name: _kept(dialect, fact) for dialect in dialects()})
        rows.setdefault(kept, []).append(fact.value)
    cells = [("what", "not kept by"), ("---", "---")]
    cells += [("; ".join(whats), losers) for losers, whats in rows.items() if losers]
    return "".join(f"| {what} | {losers} |\n" for what, losers in cells)


def _lost_by(cells: dict[str, str]) -> str:
    """Which dialects lose something, and how; "" if none does."""
    how: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if cell not in ("yes", "–"):
            how.setdefault(cell, []).append(f"`{name}`")
    kept = [f"`{name}`" for name, cell in cells.items() if cell in ("yes", "–")]
    if set(how) == {"lost"} and len(kept) < 3:
        return f"all but {' and '.join(kept)}" if kept else "all"
    parts = {cell.removeprefix("lost").strip(): ", ".join(names) for cell, names in how.items()}
    return "; ".join(f"{cell}: {names}" if cell else names for cell, names in parts.items())


def _seen(name: str, scenario: str) -> str:
    if all(wire.scenario != scenario for wire in wire_of(name)):
        return "–"
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
    if fact in (Fact.ITEMS, Fact.PREVIOUS, Fact.CALL_IDS) and dialect.name == "anthropic":
        return "–"
    if fact in dialect.loses:
        return "lost"
    return "lost in streams" if fact in dialect.loses_in_streams else "yes"


if __name__ == "__main__":
    print(table(), end="")
