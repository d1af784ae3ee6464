"""Bringing together in files: what comes out is what `reconstruct` gives of all spans at once."""

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
from otel_rollout.export import apart, partitions, reconstruct_apart
from otel_rollout.export.partitions import Partitions, parts_for
from otel_rollout.spans.record import SpanRecord, as_record
from otel_rollout.trajectory.episode import Episode
from otel_rollout.trajectory.steps import Step
from tests.kit.recording import Clients, Recording

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans reach the files."""
    monkeypatch.setattr(partitions, "_BUFFER", 100)


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


def same(spans: list[SpanRecord], folder: Path, parts: int, *, infer: bool = False) -> int:
    """Check that the trajectories are those of all spans at once; how many there are."""
    found = list(reconstruct_apart(spans, folder / "x", parts, infer_rollouts=infer))
    whole = reconstruct(spans, infer_rollouts=infer)
    found.sort(key=lambda t: (t.start_time_ns, t.id))
    assert [t.to_dict() for t in found] == [t.to_dict() for t in whole]
    assert [t.warnings for t in found] == [t.warnings for t in whole]
    assert not (folder / "x").exists()
    return len(whole)


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("infer", [False, True])
async def test_the_same_trajectories(recorded: Recording, tmp_path: Path, parts: int, infer: bool):
    """For any order of the spans, with duplicates, over any number of files."""
    for spans in orders([as_record(span) for span in recorded.spans]):
        assert same(spans, tmp_path, parts, infer=infer) == 7 + infer


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
            same([*spans[:position], lost, *spans[position + 1 :]], tmp_path, 5, infer=infer)
            same([lost, *spans], tmp_path, 5, infer=infer)


async def test_only_what_belongs_together_is_held(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts side by side in one trace are read one by one."""
    held: list[set[str | None]] = []

    def watched(spans: Any, infer_rollouts: bool = False) -> list[Trajectory]:
        records = list(spans)
        held.append({record.text(sc.ROLLOUT_ID) for record in records})
        return reconstruct(records, infer_rollouts)

    monkeypatch.setattr(apart, "reconstruct", watched)
    records = [as_record(span) for span in recorded.spans]
    assert len(list(reconstruct_apart(records, tmp_path / "x", 3))) == 7
    # The workflow is read with the trajectory that claims its call.
    assert sorted(map(len, held)) == [1] * 6 + [2]


def test_items_by_key(tmp_path: Path):
    """Keys come in order of their first item, items as they were added; also after a restart."""
    first = Partitions(tmp_path / "x", 1)
    for number in range(50):
        first.add(f"key \ud800{number % 7}", bytes([number]) * number)
    first.flush()
    again = Partitions(tmp_path / "x", 1)
    again.add("key \ud8003", b"last")
    groups = list(again.groups(0))
    assert [group[0][:1] for group in groups] == [b"", *(bytes([n]) for n in range(1, 7))]
    assert [len(item) for item in groups[1]] == [1, 8, 15, 22, 29, 36, 43]
    assert groups[3][-1] == b"last"
    assert sorted(again.items()) == sorted(item for group in groups for item in group)
    again.remove()
    assert list(again.groups(0)) == []


def test_how_many_files():
    """One for what memory can index, more for more, some where the size is not known."""
    sizes = (0, partitions.PART, 10**15, None)
    assert [parts_for(size) for size in sizes] == [1, 2, 512, 32]
