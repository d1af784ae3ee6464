"""Calls that carry a marker, and the markers that each trajectory has."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai

from otel_rollout import Trajectory
from tests.kit.recording import Recording

WAIT = 60.0
"""Seconds for what takes none, on a machine that has other things to do."""

OUTSIDE = re.compile("model calls? (was|were) made outside any rollout while it ran")
"""The warning of a rollout beside which calls were made that are nobody's."""


def ask(marker: str) -> list[Any]:
    return [{"role": "user", "content": marker}]


def call(client: openai.OpenAI, marker: str, messages: list[Any] | None = None) -> Any:
    return client.chat.completions.create(model="m", messages=messages or ask(marker))


async def acall(client: openai.AsyncOpenAI, marker: str, *, stream: bool = False) -> None:
    result: Any = await client.chat.completions.create(
        model="m",
        messages=ask(marker),
        stream=stream,
    )
    if stream:
        async for _ in result:
            await asyncio.sleep(0)


def heard(trajectory: Trajectory) -> list[str]:
    """What was asked in this trajectory, sorted; nothing in it is out of order or missing."""
    assert [w for w in trajectory.warnings if not OUTSIDE.search(w)] == []
    assert {c.status for c in trajectory.completions} <= {"complete"}
    for completion in trajectory.completions:
        message = completion.message or {}
        assert message["content"] == f"You said: {completion.request_messages[-1]['content']}"
    return sorted(c.request_messages[0]["content"] for c in trajectory.completions)


def by_name(recording: Recording) -> dict[str, list[str]]:
    """What was heard in each trajectory, by its name."""
    names = {t.name: heard(t) for t in recording.trajectories}
    assert len(names) == len(recording.trajectories)
    return names
