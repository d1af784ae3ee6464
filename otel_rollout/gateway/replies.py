"""What of a reply the client is shown: all of it as it came, or less.

Less are replies to requests that the gateway has added fields to, without what these ask for; and
replies that repeat the key of the model server. As many characters take its place, so nothing else
of such a reply changes; one without the key is not even copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeAlias

from otel_rollout.gateway.upstream import response_headers
from otel_rollout.record import decoded, secret_forms
from otel_rollout.wire import Hiding, HidingReader, hidden_reply

Headers: TypeAlias = list[tuple[bytes, bytes]]
Rewrite: TypeAlias = Callable[[bytes], bytes]

_OF_BODY = (b"content-length", b"content-encoding")
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Encodings that a stream is read in; no other is asked for where something is hidden."""


def shown_body(body: bytes, hiding: Hiding, *, is_stream: bool) -> bytes:
    """A whole reply without what is hidden."""
    if not is_stream:
        return hidden_reply(body, hiding)
    reader = HidingReader(hiding)
    return reader.shown(body) + reader.rest()


_SHORTEST_KEY = 8
"""Characters of a key; a shorter one, such as `EMPTY`, is no secret, and a word of many replies."""


class KeyRemover:
    """Takes the key of the model server out of replies, in each form in which they may have it."""

    def __init__(self, key: str) -> None:
        known = secret_forms(key) if len(key) >= _SHORTEST_KEY else ()
        forms = sorted((form.encode() for form in known), key=len, reverse=True)
        self._instead = {form: b"[redacted]".ljust(len(form), b"*")[: len(form)] for form in forms}
        self._begun: dict[int, list[bytes]] = {}
        """What a form may begin with, by its last byte, the longest first."""
        for begun in sorted({form[:n] for form in forms for n in range(1, len(form))}, key=len):
            self._begun.setdefault(begun[-1], []).insert(0, begun)

    def removed(self, text: bytes) -> bytes:
        """The text without the key, as long as before; the same object if the key is not in it."""
        for form, instead in self._instead.items():
            if form in text:
                text = text.replace(form, instead)
        return text

    def begun(self, text: bytes) -> int:
        """How many of the last bytes of a text the key may have begun with."""
        known = self._begun.get(text[-1], ()) if text else ()
        return next((len(begun) for begun in known if text.endswith(begun)), 0)


class KeylessStream:
    """A reply in pieces, without the key also where that is cut; it holds what may be its start."""

    def __init__(self, remover: KeyRemover) -> None:
        self._remover = remover
        self._held = b""

    def shown(self, piece: bytes) -> bytes:
        """What this piece completes; of an empty one, which is the end, what is left."""
        text = self._remover.removed(self._held + piece if self._held else piece)
        length = len(text) - self._remover.begun(text) if piece else len(text)
        self._held = text[length:]
        return text[:length]


def shown_headers(raw: tuple[tuple[bytes, bytes], ...], remover: KeyRemover | None) -> Headers:
    """The headers of a response as the client gets them, without the model server's key."""
    headers = response_headers(raw)
    if remover is None:
        return headers
    return [(name, remover.removed(value)) for name, value in headers]


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
