"""Capture: the request as sent and the reply as received, whichever way the client was asked."""

from __future__ import annotations

import copy
from typing import Any

import openai
import pytest

from otel_rollout import rollout
from otel_rollout.testing import Reply, ToolCall
from tests.kit.calling import (
    BOTH,
    STREAMED,
    Caller,
    Capital,
    Configure,
    Json,
    Script,
    as_bare,
    ask_bare,
    done,
    entered,
    read,
    structured,
)
from tests.kit.comparing import (
    attribute,
    everything,
    exchange_spans,
    received,
    replayed,
    sent,
    without_null,
)
from tests.kit.conversations import ASK, TOOLS, chat
from tests.kit.recording import Clients, Recording

# --- the bodies


ODD_CALLS = [
    ToolCall("add", ' { "b" :1.50,\n\t"a":  "é\\u00e9" } '),
    ToolCall("find", '{"query": "unfinish'),
    ToolCall("add", ""),
]
CASES: dict[str, tuple[Reply, Json]] = {
    "text": (Reply("Paris, à côté. 🗼"), {"temperature": 0.25, "seed": 7}),
    "two choices": (Reply(choices=[Reply("Paris"), Reply("Lyon, no: Paris")]), {"n": 2}),
    "logprobs": (Reply("Paris"), {"logprobs": True, "top_logprobs": 2}),
    "tools": (Reply(tool_calls=ODD_CALLS), {"tools": TOOLS, "tool_choice": "auto"}),
    "text and tools": (Reply("Wait.", tool_calls=ODD_CALLS[:1]), {"tools": TOOLS}),
    "reasoning": (Reply("Paris", reasoning="France, so ..."), {"reasoning_effort": "low"}),
    "refusal": (Reply(refusal="I will not say."), {}),
    "truncated": (Reply("Par", finish_reason="length"), {"max_tokens": 3}),
    "nothing said": (Reply(""), {}),
    "unknown fields": (
        Reply("Paris", extra={"kv_transfer": {"x": [1]}}, message_extra={"mood": "calm"}),
        {},
    ),
    "extra body": (
        Reply("Paris"),
        {
            "extra_body": {
                "top_k": 20,
                "return_token_ids": True,
                "chat_template_kwargs": {"enable_thinking": False},
            }
        },
    ),
}


@BOTH
@STREAMED
@pytest.mark.parametrize("case", CASES)
async def test_chat(
    configure: Configure, clients: Clients, caller: Caller, stream: bool, case: str
) -> None:
    """A completion holds the request that was sent and the reply as the server means it."""
    reply, options = CASES[case]
    if stream:
        options = {**options, "stream": True, "stream_options": {"include_usage": True}}

    async def script(client: Any) -> Any:
        return await chat(client, **options)

    recording, server, _ = await as_bare(configure, clients, caller, lambda: reply, script)

    trajectory = replayed(recording)
    (wire,) = server.exchanges
    plain = received(wire) if not stream else None
    if plain is None:
        body = {k: v for k, v in sent(wire).items() if k not in ("stream", "stream_options")}
        plain = ask_bare(clients.serve(reply), "/chat/completions", body)
    assert trajectory.warnings == []
    assert [c.choice_index for c in trajectory.completions] == list(range(len(plain["choices"])))
    for completion, choice in zip(trajectory.completions, plain["choices"], strict=True):
        assert completion.request == sent(wire)
        if stream:
            assert without_null(completion.response) == without_null(plain)
        else:
            assert completion.response == plain
        assert without_null(completion.message) == without_null(choice["message"])
        assert completion.message is not None
        assert completion.message.get("tool_calls") == choice["message"].get("tool_calls")
        assert completion.id == plain["id"]
        assert completion.status == "complete"
        assert completion.error is None
        assert completion.trainable
        assert completion.finish_reason == choice["finish_reason"]
        assert completion.token_ids == choice["token_ids"]
        assert completion.prompt_token_ids == plain["prompt_token_ids"]
        assert completion.logprobs == [e["logprob"] for e in choice["logprobs"]["content"]]
        assert completion.usage == plain["usage"]
        assert completion.model == "m"
        assert completion.request_model == "m"
        assert completion.stream is stream
        assert completion.request_messages == ASK
        assert completion.tools == options.get("tools")
        extra = options.get("extra_body", {})
        asked = {**options, **extra}
        assert completion.sampling == {k: asked[k] for k in completion.sampling}
        assert ("top_k" in completion.sampling) == ("top_k" in extra)
    (span,) = exchange_spans(recording)
    assert attribute(span, "attempts") == 1


