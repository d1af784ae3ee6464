"""Calls that pass through a gateway: live trajectories, in order, and untouched bytes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import requests
from opentelemetry import context as otel_context

from otel_rollout import ConfigurationError, NoActiveRolloutError, propagate, rollout
from otel_rollout.gateway import application, serve
from otel_rollout.gateway.serving import http_server
from otel_rollout.gateway.upstream import listening_socket
from otel_rollout.testing import Raw
from tests.gateway.programs import HARNESS, SECRET, Serve
from tests.kit.conversations import ASK
from tests.kit.outside import open_to, request_bytes, send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", CHAT),
    "text": ("/completions", {"model": "m", "prompt": "Once"}),
    "responses": ("/responses", {"model": "m", "input": "Hi"}),
    "messages": ("/messages", {"model": "m", "max_tokens": 9, "messages": ASK}),
}
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@STREAMED
@pytest.mark.parametrize("api", CALLS)
async def test_a_call_of_any_program_is_in_the_live_trajectory(
    captured: Recording, clients: Clients, gateway_to: Serve, api: str, stream: bool
):
    """Of each API, streamed or not: once the reply has come, the completion is there."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    path, body = CALLS[api]
    with rollout("agent") as trajectory:
        answer = await send(gateway.base_url() + path, {**body, "stream": stream})
        (completion,) = trajectory.completions
        assert completion.status == "complete"
    assert answer.status == 200
    assert answer.whole
    (wire,) = server.exchanges
    assert wire.path == f"/v1{path}"
    assert answer.body == wire.response
    assert captured.trajectory.warnings == []
    assert completion.stream is stream


async def test_calls_are_in_order_with_those_of_this_process(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """What the gateway passes on is on the rollout's own clock."""
    server = clients.serve(str(number) for number in range(4))
    gateway = await gateway_to(server.base_url)
    client = clients.asynchronous(server)
    with rollout("agent") as trajectory:
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=ASK)
            await send(gateway.base_url() + "/chat/completions", CHAT)
    said = [
        completion.message and completion.message["content"]
        for completion in trajectory.completions
    ]
    assert said == ["0", "1", "2", "3"]


@STREAMED
async def test_a_client_of_this_process_is_recorded_once(
    recording: Recording,
    clients: Clients,
    gateway_to: Serve,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """The hook of a client that asks through the gateway leaves the call to it."""
    monkeypatch.setenv("OTEL_ROLLOUT_SECRET", SECRET)
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        token = gateway.token()
        async with openai.AsyncOpenAI(base_url=gateway.base_url(), api_key="k") as client:
            reply: Any = await client.chat.completions.create(
                model="m",
                messages=ASK,
                stream=stream,
            )
            if stream:
                async for _ in reply:
                    pass
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=f"or-{token}"
        ) as client:
            await client.chat.completions.create(model="m", messages=ASK)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k") as client:
            headers = propagate()
            await client.chat.completions.create(model="m", messages=ASK, extra_headers=headers)
    assert [completion.status for completion in trajectory.completions] == ["complete"] * 3
    assert trajectory.warnings == []
    assert not any(token in span.to_json() for span in recording.spans)


