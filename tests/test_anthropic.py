"""The Anthropic client: the same capture, histories and replays, with messages of another shape."""

from __future__ import annotations

import base64
import inspect
import json
import logging
import random
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_rollout
from otel_rollout import Trajectory, get_current_trajectory, rollout
from otel_rollout.record import capture
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall
from otel_rollout.wire import events_of_frames, merge
from otel_rollout.wire.messages import visible_key
from tests.conftest import Clients, Recording
from tests.test_capture import (
    STREAMED,
    Caller,
    Configure,
    ask_bare,
    attribute,
    configure,
    done,
    entered,
    exchange_spans,
    outcome,
    read,
    received,
    replayed,
    sent,
)

assert configure  # the fixture

Json = dict[str, Any]
KEY = "sk-ant-not-a-real-key"
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CACHE = {"type": "ephemeral"}
TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"{name}: " + "what it does, at length. " * 20,
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
    for name in ("add", "find")
]


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def said(content: Any) -> Json:
    return {"role": "assistant", "content": content}


def result(name: str, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **more}


@dataclass(frozen=True)
class Claude(Caller):
    """A sync or an async Anthropic client."""

    def client(self, clients: Clients, server: ModelServer, **options: Any) -> Any:
        url = server.base_url.removesuffix("/v1")
        options = {"base_url": url, "api_key": KEY, "max_retries": 0, **options}
        make = anthropic.Anthropic if self.sync else anthropic.AsyncAnthropic
        client = make(**options)
        _open.append(client)
        return client


_open: list[Any] = []
BOTH = pytest.mark.parametrize("caller", [Claude(True), Claude(False)], ids=["sync", "async"])


