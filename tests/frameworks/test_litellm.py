"""LiteLLM: `openai/...` goes through the OpenAI client and is recorded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from litellm.integrations.opentelemetry import OpenTelemetry

from otel_rollout import History, rollout
from otel_rollout.testing import Raw, Reply
from tests.conftest import Clients, Recording
from tests.frameworks.wire import ADD, TOOL_LOOP, checked, continues_on_tokens, until
from tests.test_capture import STREAMED, TOOLS, exchange_spans, replayed
from tests.test_hard_cases import table

pytestmark = pytest.mark.framework

QUESTION = {"role": "user", "content": "2 + 3?"}


async def loop(ask: Any, messages: list[Any]) -> str:
    """A tool loop as LiteLLM's users write it; `ask` gives its ModelResponse."""
    while True:
        message = (await ask(messages)).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@STREAMED
@pytest.mark.parametrize("way", ["sync", "async", "router"])
async def test_a_tool_loop(recording: Recording, clients: Clients, way: str, stream: bool) -> None:
    """The agent's calls are one history, however LiteLLM is asked."""
    server = clients.serve(TOOL_LOOP, token_ids=False, logprobs=False)
    options: Any = {
        "api_base": server.base_url,
        "api_key": "none-needed",
        "tools": TOOLS,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
        "stream": stream,
    }
    parameters = {"model": "openai/m", "api_base": server.base_url, "api_key": "none-needed"}
    router = litellm.Router([{"model_name": "policy", "litellm_params": parameters}])

    async def ask(messages: list[Any]) -> Any:
        if way == "sync":
            reply: Any = litellm.completion("openai/m", messages, **options)
            chunks = list(reply) if stream else []
        else:
            if way == "router":
                del options["api_base"], options["api_key"]
                reply = await router.acompletion("policy", messages, **options)
                options.update(parameters)
                options.pop("model")
            else:
                reply = await litellm.acompletion("openai/m", messages, **options)
            chunks = [chunk async for chunk in reply] if stream else []
        return litellm.stream_chunk_builder(chunks, messages=messages) if stream else reply

    async with rollout("agent"):
        assert await loop(ask, [QUESTION]) == "It is 5."
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == ["user 2 + 3?, 0* add(), tool 5, 1* It is 5."]
    assert all(completion.token_ids for completion in trajectory.completions)
    assert all(completion.logprobs for completion in trajectory.completions)
    assert continues_on_tokens(trajectory)


@STREAMED
async def test_reasoning_is_replayed(recording: Recording, clients: Clients, stream: bool) -> None:
    """LiteLLM's message carries the reasoning on: the next call goes on without a break."""
    replies = [Reply(tool_calls=[ADD], reasoning="2 and 3"), Reply("It is 5.", reasoning="5!")]
    server = clients.serve(replies)

    async def ask(messages: list[Any]) -> Any:
        reply = await litellm.acompletion(
            "openai/m",
            messages,
            api_base=server.base_url,
            api_key="none-needed",
            tools=TOOLS,
            stream=stream,
        )
        if stream:
            return litellm.stream_chunk_builder([chunk async for chunk in reply])
        return reply

    async with rollout("agent"):
        await loop(ask, [QUESTION])
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == ["user 2 + 3?, 0* add(), tool 5, 1* It is 5."]
    assert not any(item.is_break for item in trajectory.histories[0].items)


async def test_parallel_conversations(recording: Recording, clients: Clients) -> None:
    """Conversations that run at once are histories of their own."""
    server = clients.serve(lambda body: f"to {body['messages'][-1]['content']}")

    async def talk(name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": name}]
        for _ in range(2):
            reply = await litellm.acompletion(
                "openai/m", messages, api_base=server.base_url, api_key="none-needed"
            )
            messages += [reply.choices[0].message, {"role": "user", "content": f"{name} again"}]

    async with rollout("agent"):
        await asyncio.gather(talk("a"), talk("b"))
    assert sorted(_text(history) for history in checked(recording, server, calls=4).histories) == [
        ["a", "to a", "a again", "to a again"],
        ["b", "to b", "b again", "to b again"],
    ]


def _text(history: History) -> list[Any]:
    return [message["content"] for message in history.messages()]


async def test_a_failed_call(recording: Recording, clients: Clients) -> None:
    """LiteLLM's own exception reaches the agent; the call that failed is in the trajectory."""
    refused = Raw(400, b'{"error": {"message": "no", "type": "bad", "code": null}}')
    server = clients.serve([refused, "yes"])
    options: Any = {"api_base": server.base_url, "api_key": "none-needed"}
    async with rollout("agent"):
        with pytest.raises(litellm.BadRequestError):
            await litellm.acompletion("openai/m", [QUESTION], **options)
        await litellm.acompletion("openai/m", [QUESTION], **options)
    failed, answered = replayed(recording).completions
    assert (failed.status, failed.trainable) == ("error", False)
    assert (answered.status, answered.trainable) == ("complete", True)
    assert len(server.exchanges) == len(exchange_spans(recording)) == 2


async def test_its_own_telemetry(recording: Recording, clients: Clients) -> None:
    """With LiteLLM's OpenTelemetry callback each call is still one completion."""
    server = clients.serve(TOOL_LOOP)
    litellm.callbacks = [OpenTelemetry(tracer_provider=recording.provider)]
    try:
        async with rollout("agent"):
            await loop(
                lambda messages: litellm.acompletion(
                    "openai/m",
                    messages,
                    api_base=server.base_url,
                    api_key="none-needed",
                    tools=TOOLS,
                ),
                [QUESTION],
            )
        await until(lambda: len(recording.spans_named("raw_gen_ai_request")) == 2)
    finally:
        litellm.callbacks = []
    trajectory = checked(recording, server, calls=2)
    assert table(trajectory) == ["user 2 + 3?, 0* add(), tool 5, 1* It is 5."]


@pytest.mark.parametrize("provider", ["hosted_vllm", "together_ai", "deepseek"])
async def test_providers_with_a_handler_of_litellms_own(
    recording: Recording, clients: Clients, provider: str
) -> None:
    """These pass the OpenAI client by and are not recorded: docs/frameworks.md says so."""
    server = clients.serve("hi")
    async with rollout("agent"):
        await litellm.acompletion(
            f"{provider}/m", [QUESTION], api_base=server.base_url, api_key="none-needed"
        )
    assert len(server.exchanges) == 1
    assert recording.trajectory.completions == []
