"""botocore: its ways to read a reply, and the calls of boto3's clients."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

import otel_rollout
from otel_rollout import no_capture, rollout
from otel_rollout.testing import ModelServer, Raw
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording
from tests.record.transports.libraries import BODY, HEADERS

boto3: Any = pytest.importorskip("boto3")
botocore: Any = pytest.importorskip("botocore")
prepared: Any = pytest.importorskip("botocore.awsrequest")
sessions: Any = pytest.importorskip("botocore.httpsession")
streaming: Any = pytest.importorskip("botocore.response")
pytestmark = pytest.mark.framework
TEXT = "Paris, the city of light.\nAnd more."


def _into(body: Any) -> bytes:
    buffer = bytearray(11)
    return b"".join(iter(lambda: bytes(buffer[: body.readinto(buffer)]), b""))


WAYS: dict[str, Callable[[Any], bytes]] = {
    "read": lambda body: body.read(),
    "read 7": lambda body: b"".join(iter(lambda: body.read(7), b"")),
    "iter_chunks": lambda body: b"".join(body.iter_chunks(5)),
    "iter_lines": lambda body: b"\n".join(body.iter_lines(9)),
    "iterated": lambda body: b"".join(body),
    "readlines": lambda body: b"".join(body.readlines()),
    "readinto": _into,
    "as text": lambda body: io.TextIOWrapper(body._raw_stream).read().encode(),
}


def read_by(way: Callable[[Any], bytes], server: ModelServer, *, stream: bool) -> bytes:
    """The bytes of a reply as botocore's clients hand it on."""
    body = json.dumps({**BODY, "stream": stream}).encode()
    url = server.base_url + "/chat/completions"
    request = prepared.AWSRequest("POST", url, HEADERS, body, stream_output=True).prepare()
    response = sessions.URLLib3Session().send(request)
    length = response.headers.get("content-length")
    return way(streaming.StreamingBody(response.raw, length))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_reading(recording: Recording, clients: Clients, way: str, stream: bool):
    """The reader gets the same bytes, and the reply is recorded whole."""
    with no_capture():
        bare = read_by(WAYS[way], clients.serve(TEXT, chunk_size=3), stream=stream)
    with rollout("agent"):
        given = read_by(WAYS[way], clients.serve(TEXT, chunk_size=3), stream=stream)
    assert given == bare
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert (completion.message or {})["content"] == TEXT


def bedrock(server: ModelServer) -> Any:
    return boto3.client(
        "bedrock-runtime",
        region_name="eu-west-1",
        endpoint_url=server.base_url.removesuffix("/v1"),
        aws_access_key_id="AKIAEXAMPLE",
        aws_secret_access_key="not-a-real-key",
    )


def test_a_model_that_no_api_here_reads(recording: Recording, clients: Clients):
    """It is counted once, and its body, which is signed, is sent as it was."""
    reply = {"results": [{"outputText": "Paris"}]}
    path = "/model/amazon.titan-text/invoke"
    server = clients.serve(routes={path: Raw(body=json.dumps(reply).encode())})
    asked = json.dumps({"inputText": "The capital?"})
    with rollout("agent"), otel_rollout.request_token_ids():
        found = bedrock(server).invoke_model(modelId="amazon.titan-text", body=asked)
        assert json.loads(found["body"].read()) == reply
    (exchange,) = server.exchanges
    assert exchange.request.decode() == asked
    assert exchange.request_headers["authorization"].startswith("AWS4-")
    (warning,) = [each for each in recording.trajectory.warnings if "captured" in each]
    assert warning == f"1 request to {path} went through botocore and was not captured"
