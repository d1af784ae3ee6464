"""What goes wrong: clients that leave, model servers that break, requests that are no requests."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from otel_rollout import reconstruct, rollout
from otel_rollout.gateway import serve
from otel_rollout.otlp import read
from otel_rollout.testing import ModelServer, Raw, Reply
from tests.gateway.programs import HARNESS, Serve, command
from tests.kit.conversations import ASK
from tests.kit.outside import open_to, read_answer, request_bytes, send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
STREAM = {**CHAT, "stream": True}
LONG = "lorem ipsum " * 20
JSON = {"content-type": "application/json"}


async def test_a_client_that_leaves_aborts_the_call(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """The model server is told, and the exchange is `cancelled` with what had come of it."""
    server = clients.serve(Reply(LONG, chunk_delay=0.05))
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        reader, writer = await open_to(url)
        writer.write(request_bytes(url, json.dumps(STREAM).encode(), "POST", JSON))
        await reader.readuntil(b"lorem")
        writer.close()
        while not trajectory.completions:
            await asyncio.sleep(0.01)
    (completion,) = trajectory.completions
    assert completion.status == "cancelled"
    assert completion.message is not None
    assert LONG.startswith(completion.message["content"])
    assert completion.message["content"]
    while not server.exchanges:
        await asyncio.sleep(0.01)
    assert b"DONE" not in server.exchanges[0].response


async def test_a_client_that_leaves_before_the_reply(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A call whose reply had not begun is `cancelled` too."""
    server = clients.serve(Reply("Hello", delay=60))
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        _, writer = await open_to(url)
        writer.write(request_bytes(url, json.dumps(CHAT).encode(), "POST", JSON))
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        while not trajectory.completions:
            await asyncio.sleep(0.01)
    assert [completion.status for completion in trajectory.completions] == ["cancelled"]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["plain", "stream"])
async def test_a_reply_that_is_cut(
    captured: Recording, clients: Clients, gateway_to: Serve, body: dict[str, Any]
):
    """A model server that breaks off is an `error`, and the client's reply has no end either."""
    server = clients.serve(Reply("Hello, world", cut_after=2))
    gateway = await gateway_to(server.base_url)
    direct = await send(server.base_url + "/chat/completions", body)
    with rollout("agent") as trajectory:
        through = await send(gateway.base_url() + "/chat/completions", body)
    assert not through.whole
    assert not direct.whole
    assert len(through.body) == len(direct.body)
    (completion,) = trajectory.completions
    assert completion.status == "error"


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_a_model_server_that_is_not_there(captured: Recording, gateway_to: Serve, path: str):
    """502 in the shape of the API's errors; the call is recorded as it failed."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gateway = await gateway_to(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with rollout("agent") as trajectory:
            answer = await send(gateway.base_url() + path, CHAT)
    assert answer.status == 502
    assert answer.json()["error"]["type"] == "api_error"
    assert ("type" in answer.json()) == (path == "/messages")
    (completion,) = trajectory.completions
    assert completion.status == "error"
    assert completion.error is not None
    assert completion.error["type"] == "ClientConnectorError"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(
    captured: Recording, clients: Clients, gateway_to: Serve, chunked: bool
):
    """413; by its length it is refused before any of it is read, in chunks once it is too much."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url, max_body_bytes=100)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        reader, writer = await open_to(url)
        if chunked:
            writer.write(request_bytes(url, b"x" * 200, "POST", JSON, chunked=True)[:-5])
        else:
            writer.write(request_bytes(url, None, "POST", {"content-length": str(1 << 30)}))
        answer = await read_answer(reader)
        writer.close()
    assert answer.status == 413
    assert "100 bytes" in answer.json()["error"]["message"]
    assert server.exchanges == []
    assert trajectory.completions == []


async def test_a_body_that_does_not_come(captured: Recording, clients: Clients, gateway_to: Serve):
    """A client that takes too long for the next piece is refused."""
    gateway = await gateway_to(clients.serve().base_url, body_seconds=0.1)
    with rollout("agent"):
        url = gateway.base_url() + "/chat/completions"
        reader, writer = await open_to(url)
        writer.write(request_bytes(url, None, "POST", {"content-length": "10"}) + b"{")
        answer = await read_answer(reader)
        writer.close()
    assert answer.status == 408


