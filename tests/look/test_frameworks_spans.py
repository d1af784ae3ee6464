"""A model call that a framework draws itself is not drawn again by the instrumentor."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import ConfigurationError, rollout
from tests.kit.calling import BOTH, STREAMED, Caller, done, read
from tests.kit.recording import Clients

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


async def drawn(
    clients: Clients,
    caller: Caller,
    *,
    inside: bool,
    framework: dict[str, str],
    stream: bool = False,
    **options: Any,
) -> list[str]:
    """Names of the spans of a call, but for the rollout's and the exchange."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(**options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    client = caller.client(clients, clients.serve("hi"))

    async def call() -> None:
        with provider.get_tracer("framework").start_as_current_span("outer", attributes=framework):
            reply = await done(client.chat.completions.create(**ASK, stream=stream))
            await read(reply) if stream else None

    async def agent() -> Any:
        if not inside:
            await call()
            return None
        with rollout("agent") as trajectory:
            await call()
        return trajectory

    trajectory = await caller.run(agent())
    if inside:
        assert [c.status for c in trajectory.completions] == ["complete"]
        assert trajectory.warnings == []
    names = [span.name for span in spans.get_finished_spans()]
    return [name for name in names if not name.startswith(("recording", "invoke_agent"))]


@BOTH
@STREAMED
async def test_the_frameworks_span_stays(clients: Clients, caller: Caller, stream: bool):
    """In a rollout; the call is captured as ever."""
    found = await drawn(clients, caller, inside=True, framework=CHAT, stream=stream)
    assert found == ["outer"]


@pytest.mark.parametrize(
    ("inside", "framework", "options"),
    [
        (True, CHAT, {"llm_spans": "both"}),
        (True, {"gen_ai.operation.name": "invoke_agent"}, {}),
        (True, {}, {}),
        (False, CHAT, {}),
    ],
)
@BOTH
async def test_every_other_call_is_drawn(
    clients: Clients, caller: Caller, inside: bool, framework: Any, options: Any
):
    """With the option, under a span that is no model call, and outside of rollouts."""
    found = await drawn(clients, caller, inside=inside, framework=framework, **options)
    assert found == ["chat m", "outer"]


def test_a_wrong_option():
    """It says what is expected."""
    with pytest.raises(ConfigurationError, match=r"llm_spans=.*'outer' or 'both', got 'inner'"):
        otel_rollout.configure(llm_spans="inner")  # type: ignore[arg-type]
