"""Text completions: batches of prompts, odd chunks, servers that answer in the other way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.testing import Raw, Reply
from tests.kit.calling import BOTH, STREAMED, Caller, Configure, as_bare, ask_bare
from tests.kit.comparing import replayed
from tests.kit.conversations import ASK
from tests.kit.recording import Clients, Recording
from tests.record.clients.openai_ways import CHAT, Json, call, check

pytestmark = pytest.mark.slow

PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "text": ("Once ä", ["Once ä"]),
    "texts": (["Once", "Twice"], ["Once", "Twice"]),
    "token ids": ([79, 110, 99, 101], ["Once"]),
    "lists of token ids": ([[79, 110], [99, 101, 10]], ["On", "ce\n"]),
}


@BOTH
@STREAMED
@pytest.mark.parametrize("echo", [False, True], ids=["plain", "echo"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_text_completions(
    capture_only: Configure,
    clients: Clients,
    caller: Caller,
    stream: bool,
    echo: bool,
    n: int,
    prompt: str,
) -> None:
    """Each choice is a completion of its own prompt; an echoed prompt is not called sampled."""
    given, texts = PROMPTS[prompt]
    request: Json = {"prompt": given, "n": n, "logprobs": 0, "echo": echo, "max_tokens": 9}
    reply = Reply(choices=[Reply(f" upon {i} ä") for i in range(n)])
    script = call("completions.create", **request, **({"stream": True} if stream else {}))
    recording, server, seen = await as_bare(capture_only, clients, caller, lambda: reply, script)
    assert seen[0] == "returned", seen
    trajectory = replayed(recording)
    check(trajectory.exchanges[0], server.exchanges[0], clients, reply)
    completions = trajectory.completions
    # What the same server says without the echo.
    plain = ask_bare(clients.serve(reply), "/completions", {**request, "echo": False})
    assert [c.choice_index for c in completions] == list(range(len(texts) * n))
    for completion, choice in zip(completions, plain["choices"], strict=True):
        own = texts[completion.choice_index // n]
        assert completion.message == {"role": "assistant", "content": choice["text"]}
        assert completion.token_ids == choice["token_ids"]
        assert completion.logprobs == choice["logprobs"]["token_logprobs"]
        assert completion.prompt_token_ids == list(own.encode())
        asked = given if prompt in ("text", "token ids") else given[completion.choice_index // n]
        assert completion.request_messages == [{"role": "user", "content": asked}]
        assert completion.finish_reason == "stop"
        assert completion.trainable
    assert trajectory.warnings == []


@BOTH
async def test_a_batch_of_prompts_that_was_cut(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """A stream of several prompts is not complete when the first of them is."""
    chunks: list[Json] = [
        {"id": "c", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]},
        {"id": "c", "choices": [{"index": 1, "text": "b", "finish_reason": None}]},
    ]
    server = clients.serve(
        Raw(
            200,
            chunks=[b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks],
            content_type="text/event-stream",
        )
    )

    async def script(client: Any) -> None:
        with rollout("agent"):
            await call("completions.create", prompt=["x", "y"], stream=True)(client)

    await caller.run(script(caller.client(clients, server)))
    completions = replayed(recording).completions
    assert [(c.status, c.trainable) for c in completions] == [("error", False)] * 2
    assert [c.message and c.message["content"] for c in completions] == ["a", "b"]


@BOTH
async def test_odd_chunks(capture_only: Configure, clients: Clients, caller: Caller) -> None:
    """What servers repeat on each chunk is not chained, noise of streams alone is left out."""
    deltas: list[Json] = [
        {"role": "assistant", "audio": {"id": "audio_1", "transcript": "He"}},
        {"role": "assistant", "audio": {"id": "audio_1", "transcript": "llo"}},
        {"role": "assistant", "audio": {"id": "audio_1", "data": "UklG"}},
        {"audio": {"id": "audio_1", "data": "Rg==", "expires_at": 7}},
    ]
    chunks: list[Json] = [
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
            "obfuscation": "x" * number,
        }
        for number, delta in enumerate(deltas)
    ]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    events = [b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks]
    reply = Raw(200, chunks=[*events, b"data: [DONE]\n\n"], content_type="text/event-stream")
    script = call(f"{CHAT}.create", messages=ASK, stream=True)
    recording, _, seen = await as_bare(capture_only, clients, caller, lambda: reply, script)
    assert seen[0] == "returned", seen
    (completion,) = replayed(recording).completions
    audio = {"id": "audio_1", "transcript": "Hello", "data": "UklGRg==", "expires_at": 7}
    message = {"role": "assistant", "content": None, "audio": audio}
    assert completion.response == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }


@BOTH
@STREAMED
async def test_a_server_that_answers_in_the_other_way(
    capture_only: Configure, clients: Clients, caller: Caller, stream: bool
) -> None:
    """A stream that was not asked for, or one that was but does not come, is what it is."""
    message = {"role": "assistant", "content": "Paris"}
    plain: Json = {"id": "c", "choices": [{"index": 0, "message": message}]}
    chunk: Json = {
        "id": "c",
        "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}],
    }
    events = [b"data: %b\n\n" % json.dumps(chunk).encode(), b"data: [DONE]\n\n"]
    streamed = Raw(200, chunks=events, content_type="text/event-stream")
    reply = Raw(200, json.dumps(plain).encode()) if stream else streamed
    script = call(f"{CHAT}.create", messages=ASK, **({"stream": True} if stream else {}))
    recording, _, seen = await as_bare(capture_only, clients, caller, lambda: reply, script)
    assert seen[0] == "returned", seen
    (completion,) = replayed(recording).completions
    assert completion.message == message
    assert completion.status == "complete"
    assert completion.stream is not stream
