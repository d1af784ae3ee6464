"""Requests and replies of the gateway itself, in the terms of ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from otel_rollout.wire import Json, dumps

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refusal(Exception):  # noqa: N818 - it is an answer
    """A request that the gateway answers itself, in the shape of the API's errors."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        """Type of the error, as APIs name it."""


class ClientGone(Exception):  # noqa: N818 - no error: clients may go
    """The client closed its connection before its request was whole."""


def is_foreign(scope: Scope) -> bool:
    """True if a web page of another site sends the request from a browser."""
    found = {name: value for name, value in scope["headers"] if name in (b"host", b"origin")}
    origin = found.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != found.get(b"host")


async def read_body(scope: Scope, receive: Receive, *, most: int, seconds: float) -> bytes:
    """The body of a request. Refusal for one that smuggles another.

    most: bytes; a longer body is refused with 413 and not held.
    seconds: time between two pieces; a slower client is refused with 408.
    """
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refusal(400, "a request has Transfer-Encoding or Content-Length, not both")
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or len(value) > 18):
            raise Refusal(400, "Content-Length: expected a number of bytes")
        if name == b"content-length" and int(value) > most:
            raise _too_large(most)
    parts: list[bytes] = []
    size, is_whole = 0, False
    while not is_whole:
        try:
            message = await asyncio.wait_for(receive(), seconds)
        except asyncio.TimeoutError:
            raise Refusal(408, "the request's body came too slowly") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message["body"])
        if size > most:
            raise _too_large(most)
        parts.append(message["body"])
        is_whole = not message.get("more_body")
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
    more = ((b"connection", b"close"),) if refusal.status in (400, 408, 413) else ()
    body = dumps(_error(refusal, path)).encode()
    await answer(send, refusal.status, body, more=more)


def _error(refusal: Refusal, path: str) -> Json:
    if "/v1/messages" in path:  # Anthropic's
        return {"type": "error", "error": {"type": refusal.kind, "message": refusal.message}}
    error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": None}
    return {"error": error}
