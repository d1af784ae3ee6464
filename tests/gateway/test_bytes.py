"""Bytes pass untouched: what a client gets through the gateway is what the model server sent."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, request_token_ids, rollout
from otel_rollout.testing import Raw, Reply
from tests.gateway.programs import Serve
from tests.kit.conversations import ASK
from tests.kit.outside import Answer, send, send_chunked
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
Anything = tuple[str, list[tuple[bytes, bytes]]]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def same(through: Answer, direct: Answer) -> None:
    """Assert that two replies are equal, but for HTTP's framing of connections."""
    assert (through.status, through.body, through.whole) == (
        direct.status,
        direct.body,
        direct.whole,
    )
    framing = ("connection", "transfer-encoding", "date")
    assert {k: v for k, v in through.headers.items() if k not in framing} == {
        k: v for k, v in direct.headers.items() if k not in framing
    }


ASKED: dict[str, tuple[str, str, Any]] = {
    "models": ("GET", "/models", None),
    "head": ("HEAD", "/models", None),
    "query": ("GET", "/models?a=%2F&b=c%20d", None),
    "unknown": ("POST", "/anything/at/all", {"a": 1}),
    "missing": ("DELETE", "/files/f", None),
    "no body": ("POST", "/moderations", b""),
    "not JSON": ("POST", "/chat/completions", b"\xff\xfe{"),
    "plain": ("POST", "/chat/completions", CHAT),
    "stream": ("POST", "/chat/completions", {**CHAT, "stream": True}),
}


@pytest.mark.parametrize("compress", [False, True], ids=["as is", "gzip"])
@pytest.mark.parametrize("asked", ASKED)
async def test_a_reply_is_what_the_server_sent(
    captured: Recording, clients: Clients, gateway_to: Serve, asked: str, compress: bool
):
    """Status, headers and body, for paths that are known and for others."""
    method, path, body = ASKED[asked]
    routes = {"/v1/moderations": Raw(body=b"ok", content_type="text/plain", headers={"x-a": "b"})}
    servers = [
        clients.serve(Reply("Hello", id="same"), compress=compress, routes=routes) for _ in range(2)
    ]
    gateway = await gateway_to(servers[0].base_url, allow_paths=["/"])
    direct = await send(servers[1].base_url + path, body, method)
    with rollout("agent") as trajectory:
        through = await send(gateway.base_url() + path, body, method)
    same(through, direct)
    for sent, bare in zip(servers[0].exchanges, servers[1].exchanges, strict=True):
        assert (sent.path, sent.request) == (bare.path, bare.request)
        names = (set(each.request_headers) - {"content-length"} for each in (sent, bare))
        assert next(names) == next(names)
    if asked in ("plain", "stream"):
        assert [completion.status for completion in trajectory.completions] == ["complete"]
        assert trajectory.warnings == []


async def test_a_request_in_chunks(captured: Recording, clients: Clients, gateway_to: Serve):
    """However a client frames its body, the server gets the same bytes."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        answer = await send_chunked(gateway.base_url() + "/chat/completions", CHAT)
    assert answer.status == 200
    assert server.exchanges[0].request == json.dumps(CHAT).encode()
    assert len(trajectory.completions) == 1


async def test_a_call_that_is_not_known_is_counted(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A path that asks a model in a way that is not read: where it is allowed, that is said."""
    server = clients.serve(routes={"/v1/models/m:rawPredict": Raw(body=b"{}")})
    gateway = await gateway_to(server.base_url, allow_paths=["/v1/models"])
    with rollout("agent") as trajectory:
        answer = await send(gateway.base_url() + "/models/m:rawPredict", {"a": 1})
    assert answer.body == b"{}"
    (warning,) = trajectory.warnings
    assert "/models/m:rawPredict" in warning
    assert "/r/" not in warning


# --- requests that are compressed


