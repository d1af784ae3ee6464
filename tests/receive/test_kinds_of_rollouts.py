"""Rollouts of many kinds, sent by a process: the receiver gives what was recorded live."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from otel_rollout import (
    InMemoryTrajectoryExporter,
    JsonlTrajectoryExporter,
    Trajectory,
    configure,
    gather_group,
    rollout,
    shutdown,
)
from otel_rollout.receive import HeadFile, TrajectoryReceiver
from otel_rollout.testing import Reply
from tests.kit.conversations import user
from tests.kit.played import ask_async
from tests.kit.recording import Clients
from tests.kit.scenarios import play
from tests.kit.sending import Receive, until
from tests.kit.workflows import MultiTurn


def recorded_to(receiver: TrajectoryReceiver) -> InMemoryTrajectoryExporter:
    """Record into memory, and send spans to the receiver."""
    live = InMemoryTrajectoryExporter()
    spans = OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces")
    configure(exporters=[live], span_exporters=[spans], instrumentor=None)
    return live


def received(receiver: TrajectoryReceiver, folder: Path) -> dict[str, Trajectory]:
    """What the receiver has handed over, once nothing is open."""
    assert shutdown()
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    return {t.id: t for t in JsonlTrajectoryExporter.read(folder / "out.jsonl")}


def test_scenarios(receiver_of: Receive, tmp_path: Path):
    """All but for rewards that came late, which are reported."""
    receiver = receiver_of(rollout_seconds=30, group_seconds=1)
    live = recorded_to(receiver)
    play()
    found = received(receiver, tmp_path)
    heads = HeadFile(tmp_path / "journal", reads=True)
    late = {each.rollout for each in heads.late_spans()}
    for trajectory in live.get_finished_trajectories():
        assert found[trajectory.id] == trajectory or trajectory.id in late
    assert len(found) == len(live.get_finished_trajectories())
    assert all(head.is_whole for head in heads.heads()), [*heads.heads()]


async def test_rollouts_inside_members_of_a_group(
    receiver_of: Receive, clients: Clients, tmp_path: Path
):
    """They come with it, and are no samples."""
    receiver = receiver_of(rollout_seconds=30, group_seconds=30)
    live = recorded_to(receiver)
    client = clients.asynchronous(clients.serve("ok"))

    @rollout
    async def helper() -> None:
        await ask_async(client, user("help"))

    @rollout
    async def agent() -> None:
        await helper()
        await ask_async(client, user("hi"))
        await helper()

    await gather_group([agent(), agent()], group_id="g")
    every = {each.id: each for each in live.get_finished_trajectories()}
    assert len(every) == 6
    assert received(receiver, tmp_path) == every
    [unit] = HeadFile(tmp_path / "journal", reads=True).units()
    assert (unit.name.partition("@")[0], unit.size, unit.whole, unit.times) == ("g", 2, 2, 1)


async def test_a_workflow(receiver_of: Receive, clients: Clients, tmp_path: Path):
    """A trajectory that was built by hand has the calls of the run around it."""
    receiver = receiver_of(rollout_seconds=30, group_seconds=1)
    live = recorded_to(receiver)
    engine = clients.asynchronous(clients.serve([Reply("1"), Reply("3")]))
    await MultiTurn(rollout_engine=engine).run_with_termination_handling({"q": 1}, "t:0")
    [built] = live.get_finished_trajectories()
    assert len(built.completions) == 2
    assert received(receiver, tmp_path) == {built.id: built}
    assert all(head.is_whole for head in HeadFile(tmp_path / "journal", reads=True).heads())
