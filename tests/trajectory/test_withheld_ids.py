"""A server that sends token ids to those who ask, and was not asked: one sentence says so."""

from __future__ import annotations

from typing import Any

import pytest

from otel_rollout import Trajectory, request_token_ids, rollout
from otel_rollout.testing import Raw
from otel_rollout.trajectory import sentences
from otel_rollout.wire import dumps
from tests.kit.recording import Clients, Recording

USER = [{"role": "user", "content": "hi"}]


def said(trajectory: Trajectory) -> int:
    """How often."""
    return trajectory.warnings.count(sentences.NOT_ASKED())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("long", [False, True])
async def test_it_is_said_once(stream: bool, long: bool, recording: Recording, clients: Clients):
    """However many calls there were; with ids, or asked for ids, nothing is said."""
    server = clients.serve("word " * 4000 if long else "yes", token_ids=False, logprobs=False)
    client = clients.asynchronous(server)

    async def ask() -> None:
        reply: Any = await client.chat.completions.create(
            model="m",
            messages=USER,  # type: ignore[arg-type]
            stream=stream,
        )
        if stream:
            async for _ in reply:
                pass

    async with rollout("agent") as trajectory:
        await ask()
        await ask()
    assert said(trajectory) == 1
    assert said(Trajectory.from_json(trajectory.to_json())) == 1
    with request_token_ids():
        async with rollout("agent") as trajectory:
            await ask()
    assert trajectory.completions[0].token_ids
    assert said(trajectory) == 0


@pytest.mark.parametrize("named", [False, True])
async def test_a_server_without_ids(named: bool, recording: Recording, clients: Clients):
    """Nothing is said of one that does not know them, or did not send them when asked."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "4"},
        "finish_reason": "stop",
    }
    reply = {"id": "r1", "object": "chat.completion", "choices": [choice]}
    if named:
        choice["token_ids"] = None
    client = clients.asynchronous(clients.serve(Raw(200, dumps(reply).encode())))
    with request_token_ids(named):
        async with rollout("agent") as trajectory:
            await client.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]
    assert trajectory.messages()[-1]["content"] == "4"
    assert said(trajectory) == 0