def deflated(body: bytes, window: int) -> bytes:
    """The body in zlib's format, or without its header."""
    packer = zlib.compressobj(wbits=window)
    return packer.compress(body) + packer.flush()


ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-GZIP": gzip.compress,
    "deflate": partial(deflated, window=15),
    "Deflate": partial(deflated, window=-15),
    "identity, gzip": gzip.compress,
    "deflate, gzip": lambda body: gzip.compress(deflated(body, 15)),
    "br": lambda body: import_module("brotli").compress(body),
    "zstd": lambda body: import_module("zstandard").compress(body),
}


@pytest.fixture
async def anything() -> AsyncIterator[Anything]:
    """A server that reads each encoding: its address, and the heads and bodies that it gets."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "!"}}
    reply = json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode()
    got: list[tuple[bytes, bytes]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        (length,) = re.findall(rb"content-length: (\d+)", head)
        got.append((head, await reader.readexactly(int(length))))
        said = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (said, len(reply), reply))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", got
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("encoding", ENCODED)
async def test_a_compressed_request_is_recorded_decoded(
    captured: Recording, anything: Anything, gateway_to: Serve, encoding: str
):
    """The model server gets it as it came."""
    gateway = await gateway_to(anything[0])
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi " * 9_999}]}
    sent = ENCODED[encoding](json.dumps(asked).encode())
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        answer = await send(url, sent, content_encoding=encoding)
    assert answer.status == 200
    ((head, got),) = anything[1]
    assert got == sent
    assert f"content-encoding: {encoding.lower()}\r\n".encode() in head
    (completion,) = trajectory.completions
    assert completion.request == asked
    assert trajectory.warnings == []


@pytest.mark.parametrize("encoding", ENCODED)
async def test_a_compressed_request_that_asks_for_ids_is_sent_on_decoded(
    captured: Recording, anything: Anything, gateway_to: Serve, encoding: str
):
    """What the client wrote is there, with the fields; a signed one is as it came."""
    gateway = await gateway_to(anything[0])
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    sent = ENCODED[encoding](json.dumps(asked).encode())
    with rollout("agent") as trajectory, request_token_ids():
        url = gateway.base_url() + "/chat/completions"
        answer = await send(url, sent, content_encoding=encoding)
        signed = await send(url, sent, content_encoding=encoding, digest="sha-256=abc")
    assert (answer.status, signed.status) == (200, 200)
    (head, got), (signed_head, signed_got) = anything[1]
    assert b"content-encoding" not in head
    assert json.loads(got) == {**asked, "return_token_ids": True, "logprobs": True}
    assert signed_got == sent
    assert f"content-encoding: {encoding.lower()}\r\n".encode() in signed_head
    completion, other = trajectory.completions
    assert completion.request == json.loads(got)
    assert other.request == asked


GZIPPED = gzip.compress(json.dumps(CHAT).encode())


@pytest.mark.parametrize(
    ("encoding", "sent"),
    [
        ("snappy", lambda: GZIPPED),
        ("deflate", lambda: GZIPPED),
        ("gzip", lambda: GZIPPED[:-9]),
        ("gzip", lambda: GZIPPED + GZIPPED),
        ("gzip", lambda: gzip.compress(b"no JSON")),
        ("gzip", lambda: gzip.compress(b" " * (4 << 20) + json.dumps(CHAT).encode(), 1)),
        ("gzip, gzip", lambda: gzip.compress(gzip.compress(b" " * (1 << 28), 1))),
    ],
    ids=["unknown", "other", "cut", "more after it", "no JSON", "large", "bomb"],
)
async def test_a_request_that_cannot_be_decoded_is_counted(
    captured: Recording,
    anything: Anything,
    gateway_to: Serve,
    encoding: str,
    sent: Callable[[], bytes],
):
    """It passes, and is no completion without a prompt: the warning names the encoding."""
    body = sent()
    gateway = await gateway_to(anything[0], max_body_bytes=4 << 20)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        answer = await send(url, body, content_encoding=encoding)
    assert answer.status == 200
    assert [got for _, got in anything[1]] == [body]
    assert trajectory.completions == []
    assert trajectory.warnings[0] == (
        "1 request to /chat/completions went through the gateway, which cannot decode its "
        f"Content-Encoding {encoding!r}, and was not captured"
    )


async def test_what_is_decoded_is_held(captured: Recording, clients: Clients, gateway_to: Serve):
    """A small body that is decoded to a large one counts as the large one."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url, max_held_bytes_of_rollout=1 << 20)
    large = {"model": "m", "messages": [{"role": "user", "content": "a" * (1 << 20)}]}
    with rollout("agent"):
        url = gateway.base_url() + "/chat/completions"
        packed = gzip.compress(json.dumps(large).encode())
        assert (await send(url, packed, content_encoding="gzip")).status == 503
        assert (await send(url, CHAT)).status == 200