@BOTH
@STREAMED
async def test_a_server_that_sends_neither_tokens_nor_usage(
    recording: Recording, clients: Clients, caller: Caller, stream: bool
) -> None:
    """What the server did not send is None, not empty and not zero."""
    server = clients.serve(Reply("Paris", usage=False), token_ids=False, logprobs=False)

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client, **({"stream": True} if stream else {}))

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert completion.trainable
    unknown = (completion.token_ids, completion.prompt_token_ids, completion.logprobs)
    assert (*unknown, completion.usage, completion.stop_reason) == (None,) * 5


async def _raw(client: Any) -> Any:
    response = await done(client.chat.completions.with_raw_response.create(model="m", messages=ASK))
    return [response.status_code, response.text, response.parse()]


async def _raw_stream(client: Any) -> Any:
    create = client.chat.completions.with_raw_response.create
    response = await done(create(model="m", messages=ASK, stream=True))
    return [response.status_code, await read(response.parse())]


async def _streaming_response(client: Any) -> Any:
    create = client.chat.completions.with_streaming_response.create
    async with entered(create(model="m", messages=ASK)) as response:
        return [response.status_code, await done(response.parse())]


async def _streaming_lines(client: Any) -> Any:
    create = client.chat.completions.with_streaming_response.create
    async with entered(create(model="m", messages=ASK, stream=True)) as response:
        return await read(response.iter_lines())


async def _parse(client: Any) -> Any:
    parse = structured(client).parse
    return await done(parse(model="m", messages=ASK, response_format=Capital))


async def _stream_helper(client: Any) -> Any:
    async with entered(structured(client).stream(model="m", messages=ASK)) as stream:
        events = await read(stream)
        return [[e.type for e in events], await done(stream.get_final_completion())]


async def _with_options(client: Any) -> Any:
    return await chat(client.with_options(timeout=30, default_headers={"x-team": "a"}))


async def _post(client: Any) -> Any:
    body = {"model": "m", "messages": ASK}
    return await done(client.post("/chat/completions", body=body, cast_to=object))


async def _relative(client: Any) -> Any:
    body = {"model": "m", "messages": ASK}
    return await done(client.post("chat/completions", body=body, cast_to=object))


async def _subclass(client: Any) -> Any:
    class Client(type(client)):  # type: ignore[misc]
        pass

    async with entered(Client(base_url=client.base_url, api_key=client.api_key)) as own:
        return await chat(own)


WAYS: dict[str, Script] = {
    "create": chat,
    "raw": _raw,
    "raw stream": _raw_stream,
    "streaming response": _streaming_response,
    "streaming lines": _streaming_lines,
    "parse": _parse,
    "stream helper": _stream_helper,
    "with_options": _with_options,
    "post": _post,
    "post, relative": _relative,
    "subclass": _subclass,
}


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_to_ask(
    capture_only: Configure, clients: Clients, caller: Caller, way: str
) -> None:
    """Whichever method of the client asks, one exchange is recorded and the user sees no change."""
    reply = Reply('{"city": "Paris"}')
    recording, server, seen = await as_bare(capture_only, clients, caller, lambda: reply, WAYS[way])
    assert seen[0] == "returned"
    (completion,) = replayed(recording).completions
    (wire,) = server.exchanges
    assert completion.request == sent(wire)
    assert completion.status == "complete"
    assert completion.message is not None
    assert completion.message["content"] == '{"city": "Paris"}'
    assert completion.token_ids == [*reply.content.encode(), 261]  # type: ignore[union-attr]
    if not completion.stream:
        assert completion.response == received(wire)


@BOTH
async def test_azure(recording: Recording, clients: Clients, caller: Caller) -> None:
    """Azure's clients, which build URLs of their own, are captured like any other."""
    server = clients.serve("Paris")
    client_class = openai.AzureOpenAI if caller.sync else openai.AsyncAzureOpenAI
    client = client_class(
        base_url=server.base_url, api_key="azure-key-0123456789", api_version="2024-06-01"
    )
    clients.closing.append(client)

    async def script() -> None:
        with rollout("agent"):
            await chat(client, model="my-deployment")

    with pytest.raises(openai.NotFoundError):  # the test's server is not Azure
        await caller.run(script())
    (wire,) = server.exchanges
    assert wire.path.startswith("/v1/deployments/my-deployment/chat/completions")
    (completion,) = replayed(recording).completions
    assert completion.request == sent(wire)
    assert completion.response == received(wire)
    assert completion.error is not None
    assert completion.error["type"] == "NotFoundError"
    assert "azure-key-0123456789" not in everything(recording)


TEXT_PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "text": ("Once", ["Once"]),
    "texts": (["Once", "Twice"], ["Once", "Twice"]),
    "token ids": ([79, 110, 99, 101], ["Once"]),
    "lists of token ids": ([[79, 110], [99, 101]], ["On", "ce"]),
}


