"""The model server behind a gateway: each request is asked once, with the bytes that it came with.

One session holds any number of streams at a time. It follows no redirect, keeps no cookie, decodes
nothing, adds no header, and waits for a reply for as long as the client does.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

from otel_rollout.errors import ConfigurationError
from otel_rollout.extras import module_of
from otel_rollout.gateway.paths import KEYS, RawHeaders
from otel_rollout.hosts import why_not_listening
from otel_rollout.record import decoded, guarded

_KEEP_ALIVE = 3.0
"""Seconds that an idle connection is kept: less than the 5 after which uvicorn, and with it vLLM,
closes its end, since a request that is sent just then would be lost."""
_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
"""Headers of one connection."""
_OF_REQUEST = frozenset((b"host", b"content-length", b"expect", b"baggage"))
"""Headers of a request that are made anew, or are for the gateway alone."""
_OVERRIDES = frozenset(
    (
        *(b"x-http-method-override", b"x-http-method", b"x-method-override"),
        *(b"x-original-url", b"x-rewrite-url", b"x-forwarded-prefix"),
    )
)
"""Headers by which some servers take a request for one of another method or path."""
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add."""


class Upstream:
    """The model server.

    url: its root, or its base URL with `/v1` at the end.
    api_key: sent instead of the clients' keys. None: the clients' own are passed on.
    connect_seconds: how long connecting may take.
    """

    def __init__(self, url: str, *, api_key: str | None, connect_seconds: float) -> None:
        self.root = root_of(url, "gateway upstream")
        self.api_key = api_key
        self._connect_seconds = connect_seconds
        self._aiohttp = module_of("gateway", "aiohttp", "otel_rollout.gateway")
        self._url: Any = module_of("gateway", "yarl", "otel_rollout.gateway").URL
        self._session: Any = None
        self.errors: tuple[type[Exception], ...] = (self._aiohttp.ClientError, OSError, zlib.error)
        """What asking raises if there is no reply, and reading one that is cut."""

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> Any:
        """The response of aiohttp, its body not read. `aiohttp.ClientError` if there is none.

        target: path and query, as they came.
        """
        if self._session is None:
            self._session = self._new_session()
        return await self._session.request(
            method,
            self._url(self.root + target, encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
        )

    def _new_session(self) -> Any:
        aiohttp = self._aiohttp
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def request_headers(
        self,
        headers: RawHeaders,
        *,
        key_is_token: bool,
        key_name: str,
        without: Collection[bytes] = (),
    ) -> list[tuple[str, str]]:
        """The headers of a request as the model server gets them.

        key_is_token: an API key of the request is a token, which the model server must not get.
        key_name: the header that the gateway's key is sent in.
        without: further headers that are left out.
        """
        dropped = _HOP_BY_HOP | _OF_REQUEST | _OVERRIDES | _named(headers) | {*without}
        if key_is_token or self.api_key is not None:
            dropped |= KEYS
        kept = [(_text(name), _text(value)) for name, value in headers if name not in dropped]
        if self.api_key is not None:
            bearer = f"Bearer {self.api_key}"
            kept.append((key_name, bearer if key_name == "authorization" else self.api_key))
        return kept


async def text_of_refusal(response: Any) -> str:
    """The whole text of a response, whose connection is given back."""
    body: bytes = await response.read()
    with guarded("an error response was not decoded", level=logging.DEBUG):
        body = decoded(body, response.headers.get("content-encoding"))
    return body.decode("utf-8", "replace")


def response_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of a response as the client gets them."""
    lower = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _named(lower)
    return [(name, value) for name, value in lower if name not in dropped]


def _named(headers: RawHeaders) -> frozenset[bytes]:
    """The headers that `Connection` names, which are for one connection too."""
    named = [value for name, value in headers if name == b"connection"]
    return frozenset(name.strip().lower() for value in named for name in value.split(b","))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def root_of(url: str, owner: str) -> str:
    """The address of a model server without `/v1`. ConfigurationError by `owner` if it is none."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        known = False
    if not known or "?" in url or "#" in url:
        raise ConfigurationError(
            f"{owner}: expected the address of a model server, such as http://127.0.0.1:8000/v1, "
            f"got {url!r}"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that its port is known at once.

    OSError if it cannot be, ConfigurationError for a port that there is not.
    """
    if not 0 <= port <= 65_535:
        raise ConfigurationError(why_not_listening(host, port))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol's number asyncio does not switch off the wait for larger packets.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(error.errno, why_not_listening(host, port, error)) from None
    except BaseException:
        listening.close()
        raise
    return listening