@pytest.fixture(autouse=True)
async def closed_clients(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """No variable of the machine decides, and no client stays open."""
    for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    while _open:
        await done(_open.pop().close())


async def ask(client: Any, **request: Any) -> Any:
    """Ask; a streamed reply is read to its end."""
    request = {"model": "m", "max_tokens": 100, "messages": ASK, **request}
    reply = await done(client.messages.create(**request))
    return await read(reply) if request.get("stream") else reply


async def played(
    recording: Recording, clients: Clients, caller: Claude, replies: Any, requests: list[Json]
) -> Trajectory:
    """The trajectory of a rollout that sends these requests one after the other."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            for request in requests:
                await ask(client, **request)

    await caller.run(script(caller.client(clients, clients.serve(replies))))
    return replayed(recording)


def table(trajectory: Trajectory) -> list[str]:
    """The histories: `u` a message of the user's, `0*` what completion 0 sampled and trains here,
    `0` the same as context, `0!` where its thinking was dropped, `a` a message nobody sampled.
    """
    number = {completion.span_id: n for n, completion in enumerate(trajectory.completions)}
    return [
        " ".join(
            item.message["role"][0]
            if item.completion is None
            else f"{number[item.completion.span_id]}{'*' * item.trainable}{'!' * item.is_break}"
            for item in history.items
        )
        for history in trajectory.histories
    ]


# --- the bodies


BLOCKS: list[Any] = [
    {"type": "thinking", "thinking": "France, so ...", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {
        "type": "text",
        "text": "Paris, à côté. 🗼",
        "citations": [{"type": "char_location", "cited_text": c} for c in ("Par", "is")],
    },
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "u", "title": "t", "page_age": None}],
    },
    {"type": "text", "text": ""},
    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"tool_calls": {"b": 1, "a": 2}}},
]
CASES: dict[str, tuple[Reply, Json]] = {
    "text": (Reply("Paris, à côté. 🗼"), {"extra_body": {"temperature": 0.25, "top_k": 7}}),
    "thinking": (
        Reply("Paris", reasoning="France, so ..."),
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    "tools": (
        Reply(
            "Wait.",
            tool_calls=[ToolCall("add", '{"a": 1.50, "b": "é\\u00e9\\n"}'), ToolCall("find")],
        ),
        {"tools": TOOLS, "tool_choice": {"type": "auto"}},
    ),
    "every kind of block": (Reply(message_extra={"content": BLOCKS}), {"tools": TOOLS}),
    "truncated": (Reply("Par", finish_reason="max_tokens"), {"max_tokens": 3}),
    "stop sequence": (
        Reply("Par", finish_reason="stop_sequence", extra={"stop_sequence": "is"}),
        {"stop_sequences": ["is"]},
    ),
    "nothing said": (Reply(None), {}),
    "no usage": (Reply("Paris", usage=False), {}),
    "system": (Reply("Paris"), {"system": [{"type": "text", "text": "Be brief. " * 40}]}),
    "extra body": (Reply("Paris"), {"extra_body": {"context_management": {"edits": []}}}),
}


@BOTH
@STREAMED
@pytest.mark.parametrize("case", CASES)
async def test_messages(
    configure: Configure, clients: Clients, caller: Claude, stream: bool, case: str
) -> None:
    """A completion holds the request that was sent and the reply as the server means it; the
    caller has what it would have without capture.
    """
    reply, options = CASES[case]
    if stream:
        options = {**options, "stream": True}
    bare = await outcome(caller.run(ask(caller.client(clients, clients.serve(reply)), **options)))
    assert bare[0] == "returned"
    server = clients.serve(reply)
    client = caller.client(clients, server)  # before capture is configured
    recording = configure()

    async def script() -> Any:
        with rollout("agent"):
            return await ask(client, **options)

    assert await outcome(caller.run(script())) == bare

    trajectory = replayed(recording)
    (wire,) = server.exchanges
    (completion,) = trajectory.completions
    body = {key: value for key, value in sent(wire).items() if key != "stream"}
    plain = ask_bare(clients.serve(reply), "/messages", body)
    assert trajectory.warnings == []
    assert completion.request == sent(wire)
    assert completion.response == plain
    assert completion.message == {"role": "assistant", "content": plain["content"]}
    assert completion.id == plain["id"]
    assert completion.status == "complete"
    assert completion.error is None
    assert completion.trainable
    assert completion.finish_reason == plain["stop_reason"]
    assert completion.stop_reason == plain["stop_sequence"]
    assert completion.usage == plain.get("usage")
    assert completion.model == "m"
    assert completion.stream is stream
    assert completion.request_messages == ASK
    assert completion.tools == options.get("tools")
    assert completion.token_ids is None
    assert completion.logprobs is None
    asked = {"max_tokens": 100, **options, **options.get("extra_body", {})}
    assert completion.sampling == {key: asked[key] for key in completion.sampling}
    assert completion.sampling.keys() >= asked.keys() & {"max_tokens", "top_k", "stop_sequences"}
    assert [item.trainable for item in trajectory.histories[0].items] == [False, True]


def _beta(client: Any) -> Any:
    return client.beta.messages


def _plain(client: Any) -> Any:
    return client.messages


@BOTH
@STREAMED
@pytest.mark.parametrize("api", [_plain, _beta])
@pytest.mark.parametrize("way", ["helper", "raw", "streaming", "streaming, unparsed"])
async def test_every_way_of_asking(
    recording: Recording,
    clients: Clients,
    caller: Claude,
    stream: bool,
    api: Callable[[Any], Any],
    way: str,
) -> None:
    """The stream helper, raw and streaming responses and the beta API are one whole exchange."""
    server = clients.serve(Reply("Paris", reasoning="So ...", tool_calls=[ToolCall("add", "{}")]))
    request: Json = {"model": "m", "max_tokens": 9, "messages": ASK}
    if stream and way != "helper":
        request["stream"] = True

    async def script(client: Any) -> None:
        with rollout("agent"):
            messages = api(client)
            if way == "helper":
                async with entered(messages.stream(**request)) as events:
                    final = await done(events.get_final_message())
                assert final.content[1].text == "Paris"
            elif way == "raw":
                raw = await done(messages.with_raw_response.create(**request))
                parsed = await done(raw.parse())
                assert len(await read(parsed)) > 3 if stream else parsed.content[1].text == "Paris"
            else:
                async with entered(messages.with_streaming_response.create(**request)) as raw:
                    if way == "streaming":
                        parsed = await done(raw.parse())
                        if stream:
                            await read(parsed)
                    else:
                        assert b"Paris" in b"".join(await read(raw.iter_bytes()))

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    (wire,), (completion,) = server.exchanges, trajectory.completions
    assert completion.request == sent(wire)
    assert (completion.status, completion.finish_reason) == ("complete", "tool_use")
    assert completion.message is not None
    assert [b["type"] for b in completion.message["content"]] == ["thinking", "text", "tool_use"]
    if not wire.response.startswith(b"event"):
        assert completion.response == received(wire)
    assert len(exchange_spans(recording)) == 1


@BOTH
async def test_what_does_not_generate_is_an_exchange_without_completion(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """Counting tokens and batches are recorded, and are nobody's completion."""
    batch = {"id": "msgbatch_1", "type": "message_batch", "processing_status": "in_progress"}
    server = clients.serve(routes={"/v1/messages/batches": Raw(body=json.dumps(batch).encode())})

    async def script(client: Any) -> None:
        with rollout("agent"):
            counted = await done(client.messages.count_tokens(model="m", messages=ASK))
            assert counted.input_tokens > 0
            params = {"model": "m", "max_tokens": 9, "messages": ASK}
            one = {"custom_id": "1", "params": params}
            made = await done(client.messages.batches.create(requests=[one]))
            assert made.id == "msgbatch_1"

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert trajectory.completions == []
    assert trajectory.histories == []
    assert trajectory.warnings == []
    assert [span.name for span in exchange_spans(recording)] == [
        "exchange /v1/messages/count_tokens",
        "exchange /v1/messages/batches",
    ]
    assert all(attribute(span, "status") == "complete" for span in exchange_spans(recording))


# --- streams


texts = st.text(max_size=12)
inputs = st.dictionaries(texts, st.recursive(st.none() | texts | st.integers(), st.lists))
blocks = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s" + text}, texts),
    st.builds(lambda value: {"type": "tool_use", "id": "t", "name": "n", "input": value}, inputs),
    st.sampled_from(BLOCKS),
)


