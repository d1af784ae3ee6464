"""HTTP around a call: compression, an own client or transport, hooks, retried attempts."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from otel_rollout import rollout
from otel_rollout.testing import ModelServer, Raw, Reply
from tests.kit.calling import BOTH, STREAMED, Caller, Configure, as_bare
from tests.kit.comparing import replayed
from tests.kit.conversations import ASK
from tests.kit.recording import Clients, Recording
from tests.record.clients.openai_ways import CHAT, USAGE, Json, Script, call, same, wire_json

pytestmark = pytest.mark.slow


def plain_and_streamed() -> Script:
    """A script that asks once plain, once streamed."""

    async def script(client: Any) -> Any:
        plain = await call(f"{CHAT}.create", messages=ASK)(client)
        return [plain, await call(f"{CHAT}.create", messages=ASK, **USAGE)(client)]

    return script


def check_both(recording: Recording, clients: Clients, reply: Any, server: ModelServer) -> None:
    """Two exchanges, plain and streamed, are those of the wire, and their completions are whole."""
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    for exchange, wire in zip(trajectory.exchanges, server.exchanges, strict=True):
        request = json.loads(wire.request)
        assert same(exchange.request(), request)
        assert exchange.stream is bool(request.get("stream"))
    for completion in trajectory.completions:
        assert completion.status == "complete"
        assert completion.trainable
        assert completion.message is not None
        assert completion.message["content"] == reply.content
        assert completion.token_ids == [*reply.content.encode(), 261]
        assert completion.usage is not None
    assert len(trajectory.completions) == 2


@BOTH
async def test_compressed_replies(
    capture_only: Configure, clients: Clients, caller: Caller
) -> None:
    """What comes compressed is recorded as what it says."""
    reply = Reply("Zürich 🗼" * 20)

    async def script() -> Any:
        server = clients.serve(reply, compress=True)
        client = caller.client(clients, server)
        with rollout("agent"):
            seen = await plain_and_streamed()(client)
        return server, seen

    _, bare = await caller.run(script())
    recording = capture_only()
    server, seen = await caller.run(script())
    assert seen == bare
    assert server.exchanges[0].response.startswith(b"\x1f\x8b")
    check_both(recording, clients, reply, server)
    plain = replayed(recording).completions[0]
    assert same(plain.response, wire_json(server.exchanges[0].response))


def own_transport(sync: bool, *, whole: bool = False, refuses: tuple[int, ...] = ()) -> Any:
    """An `http_client` with a transport of the user's.

    It may read replies before it gives them, and fail to connect for requests by their number.
    openai 3 has httpx2, older ones httpx.
    """
    name = type(openai.DefaultHttpxClient()).__mro__[1].__module__.partition(".")[0]
    httpx: Any = importlib.import_module(name)
    numbers = itertools.count(1)

    def before(request: Any) -> None:
        if next(numbers) in refuses:
            raise httpx.ConnectError("refused", request=request)

    def after(response: Any, body: bytes) -> Any:
        headers = {"content-type": response.headers["content-type"]}
        return httpx.Response(response.status_code, headers=headers, content=body)

    if sync:

        class Transport(httpx.HTTPTransport):
            def handle_request(self, request: Any) -> Any:
                before(request)
                response = super().handle_request(request)
                return after(response, response.read()) if whole else response

        return httpx.Client(transport=Transport())

    class AsyncTransport(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            before(request)
            response = await super().handle_async_request(request)
            return after(response, await response.aread()) if whole else response

    return httpx.AsyncClient(transport=AsyncTransport())


def reading_hook(sync: bool) -> Any:
    """An `http_client` with a hook that reads each reply, to log it."""
    if sync:
        return openai.DefaultHttpxClient(event_hooks={"response": [lambda reply: reply.read()]})

    async def hook(reply: Any) -> None:
        await reply.aread()

    return openai.DefaultAsyncHttpxClient(event_hooks={"response": [hook]})


HTTP_CLIENTS: dict[str, Callable[[bool], Any]] = {
    "transport": lambda sync: own_transport(sync),
    "transport that reads": lambda sync: own_transport(sync, whole=True),
    "hook that reads": reading_hook,
}


@BOTH
@pytest.mark.parametrize("kind", HTTP_CLIENTS)
async def test_an_http_client_of_the_users(
    capture_only: Configure, clients: Clients, caller: Caller, kind: str
) -> None:
    """Whatever the user's HTTP client does with replies, also of streams, they are recorded."""
    reply = Reply("Paris, à côté")

    async def script() -> Any:
        server = clients.serve(reply)
        http_client = HTTP_CLIENTS[kind](caller.sync)
        client = caller.client(clients, server, http_client=http_client)
        with rollout("agent"):
            return server, await plain_and_streamed()(client)

    _, bare = await caller.run(script())
    recording = capture_only()
    server, seen = await caller.run(script())
    assert seen == bare
    check_both(recording, clients, reply, server)