@BOTH
@STREAMED
@pytest.mark.parametrize("prompt", TEXT_PROMPTS)
async def test_text_completions(
    configure: Configure, clients: Clients, caller: Caller, stream: bool, prompt: str
) -> None:
    """The older completions endpoint, with each shape of a prompt, is captured the same."""
    given, texts = TEXT_PROMPTS[prompt]
    reply = Reply(" upon a time")
    options = {"stream": True} if stream else {}

    async def script(client: Any) -> Any:
        result = await done(client.completions.create(model="m", prompt=given, **options))
        return await read(result) if stream else result

    recording, server, _ = await as_bare(configure, clients, caller, lambda: reply, script)
    completions = replayed(recording).completions
    (wire,) = server.exchanges
    plain = ask_bare(clients.serve(reply), "/completions", {"model": "m", "prompt": given})
    assert [c.choice_index for c in completions] == list(range(len(texts)))
    for completion, text, choice in zip(completions, texts, plain["choices"], strict=True):
        assert completion.request == sent(wire)
        ignored = {"usage": None} if stream else {}
        assert without_null(completion.response) == without_null({**plain, **ignored})
        assert completion.message == {"role": "assistant", "content": " upon a time"}
        assert completion.prompt_token_ids == list(text.encode())
        assert completion.token_ids == choice["token_ids"]
        assert completion.logprobs == choice["logprobs"]["token_logprobs"]
        assert completion.finish_reason == "stop"
        assert completion.trainable
    own = [c.request_messages[0]["content"] for c in completions]
    assert own == (given if prompt in ("texts", "lists of token ids") else [given])


@BOTH
@STREAMED
async def test_responses(
    configure: Configure, clients: Clients, caller: Caller, stream: bool
) -> None:
    """The Responses API: the response as it is sent, or as the last event of a stream has it."""
    reply = Reply("Paris", reasoning="France ...", tool_calls=[ToolCall("add", '{ "a" :1.50}')])
    items = [{"role": "user", "content": "Capital?"}]
    options = {"stream": True} if stream else {}

    async def script(client: Any) -> Any:
        request = {"model": "m", "instructions": "Be brief.", "input": copy.deepcopy(items)}
        # A copy each: the instrumentor adds fields to the items that it is given.
        result = await done(client.responses.create(**request, **options))
        return await read(result) if stream else result

    recording, server, _ = await as_bare(configure, clients, caller, lambda: reply, script)
    (completion,) = replayed(recording).completions
    (wire,) = server.exchanges
    body = {"model": "m", "instructions": "Be brief.", "input": items}
    plain = ask_bare(clients.serve(reply), "/responses", body)
    assert completion.request == sent(wire)
    assert completion.response == plain
    assert list(completion.items) == plain["output"]
    assert [item["type"] for item in completion.items] == ["reasoning", "message", "function_call"]
    assert completion.items[2]["arguments"] == '{ "a" :1.50}'
    assert completion.id == plain["id"]
    assert completion.finish_reason == "completed"
    assert completion.usage == plain["usage"]
    assert completion.request_messages == items


@BOTH
async def test_embeddings_are_exchanges(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """A call that generates nothing is an exchange of the trajectory, but no completion."""

    async def script(client: Any) -> Any:
        return await done(client.embeddings.create(model="e", input=["a", "b"]))

    recording, server, _ = await as_bare(configure, clients, caller, lambda: None, script)
    trajectory = replayed(recording)
    assert trajectory.completions == []
    assert trajectory.histories == []
    (exchange,) = trajectory.exchanges
    assert exchange.request() == sent(server.exchanges[0])
    assert exchange.response() == received(server.exchanges[0])
    assert (exchange.status, exchange.path) == ("complete", "/embeddings")
    assert trajectory.warnings == []


@BOTH
async def test_what_is_only_read_is_not_captured(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """Listing the models is no exchange with a model."""

    async def script(client: Any) -> Any:
        return [model.id for model in await read(client.models.list())]

    recording, _, seen = await as_bare(configure, clients, caller, lambda: None, script)
    assert seen == ("returned", ["test-model"])
    assert replayed(recording).exchanges == []


# --- the record is not the user's


@BOTH
@STREAMED
async def test_changing_what_was_sent_changes_no_record(
    recording: Recording, clients: Clients, caller: Caller, stream: bool
) -> None:
    """Agents edit their list of messages in place; the request stays as it was sent."""
    server = clients.serve("Paris")
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Capital?"}]}]

    async def script(client: Any) -> None:
        with rollout("agent") as live:
            create = client.chat.completions.create
            result = await done(create(model="m", messages=messages, stream=stream))
            messages[0]["content"][0]["text"] = "edited"
            messages.append({"role": "user", "content": "added"})
            if stream:
                await read(result)
            live.completions[0].request_messages[0]["content"] = "edited in the record"
            live.get_history(live.completions[0].id).messages()[0]["content"] = "edited"

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert completion.request == sent(server.exchanges[0])
    assert completion.request_messages == [
        {"role": "user", "content": [{"type": "text", "text": "Capital?"}]}
    ]
