"""Every way to ask OpenAI's client: recorded is what was on the wire, the user sees no change."""

from __future__ import annotations

import base64
import contextlib
import gzip
import importlib
import itertools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pydantic
import pytest

from otel_rollout import rollout
from otel_rollout.spans.exchange import Exchange
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall, WireExchange
from tests.conftest import Clients, Recording
from tests.test_capture import (
    ASK,
    BOTH,
    STREAMED,
    Caller,
    Configure,
    as_bare,
    ask_bare,
    done,
    entered,
    read,
    replayed,
    structured,
    without_null,
)
from tests.test_capture import capture_only as capture_only
from tests.test_capture import configure as configure

Json = dict[str, Any]
Script = Callable[[Any], Coroutine[Any, Any, Any]]


class Capital(pydantic.BaseModel):
    """What `parse` makes of a reply."""

    city: str


CHAT = "chat.completions"
CITY = Reply('{"city": "Zürich 🗼"}')
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "Capital", "schema": {"type": "object"}, "strict": True},
}
CUSTOM_TOOL: Json = {"type": "custom", "name": "sql", "description": "Runs SQL. " * 40}
FUNCTION: Json = {"name": "add", "parameters": {"type": "object", "properties": {}}}


def wire_json(body: bytes) -> Any:
    """The JSON of a body, which the server may have compressed."""
    return json.loads(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)


def same(recorded: Any, wire: Any) -> bool:
    """Equal also in the order of members and in what is 1, 1.0 or true."""
    return json.dumps(recorded) == json.dumps(wire)


def check(exchange: Exchange, wire: WireExchange, clients: Clients, reply: Any) -> Any:
    """The exchange is what was on the wire; the reply in unstreamed form comes back."""
    request = json.loads(wire.request)
    assert same(exchange.request(), request)
    assert exchange.status == "complete"
    assert (exchange.status_code, exchange.attempts) == (200, 1)
    path = wire.path.split("?")[0]
    assert path.endswith(exchange.path.split("?")[0])
    if not request.get("stream"):
        assert not exchange.stream
        assert same(exchange.response(), wire_json(wire.response))
        return exchange.response()
    assert exchange.stream
    plain = {k: v for k, v in request.items() if k not in ("stream", "stream_options")}
    expected = ask_bare(clients.serve(reply), exchange.path.split("?")[0], plain)
    if not (request.get("stream_options") or {}).get("include_usage"):
        expected.pop("usage") if "choices" in expected else None
    assert without_null(exchange.response()) == without_null(expected)
    return expected


# --- the table of ways


def call(path: str, **request: Any) -> Script:
    """A way that calls one method of the client, such as `chat.completions.create`."""

    async def script(client: Any) -> Any:
        method = client
        for name in path.split("."):
            method = getattr(method, name)
        result = await done(method(**{"model": "m", **request}))
        if "with_raw_response" in path:
            parsed = result.parse()
            return [result.status_code, await read(parsed) if request.get("stream") else parsed]
        return await read(result) if request.get("stream") else result

    return script


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
USAGE: Json = {"stream": True, "stream_options": {"include_usage": True}}
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


# --- text completions


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


# --- around the wire


def plain_and_streamed() -> Script:
    """A script that asks once plain, once streamed."""

    async def script(client: Any) -> Any:
        plain = await call(f"{CHAT}.create", messages=ASK)(client)
        return [plain, await call(f"{CHAT}.create", messages=ASK, **USAGE)(client)]

    return script


def check_both(recording: Recording, clients: Clients, reply: Any, server: ModelServer) -> None:
    """Two exchanges, plain and streamed, are those of the wire, and their completions are whole."""
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    for exchange, wire in zip(trajectory.exchanges, server.exchanges, strict=True):
        request = json.loads(wire.request)
        assert same(exchange.request(), request)
        assert exchange.stream is bool(request.get("stream"))
    for completion in trajectory.completions:
        assert completion.status == "complete"
        assert completion.trainable
        assert completion.message is not None
        assert completion.message["content"] == reply.content
        assert completion.token_ids == [*reply.content.encode(), 261]
        assert completion.usage is not None
    assert len(trajectory.completions) == 2


@BOTH
async def test_compressed_replies(
    capture_only: Configure, clients: Clients, caller: Caller
) -> None:
    """What comes compressed is recorded as what it says."""
    reply = Reply("Zürich 🗼" * 20)

    async def script() -> Any:
        server = clients.serve(reply, compress=True)
        client = caller.client(clients, server)
        with rollout("agent"):
            seen = await plain_and_streamed()(client)
        return server, seen

    _, bare = await caller.run(script())
    recording = capture_only()
    server, seen = await caller.run(script())
    assert seen == bare
    assert server.exchanges[0].response.startswith(b"\x1f\x8b")
    check_both(recording, clients, reply, server)
    plain = replayed(recording).completions[0]
    assert same(plain.response, wire_json(server.exchanges[0].response))


