"""requests: every way to read a reply gives what it gives without us, and is recorded."""

from __future__ import annotations

import gc
import io
import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter

import otel_rollout
from otel_rollout import no_capture, rollout
from otel_rollout.testing import ModelServer, Reply
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import BODY

TEXT = "Paris, the city of light.\nAnd more."
Read = Callable[[requests.Response], bytes]


def _pieces(read: Callable[[], bytes]) -> bytes:
    return b"".join(iter(read, b""))


def _into(response: requests.Response) -> bytes:
    raw: Any = response.raw
    buffer = bytearray(11)
    return _pieces(lambda: bytes(buffer[: raw.readinto(buffer)]))


def _begun(response: requests.Response) -> bytes:
    """Some bytes, then the rest."""
    raw: Any = response.raw
    begun: bytes = raw.read(10, decode_content=True)
    rest: bytes = raw.read(decode_content=True)
    return begun + rest


DECODED: dict[str, Read] = {
    "content": lambda r: r.content,
    "text": lambda r: r.text.encode(),
    "iterated": lambda r: b"".join(r),
    "iter_content 1": lambda r: b"".join(r.iter_content()),
    "iter_content 7": lambda r: b"".join(r.iter_content(7)),
    "iter_content None": lambda r: b"".join(r.iter_content(None)),
    "iter_lines": lambda r: b"\n".join(r.iter_lines()),
    "iter_lines 1": lambda r: b"\n".join(r.iter_lines(1)),
    "raw.stream": lambda r: b"".join(r.raw.stream(decode_content=True)),
    "raw.read 10 and raw.read": _begun,
}
RAW: dict[str, Read] = {
    "raw.read": lambda r: r.raw.read(),
    "raw.read 5": lambda r: _pieces(lambda: r.raw.read(5)),
    "raw.read1": lambda r: _pieces(lambda: r.raw.read1(9)),
    "raw.readinto": _into,
    "raw.readline": lambda r: _pieces(r.raw.readline),
    "raw.readlines": lambda r: b"".join(r.raw.readlines()),
    "raw.data": lambda r: r.raw.data,
    "raw.data twice": lambda r: r.raw.data and r.raw.data,
    "raw iterated": lambda r: b"".join(r.raw),
    "raw.read_chunked": lambda r: (
        b"".join(r.raw.read_chunked(6)) if r.raw.chunked else r.raw.read()
    ),
}
"""These leave the `Content-Encoding` on."""
if not hasattr(urllib3.HTTPResponse, "read1"):  # before urllib3 2.4
    del RAW["raw.read1"]


def ask(server: ModelServer, *, stream: bool) -> requests.Response:
    """A reply, of which nothing has been read; `stream`: what the model is asked for."""
    body = {**BODY, "stream": stream}
    return requests.post(server.base_url + "/chat/completions", json=body, stream=True)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("compress", [False, True], ids=["identity", "gzip"])
@pytest.mark.parametrize("way", [*DECODED, *RAW])
def test_ways_of_reading(
    recording: Recording, clients: Clients, way: str, stream: bool, compress: bool
):
    """The reader gets the same bytes, and the reply is recorded whole."""
    read = {**DECODED, **RAW}[way]
    options: Any = {"compress": compress, "chunk_size": 3}
    with no_capture():
        bare = read(ask(clients.serve(TEXT, **options), stream=stream))
    with rollout("agent"):
        response = ask(clients.serve(TEXT, **options), stream=stream)
        assert isinstance(response.raw, urllib3.HTTPResponse)
        assert type(response) is requests.Response
        assert read(response) == bare
        assert response.raw.closed
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert (completion.message or {})["content"] == TEXT


def test_sizes_are_kept(recording: Recording, clients: Clients):
    """No chunk is longer than was asked for."""
    with rollout("agent"):
        for size in (1, 5, 64):
            server = clients.serve(TEXT)
            assert max(map(len, ask(server, stream=True).iter_content(size))) <= size
            raw = ask(server, stream=True).raw
            sizes = list(map(len, iter(partial(raw.read, size), b"")))
            assert set(sizes[:-1]) == {size}
            assert sizes[-1] <= size


def test_a_response_can_be_pickled(recording: Recording, clients: Clients):
    """As without us, streamed or not; the copy has the content."""
    with rollout("agent"):
        for stream in (False, True):
            url = clients.serve("hello").base_url + "/chat/completions"
            response = requests.post(url, json=BODY, stream=stream)
            copy = pickle.loads(pickle.dumps(response))
            assert type(copy) is requests.Response
            assert copy.json()["choices"][0]["message"]["content"] == "hello"
    assert [c.status for c in replayed(recording).completions] == ["complete", "complete"]


