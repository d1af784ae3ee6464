"""Every way to ask OpenAI's client: recorded is what was on the wire, the user sees no change."""

from __future__ import annotations

import base64
import json
from typing import Any

import openai
import pydantic
import pytest

from otel_rollout import rollout
from otel_rollout.testing import Reply, ToolCall
from tests.kit.calling import BOTH, Caller, Configure, as_bare, done, entered, read, structured
from tests.kit.comparing import replayed, without_null
from tests.kit.conversations import ASK
from tests.kit.recording import Clients, Recording
from tests.record.clients.openai_ways import CHAT, USAGE, Json, Script, call, check, same

pytestmark = pytest.mark.slow


class Capital(pydantic.BaseModel):
    """What `parse` makes of a reply."""

    city: str


CITY = Reply('{"city": "Zürich 🗼"}')
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "Capital", "schema": {"type": "object"}, "strict": True},
}
CUSTOM_TOOL: Json = {"type": "custom", "name": "sql", "description": "Runs SQL. " * 40}
FUNCTION: Json = {"name": "add", "parameters": {"type": "object", "properties": {}}}


def streaming(path: str, how: str, **request: Any) -> Script:
    """A way through `with_streaming_response`, that reads the reply by one of its methods."""

    async def script(client: Any) -> Any:
        resource = client
        for name in path.split("."):
            resource = getattr(resource, name)
        create = resource.with_streaming_response.create
        async with entered(create(**{"model": "m", **request})) as response:
            result = getattr(response, how)()
            if how.startswith("iter"):
                items = await read(result)
                return [type(items[0]), b"".join(items) if how == "iter_bytes" else items]
            result = await done(result)
            return await read(result) if request.get("stream") else result

    return script


def helper(path: str, **request: Any) -> Script:
    """A way through a `stream()` helper: its events, and what it makes of them."""

    async def script(client: Any) -> Any:
        resource = client
        for name in path.split("."):
            resource = getattr(resource, name)
        async with entered(resource.stream(**{"model": "m", **request})) as stream:
            events = [event.type for event in await read(stream)]
            chat = hasattr(stream, "get_final_completion")
            final = stream.get_final_completion if chat else stream.get_final_response
            return [events, await done(final())]

    return script


def azure(way: Script) -> Script:
    """The same way with Azure's client, which asks other URLs."""

    async def script(client: Any) -> Any:
        sync = isinstance(client, openai.OpenAI)
        client_class = openai.AzureOpenAI if sync else openai.AsyncAzureOpenAI
        own = client_class(
            azure_endpoint=str(client.base_url).removesuffix("/v1/"),
            api_key="azure-key-0123456789",
            api_version="2024-10-21",
        )
        async with entered(own):
            return await way(own)

    return script


async def _post(client: Any) -> Any:
    body = {"model": "m", "messages": ASK, "unknown": {"b": 1, "a": [1.0, 1e3, True]}}
    options: Any = {"params": {"debug": "1"}, "headers": {"x-team": "a"}}
    return await done(client.post("/chat/completions", body=body, cast_to=object, options=options))


async def _post_stream(client: Any) -> Any:
    stream_class = openai.Stream if isinstance(client, openai.OpenAI) else openai.AsyncStream
    body = {"stream": True, "model": "m", "messages": ASK}
    result = client.post(
        "/chat/completions", body=body, cast_to=object, stream=True, stream_cls=stream_class[object]
    )
    return await read(await done(result))


async def _parse(client: Any) -> Any:
    parse = structured(client).parse
    return await done(parse(model="m", messages=ASK, response_format=Capital))


async def _beta_parse(client: Any) -> Any:
    parse = client.beta.chat.completions.parse
    return await done(parse(model="m", messages=ASK, response_format=Capital))


async def _chat_helper(client: Any) -> Any:
    newer = hasattr(client.chat.completions, "stream")
    way = helper(CHAT if newer else f"beta.{CHAT}", messages=ASK, response_format=Capital)
    return await way(client)


async def _with_options(client: Any) -> Any:
    client = client.with_options(timeout=30, default_headers={"x-team": "a"})
    return await call("chat.completions.create", messages=ASK)(client)