BROKEN: dict[str, tuple[Json, str]] = {
    "cut": ({"id": "c", "choices": [{"index": 0, "delta": {"content": "Par"}}]}, "EOFError"),
    "error": ({"error": {"message": "the engine died"}}, "ErrorResponse"),
}


@BOTH
@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_stream_that_was_read_before(
    recording: Recording, clients: Clients, caller: Caller, case: str
) -> None:
    """That a hook could read a stream to its end does not make the reply complete."""
    event, error = BROKEN[case]
    chunks = [b"data: %b\n\n" % json.dumps(event).encode()]
    server = clients.serve(Raw(200, chunks=chunks, content_type="text/event-stream"))
    client = caller.client(clients, server, http_client=reading_hook(caller.sync))

    async def script() -> None:
        with rollout("agent"), contextlib.suppress(openai.APIError):
            await call(f"{CHAT}.create", messages=ASK, stream=True)(client)

    await caller.run(script())
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == ("error", False)
    assert completion.error is not None
    assert completion.error["type"] == error


@BOTH
@STREAMED
async def test_attempts_of_every_kind(
    capture_only: Configure,
    clients: Clients,
    caller: Caller,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt that failed is an event: with its status, or without where there was none."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.001)  # seconds
    script = call(f"{CHAT}.create", messages=ASK, **({"stream": True} if stream else {}))

    async def run() -> Any:
        busy = [Raw(status, b"{}", headers={"retry-after-ms": "1"}) for status in (500, 429)]
        server = clients.serve([*busy, Reply("Paris")])
        http_client = own_transport(caller.sync, refuses=(2, 4))
        client = caller.client(clients, server, http_client=http_client, max_retries=5)
        with rollout("agent"):
            return server, await script(client)

    _, bare = await caller.run(run())
    recording = capture_only()
    server, seen = await caller.run(run())
    assert seen == bare
    (exchange,) = replayed(recording).exchanges
    assert [wire.status for wire in server.exchanges] == [500, 429, 200]
    assert (exchange.attempts, exchange.status_code, exchange.status) == (5, 200, "complete")
    assert same(exchange.request(), json.loads(server.exchanges[0].request))
    (span,) = recording.spans_named("recording")
    events = [(event.name, (event.attributes or {}).get("http_status")) for event in span.events]
    assert events == [("retry", status) for status in (500, None, 429, None)]


@BOTH
@STREAMED
async def test_an_error_with_status_200(
    capture_only: Configure, clients: Clients, caller: Caller, stream: bool
) -> None:
    """A reply that is an error though HTTP says 200 is a failed completion with its message."""
    error = {"error": {"message": "the engine died", "type": "server_error", "code": 500}}
    body = json.dumps(error).encode()
    reply = Raw(200, body)
    if stream:
        reply = Raw(200, chunks=[b"data: %b\n\n" % body], content_type="text/event-stream")
    script = call(f"{CHAT}.create", messages=ASK, **({"stream": True} if stream else {}))
    recording, _, seen = await as_bare(capture_only, clients, caller, lambda: reply, script)
    assert seen[0] == ("raised" if stream else "returned")
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == ("error", False)
    assert completion.error is not None
    assert completion.error["message"] == "the engine died (code 500)"
    assert completion.request_messages == ASK
    if not stream:
        assert completion.response == error
