"""Rollouts whose calls are made in tasks and actors of a real Ray: the carrier goes with each."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    Trajectory,
    gather_group,
    get_current_trajectory,
    propagate,
    reconstruct,
    rollout,
)
from otel_rollout.otlp import read

pytestmark = pytest.mark.ray


def ask(base_url: str, text: str) -> None:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key="none")
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def configured(spans: str) -> None:
    """What a worker process does at its start; spans go to a file of its own."""
    import otel_rollout

    exporter = otel_rollout.otlp.JsonLinesSpanExporter(f"{spans}/{os.getpid()}.jsonl")
    otel_rollout.configure(instrumentor=None, span_exporters=[exporter])


def call(base_url: str, spans: str, text: str, carrier: dict[str, str]) -> Any:
    """A task that makes one call for the rollout that its carrier names."""
    from opentelemetry import trace

    from otel_rollout import continue_rollout

    configured(spans)
    with continue_rollout(carrier) as part:
        ask(base_url, text)
    provider: Any = trace.get_tracer_provider()
    assert provider.force_flush()  # nobody knows when Ray ends this process
    return part.spans


class Tools:
    """An actor that works for several rollouts at once."""

    def __init__(self, base_url: str, spans: str) -> None:
        configured(spans)
        self.base_url = base_url

    async def use(self, text: str, carrier: dict[str, str]) -> Any:
        from otel_rollout import continue_rollout, rollout

        with continue_rollout(carrier) as part:
            await asyncio.to_thread(ask, self.base_url, f"{text} 1")
            await asyncio.to_thread(ask, self.base_url, f"{text} 2")
            with rollout("inside"):
                await asyncio.to_thread(ask, self.base_url, f"{text} inside")
        return part.spans

    def close(self) -> bool:
        import otel_rollout

        return otel_rollout.shutdown()


def prompts(trajectory: Trajectory) -> list[str]:
    return sorted(each.request_messages[-1]["content"] for each in trajectory.completions)


@pytest.mark.not_replayed("calls of other processes; it compares what is rebuilt itself")
async def test_tasks_and_actors_continue_a_rollout(
    cluster: Any, recording: Recording, clients: Clients, tmp_path: Path
):
    """Each rollout has its calls and no other's, in its trace and group, live and from spans."""
    base_url = clients.serve().base_url
    task = cluster.remote(call)
    tools = cluster.remote(Tools).remote(base_url, str(tmp_path))

    @rollout("agent")
    async def agent(name: str) -> None:
        carrier = propagate()
        parts = [
            task.remote(base_url, str(tmp_path), f"{name} in a task", carrier),
            tools.use.remote(name, carrier),
        ]
        for spans in await asyncio.gather(*parts):
            get_current_trajectory().add_spans(spans)

    group = await gather_group([agent("a"), agent("b")], group_id="g")
    assert await tools.close.remote()
    cluster.kill(tools)
    for trajectory, name in zip(group, "ab", strict=True):
        assert prompts(trajectory) == [f"{name} 1", f"{name} 2", f"{name} in a task"]
        assert trajectory.warnings == []
    records: list[Any] = [*recording.spans]
    for file in tmp_path.glob("*.jsonl"):
        records += read(file)
    rebuilt = {each.id: each for each in reconstruct(records)}
    for trajectory, name in zip(group, "ab", strict=True):
        assert rebuilt.pop(trajectory.id).to_dict() == trajectory.to_dict()
        (inside,) = (each for each in rebuilt.values() if each.parent_id == trajectory.id)
        assert prompts(inside) == [f"{name} inside"]
        assert inside.trace_id == trajectory.trace_id


async def test_an_actor_that_dies_is_named(
    cluster: Any, recording: Recording, clients: Clients, tmp_path: Path
):
    """Nothing came of what it did: the trajectory says that it was continued elsewhere."""
    base_url = clients.serve().base_url
    tools = cluster.remote(Tools).remote(base_url, str(tmp_path))

    @rollout("agent")
    async def agent() -> None:
        using = tools.use.remote("a", propagate())
        cluster.kill(tools)
        with pytest.raises(cluster.exceptions.RayActorError):
            await using

    (trajectory,) = await gather_group([agent()], group_id="g")
    assert any("process" in warning for warning in trajectory.warnings)