async def test_a_subprocess_needs_the_environment_alone(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A program with two clients, given `environment()`, is in the trajectory."""
    program = (
        "import anthropic, openai; m = [{'role': 'user', 'content': 'Hi'}];"
        "openai.OpenAI().chat.completions.create(model='m', messages=m);"
        "anthropic.Anthropic().messages.create(model='m', max_tokens=9, messages=m)"
    )
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        environment = {**os.environ, **gateway.environment()}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, env=environment
        )
        assert await process.wait() == 0
        assert environment["OTEL_ROLLOUT_ID"] == trajectory.id
        assert "127.0.0.1" in environment["no_proxy"].split(",")
    assert [wire.path for wire in server.exchanges] == ["/v1/chat/completions", "/v1/messages"]
    assert len(trajectory.completions) == 2
    assert trajectory.warnings == []


def test_a_plain_with_serves_from_a_thread(captured: Recording, clients: Clients):
    """Sync code has a gateway too, and its thread ends with the block."""
    server = clients.serve("Hello")
    with serve(server.base_url) as gateway, rollout("agent") as trajectory:
        url = gateway.base_url()
        answer = asyncio.run(send(url + "/chat/completions", CHAT))
    assert answer.status == 200
    assert len(trajectory.completions) == 1


async def test_a_request_is_in_no_rollout_that_was_current_when_serving_began(
    captured: Recording, clients: Clients
):
    """A gateway that is begun inside a rollout records calls where their token says."""
    server = clients.serve("Hello")
    with rollout("outer") as outer:
        context = otel_context.get_current()
        async with serve(server.base_url) as gateway:
            token = otel_context.attach(otel_context.Context())
            try:
                with rollout("other") as other:
                    await send(gateway.base_url() + "/chat/completions", CHAT)
                    refused = await send(gateway.url + "/v1/chat/completions", CHAT)
            finally:
                otel_context.detach(token)
        assert otel_context.get_current() == context
    assert refused.status == 401
    assert len(other.completions) == 1
    assert outer.completions == []
    assert other.warnings == []


async def test_an_address_needs_a_rollout(clients: Clients, gateway_to: Serve):
    """Outside a rollout there is nothing to make an address of."""
    gateway = await gateway_to(clients.serve().base_url)
    with pytest.raises(NoActiveRolloutError, match="no rollout is current"):
        gateway.base_url()
    with pytest.raises(NoActiveRolloutError, match="does not run here"):
        gateway.environment("0" * 32)


@pytest.mark.parametrize(
    "options",
    [
        {"upstream": "localhost:8000"},
        {"upstream": "http://"},
        {"upstream": "http://h/v1?key=x"},
        {"upstream": "http://h", "host": "0.0.0.0"},
        {"upstream": "http://h", "secret": ""},
        {"upstream": "http://h", "api_key": 5},
        {"upstream": "http://h", "max_body_bytes": 0},
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any]):
    """At once, and the message says what was expected."""
    with pytest.raises(ConfigurationError, match="gateway"):
        serve(**options)


async def test_anthropics_client_is_recorded_once(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Its base URL is the one without `/v1`."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        base_url = gateway.environment()["ANTHROPIC_BASE_URL"]
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key="k") as client:
            await client.messages.create(model="m", max_tokens=9, messages=ASK)
    assert len(trajectory.completions) == 1
    assert trajectory.warnings == []


@pytest.mark.parametrize(
    ("address", "key", "path"),
    [
        ("OPENAI_BASE_URL", "OPENAI_API_KEY", "/responses"),
        ("OPENAI_API_BASE", "OPENAI_API_KEY", "/chat/completions"),
        ("LLM_BASE_URL", "LLM_API_KEY", "/chat/completions"),
        ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "/v1/messages"),
        ("ANTHROPIC_API_BASE", "ANTHROPIC_API_KEY", "/v1/messages"),
        ("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", "/v1beta/models/m:generateContent"),
    ],
)
async def test_each_address_has_a_key(
    captured: Recording, clients: Clients, gateway_to: Serve, address: str, key: str, path: str
):
    """A client appends its path to its variable, and sends the key in a header of its own."""
    gemini = Raw(body=b'{"candidates": [{"content": {"parts": [{"text": "Hi"}]}}]}')
    server = clients.serve("Hello", routes={"/v1beta/models/m:generateContent": gemini})
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        variables = gateway.environment()
        headers = {"x_goog_api_key": variables[key]}
        body = {**CHAT, "max_tokens": 9, "contents": [{"parts": [{"text": "Hi"}]}]}
        if path == "/responses":
            body = {"model": "m", "input": "Hi"}
        assert (await send(variables[address] + path, body, **headers)).status == 200
    (completion,) = trajectory.completions
    assert completion.status == "complete"
    assert not any(variables[key] in wire.request_headers.values() for wire in server.exchanges)


@pytest.mark.parametrize("missing", ["aiohttp", "uvicorn"])
async def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch):
    """Serving says which package is missing, and what to install."""
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigurationError, match=rf"{missing}, .*dist 'otel-rollout\[gateway"):
        async with serve("http://127.0.0.1:1"):
            pass


@pytest.mark.parametrize("library", ["requests", "aiohttp", "urllib"])
async def test_a_library_of_this_process_is_recorded_once(
    captured: Recording, clients: Clients, gateway_to: Serve, library: str
):
    """Hooks on HTTP libraries leave a call to the gateway, too, and count none."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    data = json.dumps(CHAT).encode()
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        if library == "aiohttp":
            async with aiohttp.ClientSession() as session, session.post(url, data=data) as reply:
                await reply.read()
        elif library == "requests":
            await asyncio.to_thread(requests.post, url, data=data)
        else:
            request = urllib.request.Request(url, data, {"content-type": "application/json"})
            await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
    assert len(trajectory.completions) == 1
    assert trajectory.warnings == []


async def test_it_can_be_mounted_below_a_path(captured: Recording, clients: Clients):
    """In an application of the user's, which says where it is."""
    server = clients.serve("Hello")
    mounted = application(server.base_url, secret=SECRET)

    async def around(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**scope, "root_path": "/models"}
        await mounted(scope, receive, send)

    listening = listening_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/models"
    served = http_server(around, 10)
    await served.startup(sockets=[listening])
    try:
        begun = (await send(url + "/rollouts", {"name": "agent"}, **HARNESS)).json()
        assert begun["anthropic_base_url"].startswith(url + "/r/")
        assert (await send(begun["openai_base_url"] + "/chat/completions", CHAT)).status == 200
        await send(f"{url}/rollouts/{begun['id']}", None, "DELETE", **HARNESS)
    finally:
        await served.shutdown(sockets=[listening])
        await mounted.close()
    assert len(captured.trajectory.completions) == 1


async def test_who_has_the_end_of_a_reply_finds_it_recorded(captured: Recording, gateway_to: Serve):
    """The last bytes of a reply in pieces are handed on after the recorder has its end."""
    reply = {"id": "c1", "object": "chat.completion", "model": "m", "created": 1}
    message = {"role": "assistant", "content": "Hello"}
    reply |= {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(reply).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked"
        writer.write(head + b"\r\n\r\n%x\r\n%b\r\n" % (len(body), body))
        await writer.drain()
        await asyncio.sleep(0.2)  # the end of the reply comes later than its last byte
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    gateway = await gateway_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        reader, writer = await open_to(url)
        data = json.dumps(CHAT).encode()
        writer.write(request_bytes(url, data, "POST", {"content-type": "application/json"}))
        await reader.readuntil(b"Hello")
        assert [completion.status for completion in trajectory.completions] == ["complete"]
        writer.close()
    server.close()
    await server.wait_closed()
