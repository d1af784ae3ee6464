"""Clients of every model API: a call is captured, or the trajectory's warning names it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import boto3
import botocore.config
import cohere
import google.genai
import groq
import httpx
import litellm
import mistralai.client
import ollama
import pytest
import requests

from otel_rollout import rollout
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
QUESTION = [{"role": "user", "content": "hi"}]
BODY: Any = {"model": "m", "messages": QUESTION}
COUNTED = {"urllib": "urllib", "boto3": "botocore"}
"""What clients send with whose whose calls are counted, not captured."""


async def by_groq(url: str) -> None:
    base_url = url.removesuffix("/openai/v1")
    async with groq.AsyncGroq(base_url=base_url, api_key="k", max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=QUESTION)


async def by_ollama(url: str) -> None:
    await ollama.AsyncClient(url).chat("m", QUESTION)


async def by_mistralai(url: str) -> None:
    async with mistralai.client.Mistral(api_key="k", server_url=url) as client:
        await client.chat.complete_async(model="m", messages=QUESTION)


async def by_cohere(url: str) -> None:
    async with cohere.AsyncClientV2("k", base_url=url) as client:
        await client.chat(model="m", messages=QUESTION)


async def by_google_genai(url: str) -> None:
    options = google.genai.types.HttpOptions(base_url=url)
    client = google.genai.Client(api_key="k", http_options=options)
    await asyncio.to_thread(client.models.generate_content, model="m", contents="hi")


async def by_boto3(url: str) -> None:
    client = boto3.client(
        "bedrock-runtime",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id="k",
        aws_secret_access_key="s",
        config=botocore.config.Config(retries={"max_attempts": 0}),
    )
    messages = [{"role": "user", "content": [{"text": "hi"}]}]
    await asyncio.to_thread(client.converse, modelId="m", messages=messages)


async def by_httpx(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/chat/completions", json=BODY)


async def by_aiohttp(url: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=BODY) as response,
    ):
        await response.read()


async def by_requests(url: str) -> None:
    address = f"{url}/v1/chat/completions"
    await asyncio.to_thread(requests.post, address, json=BODY, timeout=60)


async def by_urllib(url: str) -> None:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(BODY).encode(),
        {"content-type": "application/json"},
    )
    await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())


def by_litellm(model: str, path: str = "") -> Callable[[str], Coroutine[Any, Any, None]]:
    async def call(url: str) -> None:
        await litellm.acompletion(model, QUESTION, api_base=url + path, api_key="k")

    return call


CALLS: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
    "groq": by_groq,
    "ollama": by_ollama,
    "mistralai": by_mistralai,
    "cohere": by_cohere,
    "google-genai": by_google_genai,
    "boto3": by_boto3,
    "httpx": by_httpx,
    "aiohttp": by_aiohttp,
    "requests": by_requests,
    "urllib": by_urllib,
    "litellm openai": by_litellm("openai/m", "/v1"),
    "litellm hosted_vllm": by_litellm("hosted_vllm/m", "/v1"),
    "litellm mistral": by_litellm("mistral/m", "/v1"),
    "litellm ollama_chat": by_litellm("ollama_chat/m"),
    "litellm cohere_chat": by_litellm("cohere_chat/m", "/v2/chat"),
    "litellm gemini": by_litellm("gemini/m"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_client(
    recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """One call: it is captured as it was sent, or one warning names it."""
    server = clients.serve("hello")
    async with rollout("agent"):
        with contextlib.suppress(Exception):  # to this server most of these APIs are unknown
            await CALLS[name](server.base_url.removesuffix("/v1"))
    posts = [exchange for exchange in server.exchanges if exchange.request]
    assert posts, "it did not reach the server"
    trajectory = replayed(recording)
    if name in COUNTED:
        assert "its trajectory is empty" in caplog.text.lower()
        path = posts[0].path.partition("?")[0]
        assert trajectory.exchanges == []
        assert trajectory.warnings == [
            f"1 request to {path} went through {COUNTED[name]} and was not captured"
        ]
        return
    sent = [json.loads(exchange.request) for exchange in posts]
    assert [exchange.request() for exchange in trajectory.exchanges] == sent
    assert "not captured" not in " ".join(trajectory.warnings)
