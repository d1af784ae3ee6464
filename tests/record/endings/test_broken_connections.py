"""Connections that break, time out or are never made: one exchange with the right status."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import openai
import pytest

from otel_rollout import rollout
from tests.kit.calling import BOTH, Caller, Configure, done, outcome, read
from tests.kit.comparing import replayed
from tests.kit.conversations import ASK, chat
from tests.kit.ending import ended, open_stream, said
from tests.kit.recording import Clients, Recording
from tests.record.endings.breaking import HEAD, WAIT, event, framed

pytestmark = pytest.mark.slow

BODY = (
    b'{"id":"cut-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"Paris"},"finish_reason":"stop"}]}'
)
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
PLAIN = JSON_HEAD % len(BODY)
BROKEN: dict[str, tuple[bool, bytes, str]] = {
    "before headers": (True, b"", ""),
    "inside headers": (True, HEAD[:30], ""),
    "before the first event": (True, HEAD, ""),
    "between events": (True, HEAD + framed(event("Par")), "Par"),
    "inside an event": (True, HEAD + framed(event("Par")) + framed(event("is"))[:40], "Par"),
    "plain, before headers": (False, b"", ""),
    "plain, before the body": (False, PLAIN, ""),
    "plain, inside the body": (False, PLAIN + BODY[:60], ""),
}


@BOTH
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("where", BROKEN)
async def test_a_connection_that_breaks(
    configure: Configure,
    clients: Clients,
    caller: Caller,
    breaking: Callable[..., Any],
    where: str,
    reset: bool,
) -> None:
    """Wherever it breaks: the client's own exception and chunks, and one exchange, an error."""
    stream, sent, text = BROKEN[where]
    request: Any = {"model": "m", "messages": ASK, "stream": stream}
    server = breaking(sent, reset=reset)

    async def script(client: Any) -> list[Any]:
        seen: list[Any] = []
        try:
            result = await done(client.chat.completions.create(**request))
            while stream:
                seen += await read(result, 1)
                if len(seen) > 5:
                    break
        except Exception as error:
            seen += [type(error), str(error), type(error.__cause__)]
        return seen

    async def in_rollout(client: Any) -> list[Any]:
        with rollout("agent"):
            return await script(client)

    bare = await caller.run(script(caller.client(clients, server)))
    recording = configure()
    seen = await caller.run(in_rollout(caller.client(clients, server)))
    if not reset:  # what a reset overtakes is a matter of luck
        assert [str(s) for s in seen] == [str(s) for s in bare]
    assert issubclass(seen[-3], Exception)
    _, completion = ended(recording, "error")
    assert (said(completion) == text) or (reset and text.startswith(said(completion)))
    assert completion.error is not None
    # The client of some versions wraps what the connection raised.
    assert completion.error["type"] in (seen[-3].__qualname__, seen[-1].__qualname__)
    assert completion.request_messages == ASK
    assert completion.finish_reason is None


@BOTH
async def test_a_stream_that_breaks_when_all_is_said(
    configure: Configure, clients: Clients, caller: Caller, breaking: Callable[..., Any]
) -> None:
    """Nothing is sampled behind the finish reason; but what the client raised on does not train."""
    sent = HEAD + framed(event("Par")) + framed(event("is", "stop"))

    async def script(client: Any) -> Any:
        return await chat(client, stream=True)

    async def in_rollout(client: Any) -> Any:
        with rollout("agent"):
            return await script(client)

    server = breaking(sent)
    bare = await outcome(caller.run(script(caller.client(clients, server))))
    recording = configure()
    seen = await outcome(caller.run(in_rollout(caller.client(clients, server))))
    assert seen == bare
    assert seen[0] == "raised"
    trajectory, completion = ended(recording, "error")
    assert said(completion) == "Paris"
    assert (completion.finish_reason, completion.trainable) == ("stop", False)
    assert trajectory.status == "error"


@BOTH
@pytest.mark.parametrize("whole", [False, True], ids=["in the middle", "behind the finish reason"])
async def test_a_body_that_the_closed_connection_ends(
    recording: Recording,
    clients: Clients,
    caller: Caller,
    breaking: Callable[..., Any],
    whole: bool,
) -> None:
    """Without a length the client takes any end for the end; only a finished reply is complete."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    data = [event("Par"), event("is", "stop" if whole else None)]
    server = breaking(head + b"".join(b"data: %b\n\n" % d for d in data))

    async def script(client: Any) -> Any:
        with rollout("agent"):
            return await chat(client, stream=True)

    chunks = await caller.run(script(caller.client(clients, server)))
    assert [c.choices[0].delta.content for c in chunks] == ["Par", "is"]
    _, completion = ended(recording, "complete" if whole else "error")
    assert said(completion) == "Paris"


@BOTH
async def test_a_connect_timeout(recording: Recording, clients: Clients, caller: Caller) -> None:
    """A server that does not accept in time is an error without a reply."""
    with socket.socket() as listening, contextlib.ExitStack() as opened:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):  # fill the backlog: the kernel answers no further connection
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        server: Any = types.SimpleNamespace()
        server.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        client = caller.client(clients, server, timeout=0.3)

        async def script() -> None:
            with rollout("agent"):
                await chat(client)

        with pytest.raises(openai.APITimeoutError):
            await caller.run(script())
    trajectory, completion = ended(recording, "error")
    assert completion.error == {"type": "APITimeoutError", "message": "Request timed out."}
    assert completion.request_messages == ASK
    assert trajectory.termination_reason == "timeout"


@BOTH
async def test_a_pool_timeout(
    recording: Recording, clients: Clients, caller: Caller, breaking: Callable[..., Any]
) -> None:
    """A call that finds no free connection is an error; the one that holds it is not harmed."""
    go_on = threading.Event()
    end = framed(event("is", "stop")) + framed(b"[DONE]") + b"0\r\n\r\n"
    server = breaking(HEAD + framed(event("Par")), go_on, end)
    make = openai.DefaultHttpxClient if caller.sync else openai.DefaultAsyncHttpxClient
    httpx: Any = sys.modules[make.__mro__[1].__module__.split(".")[0]]
    options = {
        "limits": httpx.Limits(max_connections=1),
        "timeout": httpx.Timeout(WAIT, pool=0.2),
    }

    async def script(client: Any) -> None:
        with rollout("agent"):
            stream = await open_stream(client)
            with pytest.raises(openai.APITimeoutError):
                await chat(client)
            go_on.set()
            await read(stream)

    client = caller.client(clients, server, http_client=make(**options))
    await caller.run(script(client))
    trajectory = replayed(recording)
    assert [(c.status, said(c)) for c in trajectory.completions] == [
        ("complete", "Paris"),
        ("error", ""),
    ]
    assert trajectory.warnings == []
