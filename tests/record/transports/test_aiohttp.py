"""aiohttp: every way to read a reply gives what it gives without us, and is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import otel_rollout
from otel_rollout import no_capture, rollout
from otel_rollout.testing import ModelServer, Reply
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import BODY

aiohttp: Any = pytest.importorskip("aiohttp")
pytestmark = pytest.mark.framework
TEXT = "Paris, the city of light.\nAnd more."
Read = Callable[[Any], Awaitable[bytes]]


async def joined(chunks: Any) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def looped(read: Callable[[], Awaitable[bytes]]) -> bytes:
    found = b""
    while piece := await read():
        found += piece
    return found


async def chunks(response: Any) -> bytes:
    return b"".join([data async for data, _ in response.content.iter_chunks()])


async def until_eof(response: Any) -> bytes:
    found = []
    while not response.content.at_eof():
        found.append(await response.content.readany())
    return b"".join(found)


async def exactly(response: Any) -> bytes:
    found: bytes = await response.content.readexactly(20)
    with pytest.raises(asyncio.IncompleteReadError) as raised:
        await response.content.readexactly(1 << 20)
    return found + raised.value.partial


async def nowait(response: Any) -> bytes:
    """What is there, then the rest."""
    await response.content.wait_eof()
    found: bytes = response.content.read_nowait(5)
    rest: bytes = response.content.read_nowait()
    return found + rest


async def unread(response: Any) -> bytes:
    begun = await response.content.read(7)
    rest: bytes = await response.content.read()
    return bytes(begun + rest)


async def text(response: Any) -> bytes:
    found: str = await response.text()
    return found.encode()


WAYS: dict[str, Read] = {
    "read": lambda r: r.read(),
    "text": text,
    "content.read": lambda r: r.content.read(),
    "content.read 7": lambda r: looped(lambda: r.content.read(7)),
    "content.read 7 and read": unread,
    "readany": lambda r: looped(r.content.readany),
    "readline": lambda r: looped(r.content.readline),
    "readuntil": lambda r: looped(lambda: r.content.readuntil(b"\n\n")),
    "readexactly": exactly,
    "iterated": lambda r: joined(r.content),
    "iter_any": lambda r: joined(r.content.iter_any()),
    "iter_chunked": lambda r: joined(r.content.iter_chunked(3)),
    "iter_chunks": chunks,
    "at_eof": until_eof,
    "read_nowait": nowait,
}


async def read_by(
    way: Read, server: ModelServer, *, stream: bool, **options: Any
) -> tuple[bytes, Any]:
    """The bytes that are read, and the response."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            server.base_url + "/chat/completions", json={**BODY, "stream": stream}, **options
        ) as r,
    ):
        return await way(r), r


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("compress", [False, True], ids=["identity", "gzip"])
@pytest.mark.parametrize("way", WAYS)
async def test_ways_of_reading(
    recording: Recording, clients: Clients, way: str, stream: bool, compress: bool
):
    """The reader gets the same bytes, and the reply is recorded whole."""
    options: Any = {"compress": compress, "chunk_size": 3}
    with no_capture():
        bare, _ = await read_by(WAYS[way], clients.serve(TEXT, **options), stream=stream)
    async with rollout("agent"):
        given, response = await read_by(WAYS[way], clients.serve(TEXT, **options), stream=stream)
    assert given == bare
    assert type(response) is aiohttp.ClientResponse
    assert isinstance(response.content, aiohttp.StreamReader)
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert (completion.message or {})["content"] == TEXT


async def test_chunks_are_those_of_http(recording: Recording, clients: Clients):
    """`iter_chunks` tells where HTTP's chunks end, of a body that is not cut into events."""
    reply = otel_rollout.testing.Raw(chunks=(b'{"id": "a", ', b'"choices": []}'), body=b" ")
    url = clients.serve(reply).base_url + "/chat/completions"
    found = []
    async with aiohttp.ClientSession() as session:
        with no_capture():
            async with session.post(url, json=BODY) as response:
                found.append([each async for each in response.content.iter_chunks()])
        async with rollout("agent"), session.post(url, json=BODY) as response:
            found.append([each async for each in response.content.iter_chunks()])
    assert [b"".join(data for data, _ in each) for each in found] == [
        b' {"id": "a", "choices": []}'
    ] * 2
    assert [[end for _, end in each].count(True) for each in found] == [3, 3]


async def test_a_reading_that_is_given_up_may_go_on(recording: Recording, clients: Clients):
    """A reader that waits with a time limit, and tries again, has read the reply whole."""
    server = clients.serve(Reply("Paris", chunk_delay=0.2), chunk_size=2)
    given_up = 0
    async with rollout("agent"), aiohttp.ClientSession() as session:
        url = server.base_url + "/chat/completions"
        async with session.post(url, json={**BODY, "stream": True}) as response:
            while not response.content.at_eof():
                try:
                    await asyncio.wait_for(response.content.readline(), 0.05)
                except asyncio.TimeoutError:
                    given_up += 1
    (completion,) = replayed(recording).completions
    assert given_up
    assert completion.status == "complete"
    assert (completion.message or {})["content"] == "Paris"


