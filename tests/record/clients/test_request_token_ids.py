"""`request_token_ids`: requests of rollouts ask for what training needs, and for nothing else."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import otel_rollout
from otel_rollout import (
    InMemoryTrajectoryExporter,
    Trajectory,
    no_capture,
    request_token_ids,
    rollout,
)
from otel_rollout.testing import ModelServer, Raw
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

HI: Any = [{"role": "user", "content": "hi"}]


def bodies(server: ModelServer) -> list[dict[str, Any]]:
    """What the server was sent, without what every call says."""
    sent = [json.loads(exchange.request) for exchange in server.exchanges]
    return [{k: v for k, v in b.items() if k not in ("model", "messages", "prompt")} for b in sent]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_asks_for_ids(recording: Recording, clients: Clients, stream: bool):
    """The fields are on the wire, the ids on the completion, and the row is exact."""
    server = clients.serve("hello", token_ids=False, logprobs=False)
    options: dict[str, Any] = {"stream": True} if stream else {}
    with request_token_ids(), rollout("x"):
        reply = clients.sync(server).chat.completions.create(model="m", messages=HI, **options)
        if stream:
            chunks = list(reply)
            assert any(chunk.choices[0].logprobs for chunk in chunks if chunk.choices)
        else:
            assert reply.choices[0].token_ids  # the agent sees what the server sends
    counted = {"stream_options": {"include_usage": True}} if stream else {}
    assert bodies(server) == [{**options, **counted, "return_token_ids": True, "logprobs": True}]
    (completion,) = recording.trajectory.completions
    assert completion.token_ids
    assert completion.prompt_token_ids
    assert completion.logprobs
    (row,) = recording.trajectory.token_sequences()
    assert sum(row.loss_mask) == len(completion.token_ids)
    assert row.token_ids == completion.prompt_token_ids + completion.token_ids


async def test_async_clients_and_legacy_completions(recording: Recording, clients: Clients):
    """Legacy completions take a number of log-probabilities: none but the sampled one."""
    server = clients.serve("hello", token_ids=False, logprobs=False)
    client = clients.asynchronous(server)
    with request_token_ids():
        async with rollout("x"):
            await client.completions.create(model="m", prompt="hi")
    assert bodies(server) == [{"return_token_ids": True, "logprobs": 0}]
    assert len(recording.trajectory.token_sequences()) == 1


def test_what_the_call_says_stays(recording: Recording, clients: Clients):
    """A field that the agent sets, in whichever way, is sent as it set it."""
    server = clients.serve("hello", token_ids=False, logprobs=False)
    client = clients.sync(server)
    with request_token_ids(return_meta_info=True), rollout("x"):
        client.chat.completions.create(model="m", messages=HI, logprobs=False)
        client.chat.completions.create(
            model="m", messages=HI, extra_body={"return_token_ids": False, "top_k": 1}
        )
    first, second = bodies(server)
    assert first == {"logprobs": False, "return_token_ids": True, "return_meta_info": True}
    assert second == {
        "logprobs": True,
        "return_token_ids": False,
        "return_meta_info": True,
        "top_k": 1,
    }
    assert [c.logprobs is None for c in recording.trajectory.completions] == [True, False]


def test_only_calls_of_rollouts_that_generate(recording: Recording, clients: Clients):
    """Outside a rollout, under `no_capture()`, and for other endpoints nothing is added."""
    server = clients.serve("hello", token_ids=False, logprobs=False)
    client = clients.sync(server)
    with request_token_ids():
        client.chat.completions.create(model="m", messages=HI)
        with rollout("x"):
            with no_capture():
                client.chat.completions.create(model="m", messages=HI)
            client.embeddings.create(model="m", input="hi", encoding_format="float")
            client.responses.create(model="m", input="hi")
    with rollout("y"):
        client.chat.completions.create(model="m", messages=HI)
    for body in bodies(server):
        assert body.keys() <= {"input", "encoding_format"}


def test_everywhere_by_configuration(clients: Clients):
    """`configure(request_token_ids=True)` is for the process, a context may say otherwise."""
    server = clients.serve("hello", token_ids=False, logprobs=False)
    client = clients.sync(server)
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], request_token_ids=True)
    with rollout("x"):
        client.chat.completions.create(model="m", messages=HI)
        with request_token_ids(enabled=False):
            client.chat.completions.create(model="m", messages=HI)
    otel_rollout.shutdown()
    otel_rollout.configure(exporters=[exporter])
    with rollout("y"):
        client.chat.completions.create(model="m", messages=HI)
    assert bodies(server) == [{"return_token_ids": True, "logprobs": True}, {}, {}]
    asked, not_asked = exporter.get_finished_trajectories()[0].completions
    assert asked.logprobs
    assert not_asked.logprobs is None


def as_llama_cpp(body: Any) -> Any:
    """Log-probabilities do not go with a stream that has tools."""
    if body.get("stream") and body.get("tools") and "logprobs" in body:
        return Raw(400, b'{"error": {"message": "logprobs is not supported with tools + stream"}}')
    return "hello"


TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_server_that_refuses_the_fields(
    recording: Recording, clients: Clients, is_async: bool
):
    """The call is made without them, and so are those like it; others ask as before."""
    server = clients.serve(as_llama_cpp, token_ids=False, logprobs=False)
    client: Any = clients.asynchronous(server) if is_async else clients.sync(server)

    async def read(**options: Any) -> str:
        made = client.chat.completions.create(model="m", messages=HI, **options)
        reply = await made if is_async else made
        if not options.get("stream"):
            return str(reply.choices[0].message.content)
        chunks = [chunk async for chunk in reply] if is_async else list(reply)
        assert all(chunk.choices for chunk in chunks)  # no count that was not asked for
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with request_token_ids(), rollout("agent"):
        for _ in range(2):
            assert await read(stream=True, tools=TOOLS) == "hello"
        assert await read(tools=TOOLS) == "hello"
        assert await read(stream=True) == "hello"
    assert ["logprobs" in body for body in bodies(server)] == [True, False, False, True, True]
    trajectory = recording.trajectory
    refused = "logprobs,return_token_ids,stream_options"
    assert [each.refused for each in trajectory.exchanges] == [refused, refused, None, None]
    assert [each.attempts for each in trajectory.exchanges] == [2, 1, 1, 1]
    assert len(trajectory.token_sequences()) == 2
    assert next(str(each) for each in trajectory.token_sequences().dropped).endswith(
        f"(it refuses the fields that ask for them at '/chat/completions': {refused})"
    )
    assert replayed(recording).to_dict() == trajectory.to_dict()
    first = trajectory.exchanges[0]
    assert first.request() == json.loads(server.exchanges[1].request)
    assert Trajectory.from_dict(trajectory.to_dict()).exchanges[0].refused == refused


def test_a_request_that_is_refused_as_it_is(recording: Recording, clients: Clients):
    """The agent gets its error, and the server is asked again for what training needs."""
    long = Raw(400, b'{"error": {"message": "too long"}}')
    server = clients.serve([long, long, "hello"], token_ids=False, logprobs=False)
    client = clients.sync(server)
    with request_token_ids(), rollout("agent"):
        with pytest.raises(openai.BadRequestError, match="too long"):
            client.chat.completions.create(model="m", messages=HI)
        client.chat.completions.create(model="m", messages=HI)
    assert ["logprobs" in body for body in bodies(server)] == [True, False, True]
    failed, answered = recording.trajectory.exchanges
    assert (failed.status, failed.attempts, answered.refused) == ("error", 2, None)


def test_retries_ask_too(recording: Recording, clients: Clients):
    """Each attempt of the client has the same body."""
    server = clients.serve([Raw(500, b"{}"), "hello"], token_ids=False)
    with request_token_ids(), rollout("x"):
        clients.sync(server, max_retries=1).chat.completions.create(model="m", messages=HI)
    first, second = (exchange.request for exchange in server.exchanges)
    assert first == second
    assert recording.trajectory.completions[0].token_ids