EXTRAS: Json = {
    "extra_body": {
        "top_k": 20,
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.5,
    },
    "extra_query": {"trace": "yes"},
    "extra_headers": {"x-run": "7"},
}
ALL_SAID = Reply("Zürich 🗼", reasoning="CH ...", tool_calls=[ToolCall("add", ' { "a":1.50 } ')])
TWO = Reply(choices=[Reply("Paris"), Reply("Lyon, no: Paris")])
SQL = Reply(tool_calls=[ToolCall("sql", "select 'ä'\n", custom=True), ToolCall("add", "{}")])
LONG: Json = {"tools": [{"type": "function", "function": {**FUNCTION, "description": "x" * 300}}]}
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Capital?"}]},
    {"role": "developer", "content": "Be brief."},
]
WAYS: dict[str, tuple[Script, Any]] = {
    "chat": (call(f"{CHAT}.create", messages=ASK, seed=7, **LONG), ALL_SAID),
    "chat, stream": (call(f"{CHAT}.create", messages=ASK, **USAGE), ALL_SAID),
    "chat, stream without usage": (call(f"{CHAT}.create", messages=ASK, stream=True), ALL_SAID),
    "chat, raw": (call(f"{CHAT}.with_raw_response.create", messages=ASK), ALL_SAID),
    "chat, raw stream": (
        call(f"{CHAT}.with_raw_response.create", messages=ASK, stream=True),
        ALL_SAID,
    ),
    "chat, streaming response read": (streaming(CHAT, "read", messages=ASK), ALL_SAID),
    "chat, streaming response parse": (streaming(CHAT, "parse", messages=ASK), ALL_SAID),
    "chat, streaming response json": (streaming(CHAT, "json", messages=ASK), ALL_SAID),
    "chat, streaming response bytes": (streaming(CHAT, "iter_bytes", messages=ASK), ALL_SAID),
    "chat, streaming response lines": (
        streaming(CHAT, "iter_lines", messages=ASK, stream=True),
        ALL_SAID,
    ),
    "chat, streaming response stream": (
        streaming(CHAT, "parse", messages=ASK, stream=True),
        ALL_SAID,
    ),
    "chat, parse": (_parse, CITY),
    "chat, beta parse": (_beta_parse, CITY),
    "chat, stream helper": (_chat_helper, CITY),
    "chat, with_options": (_with_options, ALL_SAID),
    "chat, post": (_post, ALL_SAID),
    "chat, post stream": (_post_stream, ALL_SAID),
    "chat, extras": (call(f"{CHAT}.create", messages=ASK, temperature=1, **EXTRAS), ALL_SAID),
    "chat, extras stream": (call(f"{CHAT}.create", messages=ASK, **EXTRAS, **USAGE), ALL_SAID),
    "chat, n": (call(f"{CHAT}.create", messages=ASK, n=2), TWO),
    "chat, n stream": (call(f"{CHAT}.create", messages=ASK, n=2, **USAGE), TWO),
    "chat, n in the extra body": (
        call(f"{CHAT}.create", messages=ASK, extra_body={"n": 2}, stream=True),
        TWO,
    ),
    "chat, logprobs": (
        call(f"{CHAT}.create", messages=ASK, logprobs=True, top_logprobs=3),
        Reply("Pä"),
    ),
    "chat, logprobs stream": (
        call(f"{CHAT}.create", messages=ASK, logprobs=True, top_logprobs=3, stream=True),
        Reply("Pä"),
    ),
    "chat, structured": (call(f"{CHAT}.create", messages=ASK, response_format=SCHEMA), CITY),
    "chat, refusal": (call(f"{CHAT}.create", messages=ASK), Reply(refusal="I will not.")),
    "chat, refusal stream": (
        call(f"{CHAT}.create", messages=ASK, **USAGE),
        Reply(refusal="I will not."),
    ),
    "chat, custom tool": (call(f"{CHAT}.create", messages=ASK, tools=[CUSTOM_TOOL]), SQL),
    "chat, custom tool stream": (
        call(f"{CHAT}.create", messages=ASK, tools=[CUSTOM_TOOL], stream=True),
        SQL,
    ),
    "azure": (azure(call(f"{CHAT}.create", messages=ASK)), ALL_SAID),
    "azure, stream": (azure(call(f"{CHAT}.create", messages=ASK, **USAGE)), ALL_SAID),
    "azure, responses": (azure(call("responses.create", input="Hi")), ALL_SAID),
    "azure, text": (azure(call("completions.create", prompt="Once")), Reply(" upon")),
    "responses": (call("responses.create", input="Capital?", instructions="I" * 300), ALL_SAID),
    "responses, items": (call("responses.create", input=ITEMS, temperature=0), ALL_SAID),
    "responses, stream": (call("responses.create", input=ITEMS, stream=True), ALL_SAID),
    "responses, raw": (call("responses.with_raw_response.create", input="Hi"), ALL_SAID),
    "responses, raw stream": (
        call("responses.with_raw_response.create", input="Hi", stream=True),
        ALL_SAID,
    ),
    "responses, streaming response": (streaming("responses", "parse", input="Hi"), ALL_SAID),
    "responses, streaming lines": (
        streaming("responses", "iter_lines", input="Hi", stream=True),
        ALL_SAID,
    ),
    "responses, parse": (call("responses.parse", input="Hi", text_format=Capital), CITY),
    "responses, stream helper": (helper("responses", input="Hi", text_format=Capital), CITY),
    "responses, custom tool": (
        call("responses.create", input="Hi", tools=[CUSTOM_TOOL, {"type": "function", **FUNCTION}]),
        SQL,
    ),
    "responses, custom tool stream": (
        call("responses.create", input="Hi", tools=[CUSTOM_TOOL], stream=True),
        SQL,
    ),
    "responses, refusal": (call("responses.create", input="Hi"), Reply(refusal="I will not.")),
    "responses, truncated": (
        call("responses.create", input="Hi", max_output_tokens=3),
        Reply("Par", finish_reason="length"),
    ),
    "responses, truncated stream": (
        call("responses.create", input="Hi", max_output_tokens=3, stream=True),
        Reply("Par", finish_reason="length"),
    ),
}


