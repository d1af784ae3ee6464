"""Agents on the real vLLM: every sampled token trains once, with the model's log-probability."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from exporters.kit.recomputed import Model
from otel_rollout import Trajectory, gather_trajectory, record_reward, request_token_ids, rollout
from otel_rollout.command import main
from tests.kit.calling import STREAMED
from tests.kit.recording import Recording
from tests.servers.agents import AGENTS, Agent, Chat, serving, thinking, tools
from tests.servers.checks import check, rows_of, sampled
from tests.servers.model import user

pytestmark = pytest.mark.server
TOLERANCE = 1e-3


@pytest.fixture
async def client(vllm: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(vllm) as made:
        yield made


async def play(agent: Agent, client: openai.AsyncOpenAI, stream: bool = False) -> Trajectory:
    """The trajectory of an agent."""

    @rollout(name=agent.__name__)
    async def run() -> None:
        await agent(Chat(client, stream))
        record_reward(1.0)

    with request_token_ids():
        return await gather_trajectory(run())


@STREAMED
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_every_token_trains_once_as_it_was_sampled(
    recording: Recording,
    client: openai.AsyncOpenAI,
    model: Model,
    keep: Callable[[Trajectory], None],
    agent: Agent,
    stream: bool,
) -> None:
    """As many tokens as the server counted, each with its log-probability under the weights."""
    trajectory = await play(agent, client, stream)
    keep(trajectory)
    assert AGENTS[agent](trajectory.completions)
    check(trajectory, model, TOLERANCE)


async def test_turns_that_go_on_are_one_row(
    recording: Recording, client: openai.AsyncOpenAI
) -> None:
    """A tool's result extends the row of the call; thinking that is left out starts a new one."""
    assert max(len(row.spans) for row in (await play(tools, client)).token_sequences()) > 1
    trajectory = await play(thinking, client)
    thoughts = [bool((c.message or {}).get("reasoning")) for c in trajectory.completions[:-1]]
    assert len(trajectory.token_sequences()) == 1 + sum(thoughts)


async def test_what_is_wrong_is_found(
    recording: Recording, client: openai.AsyncOpenAI, model: Model
) -> None:
    """A log-probability of the next token, another prefix, another mask: each shows."""
    trajectory = await play(tools, client)
    ((ids, mask, logprobs), *_) = rows_of(trajectory.token_sequences())
    first = list(mask).index(1)

    def wrong(ids: Any, mask: Any, logprobs: Any) -> float:
        return max(model.gaps([(ids, mask, logprobs)]))

    assert wrong(ids, mask, logprobs) < TOLERANCE
    assert wrong(ids, mask, [0.0, *logprobs[:-1]]) > 100 * TOLERANCE
    assert wrong([*ids[:first], ids[first] + 1, *ids[first + 1 :]], mask, logprobs) > TOLERANCE
    assert wrong(ids[1:], mask[1:], logprobs[1:]) > TOLERANCE
    assert wrong(ids, [1] * len(ids), logprobs) > 100 * TOLERANCE
    assert math.isnan(wrong(ids, mask, [math.nan] * len(ids)))
    shorter = [(row[0], [*row[1][:-1], 0], row[2]) for row in rows_of(trajectory.token_sequences())]
    assert len(model.gaps(shorter)) < sampled(trajectory.completions)


@STREAMED
async def test_text_completions(
    recording: Recording, client: openai.AsyncOpenAI, model: Model, stream: bool
) -> None:
    """Prompts that are text, and ids, and two samples of each."""

    @rollout(name="text completions")
    async def agent() -> None:
        for prompt in ("One fish, ", [12, 40, 41]):
            options: Any = {"prompt": prompt, "n": 2, "max_tokens": 12, "seed": 1}
            if stream:
                options |= {"stream": True, "stream_options": {"include_usage": True}}
            made: Any = await client.completions.create(model="tiny", **options)
            if stream:
                async for _ in made:
                    pass

    with request_token_ids():
        trajectory = await gather_trajectory(agent())
    assert len(trajectory.completions) == 4
    check(trajectory, model, TOLERANCE)


async def test_a_call_that_the_server_refuses(
    recording: Recording, client: openai.AsyncOpenAI, model: Model
) -> None:
    """A prompt beyond the context fails, and the rollout goes on."""

    @rollout(name="a refused call")
    async def agent() -> None:
        chat = Chat(client, stream=False)
        with pytest.raises(openai.BadRequestError):
            await chat.ask([user("Why? " * 5000)])
        await chat.ask([user("Why?")])

    with request_token_ids():
        trajectory = await gather_trajectory(agent())
    assert [c.status for c in trajectory.completions] == ["error", "complete"]
    check(trajectory, model, TOLERANCE)


def test_doctor_finds_nothing_wrong(vllm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says that the ids of all tokens came, as docs/vllm.md shows."""
    assert main(["doctor", "--server", f"{vllm}/v1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"ok model server: {vllm}/v1 sent the ids of all \d+ tokens", printed)
