"""A key in the path of an address is on no span, in no trajectory and in no log."""

from __future__ import annotations

import contextlib
import json
import logging
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from otel_rollout import request_token_ids, rollout
from otel_rollout.record.privacy.secrets import api_path, public_address
from otel_rollout.testing import ModelServer, Raw
from tests.kit.recording import Clients, Recording

KEY = "kPq7-path-secret-77"
BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1", "/v1"),
        (f"/{KEY}/v1/", "/v1"),
        (f"/{KEY}", ""),
        (f"/v1/{KEY}", ""),
        (f"/v1/{KEY}/gateway/openai", "/openai"),
        (f"/{KEY}/openai/v1/chat/completions", "/openai/v1/chat/completions"),
        (f"/v1/{KEY}/chat/completions", "/chat/completions"),
        (f"/{KEY}/v1/messages", "/v1/messages"),
        (f"/{KEY}/v1/generate", "/v1/generate"),
        (f"/{KEY}/model/amazon.titan/invoke", "/model/amazon.titan/invoke"),
        (f"/{KEY}/v1beta/models/g:generateContent", "/v1beta/models/g:generateContent"),
        ("/openai/deployments/d/chat/completions", "/openai/deployments/d/chat/completions"),
        ("", ""),
    ],
)
def test_the_known_part_of_a_path(path: str, known: str):
    """It begins with what an API has there, and never before what may be a key."""
    assert api_path(path) == known
    address = f"https://user:pass@host:1{path}?key={KEY}"
    assert public_address(address) == f"https://host:1{known}"


def by_openai(address: str, **options: Any) -> None:
    with openai.OpenAI(base_url=address, api_key="k", max_retries=0) as client:
        client.chat.completions.create(**BODY, **options)


def by_openai_stream(address: str) -> None:
    by_openai(address, stream=True)


def by_whole_address(address: str) -> None:
    with openai.OpenAI(base_url="http://127.0.0.1:1", api_key="k", max_retries=0) as client:
        client.post(f"{address}/chat/completions", cast_to=httpx2.Response, body=BODY)


def by_httpx2(address: str) -> None:
    httpx2.post(f"{address}/chat/completions", json=BODY).raise_for_status()


def by_urllib(address: str) -> None:
    body, headers = json.dumps(BODY).encode(), {"content-type": "application/json"}
    urllib.request.urlopen(
        urllib.request.Request(f"{address}/chat/completions", body, headers)
    ).read()


def by_an_unknown_path(address: str) -> None:
    httpx2.post(f"{address}/generate", json=BODY).raise_for_status()


@pytest.mark.parametrize(
    "call",
    [by_openai, by_openai_stream, by_whole_address, by_httpx2, by_urllib, by_an_unknown_path],
)
@pytest.mark.parametrize("status", [200, 400, 404])
def test_a_key_in_the_path(
    recording: Recording,
    clients: Clients,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[str], None],
    status: int,
):
    """Whatever becomes of the call, and though the server and the client repeat the address."""

    def reply(_: Any) -> Any:
        text = {"choices": [], "error": f"no: extra return_token_ids at /{KEY}/v1"}
        return Raw(status, json.dumps({"choices": []} if status == 200 else text).encode())

    routes = {f"/{KEY}/v1/chat/completions": reply, f"/{KEY}/v1/generate": reply}
    server: ModelServer = clients.serve(routes=routes)
    caplog.set_level(logging.INFO, "otel_rollout")
    with request_token_ids(), contextlib.suppress(Exception), rollout("agent"):
        call(server.base_url.replace("/v1", f"/{KEY}/v1"))
    assert server.exchanges[-1].path.startswith(f"/{KEY}/v1/")
    spans = "".join(span.to_json() for span in recording.spans)
    assert recording.spans
    assert KEY not in spans
    assert KEY not in json.dumps(recording.trajectory.to_dict())
    assert KEY not in "".join(map(str, recording.trajectory.warnings))
    assert KEY not in caplog.text