@given(st.lists(blocks, max_size=4), st.integers(1, 9), st.booleans())
def test_a_merged_stream_is_the_unstreamed_reply(content: list[Json], size: int, usage: bool):
    """Whatever blocks a message has, its events merge to it."""
    from otel_rollout.testing.anthropic_bodies import message_body, message_events
    from otel_rollout.testing.bodies import Call

    reply = Reply(usage=usage, message_extra={"content": content})
    call = Call({"messages": ASK}, reply, 1, size, token_ids=False, logprobs=False)
    events = b"".join(message_events(call)).decode()
    merged = merge(events)
    assert merged.body == message_body(call)
    assert merged.complete
    assert merged.error is None
    left = merge(events[: events.index("event: message_stop")])
    assert left == merged
    cut = merge(events[: events.index("event: message_delta")])
    assert cut.body["content"] == merged.body["content"]
    assert not cut.complete


def events(*chunks: Json) -> str:
    return "".join(f"event: {c['type']}\ndata: {json.dumps(c)}\n\n" for c in chunks)


def test_what_newer_servers_stream() -> None:
    """Unknown fields survive: of blocks, deltas, usage and of the message; null changes nothing."""
    start = {"id": "msg_1", "type": "message", "content": [], "usage": {"input_tokens": 3, "x": 1}}
    body = merge(
        events(
            {"type": "message_start", "message": start},
            {
                "type": "content_block_start",
                "index": 1,
                "content_block": {"type": "compaction", "content": None, "new": [1]},
            },
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "compaction_delta", "content": "short", "encrypted_content": "e"},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "hi"},
            },
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "container": {"id": "c"}},
                "usage": {"input_tokens": None, "output_tokens": 5},
                "context_management": {"applied_edits": []},
            },
            {"type": "message_stop"},
        )
    ).body
    assert body == {
        "id": "msg_1",
        "type": "message",
        "content": [
            {"type": "text", "text": "hi"},
            {"type": "compaction", "content": "short", "new": [1], "encrypted_content": "e"},
        ],
        "usage": {"input_tokens": 3, "x": 1, "output_tokens": 5},
        "stop_reason": "end_turn",
        "container": {"id": "c"},
        "context_management": {"applied_edits": []},
    }


@pytest.mark.parametrize(
    "chunk",
    [
        {"type": "message_start"},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": [1]},
        {"type": "content_block_delta", "index": 0, "delta": {"text": 5}},
        {"type": "message_delta", "delta": 5},
    ],
)
def test_events_of_another_shape_are_kept_as_they_are(chunk: Json) -> None:
    """A stream that only seems to be of the Messages API is not merged, and nothing is raised."""
    start = {"type": "message_start", "message": {"content": []}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
    merged = merge(events(start, block, chunk, {"type": "message_stop"}))
    assert merged.body is None
    assert merged.complete


@BOTH
async def test_a_tool_input_that_was_cut_stays_text(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """Input that is no JSON, since the reply hit its limit, is the text that was sampled."""
    cut = '{"city": "Par'
    reply = Reply(tool_calls=[ToolCall("find", cut)], finish_reason="max_tokens")
    trajectory = await played(recording, clients, caller, reply, [{"stream": True}])
    (completion,) = trajectory.completions
    assert completion.message is not None
    assert completion.message["content"][0]["input"] == cut
    assert completion.status == "complete"


# --- how calls end


@BOTH
@pytest.mark.parametrize("events_read", [0, 1, 4])
@pytest.mark.parametrize("how", ["break", "close", "helper"])
async def test_a_stream_that_is_left(
    recording: Recording, clients: Clients, caller: Claude, events_read: int, how: str
) -> None:
    """A stream that the caller leaves is abandoned, kept as far as it came, and not trainable."""
    server = clients.serve(Reply("Paris, the city of light. " * 50))
    request: Json = {"model": "m", "max_tokens": 9, "messages": ASK}

    async def script(client: Any) -> None:
        with rollout("agent"):
            if how == "helper":
                async with entered(client.messages.stream(**request)) as stream:
                    await read(stream, events_read) if events_read else None
                return
            stream = await done(client.messages.create(stream=True, **request))
            if events_read:
                await read(stream, events_read)
            if how == "close":
                await done(stream.close())

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert completion.status == "abandoned"
    assert not completion.trainable


@BOTH
async def test_a_reader_that_stops_at_the_last_event_has_it_all(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """Who leaves a stream at `message_stop` has a complete reply, in the trajectory at once."""
    server = clients.serve(Reply("Paris"))

    async def script(client: Any) -> None:
        with rollout("agent"):
            request: Json = {"model": "m", "max_tokens": 9, "messages": ASK, "stream": True}
            stream = await done(client.messages.create(**request))
            if caller.sync:
                for event in stream:
                    if event.type == "message_stop":
                        break
            else:
                async for event in stream:
                    if event.type == "message_stop":
                        break
            live = get_current_trajectory()
            assert live is not None
            assert [c.status for c in live.completions] == ["complete"]

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.finish_reason) == ("complete", "end_turn")


@BOTH
async def test_a_stream_that_is_cut(recording: Recording, clients: Clients, caller: Claude) -> None:
    """A stream whose connection breaks is an error; what was said until then is kept."""
    server = clients.serve(Reply("Paris", cut_after=4), chunk_size=2)

    async def script(client: Any) -> None:
        with rollout("agent"):
            kind, *_ = await outcome(ask(client, stream=True))
            assert kind == "raised"

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    assert completion.message == said([{"type": "text", "text": "Pa"}])
    assert completion.finish_reason is None
    assert not completion.trainable


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}


@BOTH
async def test_an_error_inside_a_stream(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """An `error` event ends the call with its message; what was said until then is kept."""
    start = {"id": "msg_9", "type": "message", "role": "assistant", "content": [], "model": "m"}
    said_so_far = events(
        {"type": "message_start", "message": start},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": "Pa"},
        },
        {"type": "ping"},
    )
    chunks = [said_so_far.encode(), events(OVERLOADED).encode()]
    server = clients.serve(Raw(chunks=chunks, content_type="text/event-stream; charset=utf-8"))

    async def script(client: Any) -> Any:
        with rollout("agent"):
            return await outcome(ask(client, stream=True))

    kind, error, *_ = await caller.run(script(caller.client(clients, server)))
    assert kind == "raised"
    assert issubclass(error, anthropic.APIStatusError)
    (completion,) = replayed(recording).completions
    assert completion.status == "error"
    assert completion.id == "msg_9"
    assert completion.error == {"type": "ErrorResponse", "message": "Overloaded"}
    assert completion.message == said([{"type": "text", "text": "Pa"}])
    assert not completion.trainable


def failing(status: int, message: str, **headers: str) -> Raw:
    error = {"type": "error", "error": {"type": "some_error", "message": message}}
    return Raw(status, json.dumps(error).encode(), headers=headers)


@BOTH
@STREAMED
async def test_retries(
    recording: Recording, clients: Clients, caller: Claude, stream: bool
) -> None:
    """Overloaded twice, then a reply: one exchange, with what its attempts came to."""
    busy = failing(529, "Overloaded", **{"retry-after-ms": "1"})
    server = clients.serve([busy, busy, Reply("Paris")])

    async def script(client: Any) -> None:
        with rollout("agent"):
            await ask(client, stream=stream)

    await caller.run(script(caller.client(clients, server, max_retries=2)))
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert completion.request == sent(server.exchanges[0])
    (span,) = exchange_spans(recording)
    assert attribute(span, "attempts") == 3
    retries = [dict(event.attributes or {}) for event in span.events if event.name == "retry"]
    assert retries == [{"http_status": 529}, {"http_status": 529}]


@BOTH
@STREAMED
@pytest.mark.parametrize(("status", "name"), [(400, "BadRequestError"), (529, "OverloadedError")])
async def test_a_call_that_fails(
    recording: Recording, clients: Clients, caller: Claude, stream: bool, status: int, name: str
) -> None:
    """An HTTP error is a completion without message, with the server's words; nothing leaks."""
    server = clients.serve(failing(status, f"no: your key is {KEY}"))

    async def script(client: Any) -> Any:
        with rollout("agent"):
            return await outcome(ask(client, stream=stream))

    kind, error, text, *_ = await caller.run(script(caller.client(clients, server)))
    assert kind == "raised"
    assert KEY in text
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.message, completion.trainable) == ("error", None, False)
    assert completion.error is not None
    assert completion.error["type"] == error.__name__
    assert "no: your key is" in completion.error["message"]
    assert completion.request == sent(server.exchanges[0])
    assert completion.response["error"]["type"] == "some_error"
    (span,) = exchange_spans(recording)
    assert attribute(span, "response.status_code") == status


