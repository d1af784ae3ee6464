"""A stream that is left early: its record is what was read of it, however the network cut it."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.testing import Raw
from tests.kit.calling import BOTH, Caller, done, read
from tests.kit.conversations import ASK
from tests.kit.ending import collect_garbage, said
from tests.kit.recording import Clients, Recording

TEXTS = ["Par", "is", ", of", " course"]


def events(separator: str = "\n\n") -> bytes:
    choices: list[Any] = [{"index": 0, "delta": {"content": text}} for text in TEXTS]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": [c]} for c in choices]
    data = [f"data: {json.dumps(chunk)}" for chunk in chunks] + ["data: [DONE]"]
    return "".join(line + separator for line in data).encode()


@BOTH
@pytest.mark.parametrize("count", [1, 3, 5], ids=["first", "third", "last"])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
async def test_what_was_read_is_recorded(
    recording: Recording, clients: Clients, caller: Caller, count: int, compressed: bool
) -> None:
    """All in one read, event by event, or byte by byte: one status and one content."""
    body = gzip.compress(events()) if compressed else events()
    sizes = [len(body), 400, 90, 7]
    headers = {"content-encoding": "gzip"} if compressed else {}

    async def script(client: Any) -> None:
        with rollout("agent"):
            stream = await done(
                client.chat.completions.create(model="m", messages=ASK, stream=True)
            )
            chunks = await read(stream, count)
            assert len(chunks) == count
            await done(stream.close())

    for size in sizes:
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        reply = Raw(chunks=pieces, content_type="text/event-stream", headers=headers)
        await caller.run(script(caller.client(clients, clients.serve(reply))))
    await collect_garbage()
    completions = [trajectory.completions[0] for trajectory in recording.trajectories]
    whole = count == 5
    assert [c.status for c in completions] == ["complete" if whole else "abandoned"] * len(sizes)
    assert [said(c) for c in completions] == ["".join(TEXTS[:count])] * len(sizes)
    assert [c.response for c in completions] == [completions[0].response] * len(sizes)


@pytest.mark.parametrize("size", [1, 7, 90, 10_000])
@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
def test_lines_that_were_read(
    recording: Recording, clients: Clients, size: int, separator: str
) -> None:
    """Also for who reads lines: the event of the last line that was read is the last."""
    body = events(separator)
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    server = clients.serve(Raw(chunks=pieces, content_type="text/event-stream"))
    with rollout("agent"):
        create = clients.sync(server).chat.completions.with_streaming_response.create
        with create(model="m", messages=ASK, stream=True) as response:
            for line in response.iter_lines():
                if "is" in line:
                    break
    (completion,) = recording.trajectory.completions
    assert (completion.status, said(completion)) == ("abandoned", "Paris")