# --- token ids that the client did not ask for


def vllm(body: dict[str, Any]) -> Raw:
    """A reply as vLLM writes it, with what the request asks for and no more."""
    ids, logprobs = body.get("return_token_ids"), body.get("logprobs")
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}

    def choice(said: dict[str, Any], tokens: list[int], reason: str | None) -> dict[str, Any]:
        entries = [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
        shown = {"content": entries * len(tokens)} if logprobs and tokens else None
        found = {"index": 0, **said, "logprobs": shown, "finish_reason": reason}
        return {**found, **({"token_ids": tokens} if ids else {}), "stop_reason": None}

    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    prompt = {"prompt_token_ids": [1, 2]} if ids else {}
    if not body.get("stream"):
        message = {"message": {"role": "assistant", "content": 'é "token_ids": [1]'}}
        whole = {**head, "choices": [choice(message, [3, 4], "stop")], "usage": usage, **prompt}
        return Raw(body=json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode())
    deltas: list[tuple[dict[str, Any], list[int], str | None]] = [
        ({"role": "assistant", "content": ""}, [], None),
        ({"content": '"token_ids": '}, [3], None),
        *([({}, [9], None)] if ids else []),  # a token without a text: sent for its id alone
        ({}, [4], "stop"),
    ]
    chunks = [
        {**head, "choices": [choice({"delta": delta}, tokens, reason)]}
        for delta, tokens, reason in deltas
    ]
    chunks[0] |= prompt
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    events = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() for chunk in chunks]
    pieces = [event + b"\n\n" for event in (*events, b"data: [DONE]")]
    return Raw(chunks=pieces, content_type="text/event-stream")


@pytest.fixture
def with_token_ids() -> InMemoryTrajectoryExporter:
    """The library, asking for token ids with every call."""
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], instrumentor=None, request_token_ids=True)
    return exporter


def packed(body: dict[str, Any]) -> Raw:
    """The same, gzipped, as one piece for each event."""
    raw = vllm(body)
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    parts = [raw.body] if raw.body else [*raw.chunks]
    done = [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in parts]
    done[-1] += packer.flush()
    body_, chunks = (done[0], ()) if raw.body else (b"", tuple(done))
    return Raw(
        body=body_,
        chunks=chunks,
        content_type=raw.content_type,
        headers={"content-encoding": "gzip"},
    )


@STREAMED
@pytest.mark.parametrize("reply", [vllm, packed])
async def test_what_was_asked_for_training_is_not_shown(
    with_token_ids: InMemoryTrajectoryExporter,
    clients: Clients,
    gateway_to: Serve,
    stream: bool,
    reply: Any,
):
    """The client sees the bytes that it would have got; the completion has ids and log-probs."""
    server = clients.serve(reply)
    gateway = await gateway_to(server.base_url)
    body = {**CHAT, "stream": stream}
    direct = await send(clients.serve(vllm).base_url + "/chat/completions", body)
    with rollout("agent") as trajectory:
        through = await send(gateway.base_url() + "/chat/completions", body)
    assert through.body == direct.body
    assert through.whole
    assert "content-encoding" not in through.headers
    (completion,) = trajectory.completions
    assert completion.token_ids == ([3, 9, 4] if stream else [3, 4])
    assert completion.prompt_token_ids == [1, 2]
    assert completion.logprobs is not None
    assert trajectory.warnings == []


