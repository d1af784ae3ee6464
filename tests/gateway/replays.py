"""Requests that are recorded through a gateway, and asked again of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from otel_rollout import Trajectory, reconstruct, rollout
from otel_rollout.testing import ModelServer
from tests.gateway.programs import Serve
from tests.kit.conversations import ASK, TOOLS
from tests.kit.outside import Answer, send
from tests.kit.recording import Recording

CHAT = {"model": "m", "messages": ASK, "temperature": 0.5}
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
Asked = tuple[str, Any]
"""The path below the root, and the body, of a request."""


async def answers(root: str, asked: Sequence[Asked]) -> list[Answer]:
    """The replies to requests, one after the other."""
    return [await send(root + path, body) for path, body in asked]


async def recorded(
    recording: Recording, gateway_to: Serve, server: ModelServer, asked: Sequence[Asked]
) -> tuple[list[Answer], list[Trajectory]]:
    """The replies to requests through a gateway, and the trajectories that the spans give."""
    gateway = await gateway_to(server.base_url)
    with rollout("agent"):
        given = await answers(gateway.base_url().removesuffix("/v1"), asked)
    return given, reconstruct(recording.spans)


def same(again: Sequence[Answer], before: Sequence[Answer]) -> None:
    """Assert that replies are equal, as far as a client goes by them."""
    for one, other in zip(again, before, strict=True):
        assert (one.status, one.body, one.whole) == (other.status, other.body, other.whole)


def difference(answer: Answer) -> Any:
    """The difference in a reply that is one."""
    assert answer.status == 422
    return answer.json()["error"]["difference"]


def agent(client: openai.OpenAI, *, stream: bool) -> list[Any]:
    """All that a client gives of OpenAI's three APIs, of two choices, and of an embedding."""
    found: list[Any] = []

    def keep(reply: Any) -> None:
        found.append([each.to_dict() for each in reply] if stream else reply.to_dict())

    more: Any = {"stream": stream}
    keep(client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, n=2, **more))
    keep(client.completions.create(model="m", prompt="Say ✓", **more))
    keep(client.responses.create(model="m", input="Say it", instructions="Be short", **more))
    found.append(client.embeddings.create(model="m", input=["a"]).to_dict())
    return found
