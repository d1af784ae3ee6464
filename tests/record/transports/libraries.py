"""HTTP libraries, asked alike: a POST of JSON, and the reply read whole, in part or not at all."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from otel_rollout.testing import ModelServer

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hé"}]}
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Seen:
    """What a caller sees of a reply."""

    kinds: tuple[str, ...]
    """Names of the types of what the library gave."""
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """What was read."""


Ask = Callable[[str, bytes, str], Awaitable[Seen]]
"""Sends a body to an address; reads the reply `whole`, `streamed`, in `part` or `never`."""


def seen(status: int, headers: Any, body: bytes, *given: Any) -> Seen:
    kinds = tuple(type(each).__name__ for each in given)
    return Seen(kinds, status, {k.lower(): v for k, v in dict(headers).items()}, body)


def httpx_sync(module: str) -> Ask:
    async def ask(url: str, body: bytes, how: str) -> Seen:
        httpx: Any = importlib.import_module(module)
        with httpx.Client(follow_redirects=True, trust_env=False) as client:
            if how == "whole":
                r = client.post(url, content=body, headers=HEADERS)
                return seen(r.status_code, r.headers, r.content, r)
            with client.stream("POST", url, content=body, headers=HEADERS) as r:
                read = b""
                if how == "streamed":
                    read = b"".join(r.iter_bytes())
                elif how == "part":
                    read = next(r.iter_bytes(), b"")
                return seen(r.status_code, r.headers, read, r)

    return ask


def httpx_async(module: str) -> Ask:
    async def ask(url: str, body: bytes, how: str) -> Seen:
        httpx: Any = importlib.import_module(module)
        async with httpx.AsyncClient(follow_redirects=True, trust_env=False) as client:
            if how == "whole":
                r = await client.post(url, content=body, headers=HEADERS)
                return seen(r.status_code, r.headers, r.content, r)
            async with client.stream("POST", url, content=body, headers=HEADERS) as r:
                read = b""
                async for chunk in r.aiter_bytes() if how in ("streamed", "part") else _nothing():
                    read += chunk
                    if how == "part":
                        break
                return seen(r.status_code, r.headers, read, r)

    return ask


async def _nothing() -> AsyncIterator[bytes]:
    for each in tuple[bytes, ...]():
        yield each


async def requests_(url: str, body: bytes, how: str) -> Seen:
    requests: Any = importlib.import_module("requests")
    with requests.Session() as session:
        session.trust_env = False
        r = session.post(url, data=body, headers=HEADERS, stream=how != "whole")
        with contextlib.closing(r):
            read = b""
            if how in ("whole", "streamed"):
                read = r.content
            elif how == "part":
                read = next(r.iter_content(None), b"")
            return seen(r.status_code, r.headers, read, r, r.raw)


async def aiohttp_(url: str, body: bytes, how: str) -> Seen:
    aiohttp: Any = importlib.import_module("aiohttp")
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=HEADERS) as r,
    ):
        read = b""
        if how == "whole":
            read = await r.read()
        elif how == "streamed":
            read = b"".join([chunk async for chunk in r.content.iter_any()])
        elif how == "part":
            read = await r.content.readany()
        return seen(r.status, r.headers, read, r, r.content)


async def botocore_(url: str, body: bytes, how: str) -> Seen:
    """The HTTP session below the clients, as they use it."""
    sessions: Any = importlib.import_module("botocore.httpsession")
    prepared: Any = importlib.import_module("botocore.awsrequest")
    session = sessions.URLLib3Session()
    request = prepared.AWSRequest("POST", url, dict(HEADERS), body, stream_output=how != "whole")
    r = session.send(request.prepare())
    read = b""
    if how == "whole":
        read = r.content
    elif how == "streamed":
        read = b"".join(r.raw.stream())
    elif how == "part":
        read = next(r.raw.stream(), b"")
    r.raw.close()
    session.close()
    return seen(r.status_code, r.headers, read, r, r.raw)


def lm15(package: str) -> Ask:
    async def ask(url: str, body: bytes, how: str) -> Seen:
        transports: Any = importlib.import_module(f"{package}.transports")
        request = transports.TransportRequest("POST", url, list(HEADERS.items()), body)
        with transports.StdlibTransport() as transport, transport.stream(request) as r:
            read = b""
            if how in ("whole", "streamed"):
                read = r.read()
            elif how == "part":
                read = next(iter(r), b"")
            return seen(r.status, r.headers, read, r)

    return ask


def lm15_async(package: str) -> Ask:
    async def ask(url: str, body: bytes, how: str) -> Seen:
        transports: Any = importlib.import_module(f"{package}.transports")
        request = transports.TransportRequest("POST", url, list(HEADERS.items()), body)
        async with (
            transports.StdlibAsyncTransport() as transport,
            transport.stream(request) as r,
        ):
            read = b""
            if how in ("whole", "streamed"):
                read = await r.read()
            elif how == "part":
                read = await anext(aiter(r), b"")
            return seen(r.status, r.headers, read, r)

    return ask


@dataclass(frozen=True)
class Library:
    """An HTTP library, as one of its clients is used."""

    module: str
    """The module without which it is not there."""
    ask: Ask
    redirects: bool = True
    """True if it follows redirects."""
    counts: bool = True
    """True if streams can be asked for their count of tokens without showing it."""
    is_foreign: bool = False
    """True if only the environment of the frameworks has it."""


LIBRARIES: dict[str, Library] = {
    "httpx2": Library("httpx2", httpx_sync("httpx2")),
    "httpx2-async": Library("httpx2", httpx_async("httpx2")),
    "requests": Library("requests", requests_, counts=False),
    "httpx": Library("httpx", httpx_sync("httpx"), is_foreign=True),
    "httpx-async": Library("httpx", httpx_async("httpx"), is_foreign=True),
    "aiohttp": Library("aiohttp", aiohttp_, counts=False, is_foreign=True),
}
COUNTED: dict[str, Library] = {
    "botocore": Library("botocore", botocore_, redirects=False, is_foreign=True),
    "lm15": Library("dspy", lm15("dspy._vendor.lm15"), redirects=False, is_foreign=True),
    "lm15-async": Library(
        "dspy", lm15_async("dspy._vendor.lm15"), redirects=False, is_foreign=True
    ),
}
"""Libraries whose calls are counted, and not captured."""
EVERY = pytest.mark.parametrize(
    "library",
    [
        pytest.param(each, id=name, marks=[pytest.mark.framework] if each.is_foreign else [])
        for name, each in LIBRARIES.items()
    ],
)
"""A test for each library; those of `make test-frameworks` are skipped where they are missing."""
STREAMED = pytest.mark.parametrize("how", ["whole", "streamed"])


async def ask(
    library: Library,
    server: ModelServer,
    how: str = "whole",
    path: str = "/chat/completions",
    body: Mapping[str, Any] | None = None,
) -> Seen:
    """Ask a server of the test kit; a reply that is streamed is read as it comes."""
    pytest.importorskip(library.module)
    asked = {**BODY, **({} if how == "whole" else {"stream": True}), **(body or {})}
    return await library.ask(server.base_url + path, json.dumps(asked).encode(), how)
