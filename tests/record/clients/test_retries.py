"""Retries of the client: one exchange and one completion, whatever the attempts gave."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest

from otel_rollout.testing import Raw
from tests.kit.calling import BOTH, STREAMED, Caller, Configure, as_bare
from tests.kit.comparing import attribute, exchange_spans, received, replayed, sent
from tests.kit.conversations import ASK, chat
from tests.kit.recording import Clients


def failing(*statuses: int, then: Any = "Paris") -> Iterable[Any]:
    """Errors that the client retries at once, then a reply."""
    error = json.dumps({"error": {"message": "busy", "type": "server_error"}}).encode()
    headers = {"retry-after-ms": "1"}
    return itertools.chain((Raw(status, error, headers=headers) for status in statuses), [then])


@BOTH
@STREAMED
@pytest.mark.parametrize("statuses", [(500,), (429,), (503, 429)], ids=str)
async def test_retries_are_one_completion(
    configure: Configure,
    clients: Clients,
    caller: Caller,
    stream: bool,
    statuses: tuple[int, ...],
) -> None:
    """The client's retries are events of one exchange, and the last attempt is its reply."""

    async def script(client: Any) -> Any:
        return await chat(client, **({"stream": True} if stream else {}))

    recording, server, _ = await as_bare(
        configure, clients, caller, lambda: failing(*statuses), script, max_retries=2
    )
    assert [wire.status for wire in server.exchanges] == [*statuses, 200]
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert completion.trainable
    assert completion.exchange.attempts == len(statuses) + 1
    assert completion.request == sent(server.exchanges[-1])
    (span,) = exchange_spans(recording)
    assert attribute(span, "response.status_code") == 200
    assert [event.name for event in span.events] == ["retry"] * len(statuses)
    assert [dict(event.attributes or {}) for event in span.events] == [
        {"http_status": status} for status in statuses
    ]


@BOTH
async def test_retries_that_give_up(configure: Configure, clients: Clients, caller: Caller) -> None:
    """When every attempt fails, one failed completion says with what."""
    recording, server, seen = await as_bare(
        configure, clients, caller, lambda: failing(500, 500, then=Raw(503)), chat, max_retries=1
    )
    assert seen[1] is openai.InternalServerError
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    assert completion.error is not None
    assert completion.error["type"] == "InternalServerError"
    assert completion.exchange.attempts == 2
    assert completion.exchange.status_code == 500
    assert completion.response == received(server.exchanges[-1])
    assert not completion.trainable


@BOTH
async def test_a_connection_that_is_refused(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """A server that is not there: the client's own exception, and a completion that names it."""

    async def script(client: Any) -> Any:
        client.base_url = "http://127.0.0.1:9/v1"
        return await chat(client)

    recording, _, seen = await as_bare(configure, clients, caller, lambda: None, script)
    assert seen[1] is openai.APIConnectionError
    (completion,) = replayed(recording).completions
    assert completion.error == {"type": "APIConnectionError", "message": "Connection error."}
    assert completion.request == {"messages": ASK, "model": "m"}
    assert completion.response is None