@BOTH
async def test_no_span_holds_a_key(recording: Recording, clients: Clients, caller: Claude) -> None:
    """Neither the key nor a token is on any span, also when an error repeats them."""
    server = clients.serve([Reply("Paris"), failing(401, KEY), failing(401, "tok-of-a-login")])

    async def script(client: Any) -> None:
        with rollout("agent"):
            await ask(client)
            await outcome(ask(client))
            headers = {"Authorization": "Bearer tok-of-a-login"}
            await outcome(ask(client, extra_headers=headers))

    await caller.run(script(caller.client(clients, server)))
    assert len(replayed(recording).completions) == 3
    for span in recording.spans:
        text = span.to_json()
        assert KEY not in text
        assert "tok-of-a-login" not in text


MIDDLEWARE = pytest.mark.skipif(
    not hasattr(anthropic, "Middleware"), reason="this version of anthropic has no middleware"
)


@MIDDLEWARE
@BOTH
@STREAMED
async def test_an_error_that_a_middleware_saw(
    recording: Recording, clients: Clients, caller: Claude, stream: bool
) -> None:
    """A middleware that only looks on changes nothing of how a call fails."""

    def look(request: Any, call_next: Any) -> Any:
        return call_next(request)

    async def look_async(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    async def script(client: Any) -> None:
        with rollout("agent"):
            assert (await outcome(ask(client, stream=stream)))[0] == "raised"

    server = clients.serve(failing(400, "no such model"))
    middleware = [look if caller.sync else look_async]
    await caller.run(script(caller.client(clients, server, middleware=middleware)))
    (completion,) = replayed(recording).completions
    assert completion.error is not None
    assert completion.error["type"] == "BadRequestError"
    assert completion.response["error"]["message"] == "no such model"
    (span,) = exchange_spans(recording)
    assert attribute(span, "status") == "error"


@MIDDLEWARE
@BOTH
@STREAMED
@pytest.mark.parametrize("first", [failing(500, "no"), Reply("Lyon")], ids=["error", "reply"])
async def test_a_middleware_that_asks_again(
    recording: Recording, clients: Clients, caller: Claude, stream: bool, first: Raw | Reply
) -> None:
    """A client's middleware that sees a response and asks again: the last one counts."""
    status = first.status if isinstance(first, Raw) else 200
    server = clients.serve([first, Reply("Paris")])

    def again(request: Any, call_next: Any) -> Any:
        response = call_next(request).http_response
        assert response.status_code == status
        response.close()
        return call_next(request)

    async def again_async(request: Any, call_next: Any) -> Any:
        response = (await call_next(request)).http_response
        assert response.status_code == status
        await response.aclose()
        return await call_next(request)

    async def script(client: Any) -> None:
        with rollout("agent"):
            await ask(client, stream=stream)

    middleware = [again if caller.sync else again_async]
    await caller.run(script(caller.client(clients, server, middleware=middleware)))
    (completion,) = replayed(recording).completions
    assert completion.status == "complete"
    assert completion.message == said([{"type": "text", "text": "Paris"}])


# --- histories


def dumped(message: Any) -> list[Any]:
    """Its content as a client keeps it that stores plain JSON."""
    return [block.model_dump() for block in message.content]


@BOTH
@STREAMED
@pytest.mark.parametrize("keep", [lambda m: m.content, dumped], ids=["objects", "dumped"])
async def test_a_tool_loop_is_one_history(
    recording: Recording, clients: Clients, caller: Claude, stream: bool, keep: Any
) -> None:
    """Replies with parallel tool uses, replayed as objects or as JSON, are one conversation."""
    calls = [ToolCall("add", '{"a": 1.0,  "b": []}'), ToolCall("find", "{}")]
    server = clients.serve([Reply("Wait.", tool_calls=calls), Reply(tool_calls=calls), "Done."])

    async def script(client: Any) -> None:
        with rollout("agent"):
            messages = list(ASK)
            for _ in range(3):
                request = {"model": "m", "max_tokens": 9, "messages": messages, "tools": TOOLS}
                if stream:
                    async with entered(client.messages.stream(**request)) as opened:
                        reply = await done(opened.get_final_message())
                else:
                    reply = await done(client.messages.create(**request))
                uses = [block for block in reply.content if block.type == "tool_use"]
                messages = [
                    *messages,
                    said(keep(reply)),
                    user([result(use.id, str(n)) for n, use in enumerate(uses)]),
                ]

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert table(trajectory) == ["u 0* u 1* u 2*"]
    assert trajectory.warnings == []
    assert trajectory.histories[0].tools == TOOLS
    assert [c.request for c in trajectory.completions] == [sent(e) for e in server.exchanges]


THOUGHT = {"type": "thinking", "thinking": "So ...", "signature": "signature-000001"}
PARIS = {"type": "text", "text": "Paris"}
MORE = user("And of Spain?")


@BOTH
@pytest.mark.parametrize(
    ("content", "histories"),
    [
        ([THOUGHT, PARIS], "u 0* u 1*"),
        ([PARIS], "u 0*! u 1*"),
        ("Paris", "u 0*! u 1*"),
        ([{**PARIS, "cache_control": CACHE}], "u 0*! u 1*"),
        ([{**THOUGHT, "thinking": "Edited"}, PARIS], "u 0*! u 1*"),
        ([{"type": "redacted_thinking", "data": "x"}, PARIS], "u 0*! u 1*"),
        ([THOUGHT, {**PARIS, "citations": None}], "u 0* u 1*"),
        ([THOUGHT, PARIS, {"type": "text", "text": ""}], "u 0* u 1*"),
    ],
)
async def test_thinking_that_is_kept_or_dropped(
    recording: Recording, clients: Clients, caller: Claude, content: Any, histories: str
) -> None:
    """A reply replayed without its thinking continues its history, with a break."""
    replies = [Reply("Paris", reasoning="So ..."), Reply("Madrid")]
    requests: list[Json] = [{}, {"messages": [*ASK, said(content), MORE]}]
    trajectory = await played(recording, clients, caller, replies, requests)
    assert table(trajectory) == [histories]


@BOTH
@pytest.mark.parametrize(
    "content", ["Lyon", [PARIS, PARIS], [{**PARIS, "text": "Paris "}], [], [THOUGHT]]
)
async def test_an_edited_reply_is_another_message(
    recording: Recording, clients: Clients, caller: Claude, content: Any
) -> None:
    """A reply that was replayed edited trains on its own; the edited one is context."""
    replies = [Reply("Paris", reasoning="So ..."), Reply("Madrid")]
    requests: list[Json] = [{}, {"messages": [*ASK, said(content), MORE]}]
    trajectory = await played(recording, clients, caller, replies, requests)
    assert sorted(table(trajectory)) == ["u 0*", "u a u 1*"]


@BOTH
async def test_cache_breakpoints_may_move(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """Where the client marks what is to be cached (system, tools, messages) changes nothing."""
    marked = {"cache_control": CACHE}
    long = "Be brief. " * 60
    first: Json = {
        "system": long,
        "tools": [TOOLS[0], {**TOOLS[1], **marked}],
        "messages": [user([{"type": "text", "text": "Go", **marked}])],
    }
    use: Json = {"type": "tool_use", "id": "toolu_000001_0", "name": "add", "input": {"a": 1}}
    second: Json = {
        "system": [{"type": "text", "text": long, **marked}],
        "tools": TOOLS,
        "messages": [
            user("Go"),
            said([use]),
            user([result(use["id"], "1", is_error=False, **marked)]),
        ],
    }
    third: Json = {
        "system": [{"type": "text", "text": long}],
        "tools": [{**TOOLS[0], **marked}, TOOLS[1]],
        "messages": [
            user("Go"),
            said([{**use, **marked}]),
            user([result(use["id"], [{"type": "text", "text": "1", **marked}])]),
            said([{"type": "text", "text": "One.", **marked}]),
            user([{"type": "text", "text": "Thanks", **marked}]),
        ],
    }
    replies = [Reply(tool_calls=[ToolCall("add", '{"a": 1}')]), "One.", "Welcome."]
    trajectory = await played(recording, clients, caller, replies, [first, second, third])
    assert table(trajectory) == ["u 0* u 1* u 2*"]
    assert trajectory.warnings == []
    for completion, request in zip(trajectory.completions, [first, second, third], strict=True):
        assert {key: completion.request[key] for key in request} == request


@BOTH
@pytest.mark.parametrize("long", ["", "at length " * 60], ids=["short", "long"])
async def test_another_system_prompt_is_another_conversation(
    recording: Recording, clients: Clients, caller: Claude, long: str
) -> None:
    """The system prompt belongs to the conversation, as tools do, however short it is."""
    requests: list[Json] = []
    for system in ("You are A", "You are B"):
        tools = {"tools": TOOLS, "system": long + system}
        requests += [tools, {**tools, "messages": [*ASK, said("Paris"), MORE]}]
    replies = ["Paris", "Madrid", "Paris", "Madrid"]
    trajectory = await played(recording, clients, caller, replies, requests)
    assert sorted(table(trajectory)) == ["u 0* u 1*", "u 2* u 3*"]
    assert trajectory.warnings == []


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (user("a"), user([{"type": "text", "text": "a"}]), True),
        (user([result("t", "a")]), user([result("t", [{"type": "text", "text": "a"}])]), True),
        (user([result("t", "")]), user([{"type": "tool_result", "tool_use_id": "t"}]), True),
        (user([result("t", "a")]), user([result("t", "a", is_error=False)]), True),
        (user([result("t", "a")]), user([result("t", "a", is_error=True)]), False),
        (user([result("t", "a")]), user([result("u", "a")]), False),
        (user([result("t", "a")]), user([result("t", "b")]), False),
        (
            user([{"type": "document", "source": {}, "citations": {"enabled": True}}]),
            user([{"type": "document", "source": {}}]),
            False,
        ),
        (said([{**PARIS, "citations": [{"cited_text": "P"}]}]), said("Paris"), True),
        (
            said([{"type": "tool_use", "id": "t", "name": "n", "input": {"a": 1, "b": 2}}]),
            said([{"type": "tool_use", "name": "n", "id": "t", "input": {"b": 2, "a": 1}}]),
            True,
        ),
        (
            said([{"type": "tool_use", "id": "t", "name": "n", "input": {"a": 1}}]),
            said([{"type": "tool_use", "id": "t", "name": "n", "input": {"a": 2}}]),
            False,
        ),
        (
            said([{"type": "tool_use", "id": "t", "name": "n", "input": {}, "caller": {"x": 1}}]),
            said([{"type": "tool_use", "id": "t", "name": "n", "input": {}}]),
            True,
        ),
        (user([{"type": "thinking", "thinking": "a"}]), said([]), False),
    ],
)
def test_messages_that_a_model_sees_as_the_same(first: Json, second: Json, same: bool) -> None:
    """Two forms of a message are one only where the model sees no difference."""
    assert (visible_key(first) == visible_key(second)) is same


