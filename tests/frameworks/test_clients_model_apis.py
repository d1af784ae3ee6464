"""The providers' own clients: a tool loop of each is one history, however it is asked."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

import otel_rollout
from otel_rollout import Trajectory, rollout
from otel_rollout.record.transports.capture import TRANSPORTS
from otel_rollout.testing import ModelServer
from tests.kit.calling import STREAMED
from tests.kit.comparing import replayed, sent
from tests.kit.model_apis import COHERE, CONVERSE, GEMINI, MISTRAL, OLLAMA
from tests.kit.recording import Clients, Recording
from tests.kit.talk import Talk

pytestmark = pytest.mark.framework
Ask = Callable[[list[Any]], Awaitable[Any]]
QUESTION = "1 + 2 and 3 + 4?"
WAYS = pytest.mark.parametrize("way", ["sync", "async"])


@pytest.fixture
async def own() -> AsyncIterator[dict[str, Any]]:
    """HTTP clients for the providers' clients, which do not close theirs."""
    httpx: Any = importlib.import_module("httpx")
    with httpx.Client() as sync:
        async with httpx.AsyncClient() as asynchronous:
            yield {"sync": sync, "async": asynchronous}


def url_of(server: ModelServer) -> str:
    return server.base_url.removesuffix("/v1")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: the other

    """
    return a + b


def check(recording: Recording, server: ModelServer, talk: Talk, stream: bool) -> Trajectory:
    """Both calls as they were on the wire, one history, whole, and nothing to warn of."""
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    assert [c.response for c in trajectory.completions] == list(talk.replies)
    assert [c.request for c in trajectory.completions] == [sent(e) for e in server.exchanges]
    assert [c.status for c in trajectory.completions] == ["complete"] * 2
    assert [c.stream for c in trajectory.completions] == [stream] * 2
    (history,) = trajectory.histories
    found = [item.completion for item in history.items if item.completion is not None]
    assert list(dict.fromkeys(found)) == trajectory.completions
    assert not any(item.is_break for item in history.items)
    assert len(server.exchanges) == 2
    return trajectory


async def collected(stream: Any) -> list[Any]:
    """What a sync or an async stream gives."""
    if isinstance(stream, AsyncIterator) or hasattr(stream, "__aiter__"):
        return [each async for each in stream]
    assert isinstance(stream, Iterator) or hasattr(stream, "__iter__")
    return list(stream)


async def result(value: Any) -> Any:
    """The value, awaited if it has to be."""
    return await value if hasattr(value, "__await__") else value


def google(server: ModelServer, own: dict[str, Any]) -> Any:
    genai: Any = pytest.importorskip("google.genai")
    options = {"httpx_client": own["sync"], "httpx_async_client": own["async"]}
    options |= {"base_url": url_of(server), "api_version": "v1beta"}
    return genai.Client(api_key="not-a-real-key", http_options=options)


@STREAMED
@WAYS
async def test_google_genai(
    recording: Recording, clients: Clients, own: dict[str, Any], way: str, stream: bool
) -> None:
    """A chat with a function that the client calls by itself."""
    server = clients.serve(routes=GEMINI.routes())
    client = google(server, own)
    chats = client.chats if way == "sync" else client.aio.chats
    chat = chats.create(model="gemini-m", config={"tools": [add], "temperature": 0.5})
    with rollout("agent"):
        if stream:
            chunks = await collected(await result(chat.send_message_stream(QUESTION)))
            said = "".join(chunk.text or "" for chunk in chunks)
        else:
            said = (await result(chat.send_message(QUESTION))).text
    assert said.endswith("It is 3 and 7.")
    trajectory = check(recording, server, GEMINI, stream)
    assert trajectory.completions[0].request_model == "gemini-m"


@STREAMED
async def test_a_chat_that_goes_on_after_a_streamed_reply(
    recording: Recording, clients: Clients, own: dict[str, Any], stream: bool
) -> None:
    """It replays one content for each chunk; the next reply continues it."""
    server = clients.serve(routes=GEMINI.routes())
    chat = google(server, own).chats.create(model="gemini-m", config={"tools": [add]})
    with rollout("agent"):
        if stream:
            list(chat.send_message_stream(QUESTION))
        else:
            chat.send_message(QUESTION)
        chat.send_message("and?")
    trajectory = replayed(recording)
    (history,) = trajectory.histories
    found = [item.completion for item in history.items if item.completion is not None]
    assert list(dict.fromkeys(found)) == trajectory.completions
    assert len(trajectory.completions) == 3


async def loop(ask: Ask, messages: list[Any], results: Callable[[Any], list[Any]]) -> Any:
    """Ask, run the tools, ask again."""
    said = await ask(messages)
    messages += [said, *results(said)]
    return await ask(messages)


@STREAMED
@WAYS
async def test_ollama(
    recording: Recording, clients: Clients, own: dict[str, Any], way: str, stream: bool
) -> None:
    """The reply is replayed as the client's own message; a streamed one is put together."""
    ollama: Any = pytest.importorskip("ollama")
    server = clients.serve(routes=OLLAMA.routes())
    client = (ollama.Client if way == "sync" else ollama.AsyncClient)(host=url_of(server))
    own[way].base_url, client._client = client._client.base_url, own[way]

    async def ask(messages: list[Any]) -> Any:
        reply = await result(
            client.chat(model="m", messages=messages, tools=[add], stream=stream, think=True)
        )
        if not stream:
            return reply.message
        said: dict[str, Any] = {"role": "assistant", "content": "", "thinking": ""}
        for chunk in await collected(reply):
            said["content"] += chunk.message.content or ""
            said["thinking"] += chunk.message.thinking or ""
            said.setdefault("tool_calls", []).extend(chunk.message.tool_calls or ())
        return said

    tools = [{"role": "tool", "tool_name": "add", "content": n} for n in ("3", "7")]
    with rollout("agent"):
        await loop(ask, [{"role": "user", "content": QUESTION}], lambda _: tools)
    check(recording, server, OLLAMA, stream)