@BOTH
@pytest.mark.parametrize("way", WAYS)
async def test_what_was_on_the_wire_is_recorded(
    configure: Configure, clients: Clients, caller: Caller, way: str
) -> None:
    """Request and reply are equal to the wire in every member and its place, streams merged."""
    script, reply = WAYS[way]
    recording, server, seen = await as_bare(configure, clients, caller, lambda: reply, script)
    assert seen[0] == "returned", seen
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    (exchange,) = trajectory.exchanges
    (wire,) = server.exchanges
    plain = check(exchange, wire, clients, reply)
    if "choices" not in plain:
        (completion,) = trajectory.completions
        assert list(completion.items) == plain["output"]
        assert completion.finish_reason == plain["status"]
        assert completion.usage == plain["usage"]
    for completion, choice in zip(
        trajectory.completions, plain.get("choices", [plain]), strict=True
    ):
        assert (completion.id, completion.status) == (plain["id"], "complete")
        assert completion.trainable
        assert completion.request_messages[-1]["role"] in ("user", "developer")
        if "message" in choice:
            assert without_null(completion.message) == without_null(choice["message"])
            assert completion.finish_reason == choice["finish_reason"]
            assert completion.token_ids == choice["token_ids"]
            assert completion.prompt_token_ids == plain["prompt_token_ids"]
            assert completion.logprobs == [e["logprob"] for e in choice["logprobs"]["content"]]
            assert completion.usage == plain.get("usage")
    assert [len(h.completions) for h in trajectory.histories] == [1] * len(trajectory.completions)


def test_the_client_of_the_module(
    recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`openai.chat.completions.create` without a client of one's own is captured too."""
    server = clients.serve("Paris")
    monkeypatch.setattr(openai, "base_url", f"{server.base_url}/")
    monkeypatch.setattr(openai, "api_key", "sk-not-a-real-key")
    monkeypatch.setattr(openai, "_client", None)
    with rollout("agent"):
        openai.chat.completions.create(model="m", messages=ASK)
    if openai._client is not None:
        clients.closing.append(openai._client)
    (exchange,) = replayed(recording).exchanges
    check(exchange, server.exchanges[0], clients, None)


IMAGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 64).decode()
PARTS: list[Any] = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"},
    },
]


def count(haystack: Any, needle: str) -> int:
    return json.dumps(haystack).count(needle)


@BOTH
async def test_an_image_is_stored_once(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """Parts of any kind are kept exactly; what every request repeats costs twice, not each time."""
    server = clients.serve("A grey square.", token_ids=False)

    async def script(client: Any) -> None:
        with rollout("agent"):
            messages: list[Any] = [{"role": "user", "content": PARTS}]
            for turn in range(8):
                reply = await done(client.chat.completions.create(model="m", messages=messages))
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": f"And {turn}?"})

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    for exchange, wire in zip(trajectory.exchanges, server.exchanges, strict=True):
        assert same(exchange.request(), json.loads(wire.request))
    (history,) = trajectory.histories
    assert history.messages()[0]["content"] == PARTS
    assert len(history.completions) == 8
    spans = [dict(span.attributes or {}) for span in recording.spans_named("recording")]
    assert sum(count(attributes, IMAGE) for attributes in spans) == 2
    assert count(trajectory.to_dict(), IMAGE) == 1
    images = {id(c.exchange.prompt and [*c.exchange.prompt][-1]) for c in trajectory.completions}
    assert len(images) == 1
