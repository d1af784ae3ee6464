"""What of a reply the client is shown: all of it as it came, or less.

Less are replies to requests that the gateway has added fields to, without what these ask for; and
errors, which may repeat the key of the model server, without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

from otel_rollout.gateway.upstream import response_headers
from otel_rollout.record import decoded
from otel_rollout.wire import Hiding, HidingReader, hidden_reply

Headers: TypeAlias = list[tuple[bytes, bytes]]
Rewrite: TypeAlias = Callable[[bytes], bytes]

_OF_BODY = (b"content-length", b"content-encoding")
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Encodings that a stream is read in; no other is asked for where something is hidden."""


def shown_headers(raw: tuple[tuple[bytes, bytes], ...], key: str | None) -> Headers:
    """The headers of a response as the client gets them, without the model server's key."""
    headers = response_headers(raw)
    if key is None:
        return headers
    return [(name, without_key(value, key)) for name, value in headers]


def without_key(text: bytes, key: str) -> bytes:
    """A text without the key of the model server."""
    return text.replace(key.encode(), b"[redacted]")


def rewritten(body: bytes, encoding: str | None, rewrite: Rewrite) -> bytes | None:
    """A whole body, decoded and rewritten. None: it cannot be decoded, or stays as it is."""
    try:
        plain = decoded(body, encoding)
    except (zlib.error, ImportError, ValueError):
        return None
    shown = rewrite(plain)
    return None if shown == plain else shown


def headers_for(headers: Headers, body: bytes) -> Headers:
    """The headers for a body that was rewritten."""
    return [*headers_for_stream(headers), (b"content-length", str(len(body)).encode())]


def headers_for_stream(headers: Headers) -> Headers:
    """The headers for a stream that is shown without what is hidden."""
    return [(name, value) for name, value in headers if name not in _OF_BODY]


def hide_in_reply(hiding: Hiding) -> Rewrite:
    """Rewrites a reply without what is hidden."""
    return lambda body: hidden_reply(body, hiding)


class HiddenStream:
    """A stream of events, decoded, without what is hidden."""

    def __init__(self, hiding: Hiding, encoding: str | None) -> None:
        self._reader = HidingReader(hiding)
        name = (encoding or "identity").strip().lower()
        self._unpack = zlib.decompressobj(_WINDOWS[name]) if name in _WINDOWS else None

    @staticmethod
    def can_read(encoding: str | None) -> bool:
        """True if a stream in this encoding can be read as it comes."""
        return (encoding or "identity").strip().lower() in (*_WINDOWS, "identity")

    def shown(self, chunk: bytes) -> bytes:
        """What these bytes complete of what the client is shown; `zlib.error` for broken ones."""
        return self._reader.shown(chunk if self._unpack is None else self._unpack.decompress(chunk))

    def rest(self) -> bytes:
        """What is left."""
        return self._reader.rest()
