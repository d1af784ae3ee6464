"""What was recorded against what its spans give again, and against what was on the wire."""

from __future__ import annotations

import json
import random
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

import otel_rollout
from otel_rollout import Trajectory
from otel_rollout.testing import WireExchange
from otel_rollout.wire.json import dumps, loads
from tests.kit.recording import Recording


def replays(recording: Recording) -> list[Trajectory]:
    """The trajectories, by start; their spans give equal ones in any order, also when doubled."""
    live = sorted(recording.trajectories, key=lambda t: (t.start_time_ns, t.id))
    spans = list(recording.spans)
    shuffled = spans * 2
    random.Random(0).shuffle(shuffled)
    lines = [trajectory.to_json() for trajectory in live]
    for given in (spans, spans[::-1], shuffled):
        found = otel_rollout.reconstruct(given)
        assert [each.to_json() for each in found] == lines or found == live
    for trajectory in live:
        assert Trajectory.from_dict(loads(dumps(trajectory.to_dict()))) == trajectory
    return live


def replayed(recording: Recording) -> Trajectory:
    """The only trajectory, which its spans give too."""
    (trajectory,) = replays(recording)
    return trajectory


def exchange_spans(recording: Recording) -> list[ReadableSpan]:
    return recording.spans_named("recording")


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(f"rollout.exchange.{name}")


def sent(exchange: WireExchange) -> Any:
    return json.loads(exchange.request)


def received(exchange: WireExchange) -> Any:
    return json.loads(exchange.response)


def without_null(value: Any) -> Any:
    """JSON without members that are null: a stream does not send them."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def everything(recording: Recording) -> str:
    """All text of our spans and of the trajectories."""
    texts = [dumps(t.to_dict()) for t in recording.trajectories]
    for span in recording.spans:
        if span.instrumentation_scope and span.instrumentation_scope.name == "otel_rollout":
            events = [[event.name, dict(event.attributes or {})] for event in span.events]
            texts.append(repr([dict(span.attributes or {}), events, span.status.description]))
    return "\n".join(texts)


MICROSECOND = 1_000


def without_times(data: Any) -> Any:
    """JSON of a trajectory without its times."""
    if isinstance(data, list):
        return [without_times(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        key: "a time" if key.endswith("_ns") and value else without_times(value)
        for key, value in data.items()
    }


def assert_equal_to_microseconds(found: list[Trajectory], live: list[Trajectory]) -> None:
    """Equal in everything but times, and in these to the microsecond."""
    found, live = (sorted(each, key=lambda t: t.id) for each in (found, live))
    assert [without_times(t.to_dict()) for t in found] == [without_times(t.to_dict()) for t in live]
    for mine, theirs in zip(found, live, strict=True):
        assert abs(mine.start_time_ns - theirs.start_time_ns) <= MICROSECOND
        for one, other in zip(mine.completions, theirs.completions, strict=True):
            assert abs(one.start_time_ns - other.start_time_ns) <= MICROSECOND
