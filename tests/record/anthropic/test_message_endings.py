"""Calls of the Anthropic client that are left, cut, refused or retried."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from otel_rollout import get_current_trajectory, rollout
from otel_rollout.testing import Raw, Reply
from tests.kit.calling import STREAMED, done, entered, outcome, read
from tests.kit.comparing import attribute, exchange_spans, replayed, sent
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import ASK, BOTH, KEY, Claude, Json, ask, events, said

pytestmark = pytest.mark.slow


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
    assert completion.error == {"type": "ErrorResponse", "message": "Overloaded (overloaded_error)"}
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
