"""Scripts for a sync and an async client: run bare and in a rollout, the caller sees the same."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import openai
import pydantic
import pytest

from otel_rollout import rollout
from otel_rollout.testing import ModelServer
from tests.kit.recording import Clients, Recording

Json = dict[str, Any]
Script = Callable[[Any], Coroutine[Any, Any, Any]]
Configure = Callable[[], Recording]


@dataclass(frozen=True)
class Caller:
    """Whether a script has a sync client, in a thread of its own, or an async one."""

    sync: bool

    def client(self, clients: Clients, server: ModelServer, **options: Any) -> Any:
        make = clients.sync if self.sync else clients.asynchronous
        return make(server, **options)

    async def run(self, script: Coroutine[Any, Any, Any]) -> Any:
        """Run a script; with a sync client it never waits, so a thread runs it in one step."""
        return await asyncio.to_thread(_run_at_once, script) if self.sync else await script


def _run_at_once(script: Coroutine[Any, Any, Any]) -> Any:
    try:
        script.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a script with a sync client waited for something")


SYNC = pytest.param(Caller(True), id="sync", marks=pytest.mark.slow)
BOTH = pytest.mark.parametrize("caller", [SYNC, pytest.param(Caller(False), id="async")])
"""A test for each client; `make quick` runs that of the async one."""
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


async def done(value: Any) -> Any:
    """The result of a call of a sync or of an async client."""
    return await value if inspect.isawaitable(value) else value


async def read(stream: Any, count: int | None = None) -> list[Any]:
    """The first `count` items of a stream, left as `break` leaves it, or all of them."""
    items: list[Any] = []
    # The instrumentor's wrappers of sync streams have the methods of async ones too.
    if hasattr(stream, "__aiter__") and not isinstance(stream, openai.Stream):
        async for item in stream:
            items.append(item)
            if len(items) == count:
                break
        return items
    for item in stream:
        items.append(item)
        if len(items) == count:
            break
    return items


@contextlib.asynccontextmanager
async def entered(context: Any) -> Any:
    """A sync or an async context manager."""
    if hasattr(context, "__aenter__") and not isinstance(context, openai.Stream):
        async with context as value:
            yield value
    else:
        with context as value:
            yield value


def visible(value: Any) -> Any:
    """What a user has in hand, comparable: models as their class and fields, lists of them."""
    if isinstance(value, pydantic.BaseModel):
        fields = {key: visible(item) for key, item in dict(value).items()}
        return [value.__class__.__name__, fields, value.model_extra]
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value


async def outcome(result: Awaitable[Any]) -> tuple[Any, ...]:
    """What comes back, or the exception that does, comparable with that of another run."""
    try:
        return "returned", visible(await result)
    except Exception as error:
        body = getattr(error, "body", None)
        causes = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(type(cause))
            cause = cause.__cause__ or cause.__context__
        return "raised", type(error), str(error), body, causes


async def as_bare(
    configure: Configure,
    clients: Clients,
    caller: Caller,
    reply: Callable[[], Any],
    script: Script,
    **options: Any,
) -> tuple[Recording, ModelServer, tuple[Any, ...]]:
    """Run a script with a client that nothing watches, then in a rollout: it must see the same.

    `options` are the client's. Returns what was recorded, the server of the rollout, what was seen.
    """

    async def in_rollout(client: Any) -> Any:
        with rollout("agent"):
            return await script(client)

    client = caller.client(clients, clients.serve(reply()), **options)
    bare = await outcome(caller.run(script(client)))
    server = clients.serve(reply())
    client = caller.client(clients, server, **options)  # before capture is configured
    recording = configure()
    seen = await outcome(caller.run(in_rollout(client)))
    assert seen == bare
    return recording, server, seen


def ask_bare(server: ModelServer, path: str, body: Json) -> Any:
    """The reply that the server gives unstreamed, asked without any client that is captured."""
    import urllib.request

    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        return json.load(response)


class Capital(pydantic.BaseModel):
    """What `parse` makes of a reply."""

    city: str


def structured(client: Any) -> Any:
    """Where `parse` and `stream` are in this version of the client."""
    completions = client.chat.completions
    return completions if hasattr(completions, "parse") else client.beta.chat.completions
