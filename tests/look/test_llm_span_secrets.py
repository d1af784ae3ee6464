"""No key of the caller is on an LLM span."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import openai
import pytest

from otel_rollout import rollout
from tests.kit.recording import Clients, Recording
from tests.look.llm_spans import ECHOES, KEY, SECRETS, USER

pytestmark = pytest.mark.slow

SECRETS += ["custom-secret-0006"]

HEADERS = {
    "X-Api-Key": SECRETS[1],
    "Cookie": f"theme=dark; sid={SECRETS[2]}",
    "Proxy-Authorization": f"Basic {SECRETS[3]}",
    "X-Custom-Token": SECRETS[5],
    "X-Plain": "plain",
}


def assert_no_secret(spans: Any) -> None:
    assert spans
    for span in spans:
        text = span.to_json() + repr(span.events) + repr(span.status.description)
        assert [secret for secret in SECRETS if secret in text] == [], span.name


@pytest.mark.parametrize("case", ECHOES)
def test_no_secret_is_on_a_span(case: str, any_recording: Recording, clients: Clients):
    """No key, token or cookie of a request is on a span, though the server repeats them all."""
    server = clients.serve(ECHOES[case])
    address = server.base_url.replace("//", f"//user:{SECRETS[4]}@")
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    clients.closing.append(client)
    stream = case in ("stream", "cut")
    calls: list[Callable[[], Any]] = [
        lambda: client.chat.completions.create(
            model="m", messages=USER, extra_headers=HEADERS, stream=stream
        ),
        lambda: client.completions.create(
            model="m", prompt="p", extra_headers=HEADERS, stream=stream
        ),
        lambda: client.responses.create(model="m", input="p", extra_headers=HEADERS, stream=stream),
        lambda: client.embeddings.create(model="m", input="p", extra_headers=HEADERS),
        lambda: client.chat.completions.with_raw_response.create(
            model="m", messages=USER, extra_headers=HEADERS
        ),
    ]
    for call in calls:
        try:
            with rollout("x"):
                result = call()
                if stream and isinstance(result, openai.Stream):
                    list(result)
        except (openai.APIError, ValueError):
            assert case != "plain"
        gc.collect()  # openai 1.x leaves a stream that failed to the collector
    with rollout("x"), contextlib.suppress(openai.APIError):
        calls[0]()
    assert server.exchanges[0].request_headers["x-custom-token"] == SECRETS[5]
    assert_no_secret(any_recording.spans)


def test_a_key_that_cannot_be_sent_is_on_no_span(any_recording: Recording, clients: Clients):
    """A key with a line break, which the HTTP library repeats in its error, is not exported."""
    server = clients.serve()
    client = openai.OpenAI(base_url=server.base_url, api_key=KEY + "\n", max_retries=0)
    clients.closing.append(client)
    with pytest.raises(openai.APIConnectionError), rollout("x"):
        client.chat.completions.create(model="m", messages=USER)
    with pytest.raises(openai.APIConnectionError), rollout("x"):
        client.responses.create(model="m", input="p")
    assert_no_secret(any_recording.spans)


async def test_no_secret_is_on_a_span_of_async_calls(any_recording: Recording, clients: Clients):
    """The same for async calls and their streams."""
    server = clients.serve(lambda body: ECHOES["stream" if body.get("stream") else "401"])
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key=KEY, max_retries=0)
    clients.closing.append(client)
    for stream in (False, True):
        with contextlib.suppress(openai.APIError), rollout("x"):
            result: Any = await client.chat.completions.create(
                model="m", messages=USER, extra_headers=HEADERS, stream=stream
            )
            async for _ in result:
                pass
        with contextlib.suppress(openai.APIError), rollout("x"):
            result = await client.responses.create(
                model="m", input="p", extra_headers=HEADERS, stream=stream
            )
            async for _ in result:
                pass
    assert_no_secret(any_recording.spans)
