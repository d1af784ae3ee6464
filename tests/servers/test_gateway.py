"""Agents whose calls pass a gateway, on the real servers: every sampled token trains once.

The agents are those of the other tests. The gateway records their calls, not the hooks of their
client, which asks for no token ids and is shown none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

import otel_rollout
from exporters.kit.recomputed import Model
from otel_rollout import Trajectory, gather_trajectory, rollout
from otel_rollout.gateway import Gateway, serve
from tests.kit.calling import STREAMED
from tests.kit.recording import Recording
from tests.servers.agents import AGENTS, CALL_SECONDS, Agent, Chat
from tests.servers.checks import check
from tests.servers.model import user

pytestmark = pytest.mark.server
TOLERANCE = 1e-3


@pytest.fixture
async def gateway(recording: Recording, vllm: str) -> AsyncIterator[Gateway]:
    """A gateway in front of vLLM that asks for token ids."""
    otel_rollout.configure(request_token_ids=True)
    async with serve(vllm) as gateway:
        yield gateway


async def play(
    gateway: Gateway, agent: Callable[[openai.AsyncOpenAI], Any], name: str
) -> Trajectory:
    """The trajectory of an agent whose client talks to the gateway."""

    @rollout(name=name)
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=gateway.base_url(), api_key="none", max_retries=0, timeout=CALL_SECONDS
        ) as client:
            await agent(client)

    return await gather_trajectory(run())


@STREAMED
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_every_token_trains_once_past_the_gateway(
    gateway: Gateway, model: Model, agent: Agent, stream: bool
) -> None:
    """As in the agent's own process: as many tokens as were counted, each as it was sampled."""
    trajectory = await play(
        gateway, lambda client: agent(Chat(client, stream)), f"{agent.__name__}, past a gateway"
    )
    if agent.__name__ != "left_early":  # what the gateway had read when its client left differs
        assert AGENTS[agent](trajectory.completions)
    check(trajectory, model, TOLERANCE)


@STREAMED
async def test_the_client_sees_what_it_asked_for(gateway: Gateway, stream: bool) -> None:
    """Token ids that the recording asked for are on the spans, and not in the replies."""
    seen: list[str] = []

    async def agent(client: openai.AsyncOpenAI) -> None:
        options: Any = {"model": "tiny", "messages": [user("Be brief.")], "max_tokens": 20}
        made: Any = await client.chat.completions.create(**options, stream=stream)
        pieces = [piece async for piece in made] if stream else [made]
        seen.extend(piece.model_dump_json(exclude_none=True) for piece in pieces)

    trajectory = await play(gateway, agent, "one call")
    assert trajectory.completions[0].token_ids
    assert trajectory.completions[0].logprobs
    assert "token_ids" not in str(seen)
    assert "logprobs" not in str(seen)


async def test_llama_cpp_past_the_gateway(recording: Recording, llama: str) -> None:
    """Another server: its streams and its own members of a reply pass, and are recorded."""
    otel_rollout.configure(request_token_ids=True)
    texts: list[str] = []

    async def agent(client: openai.AsyncOpenAI) -> None:
        for stream in (False, True):
            chat = Chat(client, stream)
            texts.append(str((await chat.ask([user("Be brief.")]))["content"]))

    async with serve(llama) as gateway:
        trajectory = await play(gateway, agent, "llama.cpp")
    assert [str((c.message or {})["content"]) for c in trajectory.completions] == texts
    assert [c.status for c in trajectory.completions] == ["complete"] * 2