async def test_a_stream_that_is_closed_has_ended(recording: Recording, clients: Clients):
    """Its end is known at once, also where somebody keeps the response."""
    url = clients.serve(TEXT, chunk_size=1).base_url + "/chat/completions"
    async with rollout("agent") as trajectory, aiohttp.ClientSession() as session:
        response = await session.post(url, json={**BODY, "stream": True})
        await response.content.readline()
        response.close()
        assert [c.status for c in trajectory.completions] == ["abandoned"]
        with pytest.raises(aiohttp.ClientConnectionError):
            await response.content.readline()


@pytest.mark.parametrize("how", ["cancelled", "abandoned"])
async def test_a_stream_that_is_left(recording: Recording, clients: Clients, how: str):
    """What its reader took is kept."""
    server = clients.serve(Reply(TEXT, chunk_delay=0.1), chunk_size=1)
    begun = asyncio.Event()

    async def read() -> None:
        async with aiohttp.ClientSession() as session:
            url = server.base_url + "/chat/completions"
            async with session.post(url, json={**BODY, "stream": True}) as response:
                async for line in response.content:
                    if b'"content":"P"' in line.replace(b" ", b""):
                        begun.set()
                        if how == "abandoned":
                            return

    async with rollout("agent"):
        task = asyncio.create_task(read())
        await begun.wait()
        if how == "cancelled":
            task.cancel()
        await asyncio.wait([task])
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == (how, False)
    assert (completion.message or {})["content"] == "P"


@pytest.mark.parametrize(
    "options",
    [
        {"json": BODY},
        {"data": json.dumps(BODY)},
        {"data": json.dumps(BODY).encode()},
        {"data": json.dumps(BODY), "headers": {"Content-Length": str(len(json.dumps(BODY)))}},
        {"json": BODY, "headers": [("x-a", "b")], "params": {"key": "s3cret"}},
    ],
    ids=["json", "text", "bytes", "length", "params"],
)
async def test_bodies(recording: Recording, clients: Clients, options: dict[str, Any]):
    """Whatever holds the JSON, it is recorded as it is sent, with the fields that are added."""
    server = clients.serve("hello", token_ids=False)
    async with (
        rollout("agent"),
        aiohttp.ClientSession(server.base_url.removesuffix("v1")) as session,
    ):
        with otel_rollout.request_token_ids():
            for _ in range(2):
                async with session.request("post", "/v1/chat/completions", **options) as response:
                    assert (await response.json())["choices"]
    for completion, exchange in zip(replayed(recording).completions, server.exchanges, strict=True):
        assert completion.request == json.loads(exchange.request)
        assert completion.token_ids
    assert "s3cret" not in "".join(span.to_json() for span in recording.spans)


async def test_what_is_made_while_it_is_sent_is_counted(recording: Recording, clients: Clients):
    """A form has no JSON."""
    url = clients.serve("hello").base_url + "/chat/completions"
    async with (
        rollout("agent"),
        aiohttp.ClientSession() as session,
        session.post(url, data={"a": "b"}) as response,
    ):
        assert response.status == 400
    (warning,) = [each for each in recording.trajectory.warnings if "captured" in each]
    assert warning.startswith("1 request to /v1/chat/completions went through aiohttp")


async def test_errors_that_are_raised(recording: Recording, clients: Clients):
    """By the session that is asked to, or by the user: the call failed."""
    refused = otel_rollout.testing.Raw(429, b'{"error": {"message": "no"}}')
    url = clients.serve(refused).base_url + "/chat/completions"
    async with rollout("agent"), aiohttp.ClientSession() as session:
        for options in ({"raise_for_status": True}, {}):
            with pytest.raises(aiohttp.ClientResponseError):
                (await session.post(url, json=BODY, **options)).raise_for_status()
        with pytest.raises(aiohttp.InvalidURL):
            await session.post("http://[/v1/chat/completions", json=BODY)
    assert [c.status for c in replayed(recording).completions] == ["error", "error"]


@pytest.mark.parametrize(
    "options",
    [{"json": {1j}}, {"json": BODY, "headers": 7}, {"json": BODY, "params": 7}],
    ids=["json", "headers", "params"],
)
async def test_arguments_that_are_wrong(
    recording: Recording,
    clients: Clients,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
):
    """The exception is that of aiohttp, from its own code."""
    url = clients.serve("hello").base_url + "/chat/completions"
    async with rollout("agent"), aiohttp.ClientSession() as session:
        with pytest.raises(Exception) as raised:
            await session.post(url, **options)
    assert not str(raised.traceback[-1].path).endswith("record/transports/aiohttp.py")
    assert recording.trajectory.exchanges == []
    caplog.clear()
