"""Capture: the request as sent and the reply as received, whichever way the client was asked."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import json
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import openai
import pydantic
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, Trajectory, no_capture, rollout
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall, WireExchange
from otel_rollout.wire.json import dumps, loads
from tests.conftest import Clients, Recording

Json = dict[str, Any]
Script = Callable[[Any], Coroutine[Any, Any, Any]]
Configure = Callable[[], Recording]

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}: " + "what it does, at length. " * 20,
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
            "strict": True,
        },
    }
    for name in ("add", "find")
]


# --- what every test of this kind needs


@dataclass(frozen=True)
class Caller:
    """Whether a script has a sync client, in a thread of its own, or an async one."""

    sync: bool

    def client(self, clients: Clients, server: ModelServer, **options: Any) -> Any:
        make = clients.sync if self.sync else clients.asynchronous
        return make(server, **options)

    async def run(self, script: Coroutine[Any, Any, Any]) -> Any:
        """Run a script; with a sync client it never waits, so a thread runs it in one step."""
        return await asyncio.to_thread(_run_at_once, script) if self.sync else await script


def _run_at_once(script: Coroutine[Any, Any, Any]) -> Any:
    try:
        script.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a script with a sync client waited for something")


BOTH = pytest.mark.parametrize("caller", [Caller(True), Caller(False)], ids=["sync", "async"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


async def done(value: Any) -> Any:
    """The result of a call of a sync or of an async client."""
    return await value if inspect.isawaitable(value) else value


async def read(stream: Any, count: int | None = None) -> list[Any]:
    """The first `count` items of a stream, left as `break` leaves it, or all of them."""
    items: list[Any] = []
    # The instrumentor's wrappers of sync streams have the methods of async ones too.
    if hasattr(stream, "__aiter__") and not isinstance(stream, openai.Stream):
        async for item in stream:
            items.append(item)
            if len(items) == count:
                break
        return items
    for item in stream:
        items.append(item)
        if len(items) == count:
            break
    return items


@contextlib.asynccontextmanager
async def entered(context: Any) -> Any:
    """A sync or an async context manager."""
    if hasattr(context, "__aenter__") and not isinstance(context, openai.Stream):
        async with context as value:
            yield value
    else:
        with context as value:
            yield value


async def chat(client: Any, **request: Any) -> Any:
    """Ask; a streamed reply is read to its end."""
    request = {"model": "m", "messages": ASK, **request}
    result = await done(client.chat.completions.create(**request))
    return await read(result) if request.get("stream") else result


def replays(recording: Recording) -> list[Trajectory]:
    """The trajectories, by start; their spans give equal ones in any order, also when doubled."""
    live = sorted(recording.trajectories, key=lambda t: (t.start_time_ns, t.id))
    spans = list(recording.spans)
    shuffled = spans * 2
    random.Random(0).shuffle(shuffled)
    for given in (spans, spans[::-1], shuffled):
        assert otel_rollout.reconstruct(given) == live
    for trajectory in live:
        assert Trajectory.from_dict(loads(dumps(trajectory.to_dict()))) == trajectory
    return live


def replayed(recording: Recording) -> Trajectory:
    """The only trajectory, which its spans give too."""
    (trajectory,) = replays(recording)
    return trajectory


def visible(value: Any) -> Any:
    """What a user has in hand, comparable: models as their class and fields, lists of them."""
    if isinstance(value, pydantic.BaseModel):
        fields = {key: visible(item) for key, item in dict(value).items()}
        return [value.__class__.__name__, fields, value.model_extra]
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value


async def outcome(result: Awaitable[Any]) -> tuple[Any, ...]:
    """What comes back, or the exception that does, comparable with that of another run."""
    try:
        return "returned", visible(await result)
    except Exception as error:
        body = getattr(error, "body", None)
        causes = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(type(cause))
            cause = cause.__cause__ or cause.__context__
        return "raised", type(error), str(error), body, causes


async def as_bare(
    configure: Configure,
    clients: Clients,
    caller: Caller,
    reply: Callable[[], Any],
    script: Script,
    **options: Any,
) -> tuple[Recording, ModelServer, tuple[Any, ...]]:
    """Run a script with a client that nothing watches, then in a rollout: it must see the same.

    `options` are the client's. Returns what was recorded, the server of the rollout, what was seen.
    """

    async def in_rollout(client: Any) -> Any:
        with rollout("agent"):
            return await script(client)

    client = caller.client(clients, clients.serve(reply()), **options)
    bare = await outcome(caller.run(script(client)))
    server = clients.serve(reply())
    client = caller.client(clients, server, **options)  # before capture is configured
    recording = configure()
    seen = await outcome(caller.run(in_rollout(client)))
    assert seen == bare
    return recording, server, seen


@pytest.fixture
def configure(request: pytest.FixtureRequest) -> Configure:
    """Configure the library when called, not before."""
    return lambda: request.getfixturevalue("recording")


def exchange_spans(recording: Recording) -> list[ReadableSpan]:
    return recording.spans_named("exchange")


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(f"rollout.exchange.{name}")


def sent(exchange: WireExchange) -> Any:
    return json.loads(exchange.request)


def received(exchange: WireExchange) -> Any:
    return json.loads(exchange.response)


def without_null(value: Any) -> Any:
    """JSON without members that are null: a stream does not send them."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def ask_bare(server: ModelServer, path: str, body: Json) -> Any:
    """The reply that the server gives unstreamed, asked without any client that is captured."""
    import urllib.request

    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        return json.load(response)


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


