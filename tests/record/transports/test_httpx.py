"""Model calls that go through httpx alone, and those that are only counted."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from otel_rollout import gather_trajectory, get_current_trajectory, no_capture, rollout
from otel_rollout.testing import ModelServer, Raw
from tests.kit.recording import Clients, Recording

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hé"}]}


def url_of(server: ModelServer, path: str = "/chat/completions") -> str:
    return server.base_url + path


def test_a_call_is_captured(recording: Recording, clients: Clients):
    server = clients.serve("hello")

    @rollout
    def agent() -> str:
        reply = httpx2.post(url_of(server), json=BODY).json()
        return str(reply["choices"][0]["message"]["content"])

    assert agent() == "hello"
    trajectory = recording.trajectory
    assert trajectory.warnings == []
    (completion,) = trajectory.completions
    assert (completion.message or {})["content"] == "hello"
    (exchange,) = trajectory.exchanges
    assert exchange.path == "/chat/completions"
    assert exchange.request() == BODY


@pytest.mark.parametrize("streamed", [False, True])
async def test_async_calls_streamed_and_not(recording: Recording, clients: Clients, streamed: bool):
    server = clients.serve("hello")

    @rollout
    async def agent() -> bytes:
        async with httpx2.AsyncClient() as client:
            body = {**BODY, "stream": streamed}
            async with client.stream("POST", url_of(server), json=body) as response:
                return b"".join([chunk async for chunk in response.aiter_bytes()])

    trajectory = await gather_trajectory(agent())
    (completion,) = trajectory.completions
    assert (completion.message or {})["content"] == "hello"
    assert completion.status == "complete"
    assert trajectory.exchanges[0].stream is streamed


def test_an_error_is_a_failed_call(recording: Recording, clients: Clients):
    """Each attempt is a call of its own: who retries is not known here."""
    server = clients.serve([Raw(status=429, body=b'{"error": {"message": "slow down"}}'), "hello"])

    @rollout
    def agent() -> None:
        for _ in range(2):
            response = httpx2.post(url_of(server), json=BODY)
        assert response.status_code == 200

    agent()
    assert [e.status for e in recording.trajectory.exchanges] == ["error", "complete"]


def test_what_no_api_reads_is_counted(recording: Recording, clients: Clients):
    server = clients.serve("hello")

    @rollout
    def agent() -> None:
        for _ in range(2):
            httpx2.post(url_of(server, "/generate?key=x"), json={"text": "hi"})
        httpx2.post(url_of(server, "/generate/logs"), json={"text": "hi"})
        httpx2.get(url_of(server, "/generate"))
        with no_capture():
            httpx2.post(url_of(server, "/generate"), json={"text": "hi"})

    agent()
    assert recording.trajectory.exchanges == []
    assert recording.trajectory.warnings[-1:] == [
        "2 requests to /v1/generate went through httpx2 and were not captured"
    ]


def test_the_calls_of_a_captured_client_are_not_counted_twice(
    recording: Recording, clients: Clients
):
    client = clients.sync(clients.serve("hello"))

    @rollout
    def agent() -> None:
        client.chat.completions.create(**BODY)
        for _ in client.chat.completions.create(**BODY, stream=True):
            assert get_current_trajectory() is not None

    agent()
    assert len(recording.trajectory.completions) == 2
    assert recording.trajectory.warnings == []