@STREAMED
@WAYS
async def test_mistralai(
    recording: Recording, clients: Clients, own: dict[str, Any], way: str, stream: bool
) -> None:
    """With reasoning in the content, and without."""
    mistralai: Any = pytest.importorskip("mistralai.client")
    server = clients.serve(routes=MISTRAL.routes())
    client = mistralai.Mistral(
        api_key="not-a-real-key",
        server_url=url_of(server),
        client=own["sync"],
        async_client=own["async"],
    )
    methods = {
        ("sync", False): client.chat.complete,
        ("sync", True): client.chat.stream,
        ("async", False): client.chat.complete_async,
        ("async", True): client.chat.stream_async,
    }
    said = MISTRAL.said(MISTRAL.replies[0])

    async def ask(messages: list[Any]) -> Any:
        request = {"model": "m", "messages": messages, "tools": MISTRAL.question["tools"]}
        reply = await result(methods[way, stream](**request))
        if not stream:
            return reply.choices[0].message
        await collected(reply)
        return said

    tools = MISTRAL.results(said)[1:]
    with rollout("agent"):
        await loop(ask, [{"role": "user", "content": QUESTION}], lambda _: tools)
    check(recording, server, MISTRAL, stream)


@STREAMED
@WAYS
async def test_cohere(
    recording: Recording, clients: Clients, own: dict[str, Any], way: str, stream: bool
) -> None:
    """Version 2 of its API."""
    cohere: Any = pytest.importorskip("cohere")
    server = clients.serve(routes=COHERE.routes())
    kind = cohere.ClientV2 if way == "sync" else cohere.AsyncClientV2
    client = kind(api_key="not-a-real-key", base_url=url_of(server), httpx_client=own[way])
    said = COHERE.said(COHERE.replies[0])

    async def ask(messages: list[Any]) -> Any:
        request = {"model": "m", "messages": messages, "tools": COHERE.question["tools"]}
        if not stream:
            return (await result(client.chat(**request))).message
        await collected(client.chat_stream(**request))
        return said

    tools = COHERE.results(said)[1:]
    with rollout("agent"):
        await loop(ask, [{"role": "user", "content": QUESTION}], lambda _: tools)
    check(recording, server, COHERE, stream)


@pytest.mark.skipif("aiohttp.client" not in TRANSPORTS, reason="aiohttp is not hooked")
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@STREAMED
async def test_google_genai_over_aiohttp(
    recording: Recording, clients: Clients, stream: bool
) -> None:
    """As its async client asks where aiohttp is installed."""
    genai: Any = pytest.importorskip("google.genai")
    server = clients.serve(routes=GEMINI.routes())
    options = {"base_url": url_of(server), "api_version": "v1beta"}
    client = genai.Client(api_key="not-a-real-key", http_options=options)
    async with client.aio as asynchronous:
        chat = asynchronous.chats.create(model="gemini-m", config={"tools": [add]})
        with rollout("agent"):
            if stream:
                await collected(await chat.send_message_stream(QUESTION))
            else:
                await chat.send_message(QUESTION)
    client.close()
    check(recording, server, GEMINI, stream)


@STREAMED
def test_boto3(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """`converse` and `converse_stream` are counted, and their signed bodies sent as they are."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    boto3: Any = pytest.importorskip("boto3")
    server = clients.serve(routes=CONVERSE.routes())
    client = boto3.client(
        "bedrock-runtime",
        region_name="us-east-1",
        endpoint_url=url_of(server),
        aws_access_key_id="not-a-real-key",
        aws_secret_access_key="not-a-real-secret",
    )
    asked = {**CONVERSE.question, "modelId": "us.anthropic.claude-m:0"}
    with rollout("agent"), otel_rollout.request_token_ids():
        if stream:
            assert len(list(client.converse_stream(**asked)["stream"])) > 4
        else:
            assert client.converse(**asked)["output"]["message"]["role"] == "assistant"
    client.close()
    (exchange,) = server.exchanges
    assert b"token_ids" not in exchange.request
    assert exchange.request_headers["authorization"].startswith("AWS4-")
    trajectory = recording.trajectory
    assert trajectory.exchanges == []
    (warning,) = trajectory.warnings
    assert warning.endswith("went through botocore and was not captured")
