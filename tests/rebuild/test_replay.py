"""Live equals replayed, whichever way the spans took; the check of that fails when it should."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, Trajectory, reconstruct, rollout
from otel_rollout.otlp import JsonLinesSpanExporter, read
from otel_rollout.spans.record import as_record
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import SCENARIOS, play
from tests.kit.transports import TRANSPORTS
from tests.kit.witness import Witness


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_each_kind_of_rollout(name: str, recording: Recording):
    """What a trajectory holds is on its spans: in any order, doubled, one file or many."""
    play(name)
    live = sorted(recording.trajectories, key=lambda t: (t.start_time_ns, t.id))
    assert live
    spans = list(recording.spans)
    for transport in TRANSPORTS:
        records = list(map(as_record, transport(spans)))
        for seed in range(3):
            shuffled = records + records[::2]
            random.Random(seed).shuffle(shuffled)
            found = reconstruct(shuffled)
            assert found == live, transport.__name__
            assert [t.warnings for t in found] == [t.warnings for t in live], transport.__name__


def test_all_of_them_through_a_file(tmp_path: Path):
    """A batch processor and a file in between change nothing."""
    memory, path = InMemoryTrajectoryExporter(), tmp_path / "spans.jsonl"
    otel_rollout.configure(exporters=[memory], span_exporters=[JsonLinesSpanExporter(path)])
    play()
    otel_rollout.shutdown()
    live = sorted(memory.get_finished_trajectories(), key=lambda t: (t.start_time_ns, t.id))
    assert len(live) > len(SCENARIOS)
    assert reconstruct(read(path)) == live


@pytest.mark.slow
def test_every_lost_span_is_missed(recording: Recording, clients: Clients):
    """Without any one of its spans a trajectory is not equal, and says what is missing."""
    client = clients.sync(clients.serve())
    with rollout("r") as live:
        messages: list[Any] = []
        for text in ("a", "b"):
            messages.append({"role": "user", "content": text})
            reply = client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message.model_dump())
    spans = [span for span in recording.spans if span.name != "chat m"]
    assert len(spans) == 3
    for lost in spans:
        (found,) = reconstruct([span for span in spans if span is not lost])
        assert found != live
        assert found.warnings != []


# --- the check at the end of each test


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Witness:
    return Witness(monkeypatch)


@pytest.mark.not_replayed("its live trajectory is changed by hand")
def test_a_live_trajectory_that_is_not_on_its_spans_is_caught(
    witness: Witness, recording: Recording
):
    """What is only on the object fails the check."""
    with rollout("r") as trajectory:
        pass
    witness.check()
    trajectory.status = "error"
    with pytest.raises(AssertionError, match="as_it_is"):
        witness.check()


@pytest.mark.not_replayed("a span is taken away")
@pytest.mark.parametrize("prefix", ["invoke_agent", "recording"])
def test_a_lost_span_is_caught(
    prefix: str, witness: Witness, recording: Recording, clients: Clients
):
    """A trajectory whose spans did not all come fails the check."""
    client = clients.sync(clients.serve())
    with rollout("r"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    witness.check()
    witness.spans = [span for span in witness.spans if not span.name.startswith(prefix)]
    with pytest.raises(AssertionError):
        witness.check()


@pytest.mark.not_replayed("what is read is changed")
def test_a_reader_that_errs_is_caught(
    witness: Witness, recording: Recording, monkeypatch: pytest.MonkeyPatch
):
    """A way that loses a nanosecond fails the check."""
    with rollout("r"):
        pass

    def inexact(spans: Any) -> Any:
        for record in map(as_record, spans):
            yield replace(record, start_time_ns=record.start_time_ns + 1)

    monkeypatch.setattr("tests.kit.witness.TRANSPORTS", (inexact,))
    with pytest.raises(AssertionError, match="inexact"):
        witness.check()


def test_trajectories_that_were_read_are_equal_too(recording: Recording):
    """JSON of a trajectory is another way, with the same end."""
    play("annotated", "tool_loop", "streams_that_end_early")
    for trajectory in recording.trajectories:
        assert Trajectory.from_dict(trajectory.to_dict()) == trajectory
