"""Requests and replies of the gateway itself, in the terms of ASGI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from otel_rollout.record import decoded_whole
from otel_rollout.wire import Json, dumps

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refusal(Exception):  # noqa: N818 - it is an answer
    """A request that the gateway answers itself, in the shape of the API's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        **more: Json,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        """Type of the error, as APIs name it."""
        self.headers = headers
        """Further headers of the answer."""
        self.more = more
        """Further members of the error."""


class ClientGone(Exception):  # noqa: N818 - no error: clients may go
    """The client closed its connection before its request was whole."""


def is_foreign(scope: Scope) -> bool:
    """True if a web page of another site sends the request from a browser."""
    found = {name: value for name, value in scope["headers"] if name in (b"host", b"origin")}
    origin = found.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != found.get(b"host")


class HeldBodies:
    """Counts the bytes of requests that are under way, in all and for each rollout.

    most, most_each: bytes; 503 for a request with which they would be more.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._all = 0
        self._each: dict[str, int] = {}

    @contextmanager
    def body(self, rollout_id: str) -> Iterator[Callable[[int], None]]:
        """A body of a rollout, held while the block runs; each piece of it is counted by a call."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            each = self._each.get(rollout_id, 0) + size
            if each > self._most_each or self._all + size > self._most:
                holders = "other requests of this rollout" if each > self._most_each else "requests"
                raise Refusal(503, f"the gateway is full with {holders}: try later", "api_error")
            held, self._all, self._each[rollout_id] = held + size, self._all + size, each

        try:
            yield hold
        finally:
            self._all -= held
            self._each[rollout_id] = self._each.get(rollout_id, 0) - held
            if not self._each[rollout_id]:
                del self._each[rollout_id]


async def read_body(
    scope: Scope,
    receive: Receive,
    hold: Callable[[int], None],
    *,
    most: int,
    seconds: float,
    all_seconds: float,
) -> bytes:
    """The body of a request. Refusal for one that smuggles another, or has not come as announced.

    hold: called with the size of each piece before it is held.
    most: bytes; a longer body is refused with 413 and not held.
    seconds: time between two pieces; a slower client is refused with 408.
    all_seconds: time for the whole body, likewise.
    """
    length = _declared_length(scope)
    if length is not None and length > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size, is_whole, end = 0, False, time.monotonic() + all_seconds
    while not is_whole:
        try:
            left = max(0.0, end - time.monotonic())
            message = await asyncio.wait_for(receive(), min(seconds, left))
        except asyncio.TimeoutError:
            raise Refusal(408, "the request's body came too slowly") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message["body"])
        if size > most:
            raise _too_large(most)
        hold(len(message["body"]))
        parts.append(message["body"])
        is_whole = not message.get("more_body")
    # Some servers take an offer of another protocol as accepted, and lose the body.
    offers = {name for name, _ in scope["headers"]} >= {b"transfer-encoding", b"upgrade"}
    if (offers and not size) if length is None else size != length:
        expected = "chunks" if length is None else f"{length} bytes"
        raise Refusal(
            400, f"the request's body has {size} bytes, expected {expected}, as its head says"
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def plain_body(
    scope: Scope, body: bytes, hold: Callable[[int], None], most: int
) -> tuple[bytes | None, str]:
    """The body without its `Content-Encoding`, and that encoding; "" if it has none.

    None: it cannot be decoded, or has more than `most` bytes. hold: as of `read_body`.
    """
    encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
    encoding = b",".join(encodings).decode("latin-1").strip()
    if not body or encoding.lower() in ("", "identity"):
        return body, ""
    plain = decoded_whole(body, encoding, most)
    if plain is not None:
        hold(len(plain))
    return plain, encoding


def _declared_length(scope: Scope) -> int | None:
    """The length of the body as the head says it; None if it says none."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refusal(400, "a request has Transfer-Encoding or Content-Length, not both")
    length = None
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or len(value) > 18):
            raise Refusal(400, "Content-Length: expected a number of bytes")
        if name == b"content-length":
            length = int(value)
    return length


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the request's body is larger than {most} bytes")


async def answer(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    more: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole reply of the gateway's own."""
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refusal: Refusal, path: str) -> None:
    """Answer with an error in the shape of the API at this path."""
    # The rest of the body is not read.
    more = ((b"connection", b"close"),) if refusal.status in (400, 408, 413, 503) else ()
    body = dumps(_error(refusal, path)).encode()
    await answer(send, refusal.status, body, more=more + refusal.headers)


def _error(refusal: Refusal, path: str) -> Json:
    if "/v1/messages" in path:  # Anthropic's
        error = {"type": refusal.kind, "message": refusal.message, **refusal.more}
        return {"type": "error", "error": error}
    error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": None}
    return {"error": {**error, **refusal.more}}
