"""Keys of the caller are on no span, whichever way they were sent or echoed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from otel_rollout.testing import Raw
from tests.kit.calling import BOTH, Caller, Configure, Json, as_bare
from tests.kit.comparing import everything, replayed
from tests.kit.conversations import chat
from tests.kit.recording import Clients

KEY = "sk-proj-Zq8vT3nXw5Rk1Lm7Yp2Bs9Dc4Fg6Hj0"


def echo(status: int) -> Raw:
    said = f"Incorrect API key provided: {KEY}. You sent 'Authorization: Bearer {KEY}'."
    body = {"error": {"message": said, "type": "invalid_request_error", "code": None}}
    return Raw(status, json.dumps(body).encode())


def echo_in_stream() -> Raw:
    event = f'data: {{"error": {{"message": "You sent Bearer {KEY}", "code": 401}}}}\n\n'
    return Raw(200, event.encode(), content_type="text/event-stream")


SECRETS: dict[str, tuple[Any, Json]] = {
    "reply": ("Paris", {}),
    "error": (echo(401), {}),
    "server error": (echo(500), {}),
    "error with status 200": (echo(200), {}),
    "error of a stream": (echo(401), {"stream": True}),
    "error in a stream": (echo_in_stream(), {"stream": True}),
}


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", SECRETS)
async def test_secrets(configure: Configure, clients: Clients, caller: Caller, case: str) -> None:
    """The API key is nowhere in what is recorded, also where an error echoes it."""
    reply, options = SECRETS[case]

    async def script(client: Any) -> Any:
        return await chat(client, **options)

    recording, server, _ = await as_bare(
        configure, clients, caller, lambda: reply, script, api_key=KEY
    )
    assert server.exchanges[0].request_headers["authorization"] == f"Bearer {KEY}"
    replayed(recording)
    found = everything(recording)
    assert "/chat/completions" in found
    assert KEY not in found
    assert re.search("bearer", found.replace("Bearer [redacted]", ""), re.IGNORECASE) is None