class Capital(pydantic.BaseModel):
    """What `parse` makes of a reply."""

    city: str


def structured(client: Any) -> Any:
    """Where `parse` and `stream` are in this version of the client."""
    completions = client.chat.completions
    return completions if hasattr(completions, "parse") else client.beta.chat.completions


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


@pytest.fixture
def capture_only() -> Configure:
    """Configure, when called, without an instrumentation beside capture."""

    def configure() -> Recording:
        exporter, span_exporter = InMemoryTrajectoryExporter(), InMemorySpanExporter()
        provider = otel_rollout.configure(exporters=[exporter], instrumentor=None)
        provider.add_span_processor(SimpleSpanProcessor(span_exporter))
        return Recording(provider, exporter, span_exporter)

    return configure


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


# --- where it is captured


@BOTH
@STREAMED
async def test_nothing_is_captured_outside_rollouts(
    recording: Recording, clients: Clients, caller: Caller, stream: bool
) -> None:
    """A call outside of a rollout, or inside `no_capture()`, leaves no exchange."""
    server = clients.serve("Paris")
    options = {"stream": True} if stream else {}

    async def script(client: Any) -> None:
        await chat(client, **options)
        with rollout("agent"), no_capture():
            await chat(client, **options)
        await chat(client, **options)

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert (trajectory.exchanges, trajectory.warnings) == ([], [])
    assert exchange_spans(recording) == []
    assert len(recording.spans_named("openai.chat")) == 3


@BOTH
@STREAMED
async def test_parents(
    recording: Recording, clients: Clients, caller: Caller, stream: bool
) -> None:
    """The exchange span is a child of the LLM span, which is a child of the rollout's."""
    server = clients.serve("Paris")

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client, **({"stream": True} if stream else {}))

    await caller.run(script(caller.client(clients, server)))
    replayed(recording)
    (llm,) = recording.spans_named("openai.chat")
    (outer,) = recording.spans_named("invoke_agent agent")
    (exchange,) = exchange_spans(recording)
    assert exchange.name == "exchange /chat/completions"
    assert exchange.parent is not None
    assert llm.parent is not None
    assert exchange.parent.span_id == llm.context.span_id
    assert llm.parent.span_id == outer.context.span_id
    assert outer.parent is None
    assert {s.context.trace_id for s in recording.spans} == {outer.context.trace_id}
    # The current span of the HTTP layer, so of its instrumentations and of `traceparent`.
    assert trace.get_current_span() is trace.INVALID_SPAN