@STREAMED
async def test_a_client_that_asks_gets_all(
    with_token_ids: InMemoryTrajectoryExporter, clients: Clients, gateway_to: Serve, stream: bool
):
    """What the client asked for itself stays, and nothing else is shown."""
    server = clients.serve(vllm)
    gateway = await gateway_to(server.base_url)
    options = {"include_usage": True}
    for more in ({"return_token_ids": True}, {"logprobs": True}, {"stream_options": options}):
        body = {**CHAT, "stream": stream, **more}
        direct = await send(clients.serve(vllm).base_url + "/chat/completions", body)
        with rollout("agent") as trajectory:
            through = await send(gateway.base_url() + "/chat/completions", body)
        assert through.body == direct.body or (stream and "return_token_ids" not in more)
        assert (b'token_ids":[' in through.body) == ("return_token_ids" in more)
        assert (b'"usage"' in through.body) == (not stream or "stream_options" in more)
        assert trajectory.completions[0].token_ids is not None


async def test_it_asks_as_the_code_that_gives_the_address_would(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Inside `request_token_ids`, or not, wherever the request itself is made."""
    server = clients.serve(vllm)
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        with request_token_ids():
            url = gateway.base_url() + "/chat/completions"
        asked = await send(url, CHAT)
        gateway.base_url()
        bare = await send(url, CHAT)
    assert asked.body == bare.body
    assert [c.token_ids for c in trajectory.completions] == [[3, 4], None]


class Picky:
    """A server that refuses fields that it does not know.

    refuses_all: True if it refuses all others, too.
    """

    def __init__(self, status: int, *, refuses_all: bool = False) -> None:
        self.status = status
        self.refuses_all = refuses_all

    def __call__(self, body: dict[str, Any]) -> Raw:
        unknown = sorted(body.keys() - {"model", "messages", "stream"})
        if unknown or self.refuses_all:
            said = {"error": {"message": f"Unexpected fields in the request: {unknown}"}}
            return Raw(self.status, json.dumps(said).encode())
        message = {"role": "assistant", "content": "Hi"}
        if body.get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "delta": message}
            chunk = json.dumps({"id": "c", "model": "m", "choices": [choice]})
            events = f"data: {chunk}\n\ndata: [DONE]\n\n".encode()
            return Raw(body=events, content_type="text/event-stream")
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return Raw(body=json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode())


@STREAMED
@pytest.mark.parametrize("status", [400, 422])
async def test_fields_that_the_server_refuses_are_left_out(
    with_token_ids: InMemoryTrajectoryExporter,
    clients: Clients,
    gateway_to: Serve,
    status: int,
    stream: bool,
):
    """The call is made once more as the client wrote it, and the next one at once."""
    server = clients.serve(routes={"/v1/chat/completions": Picky(status)})
    gateway = await gateway_to(server.base_url)
    asked = {**CHAT, "stream": stream}
    with rollout("agent") as trajectory:
        answers = [await send(gateway.base_url() + "/chat/completions", asked) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    sent = [json.loads(wire.request) for wire in server.exchanges]
    assert sent[0] != asked
    assert sent[1:] == [asked, asked]
    assert [each.request for each in trajectory.completions] == [asked, asked]
    assert [each.exchange.attempts for each in trajectory.completions] == [2, 1]
    for completion in trajectory.completions:
        assert completion.status == "complete"
        assert "return_token_ids" in str(completion.exchange.refused)


async def test_a_compressed_request_is_asked_again_as_it_was_meant(
    with_token_ids: InMemoryTrajectoryExporter, clients: Clients, gateway_to: Serve
):
    """Where the server refuses the fields it gets what the client wrote, decoded."""
    server = clients.serve(routes={"/v1/chat/completions": Picky(400)})
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        answer = await send(url, gzip.compress(json.dumps(CHAT).encode()), content_encoding="gzip")
    assert answer.status == 200
    assert [json.loads(wire.request) == CHAT for wire in server.exchanges] == [False, True]
    assert [each.request for each in trajectory.completions] == [CHAT]


async def test_a_request_that_is_refused_all_the_same(
    with_token_ids: InMemoryTrajectoryExporter, clients: Clients, gateway_to: Serve
):
    """The client gets the refusal of what it sent, and the fields are tried with the next one."""
    server = clients.serve(routes={"/v1/chat/completions": Picky(400, refuses_all=True)})
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        answers = [await send(url, CHAT) for _ in range(2)]
    assert [answer.status for answer in answers] == [400, 400]
    assert answers[0].json()["error"]["message"] == "Unexpected fields in the request: []"
    assert len(server.exchanges) == 4
    assert [each.status for each in trajectory.completions] == ["error", "error"]


class Moody:
    """A server that refuses some of the requests that ask for token ids; `said` in turn."""

    def __init__(self, *said: str | None) -> None:
        self.said = [*said]
        self.asked: list[bool] = []

    def __call__(self, body: dict[str, Any]) -> Any:
        self.asked.append("return_token_ids" in body)
        text = self.said.pop(0) if self.asked[-1] and self.said else None
        if text is None:
            return "Hi"
        return Raw(400, json.dumps({"error": {"message": text}}).encode())


@STREAMED
async def test_a_refusal_is_about_that_request(
    with_token_ids: InMemoryTrajectoryExporter,
    clients: Clients,
    gateway_to: Serve,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
):
    """The call is made without the fields, the next ones with them, and the trajectory says it."""
    model = Moody(None, "Out of range float values are not JSON compliant: nan", None, "no", "no")
    gateway = await gateway_to(clients.serve(model, token_ids=False, logprobs=False).base_url)
    with rollout("agent") as trajectory:
        for _ in range(8):
            url = gateway.base_url() + "/chat/completions"
            assert (await send(url, {**CHAT, "stream": stream})).status == 200
    assert model.asked == [True, True, False, True, True, False, True, False, *[True] * 3]
    assert sum(bool(each.token_ids) for each in trajectory.completions) == 5
    (warning,) = trajectory.warnings
    assert warning.startswith("3 replies have no token ids: the server refused the fields")
    assert "refuses" not in caplog.text


async def test_a_server_that_refuses_without_a_name(
    with_token_ids: InMemoryTrajectoryExporter,
    clients: Clients,
    gateway_to: Serve,
    caplog: pytest.LogCaptureFixture,
):
    """It is asked three times, then for a while no more; then it is tried again."""
    model = Moody(*["no"] * 4)
    gateway = await gateway_to(clients.serve(model, token_ids=False, logprobs=False).base_url)
    with rollout("agent"):
        for _ in range(3 + 32 + 1 + 32 + 2):
            assert (await send(gateway.base_url() + "/chat/completions", CHAT)).status == 200
    tried = [True, False]
    assert model.asked == [*tried * 3, *[False] * 32, *tried, *[False] * 32, True, True]
    assert caplog.text.count("the model server refuses") == 1


@STREAMED
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_what_the_client_wrote_wrong(
    with_token_ids: InMemoryTrajectoryExporter,
    clients: Clients,
    gateway_to: Serve,
    stream: bool,
    encoding: str,
):
    """It is sent once, and the client gets the error as it came."""
    text = "Invalid 'temperature': decimal above maximum value."
    model = Moody(text)
    server = clients.serve(model, token_ids=False, logprobs=False, compress=encoding == "gzip")
    gateway = await gateway_to(server.base_url, api_key="sk-of-the-server")
    asked = {**CHAT, "stream": stream, "temperature": 3}
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        answers = [await send(url, asked, accept_encoding=encoding) for _ in range(2)]
    assert [answer.status for answer in answers] == [400, 200]
    body = answers[0].body if encoding == "identity" else gzip.decompress(answers[0].body)
    assert json.loads(body) == {"error": {"message": text}}
    assert model.asked == [True, True]
    first = trajectory.completions[0]
    assert (first.status, first.exchange.attempts, first.exchange.refused) == ("error", 1, None)


async def test_a_body_that_is_signed_stays(
    with_token_ids: InMemoryTrajectoryExporter, clients: Clients, gateway_to: Serve
):
    """Fields are not added where the body's digest is in a header."""
    server = clients.serve(vllm)
    gateway = await gateway_to(server.base_url)
    with rollout("agent"):
        await send(gateway.base_url() + "/chat/completions", CHAT, digest="sha-256=abc")
    assert server.exchanges[0].request == json.dumps(CHAT).encode()
