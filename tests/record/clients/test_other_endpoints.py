"""Endpoints that do not generate text: speech, files, embeddings, raw posts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.testing import Raw
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.calling import BOTH, Caller, Configure, done, entered, read
from tests.kit.comparing import replayed
from tests.kit.recording import Clients
from tests.record.clients.openai_ways import Script, call, same

pytestmark = pytest.mark.slow

BINARY = bytes(range(256)) * 8
ROUTES = {
    "/v1/moderations": Raw(body=b'{"id": "modr-1", "model": "m", "results": []}'),
    "/v1/audio/transcriptions": Raw(body=b'{"text": "Hello"}'),
    "/v1/audio/speech": Raw(body=BINARY, content_type="audio/mpeg"),
    "/v1/images/generations": Raw(body=b'{"created": 1, "data": [{"b64_json": "aGk="}]}'),
    "/v1/images/edits": Raw(body=b'{"created": 1, "data": [{"b64_json": "aGk="}]}'),
    "/v1/files": Raw(body=b'{"id": "file-1", "object": "file", "filename": "a.jsonl"}'),
    "/v1/files/file-1/content": Raw(body=BINARY, content_type="application/octet-stream"),
    "/v1/vector_stores": Raw(body=b'{"id": "vs_1", "object": "vector_store"}'),
    "/v1/conversations": Raw(body=b'{"id": "conv_1", "object": "conversation", "created_at": 1}'),
    "/v1/responses/input_tokens": Raw(body=b'{"object": "response.input_tokens"}'),
}
SECRET = "a line of the file that was uploaded"


async def _speech(client: Any) -> Any:
    reply = await done(client.audio.speech.create(model="t", voice="alloy", input="Hi"))
    return reply.content


async def _speech_stream(client: Any) -> Any:
    create = client.audio.speech.with_streaming_response.create
    async with entered(create(model="t", voice="alloy", input="Hi")) as reply:
        return b"".join(await read(reply.iter_bytes()))


async def _file_content(client: Any) -> Any:
    return (await done(client.files.content("file-1"))).content


async def _post_without_body(client: Any) -> Any:
    return await done(client.post("/vector_stores", cast_to=object))


FILE = ("a.jsonl", SECRET.encode())
BESIDE: dict[str, tuple[Script, str | None]] = {
    "embeddings": (call("embeddings.create", input=["a", "b"]), "/embeddings"),
    "embeddings as floats": (
        call("embeddings.create", input="a", encoding_format="float"),
        "/embeddings",
    ),
    "embeddings of ids": (call("embeddings.create", input=[[1, 2], [3]]), "/embeddings"),
    "moderation": (call("moderations.create", input="a"), "/moderations"),
    "transcription": (call("audio.transcriptions.create", file=FILE), "/audio/transcriptions"),
    "speech": (_speech, "/audio/speech"),
    "speech, streaming response": (_speech_stream, "/audio/speech"),
    "image": (call("images.generate", prompt="A cat"), "/images/generations"),
    "image edit": (call("images.edit", image=FILE, prompt="A cat"), "/images/edits"),
    "upload": (
        lambda client: done(client.files.create(file=FILE, purpose="batch")),
        "/files",
    ),
    "download": (_file_content, None),
    "vector store": (lambda client: done(client.vector_stores.create(name="a")), "/vector_stores"),
    "no body": (_post_without_body, "/vector_stores"),
}


@BOTH
@pytest.mark.parametrize("case", BESIDE)
async def test_other_endpoints(
    capture_only: Configure, clients: Clients, caller: Caller, case: str
) -> None:
    """Calls that generate no text are exchanges; files that go up or down are not recorded."""
    script, path = BESIDE[case]

    async def run() -> Any:
        server = clients.serve(routes=ROUTES)
        with rollout("agent"):
            return server, await script(caller.client(clients, server))

    _, bare = await caller.run(run())
    recording = capture_only()
    server, seen = await caller.run(run())
    assert seen == bare
    trajectory = replayed(recording)
    assert (trajectory.completions, trajectory.histories) == ([], [])
    assert trajectory.warnings == ([] if path else [NO_CALL.words])
    if path is None:
        assert trajectory.exchanges == []
        return
    (exchange,) = trajectory.exchanges
    (wire,) = server.exchanges
    assert (exchange.path, exchange.status, exchange.status_code) == (path, "complete", 200)
    uploaded = "multipart" in wire.request_headers.get("content-type", "")
    if wire.request and not uploaded:
        assert same(exchange.request(), json.loads(wire.request))
    if wire.response != BINARY:
        assert same(exchange.response(), json.loads(wire.response))
    else:
        assert exchange.response() is None
    texts = repr([dict(span.attributes or {}) for span in recording.spans])
    assert SECRET not in texts
    assert "\\xfe" not in texts
