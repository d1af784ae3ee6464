"""Questions to a client, the texts of histories, and what spans rebuild in any order."""

from __future__ import annotations

import random
from typing import Any

import openai

from otel_rollout import Trajectory, reconstruct
from tests.kit.recording import Recording


def ask(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=list(messages), **options)


async def ask_async(client: openai.AsyncOpenAI, *messages: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=list(messages))


def contents(trajectory: Trajectory) -> list[list[str]]:
    """The texts of each history."""
    return [[message["content"] for message in h.messages()] for h in trajectory.histories]


def assert_replays(recording: Recording) -> None:
    """Every trajectory is what its spans, in any order and some of them twice, rebuild."""
    spans = list(recording.spans)
    spans += random.Random(1).sample(spans, len(spans) // 2)
    for seed in range(3):
        random.Random(seed).shuffle(spans)
        replayed = {trajectory.id: trajectory for trajectory in reconstruct(spans)}
        assert replayed.keys() == {trajectory.id for trajectory in recording.trajectories}
        for trajectory in recording.trajectories:
            assert replayed[trajectory.id].to_dict() == trajectory.to_dict()
