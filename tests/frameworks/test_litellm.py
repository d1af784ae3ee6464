"""LiteLLM: through the OpenAI client, and through an HTTP client of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import litellm
import pytest
from litellm.integrations.opentelemetry import OpenTelemetry
from litellm.llms.custom_httpx.http_handler import (
    AsyncHTTPHandler,
    HTTPHandler,
    get_async_httpx_client,
)

import otel_rollout
from otel_rollout import History, rollout
from otel_rollout.record import capture
from otel_rollout.testing import ModelServer, Raw, Reply
from tests.frameworks.wire import ADD, TOOL_LOOP, checked, continues_on_tokens, until
from tests.kit.calling import STREAMED, done
from tests.kit.comparing import attribute, exchange_spans, replayed
from tests.kit.conversations import TOOLS, table
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.framework
httpx: Any = importlib.import_module("httpx")  # which LiteLLM brings
QUESTION = {"role": "user", "content": "2 + 3?"}
KEY = "sk-not-a-real-key"
MODELS = pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m"], ids=["openai", "vllm"])
"""One model that LiteLLM asks through the OpenAI client, one that it does not."""


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    """LiteLLM keeps a test's callbacks in more lists than one."""
    yield
    litellm.logging_callback_manager._reset_all_callbacks()


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
@MODELS
@pytest.mark.parametrize("way", ["sync", "async", "router"])
async def test_a_tool_loop(
    recording: Recording, clients: Clients, way: str, model: str, stream: bool
) -> None:
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
    parameters = {"model": model, "api_base": server.base_url, "api_key": "none-needed"}
    router = litellm.Router([{"model_name": "policy", "litellm_params": parameters}])

    async def ask(messages: list[Any]) -> Any:
        if way == "sync":
            reply: Any = litellm.completion(model, messages, **options)
            chunks = list(reply) if stream else []
        else:
            if way == "router":
                del options["api_base"], options["api_key"]
                reply = await router.acompletion("policy", messages, **options)
                options.update(parameters)
                options.pop("model")
            else:
                reply = await litellm.acompletion(model, messages, **options)
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
@MODELS
async def test_reasoning_is_replayed(
    recording: Recording, clients: Clients, model: str, stream: bool
) -> None:
    """LiteLLM's message carries the reasoning on: the next call goes on without a break."""
    replies = [Reply(tool_calls=[ADD], reasoning="2 and 3"), Reply("It is 5.", reasoning="5!")]
    server = clients.serve(replies)

    async def ask(messages: list[Any]) -> Any:
        reply = await litellm.acompletion(
            model,
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


@MODELS
async def test_parallel_conversations(recording: Recording, clients: Clients, model: str) -> None:
    """Conversations that run at once are histories of their own."""
    server = clients.serve(lambda body: f"to {body['messages'][-1]['content']}")

    async def talk(name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": name}]
        for _ in range(2):
            reply = await litellm.acompletion(
                model, messages, api_base=server.base_url, api_key="none-needed"
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


@MODELS
async def test_a_failed_call(recording: Recording, clients: Clients, model: str) -> None:
    """LiteLLM's own exception reaches the agent; the call that failed is in the trajectory."""
    refused = Raw(400, b'{"error": {"message": "no", "type": "bad", "code": null}}')
    server = clients.serve([refused, "yes"])
    options: Any = {"api_base": server.base_url, "api_key": "none-needed"}
    async with rollout("agent"):
        with pytest.raises(litellm.BadRequestError):
            await litellm.acompletion(model, [QUESTION], **options)
        await litellm.acompletion(model, [QUESTION], **options)
    failed, answered = replayed(recording).completions
    assert (failed.status, failed.trainable) == ("error", False)
    assert (answered.status, answered.trainable) == ("complete", True)
    assert len(server.exchanges) == len(exchange_spans(recording)) == 2


async def test_its_own_telemetry(recording: Recording, clients: Clients) -> None:
    """With LiteLLM's OpenTelemetry callback each call is still one completion."""
    server = clients.serve([*TOOL_LOOP, *TOOL_LOOP])
    models = ("openai/m", "hosted_vllm/m")
    litellm.callbacks = [OpenTelemetry(tracer_provider=recording.provider)]
    async with rollout("agent"):
        for model in models:
            await loop(
                lambda messages, model=model: litellm.acompletion(
                    model, messages, **options(server, tools=TOOLS)
                ),
                [{"role": "user", "content": model}],
            )
    await until(lambda: len(recording.spans_named("raw_gen_ai_request")) == 4)
    trajectory = checked(recording, server, calls=4)
    assert table(trajectory) == [
        "user hosted_vllm/m, 2* add(), tool 5, 3* It is 5.",
        "user openai/m, 0* add(), tool 5, 1* It is 5.",
    ]


def options(server: ModelServer, **more: Any) -> dict[str, Any]:
    return {"api_base": server.base_url, "api_key": KEY, **more}


async def ask(caller: str, model: str, messages: list[Any], **more: Any) -> Any:
    """A reply, or the chunks of a streamed one, all of them, to the sync or the async function."""
    if caller == "sync":
        reply: Any = litellm.completion(model, messages, **more)
        return list(reply) if more.get("stream") else reply
    reply = await litellm.acompletion(model, messages, **more)
    return [chunk async for chunk in reply] if more.get("stream") else reply


BOTH = pytest.mark.parametrize("caller", ["sync", "async"])


@STREAMED
@BOTH
@pytest.mark.parametrize("provider", ["together_ai", "deepseek", "openrouter", "fireworks_ai"])
async def test_providers_with_a_client_of_litellms_own(
    recording: Recording, clients: Clients, provider: str, caller: str, stream: bool
) -> None:
    """What does not go through the OpenAI client is recorded all the same, as it was sent."""
    server = clients.serve("hi")
    async with rollout("agent"):
        await ask(caller, f"{provider}/m", [QUESTION], **options(server, stream=stream))
    (completion,) = checked(recording, server, calls=1).completions
    assert (completion.message or {})["content"] == "hi"
    assert completion.stream is stream


@STREAMED
@BOTH
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_the_responses_api(
    recording: Recording, clients: Clients, provider: str, caller: str, stream: bool
) -> None:
    """Responses that name the one before are one history: the ids are those on the wire."""
    server = clients.serve(["Paris", "Rome"])

    async def respond(**more: Any) -> str:
        more |= {"model": f"{provider}/m", "stream": stream, **options(server)}
        if caller == "sync":
            reply: Any = litellm.responses(**more)
            events = list(reply) if stream else []
        else:
            reply = await litellm.aresponses(**more)
            events = [event async for event in reply] if stream else []
        return str((events[-1].response if stream else reply).id)

    async with rollout("agent"):
        first = await respond(input="The capital of France?")
        await respond(input="Of Italy?", previous_response_id=first)
    trajectory = checked(recording, server, calls=2)
    (history,) = trajectory.histories
    assert history.completion_ids == [completion.id for completion in trajectory.completions]
    # LiteLLM has a name of its own for it, which the server never sees.
    assert stream or first not in history.completion_ids


@STREAMED
@BOTH
async def test_anthropic(recording: Recording, clients: Clients, caller: str, stream: bool) -> None:
    """The Messages API: LiteLLM reads a stream no further than the reason why it ended."""
    # What says nothing beside a call is replayed with a sentence of LiteLLM's in it.
    server = clients.serve([Reply("Let me see.", tool_calls=[ADD]), "It is 5."])
    more = options(server, tools=TOOLS, stream=stream)
    more["api_base"] = server.base_url.removesuffix("/v1")

    async def ask_claude(messages: list[Any]) -> Any:
        reply = await ask(caller, "anthropic/m", messages, **more)
        return litellm.stream_chunk_builder(reply, messages=messages) if stream else reply

    async with rollout("agent"):
        await loop(ask_claude, [QUESTION])
    trajectory = replayed(recording)
    (history,) = trajectory.histories
    assert trajectory.warnings == []
    assert [c.status for c in history.completions] == ["complete", "complete"]
    assert [c.finish_reason for c in history.completions] == ["tool_use", "end_turn"]
    assert [c.request for c in history.completions] == [
        json.loads(exchange.request) for exchange in server.exchanges
    ]
    if not stream:
        assert [c.response for c in history.completions] == [
            json.loads(exchange.response) for exchange in server.exchanges
        ]


@BOTH
async def test_calls_without_a_completion(
    recording: Recording, clients: Clients, caller: str
) -> None:
    """Embeddings are exchanges; what goes elsewhere, such as a log, is none."""
    server = clients.serve(routes={"/log": Raw(body=b"{}"), "/v1/chat/logs": Raw(body=b"{}")})
    root = server.base_url.removesuffix("/v1")
    more = options(server, model="hosted_vllm/m", input=["a"])
    async with rollout("agent"):
        if caller == "sync":
            litellm.embedding(**more)
            handler: Any = HTTPHandler()
        else:
            await litellm.aembedding(**more)
            handler = AsyncHTTPHandler()
        for path in ("/log?to=/chat/completions", "/v1/chat/logs"):
            assert (await done(handler.post(root + path, json={"n": 1}))).status_code == 200
        await done(handler.close())
    trajectory = replayed(recording)
    (span,) = exchange_spans(recording)
    assert span.name == "recording /embeddings"
    assert attribute(span, "status") == "complete"
    assert trajectory.completions == []
    assert trajectory.warnings == []


async def test_callbacks_that_post(recording: Recording, clients: Clients) -> None:
    """What LiteLLM's callbacks send inside the rollout is no call of a model."""
    server = clients.serve("hi")
    logs = clients.serve(routes={"/chat/log": Raw(body=b"{}")})
    url = logs.base_url.removesuffix("/v1") + "/chat/log"

    async def report(kwargs: Any, reply: Any, *_: Any) -> None:
        body = {"messages": kwargs["messages"], "reply": reply.model_dump()}
        await get_async_httpx_client("logging_callback").post(url, json=body)

    litellm.success_callback = [report]
    async with rollout("agent"):
        await litellm.acompletion("hosted_vllm/m", [QUESTION], **options(server))
        await litellm.acompletion("openai/m", [QUESTION], **options(server))
        await until(lambda: len(logs.exchanges) == 2)
    checked(recording, server, calls=2)


@STREAMED
@BOTH
@pytest.mark.parametrize("status", [400, 500])
async def test_an_error(
    recording: Recording, clients: Clients, status: int, caller: str, stream: bool
) -> None:
    """Each attempt that LiteLLM makes is an exchange; the key is not in what was recorded."""
    body = {"error": {"message": f"no, {KEY}", "type": "bad", "code": None}}
    server = clients.serve([Raw(status, json.dumps(body).encode()), "yes"])
    more = options(server, stream=stream, num_retries=1, retry_strategy="constant_retry")
    async with rollout("agent"):
        if status == 400:
            with pytest.raises(litellm.BadRequestError):
                await ask(caller, "hosted_vllm/m", [QUESTION], **more | {"num_retries": 0})
        await ask(caller, "hosted_vllm/m", [QUESTION], **more)
    trajectory = replayed(recording)
    failed, answered = trajectory.completions
    assert (failed.status, failed.trainable) == ("error", False)
    assert failed.error is not None
    assert f"{status}" in failed.error["message"]
    assert (answered.status, answered.trainable) == ("complete", True)
    assert [json.loads(e.request) for e in server.exchanges] == [failed.request, answered.request]
    assert [attribute(span, "attempts") for span in exchange_spans(recording)] == [1, 1]
    assert KEY in server.exchanges[0].response.decode()
    assert KEY not in "".join(span.to_json() for span in recording.spans)


@STREAMED
async def test_nobody_listens(recording: Recording, stream: bool) -> None:
    """The client connects twice: each attempt is an exchange that failed, with the request."""
    async with rollout("agent"):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and does not listen
            base = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
            with pytest.raises(litellm.InternalServerError):
                await litellm.acompletion(
                    "hosted_vllm/m", [QUESTION], api_base=base, api_key=KEY, stream=stream
                )
    completions = replayed(recording).completions
    assert [completion.status for completion in completions] == ["error", "error"]
    assert [completion.request_messages for completion in completions] == [[QUESTION]] * 2


async def test_a_connection_that_is_tried_again(recording: Recording, clients: Clients) -> None:
    """What the client tries again by itself is an exchange that failed, and one that did not."""

    def refuse(request: Any) -> Any:
        raise httpx.ConnectError("refused", request=request)

    server = clients.serve("hi")
    handler = AsyncHTTPHandler()
    await handler.close()
    handler.client = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
    async with rollout("agent"):
        url = server.base_url + "/chat/completions"
        await handler.post(url, json={"model": "m", "messages": [QUESTION]})
    failed, answered = replayed(recording).completions
    assert (failed.status, answered.status) == ("error", "complete")
    assert failed.request_messages == answered.request_messages == [QUESTION]
    assert len(server.exchanges) == 1


@STREAMED
@pytest.mark.parametrize("transport", ["aiohttp", "httpx"])
async def test_a_compressed_reply(
    recording: Recording,
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    stream: bool,
) -> None:
    """The bytes that were received are read as LiteLLM reads them, whoever unpacks them."""
    monkeypatch.setattr(litellm, "disable_aiohttp_transport", transport == "httpx")
    litellm.in_memory_llm_clients_cache.flush_cache()
    server = clients.serve("hi", compress=True)
    async with rollout("agent"):
        for caller in ("sync", "async"):
            await ask(caller, "hosted_vllm/m", [QUESTION], **options(server, stream=stream))
    litellm.in_memory_llm_clients_cache.flush_cache()
    trajectory = replayed(recording)
    assert [(c.status, c.trainable) for c in trajectory.completions] == [("complete", True)] * 2
    assert [(c.message or {})["content"] for c in trajectory.completions] == ["hi", "hi"]
    assert all(c.token_ids for c in trajectory.completions)


@pytest.mark.parametrize("how", ["cancelled", "abandoned"])
async def test_a_stream_that_is_left(recording: Recording, clients: Clients, how: str) -> None:
    """What had come of it is kept, and it does not train."""
    server = clients.serve(Reply("Paris, city of light", chunk_delay=0.2), chunk_size=1)
    begun = asyncio.Event()

    async def read() -> None:
        reply: Any = await litellm.acompletion(
            "hosted_vllm/m", [QUESTION], **options(server, stream=True)
        )
        async for chunk in reply:
            if chunk.choices[0].delta.content:
                begun.set()
                if how == "abandoned":
                    return

    async with rollout("agent"):
        task = asyncio.create_task(read())
        await begun.wait()
        if how == "cancelled":
            task.cancel()
        await asyncio.wait([task])
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == (how, False)
    assert str((completion.message or {})["content"]).startswith("P")
    assert completion.finish_reason is None


async def test_a_cancelled_call(recording: Recording, clients: Clients) -> None:
    """A call that is given up before it is answered has its request."""
    asked = threading.Event()

    def reply(body: Any) -> Reply:
        asked.set()
        return Reply("late", delay=600)

    server = clients.serve(reply)
    async with rollout("agent"):
        task = asyncio.create_task(
            litellm.acompletion("hosted_vllm/m", [QUESTION], **options(server))
        )
        await asyncio.to_thread(asked.wait, 300)
        task.cancel()
        await asyncio.wait([task])
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.message) == ("cancelled", None)
    assert completion.request_messages == [QUESTION]


def through_litellm(request: Any) -> Any:
    """The OpenAI client's HTTP, sent by LiteLLM's client."""
    reply = HTTPHandler().post(str(request.url), data=request.read(), headers=dict(request.headers))
    return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)


async def test_a_call_inside_a_call(recording: Recording, clients: Clients) -> None:
    """A call that two clients make between them is counted once."""
    server = clients.serve("hi")
    with httpx.Client(transport=httpx.MockTransport(through_litellm)) as transport:
        client = clients.sync(server, http_client=transport)
        async with rollout("agent"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            litellm.completion("hosted_vllm/m", [QUESTION], **options(server))
    checked(recording, server, calls=2)


@BOTH
@STREAMED
async def test_token_ids_are_asked_for(
    recording: Recording, clients: Clients, caller: str, stream: bool
) -> None:
    """`request_token_ids` is for these calls too, and what the agent asks for itself stays."""
    server = clients.serve("hi", token_ids=False, logprobs=False)
    async with rollout("agent"):
        with otel_rollout.request_token_ids():
            await ask(caller, "hosted_vllm/m", [QUESTION], **options(server, stream=stream))
            more = options(server, stream=stream, logprobs=False)
            await ask(caller, "hosted_vllm/m", [QUESTION], **more)
        await ask(caller, "hosted_vllm/m", [QUESTION], **options(server, stream=stream))
    asked, partly, plain = checked(recording, server, calls=3).completions
    assert asked.token_ids
    assert asked.logprobs
    assert partly.token_ids
    assert (partly.logprobs, plain.token_ids, plain.logprobs) == (None, None, None)


async def test_where_nothing_is_captured(recording: Recording, clients: Clients) -> None:
    """Outside a rollout, and where the user wants none, a call leaves no exchange."""
    server = clients.serve("hi")
    await litellm.acompletion("hosted_vllm/m", [QUESTION], **options(server))
    async with rollout("agent"):
        with otel_rollout.no_capture():
            litellm.completion("hosted_vllm/m", [QUESTION], **options(server))
    assert len(server.exchanges) == 2
    assert exchange_spans(recording) == []


def test_a_version_without_the_methods_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be hooked is said in the log, and nothing is raised."""
    monkeypatch.delattr(httpx.AsyncClient, "send")
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        otel_rollout.configure()
    assert "calls of httpx are not captured" in caplog.text
    assert "AsyncClient.send" in caplog.text
    assert not hasattr(httpx.Client.send, "_self_wrapper")
    caplog.clear()


def test_the_hooks_go_in_and_out(recording: Recording) -> None:
    """After shutdown the client is as it was; it is hooked once, however often it is asked."""
    capture.instrument()
    assert hasattr(httpx.Client.send, "_self_wrapper")
    assert not hasattr(httpx.Client.send.__wrapped__, "_self_wrapper")
    otel_rollout.shutdown()
    for method in (httpx.Client.send, httpx.AsyncClient.send, HTTPHandler.post):
        assert not hasattr(method, "_self_wrapper")


PROGRAM = """
import sys
import otel_rollout
from otel_rollout.testing import ModelServer
exporter = otel_rollout.InMemoryTrajectoryExporter()
otel_rollout.configure(exporters=[exporter])
print("litellm" in sys.modules)
import litellm
with ModelServer("hi") as server, otel_rollout.rollout("agent"):
    message = [{"role": "user", "content": "a"}]
    litellm.completion("hosted_vllm/m", message, api_base=server.base_url, api_key="k")
print([c.status for t in exporter.get_finished_trajectories() for c in t.completions])
"""


def test_litellm_may_be_imported_later() -> None:
    """It is not imported by us, and hooked once somebody does."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True
    )
    assert ran.stdout.split("\n")[:2] == ["False", "['complete']"]
