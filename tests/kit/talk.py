"""A conversation in the shape of one model API, and the framings that its streams come in."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from otel_rollout.testing import Raw

Json = dict[str, Any]


@dataclass(frozen=True)
class Talk:
    """A tool loop of two turns in the shape of one API."""

    name: str
    path: str
    """Path of calls that are not streamed."""
    streamed: str
    """Path of those that are."""
    content_type: str
    """Of streams."""
    replies: tuple[Json, Json]
    """The unstreamed replies."""
    streams: tuple[list[Json], list[Json]]
    """The same as the chunks of a stream."""
    framed: Callable[[Sequence[Json]], list[bytes]]
    """The chunks as the parts of a body, one for each."""
    question: Json
    """The first request."""
    said: Callable[[Json], Any]
    """The sampled message of a reply."""
    results: Callable[[Any], list[Any]]
    """The messages that follow a sampled message: the message as clients replay it, the results."""
    conversation: str = "messages"

    def requests(self) -> tuple[Json, Json]:
        """The two requests of the loop."""
        follow = self.results(self.said(self.replies[0]))
        second = {self.conversation: [*self.question[self.conversation], *follow]}
        return self.question, {**self.question, **second}

    def answer(self, body: Json, streamed: bool) -> Raw:
        """The response to a request of the loop, whichever turn it is."""
        turn = int(len(body[self.conversation]) > len(self.question[self.conversation]))
        if streamed:
            return Raw(chunks=self.framed(self.streams[turn]), content_type=self.content_type)
        return Raw(body=json.dumps(self.replies[turn]).encode())

    def routes(self) -> dict[str, Callable[[Json], Raw]]:
        """The endpoints of a server that answers so."""
        streamed, path = self.streamed.partition("?")[0], self.path
        if streamed == path:
            return {path: lambda body: self.answer(body, body.get("stream", True))}
        return {
            path: lambda body: self.answer(body, False),
            streamed: lambda body: self.answer(body, True),
        }


def sse(chunks: Sequence[Json]) -> list[bytes]:
    return [b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n" for chunk in chunks]


def lines(chunks: Sequence[Json]) -> list[bytes]:
    return [json.dumps(chunk).encode() + b"\n" for chunk in chunks]


def array(chunks: Sequence[Json]) -> list[bytes]:
    """As Google writes it: pretty-printed, the commas on lines of their own."""
    texts = [json.dumps(chunk, indent=2).encode() for chunk in chunks]
    return [(b"[" if n == 0 else b",\r\n") + text for n, text in enumerate(texts)] + [b"]\n"]


def frame(payload: Json, **headers: str) -> bytes:
    """An event as AWS frames it: lengths, their checksum, headers, payload, the checksum of all."""
    head = b"\x04:one\x00"  # a header that is no text
    for name, value in headers.items():
        key = b":" + name.replace("_", "-").encode()
        head += bytes([len(key)]) + key + b"\x07" + struct.pack(">H", len(value)) + value.encode()
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", len(head) + len(body) + 16, len(head))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + head + body
    return message + struct.pack(">I", zlib.crc32(message))


def frames(chunks: Sequence[Json]) -> list[bytes]:
    return [
        frame({**payload, "p": "abc"}, event_type=kind, message_type="event")
        for chunk in chunks
        for kind, payload in chunk.items()
    ]
