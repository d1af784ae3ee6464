"""HTTP as a program of another language sends it: over a bare socket, which no hook sees."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """A reply as it was on the wire."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    """Without HTTP's chunk framing."""
    whole: bool
    """True if the reply came to its end."""

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    url: str, body: bytes | None, method: str, headers: dict[str, str], *, chunked: bool = False
) -> bytes:
    """A request as it is on the wire."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {target} HTTP/1.1"]
    if "host" not in headers:
        lines.append(f"Host: {parts.netloc}")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif body is not None:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join([*lines, "", ""]).encode()
    if not chunked:
        return head + (body or b"")
    pieces = [(body or b"")[at : at + 7] for at in range(0, len(body or b""), 7)]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in [*pieces, b""])


async def open_to(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server of this address."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return await asyncio.open_connection(parts.hostname, parts.port)


async def send(
    url: str,
    body: Any = None,
    method: str = "POST",
    **headers: str,
) -> Answer:
    """Send a request and read its reply. body: JSON, or bytes. headers: `_` for `-`."""
    return await _sent(url, body, method, headers, chunked=False)


async def send_chunked(url: str, body: Any, **headers: str) -> Answer:
    """`send`, with a body in HTTP's chunks."""
    return await _sent(url, body, "POST", headers, chunked=True)


async def _sent(
    url: str, body: Any, method: str, headers: dict[str, str], *, chunked: bool
) -> Answer:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None:
        given = {"content-type": "application/json", **given}
    reader, writer = await open_to(url)
    try:
        writer.write(request_bytes(url, data, method, given, chunked=chunked))
        await writer.drain()
        return await read_answer(reader, method)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader, method: str = "POST") -> Answer:
    """The reply that comes next on a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:-2])
    }
    if method == "HEAD" or status in (204, 304):
        return Answer(status, headers, b"", True)
    if headers.get("transfer-encoding") == "chunked":
        body, whole = await _chunks(reader)
        return Answer(status, headers, body, whole)
    if "content-length" not in headers:
        return Answer(status, headers, await reader.read(), True)
    length = int(headers["content-length"])
    try:
        return Answer(status, headers, await reader.readexactly(length), True)
    except asyncio.IncompleteReadError as error:
        return Answer(status, headers, error.partial, False)


async def _chunks(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    body = b""
    try:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError):
        return body, False
    return body, True


def events(body: bytes) -> list[Any]:
    """The JSON of the events of a stream, `[DONE]` left out."""
    datas = [part[6:] for part in body.decode().split("\n\n") if part.startswith("data: {")]
    return [json.loads(data) for data in datas]