@pytest.mark.parametrize("how", ["closed", "dropped", "kept"])
def test_a_stream_that_is_left(recording: Recording, clients: Clients, how: str):
    """What its reader took is kept: the first event, though more of them came at once."""
    server = clients.serve(TEXT, chunk_size=1)
    kept = []
    with rollout("agent"):
        response = ask(server, stream=True)
        for chunk in response.iter_content(None):
            if b'"content":"P"' in chunk.replace(b" ", b""):
                break
        if how == "closed":
            response.close()
        elif how == "kept":
            kept.append(response)
        del response
        gc.collect()
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == ("abandoned", False)
    assert (completion.message or {})["content"] == "P"


def test_a_stream_that_is_closed_has_ended(recording: Recording, clients: Clients):
    """Its end is known at once, also where somebody keeps the response."""
    with rollout("agent") as trajectory:
        response = ask(clients.serve(TEXT), stream=True)
        next(response.iter_lines())
        response.close()
        assert [c.status for c in trajectory.completions] == ["abandoned"]
        assert response.raw.closed


def test_bodies(recording: Recording, clients: Clients):
    """Whatever holds the JSON: text, bytes. What is made while it is sent is counted."""
    url = clients.serve("hello").base_url + "/chat/completions"
    text = json.dumps(BODY, ensure_ascii=False)
    headers = {"Content-Type": "application/json"}

    with rollout("agent"):
        for body in (text, text.encode(), bytearray(text.encode())):
            requests.post(url, data=body, headers=headers).raise_for_status()
        requests.post(url, data=io.BytesIO(text.encode()), headers=headers).raise_for_status()
    trajectory = replayed(recording)
    assert [c.request for c in trajectory.completions] == [BODY] * 3
    assert "1 request to /v1/chat/completions went through requests" in trajectory.warnings[-1]


def test_the_users_request_is_not_changed(recording: Recording, clients: Clients):
    """The fields that are added are in the one that is sent."""
    server = clients.serve("hello", token_ids=False)
    with requests.Session() as session, rollout("agent"), otel_rollout.request_token_ids():
        url = server.base_url + "/chat/completions"
        prepared = session.prepare_request(requests.Request("POST", url, json=BODY))
        length = prepared.headers["Content-Length"]
        for _ in range(2):
            assert session.send(prepared).ok
    assert isinstance(prepared.body, bytes)
    assert json.loads(prepared.body) == BODY
    assert prepared.headers["Content-Length"] == length
    assert all(c.token_ids for c in replayed(recording).completions)


class Own(requests.Session):
    """A user's session."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        request.headers["x-mine"] = "1"
        return super().send(request, **options)


class Made(BaseAdapter):
    """An adapter without a network, as tests mount them."""

    def send(self, request: Any, *args: Any, **options: Any) -> requests.Response:
        body = json.dumps({"id": "r", "choices": [{"index": 0, "message": {"content": "hi"}}]})
        response = HTTPAdapter().build_response(
            request, urllib3.HTTPResponse(io.BytesIO(body.encode()), preload_content=False)
        )
        response.status_code = 200
        return response

    def close(self) -> None: ...


@pytest.mark.parametrize("stream", [False, True])
def test_sessions_of_the_user(recording: Recording, clients: Clients, stream: bool):
    """A subclass, and an adapter that reaches no network."""
    server = clients.serve("hello")
    with Own() as session, rollout("agent"):
        url = server.base_url + "/chat/completions"
        assert session.post(url, json=BODY, stream=stream).json()["choices"]
        session.mount("made://", Made())
        response = session.post(
            "made://x/v1/chat/completions", data=json.dumps(BODY), stream=stream
        )
        assert response.json()["id"] == "r"
    assert server.exchanges[0].request_headers["x-mine"] == "1"
    assert [c.status for c in replayed(recording).completions] == ["complete", "complete"]


def test_arguments_that_are_wrong(recording: Recording):
    """The exception is that of requests."""
    with rollout("agent"), requests.Session() as session:
        with pytest.raises(AttributeError):
            session.send(object())  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            session.send()  # type: ignore[call-arg]
        for url in ("http://[::1/v1/chat/completions", "/v1/chat/completions"):
            with pytest.raises(requests.exceptions.RequestException):
                requests.post(url, json=BODY)
    assert recording.trajectory.exchanges == []


def test_a_timeout_while_reading(recording: Recording, clients: Clients):
    """What had come is kept with the error that the reader got."""
    server = clients.serve(Reply(TEXT, chunk_delay=0.6), chunk_size=1)
    with rollout("agent"):
        url = server.base_url + "/chat/completions"
        response = requests.post(url, json={**BODY, "stream": True}, stream=True, timeout=0.3)
        with pytest.raises(requests.exceptions.ConnectionError):
            assert response.content
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    assert (completion.error or {})["type"] == "ReadTimeoutError"
