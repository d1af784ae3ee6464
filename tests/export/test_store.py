"""Spans in a store: what comes out is what `reconstruct` gives of all spans at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import Trajectory, Workflow, reconstruct, record_reward, rollout
from otel_rollout import semconv as sc
from otel_rollout.export import reconstruct_by_rollout, store
from otel_rollout.export.store import Store
from otel_rollout.spans.record import SpanEvent, SpanRecord, as_record
from otel_rollout.trajectory.episode import Episode
from otel_rollout.trajectory.steps import Step
from tests.kit.recording import Clients, Recording

HI: Any = [{"role": "user", "content": "hi"}]


class Claiming(Workflow):
    """A workflow with a trajectory whose calls were made in the workflow's own rollout."""

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode | None:
        reply = await self.rollout_engine.chat.completions.create(model="m", messages=HI)
        text = reply.choices[0].message.content
        conversation = [*HI, {"role": "assistant", "content": text}]
        step = Step(chat_completions=conversation, model_response=text, reward=1.0)
        return Episode(id=uid, task=task, trajectories=[Trajectory(name="built", steps=[step])])


@pytest.fixture
async def recorded(recording: Recording, clients: Clients) -> Recording:
    """Rollouts that are nested, side by side in one trace, over two traces, rewarded late."""
    server = clients.serve()
    client = clients.sync(server)
    chat = client.chat.completions
    tracer = trace.get_tracer("else", tracer_provider=recording.provider)
    with rollout("outer"):
        chat.create(model="m", messages=HI)
        with rollout("inner"):
            chat.create(model="m", messages=HI)
    with tracer.start_as_current_span("a training step"):
        for number in range(3):
            with rollout(f"side by side {number}") as trajectory:
                chat.create(model="m", messages=HI)
    record_reward(1.0, trajectory=trajectory)
    with rollout("over two traces"):
        with tracer.start_as_current_span("of its own", context=otel_context.Context()) as span:
            token = otel_context.attach(trace.set_span_in_context(span))
            chat.create(model="m", messages=HI)
            otel_context.detach(token)
        chat.create(model="m", messages=HI)
    workflow = Claiming(clients.asynchronous(server))
    await workflow.run_with_termination_handling({"q": 1}, "t:0")
    chat.create(model="m", messages=HI)  # in no rollout: a span of the instrumentor alone
    return recording


def orders(spans: list[SpanRecord]) -> Iterator[list[SpanRecord]]:
    yield spans
    for seed in range(3):
        shuffled = [*spans, *spans[::3]]
        random.Random(seed).shuffle(shuffled)
        yield shuffled


def same(spans: list[SpanRecord], path: Path, *, infer: bool = False) -> int:
    """Check that the trajectories are those of all spans at once; how many there are."""
    found = list(reconstruct_by_rollout(spans, path, infer_rollouts=infer))
    whole = reconstruct(spans, infer_rollouts=infer)
    found.sort(key=lambda t: (t.start_time_ns, t.id))
    assert [t.to_dict() for t in found] == [t.to_dict() for t in whole]
    assert [t.warnings for t in found] == [t.warnings for t in whole]
    assert not path.exists()
    return len(whole)


@pytest.mark.parametrize("infer", [False, True])
async def test_the_same_trajectories(recorded: Recording, tmp_path: Path, infer: bool):
    """For any order of the spans, with duplicates."""
    for spans in orders([as_record(span) for span in recorded.spans]):
        assert same(spans, tmp_path / "x", infer=infer) == 7 + infer


async def test_the_same_of_spans_that_lost_whose_they_are(recorded: Recording, tmp_path: Path):
    """The trajectories of such a trace say how many; also when copies came whole."""
    spans = [as_record(span) for span in recorded.spans]
    for position in (0, 4, 8, len(spans) - 4):
        record = spans[position]
        name = record.text(sc.ROLLOUT_ID)
        if name is None:
            continue
        lost = replace(
            record,
            attributes={k: v for k, v in record.attributes.items() if k != sc.ROLLOUT_ID},
            cut=frozenset({sc.ROLLOUT_ID}),
        )
        for infer in (False, True):
            same([*spans[:position], lost, *spans[position + 1 :]], tmp_path / "x", infer=infer)
            same([lost, *spans], tmp_path / "x", infer=infer)


async def test_only_what_belongs_together_is_held(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts side by side in one trace are read one by one."""
    held: list[set[str | None]] = []

    def watched(spans: Any, infer_rollouts: bool = False) -> list[Trajectory]:
        records = list(spans)
        held.append({record.text(sc.ROLLOUT_ID) for record in records})
        return reconstruct(records, infer_rollouts)

    monkeypatch.setattr(store, "reconstruct", watched)
    records = [as_record(span) for span in recorded.spans]
    assert len(list(reconstruct_by_rollout(records, tmp_path / "x"))) == 7
    # The workflow is read with the trajectory that claims its call.
    assert sorted(map(len, held)) == [1] * 6 + [2]


def test_items_by_key(tmp_path: Path):
    """Keys come in order of their first item, items as they were added; also when opened again."""
    with Store(tmp_path / "x") as first:
        for number in range(50):
            first.add(f"key \ud800{number % 7}", bytes([number]) * number)
        assert list(first.every()) == [bytes([number]) * number for number in range(50)]
        first.commit()
    with Store(tmp_path / "x") as again:
        again.add("key \ud8003", b"last")
        assert list(again.each_key()) == [(n + 1, f"key \ud800{n}") for n in range(7)]
        assert [first for first, _ in again.each_key(after=5)] == [6, 7]
        assert [len(item) for item in again.items("key \ud8001")] == [1, 8, 15, 22, 29, 36, 43]
        assert again.items("key \ud8003", "key \ud8000")[7:9] == [b"last", b""]


def test_what_was_not_committed_is_not_there(tmp_path: Path):
    """A store that was closed before is empty."""
    with Store(tmp_path / "x") as store:
        store.add("key", b"item")
    with Store(tmp_path / "x") as store:
        assert list(store.every()) == []


def test_a_store_is_private_and_no_link(tmp_path: Path):
    """A link that somebody put in the place is not followed; what is no store is an OSError."""
    with Store(tmp_path / "x"):
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "diary").write_text("my diary\n" * 1000)
    for name in ("link", "diary"):
        with pytest.raises(OSError, match=name):
            Store(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_every_value_of_a_span_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also those that have no JSON."""
    attributes: dict[str, Any] = {
        "a": "\ud800é",
        "b": [1, 2.5, None, ["x"]],
        "c": b"\xff\x00",
        "d": 2**80,
        "e": {"\0bytes": 1},
        "g": True,
        "h": -0.0,
    }
    span = SpanRecord("n", "t", "s", None, 1, None, attributes, cut=frozenset("xy"), scope="z")
    span = replace(span, attributes={**attributes, sc.ROLLOUT_ID: "r"}, events=[SpanEvent("e", 1)])
    read: list[SpanRecord] = []

    def watched(spans: Any, **_: Any) -> list[Trajectory]:
        read.extend(spans)
        return []

    monkeypatch.setattr(store, "reconstruct", watched)
    other: dict[str, Any] = {sc.ROLLOUT_ID: "r", "x": object()}
    unwritable = replace(span, attributes=other)
    assert list(reconstruct_by_rollout([span, unwritable], tmp_path / "x")) == []
    assert read == [as_record(span)]
