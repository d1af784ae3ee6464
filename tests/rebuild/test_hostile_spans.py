"""Spans that were changed in any way: nothing raises, no other rollout changes, damage is said."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from otel_rollout import Trajectory, continue_rollout, propagate, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.wire import dumps
from otel_rollout.workflows import reconstruct_episodes
from tests.kit.fuzzing import changed, changed_others, read_all, sealed
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import SCENARIOS, client, play, user

pytestmark = pytest.mark.not_replayed("spans are changed on purpose")
NOT_READ = (sc.ROLLOUT_REWARD, sc.GEN_AI_OPERATION_NAME, sc.ERROR_TYPE)
"""Attributes for people: nothing is read from them."""


def two_processes(url: str) -> None:
    """A rollout that another process continues, as far as this one can play it."""
    with client(url) as c, rollout("agent") as trajectory:
        c.chat.completions.create(model="m", messages=[user("here")])  # type: ignore[list-item]
        carrier = propagate()
        del process_state.rollouts[trajectory.id]
        with continue_rollout(carrier):
            c.chat.completions.create(model="m", messages=[user("there")])  # type: ignore[list-item]


@pytest.fixture
def traces(recording: Recording, clients: Clients) -> list[list[SpanRecord]]:
    """The spans of rollouts of every kind, and of one that two processes ran, by trace."""
    play(*(name for name in SCENARIOS if name != "long"))
    two_processes(clients.serve("hello").base_url)
    found: dict[str, list[SpanRecord]] = {}
    for span in map(as_record, recording.spans):
        found.setdefault(span.trace_id, []).append(span)
    return list(found.values())


def fuzz(
    traces: list[list[SpanRecord]], seed: int, changes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Change one span of two traces, so many times."""
    draw = random.Random(seed)
    known: dict[tuple[int, ...], list[Trajectory]] = {}
    for number in range(changes):
        names = tuple(sorted(draw.sample(range(len(traces)), 2)))
        spans = [span for name in names for span in traces[name]]
        whole = known.setdefault(names, []) or reconstruct(spans)
        known[names] = whole
        change = changed(spans, draw)
        caplog.clear()
        try:
            found = reconstruct(change.spans)
            said = [*caplog.messages, *(w for t in found for w in t.warnings)]
            for trajectory in found:
                if trajectory.id in change.touched:
                    read_all(trajectory)
            reconstruct_episodes(change.spans)
            assert changed_others(whole, found, change.touched) == []
            if not change.forged and found != whole:
                before = Counter(w for t in whole for w in t.warnings)
                assert Counter(said) - before or any(key in change.what for key in NOT_READ)
            shuffled = draw.sample(change.spans, len(change.spans))
            again = reconstruct(shuffled + shuffled[::2])
            assert [t.to_dict() for t in again] == [t.to_dict() for t in found]
        except Exception as error:
            raise AssertionError(f"seed {seed}, change {number}: {change.what}") from error


@pytest.mark.parametrize("error", [{"value": "nan"}, {"type": 1, "message": "m"}, {"type": "E"}])
def test_an_error_of_another_shape(error: dict[str, Any], recording: Recording, clients: Clients):
    """What went wrong has a type and a message, both texts, whatever the span says."""
    with client(clients.serve("hello").base_url) as c, rollout("agent"):
        c.chat.completions.create(model="m", messages=[user("hi")])  # type: ignore[list-item]
    wrong = {sc.EXCHANGE_STATUS: "error", sc.EXCHANGE_ERROR: dumps(error)}
    spans = [
        replace(span, attributes=sealed({**span.attributes, **wrong}))
        if sc.EXCHANGE_STATUS in span.attributes
        else span
        for span in map(as_record, recording.spans)
    ]
    (trajectory,) = reconstruct(spans)
    read_all(trajectory)
    found = trajectory.completions[0].error
    assert found is not None
    assert set(found) == {"type", "message"}
    assert all(isinstance(text, str) for text in found.values())
    assert any("should have a type and a message" in text for text in trajectory.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_changed_span(
    seed: int, traces: list[list[SpanRecord]], caplog: pytest.LogCaptureFixture
):
    """Reading never raises, other rollouts are as they were, what is missing is said."""
    fuzz(traces, seed, 150, caplog)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_changed_spans(
    seed: int, traces: list[list[SpanRecord]], caplog: pytest.LogCaptureFixture
):
    """The same for long: `make fuzz`."""
    fuzz(traces, seed, 5000, caplog)
