"""DSPy: its LiteLLM engine is captured; its own client, lm15, on sockets of its own, is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import otel_rollout
from otel_rollout import rollout
from otel_rollout.testing import ModelServer, Raw
from tests.frameworks.wire import checked
from tests.kit.calling import done
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

dspy: Any = pytest.importorskip("dspy")
pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def no_cache() -> None:
    """DSPy remembers replies, also on disk."""
    dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


def model(server: ModelServer, **options: Any) -> Any:
    """A language model of DSPy's that asks the server."""
    return dspy.LM(
        "openai/m",
        api_base=server.base_url,
        api_key="sk-not-a-real-key",
        cache=False,
        num_retries=0,
        **{"engine": "litellm", **options},
    )


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_call(recording: Recording, clients: Clients, kind: str, is_async: bool):
    """The call is recorded, as it was sent."""
    server = clients.serve("Paris")
    lm = model(server, model_type=kind)
    async with rollout("agent"):
        reply = await lm.acall("The capital of France?") if is_async else lm("The capital?")
    assert reply == ["Paris"] or reply[0]["text"] == "Paris"
    assert len(checked(recording, server, calls=1).completions) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_program(recording: Recording, clients: Clients, is_async: bool):
    """A predictor that is asked twice; it asks for token ids where it is told to."""
    server = clients.serve("[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]", token_ids=False)
    async with rollout("agent"):
        with dspy.context(lm=model(server)), otel_rollout.request_token_ids():
            predict = dspy.Predict("question -> answer")
            for _ in range(2):
                asked = predict.acall if is_async else predict
                assert (await done(asked(question="France?"))).answer == "Paris"
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    assert [c.status for c in trajectory.completions] == ["complete", "complete"]
    assert all(completion.token_ids for completion in trajectory.completions)


async def test_a_stream(recording: Recording, clients: Clients):
    """A program that is streamed is recorded to its end."""
    server = clients.serve("[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]")
    async with rollout("agent"):
        with dspy.context(lm=model(server)):
            program = dspy.streamify(
                dspy.Predict("question -> answer"),
                stream_listeners=[dspy.streaming.StreamListener("answer")],
            )
            chunks = [chunk async for chunk in program(question="France?")]
    assert chunks[-1].answer == "Paris"
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert completion.stream


async def test_an_error(recording: Recording, clients: Clients):
    """DSPy's exception reaches the agent, and the call failed."""
    server = clients.serve(Raw(400, b'{"error": {"message": "no", "type": "bad", "code": null}}'))
    async with rollout("agent"):
        with pytest.raises(Exception, match="no"):
            await asyncio.to_thread(model(server), "The capital?")
    (completion,) = replayed(recording).completions
    assert completion.status == "error"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_its_own_client(recording: Recording, clients: Clients, is_async: bool):
    """Each call reaches the agent, and is counted and named."""
    lm = model(clients.serve("Paris"), engine="lm15")
    async with rollout("agent"):
        for _ in range(2):
            assert await lm.acall("The capital?") if is_async else lm("The capital?")
    trajectory = replayed(recording)
    assert trajectory.exchanges == []
    assert trajectory.warnings == [
        "2 requests to /v1/chat/completions went through dspy (lm15) and were not captured"
    ]
