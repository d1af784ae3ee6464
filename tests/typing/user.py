"""A user's project, as type checkers see it: what is right passes, each line marked is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import assert_type

import otel_rollout
from otel_rollout import (
    Completion,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    gather_group,
    gather_trajectories,
    gather_trajectory,
    rollout,
    to_token_rows,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

otel_rollout.configure(service_name="agent", request_token_ids=True)


@rollout
async def bare(client: AsyncOpenAI, question: str) -> str:
    reply = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": question}]
    )
    return reply.choices[0].message.content or ""


@rollout(task_id="t", timeout=30.0)
async def named(client: AsyncOpenAI, question: str) -> int:
    return len(await bare(client, question))


async def train(client: AsyncOpenAI) -> None:
    assert_type(await bare(client, "Hi"), str)
    assert_type(await named(client, "Hi"), int)
    one = await gather_trajectory(bare(client, "Hi"), task_id="t")
    assert_type(one, Trajectory)
    many = await gather_trajectories((bare(client, "Hi") for _ in range(2)), max_concurrency=2)
    group = await gather_group((bare(client, "Hi") for _ in range(2)), group_id="g", timeout=9)
    assert_type(group, TrajectoryGroup)
    completion = one.completions[0]
    assert_type(completion, Completion)
    assert_type(completion.token_ids, "list[int] | None")
    row = one.token_sequences(on_failure="keep")[0]
    assert_type(row, TokenSequence)
    assert_type(row.loss_mask, "list[int]")
    to_token_rows(many, max_length=512, scale_advantages=True)
    to_token_rows(many, max_len=512)  # wrong
    one.token_sequences(max_len=512)  # wrong
    await gather_trajectories([], max_concurency=2)  # wrong
    await gather_group([], tiemout=2)  # wrong
    await gather_trajectory(bare(client, "Hi"), task=3)  # wrong
    await bare(client, 3)  # wrong
    completion.token_idz  # wrong
    row.los_mask  # wrong
    rollout(task="t")  # wrong