def own_transport(sync: bool, *, whole: bool = False, refuses: tuple[int, ...] = ()) -> Any:
    """An `http_client` with a transport of the user's.

    It may read replies before it gives them, and fail to connect for requests by their number.
    openai 3 has httpx2, older ones httpx.
    """
    name = type(openai.DefaultHttpxClient()).__mro__[1].__module__.partition(".")[0]
    httpx: Any = importlib.import_module(name)
    numbers = itertools.count(1)

    def before(request: Any) -> None:
        if next(numbers) in refuses:
            raise httpx.ConnectError("refused", request=request)

    def after(response: Any, body: bytes) -> Any:
        headers = {"content-type": response.headers["content-type"]}
        return httpx.Response(response.status_code, headers=headers, content=body)

    if sync:

        class Transport(httpx.HTTPTransport):
            def handle_request(self, request: Any) -> Any:
                before(request)
                response = super().handle_request(request)
                return after(response, response.read()) if whole else response

        return httpx.Client(transport=Transport())

    class AsyncTransport(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            before(request)
            response = await super().handle_async_request(request)
            return after(response, await response.aread()) if whole else response

    return httpx.AsyncClient(transport=AsyncTransport())


def reading_hook(sync: bool) -> Any:
    """An `http_client` with a hook that reads each reply, to log it."""
    if sync:
        return openai.DefaultHttpxClient(event_hooks={"response": [lambda reply: reply.read()]})

    async def hook(reply: Any) -> None:
        await reply.aread()

    return openai.DefaultAsyncHttpxClient(event_hooks={"response": [hook]})


HTTP_CLIENTS: dict[str, Callable[[bool], Any]] = {
    "transport": lambda sync: own_transport(sync),
    "transport that reads": lambda sync: own_transport(sync, whole=True),
    "hook that reads": reading_hook,
}


@BOTH
@pytest.mark.parametrize("kind", HTTP_CLIENTS)
async def test_an_http_client_of_the_users(
    capture_only: Configure, clients: Clients, caller: Caller, kind: str
) -> None:
    """Whatever the user's HTTP client does with replies, also of streams, they are recorded."""
    reply = Reply("Paris, à côté")

    async def script() -> Any:
        server = clients.serve(reply)
        http_client = HTTP_CLIENTS[kind](caller.sync)
        client = caller.client(clients, server, http_client=http_client)
        with rollout("agent"):
            return server, await plain_and_streamed()(client)

    _, bare = await caller.run(script())
    recording = capture_only()
    server, seen = await caller.run(script())
    assert seen == bare
    check_both(recording, clients, reply, server)


BROKEN: dict[str, tuple[Json, str]] = {
    "cut": ({"id": "c", "choices": [{"index": 0, "delta": {"content": "Par"}}]}, "EOFError"),
    "error": ({"error": {"message": "the engine died"}}, "ErrorResponse"),
}


@BOTH
@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_stream_that_was_read_before(
    recording: Recording, clients: Clients, caller: Caller, case: str
) -> None:
    """That a hook could read a stream to its end does not make the reply complete."""
    event, error = BROKEN[case]
    chunks = [b"data: %b\n\n" % json.dumps(event).encode()]
    server = clients.serve(Raw(200, chunks=chunks, content_type="text/event-stream"))
    client = caller.client(clients, server, http_client=reading_hook(caller.sync))

    async def script() -> None:
        with rollout("agent"), contextlib.suppress(openai.APIError):
            await call(f"{CHAT}.create", messages=ASK, stream=True)(client)

    await caller.run(script())
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == ("error", False)
    assert completion.error is not None
    assert completion.error["type"] == error


@BOTH
@STREAMED
async def test_attempts_of_every_kind(
    capture_only: Configure,
    clients: Clients,
    caller: Caller,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt that failed is an event: with its status, or without where there was none."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.001)  # seconds
    script = call(f"{CHAT}.create", messages=ASK, **({"stream": True} if stream else {}))

    async def run() -> Any:
        busy = [Raw(status, b"{}", headers={"retry-after-ms": "1"}) for status in (500, 429)]
        server = clients.serve([*busy, Reply("Paris")])
        http_client = own_transport(caller.sync, refuses=(2, 4))
        client = caller.client(clients, server, http_client=http_client, max_retries=5)
        with rollout("agent"):
            return server, await script(client)

    _, bare = await caller.run(run())
    recording = capture_only()
    server, seen = await caller.run(run())
    assert seen == bare
    (exchange,) = replayed(recording).exchanges
    assert [wire.status for wire in server.exchanges] == [500, 429, 200]
    assert (exchange.attempts, exchange.status_code, exchange.status) == (5, 200, "complete")
    assert same(exchange.request(), json.loads(server.exchanges[0].request))
    (span,) = recording.spans_named("exchange")
    events = [(event.name, (event.attributes or {}).get("http_status")) for event in span.events]
    assert events == [("retry", status) for status in (500, None, 429, None)]


@BOTH
@STREAMED
async def test_an_error_with_status_200(
    capture_only: Configure, clients: Clients, caller: Caller, stream: bool
) -> None:
    """A reply that is an error though HTTP says 200 is a failed completion with its message."""
    error = {"error": {"message": "the engine died", "type": "server_error", "code": 500}}
    body = json.dumps(error).encode()
    reply = Raw(200, body)
    if stream:
        reply = Raw(200, chunks=[b"data: %b\n\n" % body], content_type="text/event-stream")
    script = call(f"{CHAT}.create", messages=ASK, **({"stream": True} if stream else {}))
    recording, _, seen = await as_bare(capture_only, clients, caller, lambda: reply, script)
    assert seen[0] == ("raised" if stream else "returned")
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable) == ("error", False)
    assert completion.error is not None
    assert completion.error["message"] == "the engine died"
    assert completion.request_messages == ASK
    if not stream:
        assert completion.response == error


# --- what messages carry


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
    spans = [dict(span.attributes or {}) for span in recording.spans_named("exchange")]
    assert sum(count(attributes, IMAGE) for attributes in spans) == 2
    assert count(trajectory.to_dict(), IMAGE) == 1
    images = {id(c.exchange.prompt and [*c.exchange.prompt][-1]) for c in trajectory.completions}
    assert len(images) == 1


# --- endpoints beside


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
    assert trajectory.warnings == []
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
