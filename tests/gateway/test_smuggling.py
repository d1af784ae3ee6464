"""Odd requests: the model server gets at most what the gateway itself read as one request."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from otel_rollout import rollout
from tests.gateway.programs import Serve
from tests.kit.conversations import ASK
from tests.kit.outside import open_to
from tests.kit.recording import Recording

BODY = json.dumps({"model": "m", "messages": ASK}).encode()
HIDDEN = b"POST /v1/hidden HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
"""What one of two readers could take for the next request."""
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
TE = b"Transfer-Encoding: chunked\r\n"
PLAIN = {
    "a length": LENGTH + b"\r\n" + BODY,
    "chunks": TE + b"\r\n" + CHUNKED,
}
REQUESTS = {
    **PLAIN,
    "length, then chunks": LENGTH + TE + b"\r\n" + CHUNKED + HIDDEN,
    "chunks, then length": TE + b"Content-Length: 4\r\n\r\n" + CHUNKED + HIDDEN,
    "two lengths": LENGTH + b"Content-Length: 0\r\n\r\n" + BODY + HIDDEN,
    "two lengths in one": b"Content-Length: 0, %d\r\n\r\n" % len(BODY) + BODY + HIDDEN,
    "a sign": b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY + HIDDEN,
    "a negative length": b"Content-Length: -1\r\n\r\n" + BODY + HIDDEN,
    "a length of words": b"Content-Length: 0x10\r\n\r\n" + BODY + HIDDEN,
    "a blank before the colon": b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKED + HIDDEN,
    "chunks twice": TE + TE + b"\r\n" + CHUNKED + HIDDEN,
    "another coding": b"Transfer-Encoding: xchunked\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN,
    "chunks, not last": b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED + HIDDEN,
    "a folded line": LENGTH + b"X-A: a\r\n Transfer-Encoding: chunked\r\n\r\n" + BODY + HIDDEN,
    "line feeds alone": LENGTH.replace(b"\r\n", b"\n") + b"\n" + BODY + HIDDEN,
    "a NUL": LENGTH + b"X-A: a\0b\r\n\r\n" + BODY + HIDDEN,
    "a bare return": LENGTH + b"X-A: a\rContent-Length: 0\r\n\r\n" + BODY + HIDDEN,
    "a chunk's extension": TE + b"\r\n" + CHUNKED.replace(b"\r\n", b';a="b"\r\n', 1) + HIDDEN,
    "a wrong chunk": TE + b"\r\n" + b"zz\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN,
    "trailers": TE + b"\r\n" + CHUNKED[:-2] + b"Content-Length: 0\r\n\r\n" + HIDDEN,
    "a named length": LENGTH + b"Connection: content-length\r\n\r\n" + BODY + HIDDEN,
    "a websocket": LENGTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + BODY + HIDDEN,
}


@asynccontextmanager
async def raw_server() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that keeps each connection's bytes, and answers once to each."""
    kept: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(kept)
        kept.append(b"")
        said = b'{"id": "r", "choices": []}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(said) + said)
        while piece := await reader.read(1 << 16):
            kept[place] += piece
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/v1", kept


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_odd_request_is_one_request_or_none(
    captured: Recording, gateway_to: Serve, name: str
):
    async with raw_server() as (upstream, kept):
        gateway = await gateway_to(upstream)
        with rollout("agent"):
            url = gateway.base_url() + "/chat/completions"
            path = url.removeprefix(gateway.url)
            reader, writer = await open_to(url)
            writer.write(b"POST %b HTTP/1.1\r\nHost: h\r\n" % path.encode())
            writer.write(b"Content-Type: application/json\r\n" + REQUESTS[name])
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
        await asyncio.sleep(0.05)
    assert answer.startswith(b"HTTP/1.1 ") or not answer
    sent = b"".join(kept)
    assert b"hidden" not in sent.partition(b"\r\n")[0]
    heads = re.findall(rb"^(?:GET|POST) [^\r\n]* HTTP/1\.[01]\r\n(?:[^\r\n]+\r\n)*", sent, re.M)
    assert (len(heads) == 1) if name in PLAIN else (len(heads) <= 1)
    for head in heads:
        framing = re.findall(rb"^(content-length|transfer-encoding) *:", head, re.M | re.I)
        assert len(framing) == 1
        assert head.startswith(b"POST /v1/chat/completions ")
        length = re.search(rb"^content-length: (\d+)\r\n", head, re.M | re.I)
        body = sent.partition(b"\r\n\r\n")[2]
        assert length is not None
        assert len(body) == int(length[1])