@BOTH
async def test_parents_without_an_instrumentation(
    capture_only: Configure, clients: Clients, caller: Caller
) -> None:
    """With `instrumentor=None` the exchange span is a child of the rollout's."""
    recording = capture_only()
    server = clients.serve("Paris")

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client)

    await caller.run(script(caller.client(clients, server)))
    assert replayed(recording).warnings == []
    (outer,) = recording.spans_named("invoke_agent")
    (exchange,) = exchange_spans(recording)
    assert exchange.parent is not None
    assert exchange.parent.span_id == outer.context.span_id
    assert len(recording.spans) == 2


@BOTH
async def test_clients_made_before_and_after(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """It does not matter whether a client, or a bound method of it, is older than configure()."""
    server = clients.serve("Paris")
    old = caller.client(clients, server)
    create = old.chat.completions.create  # a method that was bound before
    recording = configure()
    new = caller.client(clients, server)

    async def script() -> None:
        with rollout("agent"):
            await done(create(model="old", messages=ASK))
            await chat(old, model="old")
            await chat(new, model="new")

    await caller.run(script())
    models = [completion.request_model for completion in replayed(recording).completions]
    assert models == ["old", "old", "new"]


@BOTH
async def test_a_provider_that_samples_nothing(clients: Clients, caller: Caller) -> None:
    """Training does not sample: what the user's sampler drops is captured all the same."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    exporter, span_exporter = InMemoryTrajectoryExporter(), InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    otel_rollout.configure(tracer_provider=provider, exporters=[exporter])
    server = clients.serve("Paris")

    async def script(client: Any) -> None:
        with rollout("agent"):
            await chat(client)

    await caller.run(script(caller.client(clients, server)))
    (trajectory,) = exporter.get_finished_trajectories()
    (completion,) = trajectory.completions
    assert completion.response == received(server.exchanges[0])
    assert span_exporter.get_finished_spans() == ()


async def test_concurrent_rollouts_do_not_mix(recording: Recording, clients: Clients) -> None:
    """Calls of rollouts that run at once, over one client, stay with the rollout that made them."""
    server = clients.serve(lambda body: Reply(body["model"], chunk_delay=0.002))
    client = clients.asynchronous(server)

    async def agent(name: str) -> None:
        async with rollout(name):
            calls = (chat(client, model=name, stream=bool(i % 2)) for i in range(4))
            await asyncio.gather(*calls)

    await asyncio.gather(*(agent(f"agent-{i}") for i in range(8)))
    trajectories = replays(recording)
    assert sorted(t.name for t in trajectories) == [f"agent-{i}" for i in range(8)]
    for trajectory in trajectories:
        assert trajectory.warnings == []
        said = [c.message["content"] for c in trajectory.completions if c.message]
        assert said == [trajectory.name] * 4


# --- retries


def failing(*statuses: int, then: Any = "Paris") -> Iterable[Any]:
    """Errors that the client retries at once, then a reply."""
    error = json.dumps({"error": {"message": "busy", "type": "server_error"}}).encode()
    headers = {"retry-after-ms": "1"}
    return itertools.chain((Raw(status, error, headers=headers) for status in statuses), [then])


@BOTH
@STREAMED
@pytest.mark.parametrize("statuses", [(500,), (429,), (503, 429)], ids=str)
async def test_retries_are_one_completion(
    configure: Configure,
    clients: Clients,
    caller: Caller,
    stream: bool,
    statuses: tuple[int, ...],
) -> None:
    """The client's retries are events of one exchange, and the last attempt is its reply."""

    async def script(client: Any) -> Any:
        return await chat(client, **({"stream": True} if stream else {}))

    recording, server, _ = await as_bare(
        configure, clients, caller, lambda: failing(*statuses), script, max_retries=2
    )
    assert [wire.status for wire in server.exchanges] == [*statuses, 200]
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert completion.trainable
    assert completion.exchange.attempts == len(statuses) + 1
    assert completion.request == sent(server.exchanges[-1])
    (span,) = exchange_spans(recording)
    assert attribute(span, "response.status_code") == 200
    assert [event.name for event in span.events] == ["retry"] * len(statuses)
    assert [dict(event.attributes or {}) for event in span.events] == [
        {"http_status": status} for status in statuses
    ]


@BOTH
async def test_retries_that_give_up(configure: Configure, clients: Clients, caller: Caller) -> None:
    """When every attempt fails, one failed completion says with what."""
    recording, server, seen = await as_bare(
        configure, clients, caller, lambda: failing(500, 500, then=Raw(503)), chat, max_retries=1
    )
    assert seen[1] is openai.InternalServerError
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    assert completion.error is not None
    assert completion.error["type"] == "InternalServerError"
    assert completion.exchange.attempts == 2
    assert completion.exchange.status_code == 500
    assert completion.response == received(server.exchanges[-1])
    assert not completion.trainable


@BOTH
async def test_a_connection_that_is_refused(
    configure: Configure, clients: Clients, caller: Caller
) -> None:
    """A server that is not there: the client's own exception, and a completion that names it."""

    async def script(client: Any) -> Any:
        client.base_url = "http://127.0.0.1:9/v1"
        return await chat(client)

    recording, _, seen = await as_bare(configure, clients, caller, lambda: None, script)
    assert seen[1] is openai.APIConnectionError
    (completion,) = replayed(recording).completions
    assert completion.error == {"type": "APIConnectionError", "message": "Connection error."}
    assert completion.request == {"messages": ASK, "model": "m"}
    assert completion.response is None


# --- secrets


KEY = "sk-proj-Zq8vT3nXw5Rk1Lm7Yp2Bs9Dc4Fg6Hj0"


def everything(recording: Recording) -> str:
    """All text of our spans and of the trajectories."""
    texts = [dumps(t.to_dict()) for t in recording.trajectories]
    for span in recording.spans:
        if span.instrumentation_scope and span.instrumentation_scope.name == "otel_rollout":
            events = [[event.name, dict(event.attributes or {})] for event in span.events]
            texts.append(repr([dict(span.attributes or {}), events, span.status.description]))
    return "\n".join(texts)


def echo(status: int) -> Raw:
    said = f"Incorrect API key provided: {KEY}. You sent 'Authorization: Bearer {KEY}'."
    body = {"error": {"message": said, "type": "invalid_request_error", "code": None}}
    return Raw(status, json.dumps(body).encode())


def echo_in_stream() -> Raw:
    event = f'data: {{"error": {{"message": "You sent Bearer {KEY}", "code": 401}}}}\n\n'
    return Raw(200, event.encode(), content_type="text/event-stream")


SECRETS: dict[str, tuple[Any, Json]] = {
    "reply": ("Paris", {}),
    "error": (echo(401), {}),
    "server error": (echo(500), {}),
    "error with status 200": (echo(200), {}),
    "error of a stream": (echo(401), {"stream": True}),
    "error in a stream": (echo_in_stream(), {"stream": True}),
}


@BOTH
@pytest.mark.parametrize("case", SECRETS)
async def test_secrets(configure: Configure, clients: Clients, caller: Caller, case: str) -> None:
    """The API key is nowhere in what is recorded, also where an error echoes it."""
    reply, options = SECRETS[case]

    async def script(client: Any) -> Any:
        return await chat(client, **options)

    recording, server, _ = await as_bare(
        configure, clients, caller, lambda: reply, script, api_key=KEY
    )
    assert server.exchanges[0].request_headers["authorization"] == f"Bearer {KEY}"
    replayed(recording)
    found = everything(recording)
    assert "/chat/completions" in found
    assert KEY not in found
    assert re.search("bearer", found.replace("Bearer [redacted]", ""), re.IGNORECASE) is None
