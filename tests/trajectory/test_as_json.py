"""A trajectory's JSON has each content once, and gives the same trajectory back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanLimits, TracerProvider

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, Trajectory, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.spans import PACKED, as_record, digest_of, with_lengths
from otel_rollout.wire import dumps
from tests.kit.recording import Clients, Recording

LONG = "x" * 100_000
MESSAGE = {"role": "assistant", "content": "a"}
REPLY = dumps({"id": "r", "choices": [{"message": MESSAGE}], "prompt_token_ids": {PACKED: 0}})


def test_long_parameters_are_written_once(recording: Recording, clients: Clients):
    """Calls that differ in a short parameter share the tools that all of them have."""
    tool: Any = {"type": "function", "function": {"name": "f", "description": LONG}}
    client = clients.sync(clients.serve("hello"))
    with rollout("agent") as trajectory:
        for seed in range(10):
            client.chat.completions.create(
                model="m",
                seed=seed,
                tools=[tool] if seed % 2 else [tool, tool],
                messages=[{"role": "user", "content": "hi"}],
            )
    data = trajectory.to_dict()
    assert len(dumps(data)) < 4 * len(LONG)
    again = Trajectory.from_dict(data)
    assert [c.request for c in again.completions] == [c.request for c in trajectory.completions]
    assert [c.sampling for c in again.completions] == [c.sampling for c in trajectory.completions]
    assert again.to_dict() == data
    data["params"][0][0]["tools"].clear()
    assert trajectory.completions[0].tools


def test_numbers_stay_what_they_are():
    """An integer is no float, though they are equal, and a bool is neither."""
    made = Trajectory(id="t", metrics={"n": 3, "x": 3.0, "won": True}, metadata={"n": 1 << 70})
    made.reward = 1
    for read in (Trajectory.from_json(made.to_json()), Trajectory.from_dict(made.to_dict())):
        assert repr(read.to_dict()) == repr(made.to_dict())
        assert repr(dict(read.metrics)) == "{'n': 3, 'x': 3.0, 'won': True}"


@pytest.mark.parametrize("name", ["agent", "\ud800"])
def test_texts_and_numbers_that_json_has_not_are_kept(name: str):
    metadata = {"x": math.nan, "text": "\ud801é"}
    made = Trajectory(id="t", name=name, logs=[name], metadata=metadata)
    read = Trajectory.from_json(made.to_json())
    assert "NaN" in made.to_json()
    assert (read.name, read.logs, read.metadata["text"]) == (name, [name], "\ud801é")
    assert math.isnan(read.metadata["x"])


@pytest.mark.parametrize("block", ["1,0", "1, 0", "1,\r\n0", "1,-0"])
def test_ids_are_read_again_however_their_span_has_them(block: str, recording: Recording):
    """Compact, and as numbers."""
    with rollout("agent"):
        pass
    digest = digest_of(digest_of(block.encode())).hex()
    ids = dumps([{"base": "", "digest": digest, "blocks": [block]}])
    (own,) = map(as_record, recording.spans)
    call = {
        sc.ROLLOUT_ID: own.attributes[sc.ROLLOUT_ID],
        sc.EXCHANGE_VERSION: 1,
        sc.EXCHANGE_STATUS: "complete",
        sc.REQUEST_PATH: "/v1/chat/completions",
        sc.RESPONSE_BODY: REPLY,
        sc.RESPONSE_PROMPT_IDS: ids,
    }
    span = replace(own, span_id="1" * 16, parent_span_id=own.span_id, attributes=with_lengths(call))
    (made,) = reconstruct([span, own])
    line = made.to_json()
    assert "[0,[1,0]]" in line
    for trajectory in (made, Trajectory.from_json(line)):
        assert [each.prompt_token_ids for each in trajectory.completions] == [[1, 0]]


@pytest.mark.filterwarnings("ignore::otel_rollout.wiring.TruncationWarning")
def test_what_a_limit_cut_is_seen_live(clients: Clients):
    """A span is trusted only while it has all that was written on it."""
    exporter = InMemoryTrajectoryExporter()
    provider = TracerProvider(span_limits=SpanLimits(max_span_attribute_length=900))
    otel_rollout.configure(exporters=[exporter], tracer_provider=provider, instrumentor=None)
    client = clients.sync(clients.serve("long " * 400))
    with rollout("agent"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    (trajectory,) = exporter.get_finished_trajectories()
    assert any("was cut" in warning for warning in trajectory.warnings)
    assert not trajectory.completions[0].trainable
    otel_rollout.shutdown()
