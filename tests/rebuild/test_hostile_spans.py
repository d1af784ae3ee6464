"""Spans that were changed in any way: nothing raises, nothing else changes, damage is said."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from otel_rollout import Trajectory, reconstruct, reconstruct_episodes, rollout
from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state
from otel_rollout.spans import SpanRecord, as_record
from tests.dialects.compare import NAMES, spans_of
from tests.kit.fuzzing import changed_others, hostile, read_all
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import SCENARIOS, client, play, user
from tests.kit.workflows import Agent, Environment

from otel_rollout import continue_rollout, propagate  # isort: skip

ROUNDS = int(os.environ.get("OTEL_ROLLOUT_FUZZ", "400"))


def two_processes(url: str) -> None:
    """A rollout that another process continues, as far as this one can play it."""
    with client(url) as c, rollout("agent") as trajectory:
        c.chat.completions.create(model="m", messages=[user("here")])
        carrier = propagate()
        del process_state.rollouts[trajectory.id]
        with continue_rollout(carrier) as part:
            c.chat.completions.create(model="m", messages=[user("there")])
        trajectory.add_spans(part.spans)


@pytest.fixture
def spans(recording: Recording, clients: Clients) -> list[SpanRecord]:
    """The spans of rollouts of every kind, and of one that two processes ran."""
    play(*(name for name in SCENARIOS if name != "long"))
    two_processes(clients.serve("hello").base_url)
    return [as_record(span) for span in recording.spans]


@pytest.mark.not_replayed("the fixture's rollouts are changed on purpose")
@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_span_raises_or_reaches_others(seed: int, spans: list[SpanRecord]):
    draw = random.Random(seed)
    traces = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    failures = []
    import collections, traceback, time

    t0 = time.time()
    where = collections.Counter()
    wholes = {}
    for number in range(ROUNDS):
        names = tuple(sorted(draw.sample(sorted(traces), 2)))
        some = [x for n in names for x in traces[n]]
        if names not in wholes:
            wholes[names] = reconstruct(some)
        whole = wholes[names]
        given, touched = hostile(some, draw)
        try:
            found = reconstruct(given)
            for t in found:
                read_all(t) if t.id in touched else 0
            reconstruct_episodes(given)
            others = changed_others(whole, found, touched)
            assert not others, others
        except Exception as e:
            tb = traceback.extract_tb(e.__traceback__)
            where[
                (
                    type(e).__name__,
                    str(e)[:80],
                    *[
                        f"{f.filename.split('/')[-1]}:{f.lineno}:{f.name}"
                        for f in tb
                        if "otel_rollout" in f.filename and "tests" not in f.filename
                    ][-2:],
                )
            ] += 1
    print(f"{ROUNDS / (time.time() - t0):.0f}/s")
    for k, v in where.most_common():
        print(v, k)
    assert not where
