"""What clients of other languages do with a connection: offers of HTTP/2, HTTP/1.0, odd lengths."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.gateway import application
from otel_rollout.record import running_rollout
from otel_rollout.testing import Reply
from tests.gateway.programs import SECRET, Serve
from tests.kit.conversations import ASK
from tests.kit.outside import open_to, read_answer, request_bytes, send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
DATA = json.dumps(CHAT).encode()
JSON = {"content-type": "application/json"}
OFFER = {
    **JSON,
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
}
"""The head of a request by the JDK's client, on plain http."""
JAVA = """
import java.net.URI;
import java.net.http.*;
class Ask {
    public static void main(String[] asked) throws Exception {
        var client = HttpClient.newHttpClient();
        for (int call = 0; call < 2; call++) {
            var request = HttpRequest.newBuilder(URI.create(asked[0]))
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(asked[1])).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).body());
        }
    }
}
"""


async def sent_in(url: str, data: bytes, size: int) -> tuple[Any, Any]:
    """A connection on which these bytes were sent, so many at a time."""
    reader, writer = await open_to(url)
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await writer.drain()
        if size < len(data):
            await asyncio.sleep(0)
    return reader, writer


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("size", [1 << 20, 7, 1])
async def test_an_offer_of_another_protocol_is_ignored(
    captured: Recording, clients: Clients, gateway_to: Serve, size: int, chunked: bool
):
    """The body is read, however it comes in pieces, and the connection is kept for more."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        one = request_bytes(url, DATA, "POST", OFFER, chunked=chunked)
        plain = request_bytes(url, DATA, "POST", JSON)
        models = request_bytes(gateway.base_url() + "/models", None, "GET", OFFER)
        reader, writer = await sent_in(url, one + plain + one + models, size)
        answers = [await read_answer(reader) for _ in range(4)]
        writer.close()
    assert [answer.status for answer in answers] == [200] * 4
    assert [json.loads(wire.request or b"{}") for wire in server.exchanges] == [CHAT] * 3 + [{}]
    assert len(trajectory.completions) == 3
    assert trajectory.warnings == []
    named = {name.lower() for wire in server.exchanges for name in wire.request_headers}
    assert not named & {"upgrade", "http2-settings"}


async def test_many_offers_at_once(captured: Recording, clients: Clients, gateway_to: Serve):
    """Requests that come together are read one after the other, however many they are."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent"):
        url = gateway.base_url() + "/models"
        reader, writer = await sent_in(url, request_bytes(url, None, "GET", OFFER) * 700, 1 << 20)
        answers = [await read_answer(reader) for _ in range(700)]
        writer.close()
    assert {answer.status for answer in answers} == {200}


@pytest.mark.skipif(shutil.which("java") is None, reason="needs a JDK")
async def test_the_client_of_java(
    captured: Recording, clients: Clients, gateway_to: Serve, tmp_path: Path
):
    """It offers HTTP/2 on plain http, in each request of its first connection."""
    server = clients.serve(["Hello", "again"])
    gateway = await gateway_to(server.base_url)
    program = tmp_path / "Ask.java"
    program.write_text(JAVA)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        asking = await asyncio.create_subprocess_exec(
            *("java", str(program), url, DATA.decode()), stdout=PIPE
        )
        said, _ = await asking.communicate()
    assert said.index(b"Hello") < said.index(b"again")
    assert [wire.request for wire in server.exchanges] == [DATA] * 2
    assert len(trajectory.completions) == 2


@pytest.mark.parametrize("head", [{"content-length": "9"}, {"upgrade": "h2c"}])
async def test_a_body_of_another_length_is_not_passed_on(captured: Recording, head: dict[str, str]):
    """Below a server that loses bodies: what has not come as its head says is refused."""
    gateway = application("http://127.0.0.1:1", secret=SECRET)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def take(message: Any) -> None:
        sent.append(message)

    headers = {"transfer-encoding": "chunked", **head}
    if "content-length" in head:
        del headers["transfer-encoding"]
    with rollout("agent") as trajectory:
        active = running_rollout(trajectory.id)
        assert active is not None
        headers["authorization"] = f"Bearer or-{gateway.tokens.own(active)}"
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await gateway(scope, receive, take)
    await gateway.close()
    assert sent[0]["status"] == 400
    assert b"body" in sent[1]["body"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_http_1_0_gets_no_chunks(
    captured: Recording, clients: Clients, gateway_to: Serve, stream: bool
):
    """A stream ends with its connection, and has the bytes that the server sent."""
    server = clients.serve(Reply("Hello there"))
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        data = json.dumps({**CHAT, "stream": stream}).encode()
        request = request_bytes(url, data, "POST", JSON).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n")
        reader, writer = await sent_in(url, request, 1 << 20)
        answer = await read_answer(reader)
        assert await reader.read() == b""
        writer.close()
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"
    assert answer.body == server.exchanges[0].response
    (completion,) = trajectory.completions
    assert completion.status == "complete"


async def test_http_1_0_is_answered_by_the_gateway_itself(clients: Clients, gateway_to: Serve):
    """Its own replies have a length."""
    gateway = await gateway_to(clients.serve().base_url)
    request = request_bytes(gateway.url + "/v1/x", b"{}", "POST", JSON)
    reader, writer = await sent_in(
        gateway.url, request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"), 1 << 20
    )
    answer = await read_answer(reader)
    writer.close()
    assert answer.status == 401
    assert (await send(gateway.url + "/v1/x", {})).body == answer.body