async def test_a_body_that_comes_drop_by_drop(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Each piece comes in time, the whole does not."""
    gateway = await gateway_to(clients.serve().base_url, request_seconds=0.3)
    with rollout("agent"):
        url = gateway.base_url() + "/chat/completions"
        reader, writer = await open_to(url)
        writer.write(request_bytes(url, None, "POST", {"content-length": "1000000"}))
        asking = asyncio.create_task(read_answer(reader))
        while not asking.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        writer.close()
    assert (await asking).status == 408


async def half_sent(url: str, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body has come but for its last byte."""
    reader, writer = await open_to(url)
    writer.write(request_bytes(url, None, "POST", {**JSON, "content-length": str(size + 1)}))
    writer.write(b" " * size)
    await writer.drain()
    return reader, writer


async def test_bodies_are_bounded_in_all_and_for_each_rollout(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A rollout that sends too much at once is refused, and others are not; what ended is free."""
    server = clients.serve("Hello")
    gateway = await gateway_to(
        server.base_url, max_held_bytes=250_000, max_held_bytes_of_rollout=100_000
    )
    bodies = gateway._application._bodies
    long = {**CHAT, "user": "x" * 20_000}

    async def begin() -> str:
        begun = await send(gateway.url + "/rollouts", {}, **HARNESS)
        return str(begun.json()["openai_base_url"]) + "/chat/completions"

    async def held(size: int) -> None:
        while bodies._all != size:
            await asyncio.sleep(0.01)

    urls = [await begin() for _ in range(4)]
    opened = [await half_sent(urls[0], 60_000)]
    await held(60_000)
    reader, writer = await half_sent(urls[0], 60_000)
    answer = await read_answer(reader)
    writer.close()
    assert answer.status == 503
    assert answer.headers["connection"] == "close"
    assert "of this rollout" in answer.json()["error"]["message"]
    assert (await send(urls[1], CHAT)).status == 200
    opened += [await half_sent(urls[1], 90_000), await half_sent(urls[2], 90_000)]
    await held(240_000)
    answer = await send(urls[3], long)
    assert answer.status == 503
    assert "of this rollout" not in answer.json()["error"]["message"]
    for _, writer in opened:
        writer.close()
    await held(0)
    assert (await send(urls[3], long)).status == 200
    assert bodies._each == {}


async def test_a_body_of_who_has_no_secret_is_not_read(clients: Clients, gateway_to: Serve):
    """A control route refuses it first."""
    gateway = await gateway_to(clients.serve().base_url)
    reader, writer = await half_sent(gateway.url + "/rollouts", 10)
    assert (await read_answer(reader)).status == 401
    writer.close()


async def test_headers_that_do_not_come(clients: Clients, gateway_to: Serve):
    """A connection without a whole request is closed after a while, and one that waits is."""
    gateway = await gateway_to(clients.serve().base_url, header_seconds=0.1)
    for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-A: "):
        reader, writer = await open_to(gateway.url)
        writer.write(start)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: -5\r\n",
    ],
)
async def test_two_ways_to_end_a_request(
    captured: Recording, clients: Clients, gateway_to: Serve, framing: str
):
    """A request that ends here or there, as one reads it, is refused, and so is what follows it."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        path = gateway.base_url().removeprefix(gateway.url) + "/chat/completions"
        reader, writer = await open_to(gateway.url)
        second = b"POST /v1/chat/completions HTTP/1.1\r\nHost: b\r\n\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{framing}\r\n0\r\n\r\n".encode()
        writer.write(head + second)
        answer = await read_answer(reader)
        writer.close()
    assert answer.status == 400
    assert server.exchanges == []
    assert trajectory.completions == []


async def test_a_stream_is_read_as_fast_as_the_client_takes_it(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A client that does not read holds the model server back: nothing is buffered without end."""
    size = 64 << 20
    sent = [0]

    def write(connection: socket.socket) -> None:
        piece = b"data: " + b"x" * 65_000 + b"\n\n"
        try:
            while sent[0] < size:
                connection.sendall(piece)
                sent[0] += len(piece)
        except OSError:
            pass
        connection.close()

    def accept(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        write(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        gateway = await gateway_to(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with rollout("agent"):
            url = gateway.base_url() + "/chat/completions"
            reader, writer = await open_to(url)
            writer.write(request_bytes(url, json.dumps(STREAM).encode(), "POST", JSON))
            await reader.readuntil(b"data: ")
            before = -1
            while before != sent[0]:  # until the server is held back
                before = sent[0]
                await asyncio.sleep(0.3)
            writer.close()
    await asyncio.to_thread(thread.join)
    assert sent[0] < size


async def test_a_gateway_that_is_stopped_in_a_stream(captured: Recording, clients: Clients):
    """The call is `cancelled`, the client's reply has no end, and nothing waits for either."""
    server = clients.serve(Reply(LONG * 20, chunk_delay=0.05))
    with rollout("agent") as trajectory:
        async with serve(server.base_url) as gateway:
            url = gateway.base_url() + "/chat/completions"
            reader, writer = await open_to(url)
            writer.write(request_bytes(url, json.dumps(STREAM).encode(), "POST", JSON))
            await reader.readuntil(b"lorem")
        assert not await read_rest(reader)
        writer.close()
    assert [completion.status for completion in trajectory.completions] == ["cancelled"]


async def test_many_streams_at_a_time(captured: Recording, clients: Clients, gateway_to: Serve):
    """Each of them is whole, and in its own rollout."""
    server = clients.serve(lambda body: Reply(body["messages"][0]["content"], chunk_delay=0.01))
    gateway = await gateway_to(server.base_url)
    rollouts = [(await send(gateway.url + "/rollouts", {}, **HARNESS)).json() for _ in range(8)]

    async def ask(number: int) -> None:
        url = rollouts[number % 8]["openai_base_url"] + "/chat/completions"
        messages = [{"role": "user", "content": f"{number % 8} of {number}"}]
        answer = await send(url, {"model": "m", "stream": True, "messages": messages})
        assert answer.whole

    await asyncio.gather(*map(ask, range(128)))
    for each in rollouts:
        await send(f"{gateway.url}/rollouts/{each['id']}", None, "DELETE", **HARNESS)
    found = {trajectory.id: trajectory for trajectory in captured.trajectories}
    for number, each in enumerate(rollouts):
        said = [str(c.message and c.message["content"]) for c in found[each["id"]].completions]
        assert sorted(said) == sorted(f"{number} of {n}" for n in range(number, 128, 8))
        assert found[each["id"]].warnings == []


# --- memory

_GIGABYTE = 1 << 30


@pytest.mark.slow
async def test_a_gigabyte_is_refused(clients: Clients):
    """A body that is really sent is held until it is too much, and the rest is not read."""
    server = clients.serve("Hello")
    process, root = await command(server, OTEL_ROLLOUT_GATEWAY_MAX_BODY_BYTES=str(16 << 20))
    try:
        begun = (await send(root + "/rollouts", {}, **HARNESS)).json()
        url = begun["openai_base_url"] + "/chat/completions"
        assert (await send(url, CHAT)).status == 200
        before = most_memory(process.pid)
        status, sent = await asyncio.to_thread(send_in_chunks, url, _GIGABYTE)
        assert status == b"HTTP/1.1 413"
        assert sent < _GIGABYTE
        assert most_memory(process.pid) - before < 64 << 20
    finally:
        process.kill()
        await process.wait()


def send_in_chunks(url: str, size: int) -> tuple[bytes, int]:
    """Send a body of so many bytes until it is refused: the beginning of the reply, bytes sent."""
    address = urlsplit(url)
    head = request_bytes(url, None, "POST", {**JSON, "transfer-encoding": "chunked"})
    piece = b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))
    sent = 0
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(head)
        try:
            while sent < size:
                connection.sendall(piece)
                sent += 1 << 16
            connection.sendall(b"0\r\n\r\n")
        except ConnectionError:
            pass  # what it answered before can still be read
        return connection.recv(12), sent


def most_memory(pid: int) -> int:
    """Bytes of memory that a process had at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


# --- secrets


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_keys_and_tokens_are_nowhere(
    captured: Recording,
    clients: Clients,
    gateway_to: Serve,
    path: str,
    caplog: pytest.LogCaptureFixture,
):
    """The model server gets the gateway's key alone; an error that repeats it is shown without."""
    key, own = "sk-of-the-gateway-0123456789", "sk-of-the-client-0123456789"
    said = json.dumps({"error": {"message": f"bad key {key} for {own}"}}).encode()
    server = clients.serve(Raw(401, said, headers={"x-echo": key}))
    gateway = await gateway_to(server.base_url, api_key=key)
    with rollout("agent") as trajectory:
        token = gateway.token()
        for headers in ({"authorization": f"Bearer {own}"}, {"x_api_key": f"or-{token}"}):
            answer = await send(gateway.base_url() + path, CHAT, **headers)
            assert answer.status == 401
            assert key not in str(answer)
            assert "[redacted]" in str(answer.body)
    for wire in server.exchanges:
        sent = wire.request_headers
        bearer, plain = sent.get("authorization"), sent.get("x-api-key")
        assert (bearer, plain) == ((None, key) if path == "/messages" else (f"Bearer {key}", None))
    told = "".join(span.to_json() for span in captured.spans) + caplog.text
    told += json.dumps(trajectory.to_dict()) + str(trajectory.warnings)
    assert not any(secret in told for secret in (key, own, token))
    assert [completion.status for completion in trajectory.completions] == ["error"] * 2


async def test_a_clients_own_key_is_passed_on(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Where the gateway has none."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent"):
        url = gateway.base_url() + "/chat/completions"
        await send(url, CHAT, authorization="Bearer sk-mine", x_api_key="mine")
    headers = server.exchanges[0].request_headers
    assert (headers["authorization"], headers["x-api-key"]) == ("Bearer sk-mine", "mine")


# --- kill -9

_SLOW_SERVER = """
import sys
from otel_rollout.testing import ModelServer, Reply

with ModelServer(Reply(sys.argv[1], chunk_delay=1)) as server:
    print(server.base_url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
async def test_a_model_server_that_is_killed_in_a_stream(captured: Recording, gateway_to: Serve):
    """The client's connection is cut, and the exchange is an `error` with what had come."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SLOW_SERVER, LONG), stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    gateway = await gateway_to((await process.stdout.readline()).decode().strip())
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        reader, writer = await open_to(url)
        headers = {**JSON, "connection": "close"}  # a reply with an end would end the connection
        writer.write(request_bytes(url, json.dumps(STREAM).encode(), "POST", headers))
        await reader.readuntil(b"lorem")
        process.kill()
        await process.wait()
        assert not await read_rest(reader)
        writer.close()
    (completion,) = trajectory.completions
    assert completion.status == "error"
    assert completion.message is not None
    assert completion.message["content"].startswith("lorem")


@pytest.mark.slow
async def test_a_gateway_that_is_killed_in_a_stream(tmp_path: Path):
    """What was recorded before is rebuilt; what is missing is said."""
    spans = tmp_path / "spans.jsonl"
    with ModelServer(lambda body: Reply(LONG, chunk_delay=0.05 if body.get("stream") else 0)) as s:
        process, root = await command(s, "--spans", str(spans))
        begun = (
            await send(root + "/rollouts", {"name": "agent", "task_id": "t"}, **HARNESS)
        ).json()
        url = begun["openai_base_url"] + "/chat/completions"
        assert (await send(url, CHAT)).status == 200
        while not spans.exists():
            await asyncio.sleep(0.02)
        reader, writer = await open_to(url)
        writer.write(request_bytes(url, json.dumps(STREAM).encode(), "POST", JSON))
        await reader.readuntil(b"lorem")
        process.kill()
        await process.wait()
        assert not (await read_rest(reader))
        writer.close()
    (trajectory,) = reconstruct(read(spans))
    assert trajectory.id == begun["id"]
    assert [completion.status for completion in trajectory.completions] == ["complete"]
    assert any("rollout" in warning and "span" in warning for warning in trajectory.warnings)


async def read_rest(reader: asyncio.StreamReader) -> bool:
    """Read until the connection is lost; True if the reply came to its end."""
    try:
        rest = await reader.read()
    except ConnectionError:
        return False
    return rest.endswith(b"0\r\n\r\n")