@BOTH
@pytest.mark.parametrize("reasoning", [None, "So ..."])
async def test_a_reply_that_was_begun_for_the_model(
    recording: Recording, clients: Clients, caller: Claude, reasoning: str | None
) -> None:
    """Only what the model said is sampled; the beginning that it was given is context."""
    begun = [*ASK, said("The answer is (")]
    replies = [Reply("Paris)", reasoning=reasoning), "Madrid"]
    apart = [*begun, said("Paris)"), MORE]
    trajectory = await played(
        recording, clients, caller, replies, [{"messages": begun}, {"messages": apart}]
    )
    assert table(trajectory) == [f"u a 0*{'!' if reasoning else ''} u 1*"]
    message = trajectory.completions[0].message
    assert message is not None
    assert message["content"][-1] == {"type": "text", "text": "Paris)"}


@BOTH
async def test_a_thread_that_the_server_keeps_is_one_history(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """A request that names the message it continues carries only what is new, and no tools."""
    calls = [ToolCall("add", "{}")]
    replies = [Reply("Go.", reasoning="So ...", tool_calls=calls), "One.", "Two.", "Other."]

    def go_on(name: str, *messages: Json) -> Json:
        thread = {"type": "continue", "previous_message_id": name}
        return {"messages": list(messages), "extra_body": {"thread": thread}}

    requests: list[Json] = [
        {"tools": TOOLS, "extra_body": {"thread": {"type": "create"}}},
        go_on("msg_000001", user([result("toolu_000001_0", "1")])),
        go_on("msg_000002", MORE),
        go_on("msg_000001", user([result("toolu_000001_0", "2")])),
    ]
    trajectory = await played(recording, clients, caller, replies, requests)
    assert sorted(table(trajectory)) == ["u 0 u 3*", "u 0* u 1* u 2*"]
    assert trajectory.warnings == []
    assert [history.tools for history in trajectory.histories] == [TOOLS, TOOLS]
    assert [message["role"] for message in trajectory.histories[0].messages()] == [
        *("user", "assistant") * 3
    ]


@BOTH
async def test_a_thread_whose_beginning_is_missing(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """A request that names a message of nobody's is a history of its own, and that is said."""
    thread = {"type": "continue", "previous_message_id": "msg_of_another"}
    requests = [{"extra_body": {"thread": thread}}]
    trajectory = await played(recording, clients, caller, "Paris", requests)
    assert table(trajectory) == ["u 0*"]
    (warning,) = trajectory.warnings
    assert "msg_of_another" in warning


@BOTH
async def test_an_image_is_stored_once(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """An image is carried by as many spans as any message, however long the conversation gets."""
    data = base64.b64encode(random.Random(0).randbytes(40_000)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    messages = [user([{"type": "image", "source": source}, {"type": "text", "text": "What?"}])]
    requests: list[Json] = []
    for number in range(8):
        requests.append({"messages": list(messages)})
        messages += [said(f"It is {number}."), user("Sure?")]
    replies = [f"It is {number}." for number in range(8)]
    trajectory = await played(recording, clients, caller, replies, requests)
    assert table(trajectory) == ["u 0* u 1* u 2* u 3* u 4* u 5* u 6* u 7*"]
    assert trajectory.completions[-1].request["messages"] == requests[-1]["messages"]
    assert sum(span.to_json().count(data) for span in exchange_spans(recording)) == 2


@BOTH
async def test_clients_of_two_libraries_in_one_rollout(
    recording: Recording, clients: Clients, caller: Claude
) -> None:
    """One rollout may use both clients; each conversation is its own."""
    server = clients.serve(["Paris", "Rome", "Madrid", "Lisbon"])

    async def script(claude: Any, gpt: Any) -> None:
        with rollout("agent"):
            messages = list(ASK)
            for _ in range(2):
                reply = await ask(claude, messages=messages)
                messages += [said(reply.content), MORE]
                other = await done(gpt.chat.completions.create(model="g", messages=ASK))
                assert other.choices[0].message.content

    openai_client = Caller(caller.sync).client(clients, server)
    await caller.run(script(caller.client(clients, server), openai_client))
    trajectory = replayed(recording)
    assert sorted(table(trajectory)) == ["u 0* u 2*", "u 1*", "u 3*"]
    assert trajectory.warnings == []
    assert [c.finish_reason for c in trajectory.completions] == ["end_turn", "stop"] * 2
    assert [c.request_model for c in trajectory.completions] == ["m", "g"] * 2


# --- other ways to the same models


VERTEX = "/projects/p/locations/r/publishers/anthropic/models/m:"
ANSWER = {
    "id": "msg_vrtx_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [PARIS],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


@BOTH
async def test_vertex(recording: Recording, clients: Clients, caller: Claude) -> None:
    """Claude on Vertex is asked at another URL; the completion is the same."""
    route = {VERTEX + "rawPredict": Raw(body=json.dumps(ANSWER).encode())}
    server = clients.serve(routes=route)
    make = anthropic.AnthropicVertex if caller.sync else anthropic.AsyncAnthropicVertex
    url = server.base_url.removesuffix("/v1")
    client = make(region="r", project_id="p", access_token=KEY, base_url=url)
    _open.append(client)

    async def script() -> None:
        with rollout("agent"):
            await ask(client)

    await caller.run(script())
    (completion,) = replayed(recording).completions
    assert completion.response == ANSWER
    assert completion.message == said([PARIS])
    assert completion.trainable
    assert completion.request == sent(server.exchanges[0])


def frame(payload: Json) -> bytes:
    """An event as AWS frames it: lengths, their checksum, headers, payload, the checksum of all."""
    headers = b""
    for name, value in ((b":event-type", b"chunk"), (b":message-type", b"event")):
        headers += bytes([len(name)]) + name + b"\x07" + struct.pack(">H", len(value)) + value
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", len(headers) + len(body) + 16, len(headers))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + body
    return message + struct.pack(">I", zlib.crc32(message))


def framed(text: str) -> list[bytes]:
    """Server-sent events in AWS's frames."""
    datas = [event.split("data: ")[1] for event in text.split("\n\n") if event]
    return [frame({"bytes": base64.b64encode(d.encode()).decode(), "p": "ab"}) for d in datas]


BEDROCK = pytest.mark.skipif(
    "api_key" not in inspect.signature(anthropic.AnthropicBedrock.__init__).parameters,
    reason="this version of anthropic needs boto3 for Bedrock",
)
PIECES = events(
    {"type": "message_start", "message": {**ANSWER, "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {**PARIS, "text": ""}},
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Paris"},
    },
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": 1},
    },
    {"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 1}},
)


def bedrock(caller: Claude, server: ModelServer) -> Any:
    make: Any = anthropic.AnthropicBedrock if caller.sync else anthropic.AsyncAnthropicBedrock
    url = server.base_url.removesuffix("/v1")
    _open.append(make(aws_region="r", api_key=KEY, base_url=url, max_retries=0))
    return _open[-1]


@BEDROCK
@BOTH
@pytest.mark.parametrize(
    ("frames", "status", "text"),
    [
        (framed(PIECES), "complete", "Paris"),
        ([*framed(PIECES)[:3], framed(PIECES)[3][:-9]], "error", "Paris"),
        ([*framed(PIECES)[:2], frame({"message": "Too many requests"})], "error", ""),
    ],
    ids=["whole", "cut", "exception"],
)
async def test_a_stream_of_bedrock(
    recording: Recording,
    clients: Clients,
    caller: Claude,
    frames: list[bytes],
    status: str,
    text: str,
) -> None:
    """Bedrock frames its events in a way of its own; they are merged all the same."""
    kind = "application/vnd.amazon.eventstream"
    route = {"/model/m/invoke-with-response-stream": Raw(chunks=frames, content_type=kind)}
    server = clients.serve(routes=route)

    async def script(client: Any) -> None:
        request: Json = {"model": "m", "max_tokens": 9, "messages": ASK, "stream": True}
        with rollout("agent"):
            async with entered(client.messages.with_streaming_response.create(**request)) as raw:
                assert b"".join(await read(raw.iter_bytes())) == b"".join(frames)

    await caller.run(script(bedrock(caller, server)))
    (completion,) = replayed(recording).completions
    assert completion.status == status
    assert completion.message == said([{**PARIS, "text": text}])
    if status == "complete":
        assert completion.response == ANSWER
    elif frames[-1].endswith(frame({"message": "Too many requests"})):
        assert completion.error == {"type": "ErrorResponse", "message": "Too many requests"}


@BEDROCK
@BOTH
async def test_bedrock(recording: Recording, clients: Clients, caller: Claude) -> None:
    """Claude on Bedrock is asked at another URL; the completion is the same."""
    answer = Raw(body=json.dumps(ANSWER).encode())
    server = clients.serve(routes={"/model/m/invoke": answer})

    async def script(client: Any) -> None:
        with rollout("agent"):
            await ask(client)

    await caller.run(script(bedrock(caller, server)))
    (completion,) = replayed(recording).completions
    assert completion.response == ANSWER
    assert completion.request == sent(server.exchanges[0])
    assert completion.trainable


@pytest.mark.parametrize("frames", [b"\0" * 16, b"data: {}\n\n" * 4, frame({})[:12] + b"x" * 90])
def test_what_is_no_frame_is_refused(frames: bytes) -> None:
    """Bytes that AWS did not frame are a ValueError, not something guessed."""
    with pytest.raises(ValueError, match=r"not a frame|Expecting value"):
        events_of_frames(frames)


# --- the hooks


def run_python(code: str) -> str:
    """The output of a program, in an interpreter of its own."""
    program = textwrap.dedent(code)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


CALL = """
    import json, sys
    import otel_rollout
    from otel_rollout import InMemoryTrajectoryExporter, rollout
    from otel_rollout.testing import ModelServer

    def call():
        import anthropic
        with ModelServer("Paris") as server:
            url = server.base_url.removesuffix("/v1")
            with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
                with rollout("agent"):
                    client.messages.create(
                        model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
                    )

    exporter = InMemoryTrajectoryExporter()
"""


@pytest.mark.parametrize("first", ["", "import anthropic", "import anthropic._base_client"])
def test_the_library_may_be_imported_before_or_after(first: str) -> None:
    """It is not imported by us, and hooked whenever somebody does."""
    code = f"""
    {first}
    {CALL}
    otel_rollout.configure(exporters=[exporter])
    print("anthropic" in sys.modules)
    call()
    (trajectory,) = exporter.get_finished_trajectories()
    print([completion.status for completion in trajectory.completions])
    """
    assert run_python(code).split("\n")[:2] == [str(bool(first)), "['complete']"]


def test_what_is_taken_out_stays_out() -> None:
    """After shutdown an import hooks nothing; configured again it does, and once."""
    code = f"""
    {CALL}
    otel_rollout.configure(exporters=[exporter])
    otel_rollout.shutdown()
    import anthropic._base_client as base
    print(hasattr(base.SyncAPIClient.request, "__wrapped__"))
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter])
    capture.instrument()
    print(hasattr(base.SyncAPIClient.request, "__wrapped__"))
    print(hasattr(base.SyncAPIClient.request.__wrapped__, "__wrapped__"))
    call()
    otel_rollout.shutdown()
    print(hasattr(base.SyncAPIClient.request, "__wrapped__"))
    print([len(t.completions) for t in exporter.get_finished_trajectories()])
    """
    assert run_python(code).split() == ["False", "True", "False", "False", "[1]"]


def test_a_version_without_the_methods_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is optional: what cannot be hooked is said in the log, and nothing is raised."""
    import anthropic._base_client as base

    monkeypatch.delattr(base.BaseClient, "_build_request")
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        otel_rollout.configure()
    assert "anthropic" in caplog.text
    assert "BaseClient._build_request" in caplog.text
    assert not hasattr(base.SyncAPIClient.request, "__wrapped__")
    assert capture._installed


async def test_outside_a_rollout_nothing_is_done(recording: Recording, clients: Clients) -> None:
    """A call outside any rollout leaves no exchange span."""
    caller = Claude(True)
    await caller.run(ask(caller.client(clients, clients.serve("Paris"))))
    assert exchange_spans(recording) == []
