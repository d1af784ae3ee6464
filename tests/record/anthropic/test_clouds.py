"""Claude on Vertex and on Bedrock."""

from __future__ import annotations

import base64
import inspect
import json
import struct
import zlib
from typing import Any

import anthropic
import pytest

from otel_rollout import rollout
from otel_rollout.testing import ModelServer, Raw
from otel_rollout.wire import as_events
from tests.kit.calling import entered, read
from tests.kit.comparing import replayed, sent
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import (
    ASK,
    BOTH,
    KEY,
    PARIS,
    Claude,
    Json,
    _open,
    ask,
    events,
    said,
)

pytestmark = pytest.mark.slow

VERTEX = "/projects/p/locations/r/publishers/anthropic/models/m:"
ANSWER = {
    "id": "msg_vrtx_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [PARIS],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


@BOTH
async def test_vertex(recording: Recording, clients: Clients, caller: Claude) -> None:
    """Claude on Vertex is asked at another URL; the completion is the same."""
    route = {VERTEX + "rawPredict": Raw(body=json.dumps(ANSWER).encode())}
    server = clients.serve(routes=route)
    make = anthropic.AnthropicVertex if caller.sync else anthropic.AsyncAnthropicVertex
    url = server.base_url.removesuffix("/v1")
    client = make(region="r", project_id="p", access_token=KEY, base_url=url)
    _open.append(client)

    async def script() -> None:
        with rollout("agent"):
            await ask(client)

    await caller.run(script())
    (completion,) = replayed(recording).completions
    assert completion.response == ANSWER
    assert completion.message == said([PARIS])
    assert completion.trainable
    assert completion.request == sent(server.exchanges[0])


def frame(payload: Json) -> bytes:
    """An event as AWS frames it: lengths, their checksum, headers, payload, the checksum of all."""
    headers = b""
    for name, value in ((b":event-type", b"chunk"), (b":message-type", b"event")):
        headers += bytes([len(name)]) + name + b"\x07" + struct.pack(">H", len(value)) + value
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", len(headers) + len(body) + 16, len(headers))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + body
    return message + struct.pack(">I", zlib.crc32(message))


def framed(text: str) -> list[bytes]:
    """Server-sent events in AWS's frames."""
    datas = [event.split("data: ")[1] for event in text.split("\n\n") if event]
    return [frame({"bytes": base64.b64encode(d.encode()).decode(), "p": "ab"}) for d in datas]


BEDROCK = pytest.mark.skipif(
    "api_key" not in inspect.signature(anthropic.AnthropicBedrock.__init__).parameters,
    reason="this version of anthropic needs boto3 for Bedrock",
)
PIECES = events(
    {"type": "message_start", "message": {**ANSWER, "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {**PARIS, "text": ""}},
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Paris"},
    },
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": 1},
    },
    {"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 1}},
)


def bedrock(caller: Claude, server: ModelServer) -> Any:
    make: Any = anthropic.AnthropicBedrock if caller.sync else anthropic.AsyncAnthropicBedrock
    url = server.base_url.removesuffix("/v1")
    _open.append(make(aws_region="r", api_key=KEY, base_url=url, max_retries=0))
    return _open[-1]


@BEDROCK
@BOTH
@pytest.mark.parametrize(
    ("frames", "status", "text"),
    [
        (framed(PIECES), "complete", "Paris"),
        ([*framed(PIECES)[:3], framed(PIECES)[3][:-9]], "error", "Paris"),
        ([*framed(PIECES)[:2], frame({"message": "Too many requests"})], "error", ""),
    ],
    ids=["whole", "cut", "exception"],
)
async def test_a_stream_of_bedrock(
    recording: Recording,
    clients: Clients,
    caller: Claude,
    frames: list[bytes],
    status: str,
    text: str,
) -> None:
    """Bedrock frames its events in a way of its own; they are merged all the same."""
    kind = "application/vnd.amazon.eventstream"
    route = {"/model/m/invoke-with-response-stream": Raw(chunks=frames, content_type=kind)}
    server = clients.serve(routes=route)

    async def script(client: Any) -> None:
        request: Json = {"model": "m", "max_tokens": 9, "messages": ASK, "stream": True}
        with rollout("agent"):
            async with entered(client.messages.with_streaming_response.create(**request)) as raw:
                assert b"".join(await read(raw.iter_bytes())) == b"".join(frames)

    await caller.run(script(bedrock(caller, server)))
    (completion,) = replayed(recording).completions
    assert completion.status == status
    assert completion.message == said([{**PARIS, "text": text}])
    if status == "complete":
        assert completion.response == ANSWER
    elif frames[-1].endswith(frame({"message": "Too many requests"})):
        assert completion.error == {"type": "ErrorResponse", "message": "Too many requests"}


@BEDROCK
@BOTH
async def test_bedrock(recording: Recording, clients: Clients, caller: Claude) -> None:
    """Claude on Bedrock is asked at another URL; the completion is the same."""
    answer = Raw(body=json.dumps(ANSWER).encode())
    server = clients.serve(routes={"/model/m/invoke": answer})

    async def script(client: Any) -> None:
        with rollout("agent"):
            await ask(client)

    await caller.run(script(bedrock(caller, server)))
    (completion,) = replayed(recording).completions
    assert completion.response == ANSWER
    assert completion.request == sent(server.exchanges[0])
    assert completion.trainable


@pytest.mark.parametrize("frames", [b"\0" * 16, b"data: {}\n\n" * 4, frame({})[:12] + b"x" * 90])
def test_what_is_no_frame_is_refused(frames: bytes) -> None:
    """Bytes that AWS did not frame are a ValueError, not something guessed."""
    with pytest.raises(ValueError, match=r"not a frame|Expecting value"):
        as_events(frames, "frames")
