"""Libraries below those that are captured: a model call that goes through them is counted, once."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import requests
import urllib3
from opentelemetry import context

from otel_rollout import no_capture, rollout
from otel_rollout.testing import ModelServer, Raw
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import BODY

DATA = json.dumps(BODY).encode()
HEADERS = {"Content-Type": "application/json"}


def by_http_client(url: str) -> bytes:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host)
    connection.request("POST", f"/{path}", DATA, HEADERS)
    found = connection.getresponse().read()
    connection.close()
    return found


def by_urllib(url: str) -> bytes:
    request = urllib.request.Request(url, DATA, HEADERS)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        found: bytes = response.read()
    return found


def by_urllib3(url: str) -> bytes:
    with urllib3.PoolManager() as pool:
        return pool.request("POST", url, body=DATA, headers=HEADERS).data


def by_urllib3_pool(url: str) -> bytes:
    with urllib3.connection_from_url(url) as pool:
        path = "/" + url.split("/", 3)[3]
        return pool.urlopen("POST", path, body=DATA, headers=HEADERS, retries=False).data


WATCHED: dict[str, tuple[Callable[[str], bytes], str]] = {
    "http.client": (by_http_client, "http.client"),
    "urllib": (by_urllib, "urllib"),
    "urllib3": (by_urllib3, "urllib3"),
    "urllib3 pool": (by_urllib3_pool, "urllib3"),
}
EVERY = pytest.mark.parametrize("library", WATCHED)


def address(server: ModelServer, path: str = "/chat/completions") -> str:
    return server.base_url + path


def uncaptured(recording: Recording) -> list[str]:
    return [each for each in recording.trajectory.warnings if "captured" in each]


@EVERY
def test_a_call_is_counted(recording: Recording, clients: Clients, library: str):
    """It is named by the library that the user called, and the reply is what it was."""
    server = clients.serve("hello", routes={"/v1/log": Raw(body=b"{}")})
    post, name = WATCHED[library]
    with rollout("agent"):
        for _ in range(2):
            assert b"hello" in post(address(server))
        post(address(server, "/log?to=/chat/completions"))
        with no_capture():
            post(address(server))
    assert recording.trajectory.exchanges == []
    assert uncaptured(recording) == [
        f"2 requests to /v1/chat/completions went through {name} and were not captured"
    ]


def by_requests(url: str) -> bytes:
    return requests.post(url, data=DATA, headers=HEADERS).content


def by_httpx2(url: str) -> bytes:
    return httpx2.post(url, content=DATA, headers=HEADERS).content


@pytest.mark.parametrize("post", [*(post for post, _ in WATCHED.values()), by_requests, by_httpx2])
def test_outside_of_a_rollout(recording: Recording, clients: Clients, post: Any):
    """A thread that is in no rollout calls while one runs: that is counted, once."""
    server = clients.serve("hello")
    post(address(server))
    worker = threading.Thread(target=post, args=(address(server),), name="worker")
    with rollout("agent"):
        pass
    with rollout("other"):
        _without_context(worker)
    first, second = recording.trajectories
    assert first.warnings == [NO_CALL.words]
    warning, no_call = second.warnings
    assert no_call == NO_CALL.words
    assert warning.startswith("1 model call was made outside any rollout while it ran, in thread")


def _without_context(worker: threading.Thread) -> None:
    """Run a thread that was started by one that is in no rollout."""
    token = context.attach(context.Context())
    try:
        worker.start()
        worker.join()
    finally:
        context.detach(token)


def test_retries_are_one_request(recording: Recording):
    """urllib3 tries three times to connect, and that is one request of the user's."""
    url, retries = "http://127.0.0.1:9/v1/chat/completions", urllib3.Retry(2, backoff_factor=0)
    with (
        rollout("agent"),
        urllib3.PoolManager() as pool,
        pytest.raises(urllib3.exceptions.MaxRetryError),
    ):
        pool.request("POST", url, body=DATA, retries=retries)
    assert uncaptured(recording) == [
        "1 request to /v1/chat/completions went through urllib3 and was not captured"
    ]


def test_what_is_captured_above_is_not_counted_below(recording: Recording, clients: Clients):
    """Requests is on urllib3, which is on http.client; and clients may be on any of them."""
    server = clients.serve("hello")

    def through_requests(request: Any) -> Any:
        reply = requests.post(str(request.url), data=request.read(), headers=request.headers)
        return httpx2.Response(reply.status_code, headers=reply.headers, content=reply.content)

    with httpx2.Client(transport=httpx2.MockTransport(through_requests)) as inner:
        client = clients.sync(server, http_client=inner)
        with rollout("agent"):
            requests.post(address(server), json=BODY)
            inner.post(address(server), json=BODY)
            client.chat.completions.create(**BODY)
    trajectory = recording.trajectory
    assert len(trajectory.completions) == len(server.exchanges) == 3
    assert trajectory.warnings == []


@pytest.mark.parametrize("arguments", [(), ("POST",)])
def test_arguments_that_are_wrong(recording: Recording, arguments: Any):
    """The exception is that of the library."""
    with rollout("agent"), urllib3.PoolManager() as pool:
        for call in (pool.urlopen, http.client.HTTPConnection("h").putrequest):
            with pytest.raises(TypeError, match="missing"):
                call(*arguments)
    assert recording.trajectory.warnings == [NO_CALL.words]
