"""A replay: calls that ask what was recorded get its bytes again; the first other one ends it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import ConfigurationError, Trajectory, reconstruct, rollout
from otel_rollout.gateway import Difference, ReplayServer
from otel_rollout.gateway.recorded_calls import RecordedCalls, RecordedReply
from otel_rollout.record import ExchangeRecorder, current_rollout
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall
from tests.gateway.programs import Serve
from tests.gateway.replays import CHAT, STREAMED, agent, answers, difference, recorded, same
from tests.kit.conversations import ASK, TOOLS, user
from tests.kit.model_apis import TALKS
from tests.kit.outside import open_to, read_answer, request_bytes, send
from tests.kit.recording import Clients, Recording
from tests.kit.talk import Talk

# --- what was recorded


@STREAMED
@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.name)
async def test_every_api(
    captured: Recording, clients: Clients, gateway_to: Serve, talk: Talk, stream: bool
):
    """Both turns of a tool loop, in any order."""
    path = talk.streamed if stream else talk.path
    bodies = [{**body, "stream": stream} if "model" in body else body for body in talk.requests()]
    server = clients.serve(routes={unquote(path): route for path, route in talk.routes().items()})
    asked = [(path, body) for body in bodies]
    before, trajectories = await recorded(captured, gateway_to, server, asked)
    assert [answer.status for answer in before] == [200, 200]
    async with ReplayServer(trajectories) as replay:
        same((await answers(replay.url, asked[::-1]))[::-1], before)
    assert replay.difference is None
    assert replay.unasked == []


@STREAMED
def test_openais_client(captured: Recording, clients: Clients, stream: bool):
    """What it gives its caller is what it gave when its own process recorded it."""
    client = clients.sync(clients.serve(Reply("Hi ✓", tool_calls=[ToolCall("add", "{}")])))
    with rollout("agent"):
        before = agent(client, stream=stream)
    with ReplayServer(reconstruct(captured.spans)) as replay:
        with openai.OpenAI(base_url=replay.base_url, api_key="k") as again:
            assert agent(again, stream=stream) == before
            assert [model.id for model in again.models.list()] == ["m"]
        assert (replay.difference, replay.unasked) == (None, [])


@STREAMED
def test_anthropics_client(captured: Recording, clients: Clients, stream: bool):
    """The same of another client and its list of models."""

    def asked(url: str) -> list[Any]:
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
            options: Any = {"stream": stream, "max_tokens": 9}
            reply: Any = client.messages.create(model="m", messages=[user("hi")], **options)
            return [each.to_dict() for each in reply] if stream else [reply.to_dict()]

    with rollout("agent"):
        before = asked(clients.serve("Hello").base_url.removesuffix("/v1"))
    with ReplayServer(reconstruct(captured.spans)) as replay:
        assert asked(replay.url) == before
        with anthropic.Anthropic(base_url=replay.url, api_key="k") as client:
            assert [model.id for model in client.models.list()] == ["m"]
            assert client.models.retrieve("m").display_name == "m"


async def test_a_reply_in_the_background(captured: Recording, clients: Clients):
    """Each time that it is asked for gives what it gave."""
    client = clients.asynchronous(clients.serve(Reply("done", polls=2)))

    async def asked(client: openai.AsyncOpenAI) -> list[Any]:
        reply = await client.responses.create(model="m", input="Say it", background=True)
        return [(await client.responses.retrieve(reply.id)).to_dict() for _ in range(3)]

    with rollout("agent"):
        before = await asked(client)
    assert [reply["status"] for reply in before] == ["in_progress", "in_progress", "completed"]
    async with (
        ReplayServer(reconstruct(captured.spans)) as replay,
        openai.AsyncOpenAI(base_url=replay.base_url, api_key="k") as again,
    ):
        assert await asked(again) == before


async def test_errors_have_their_status(captured: Recording, clients: Clients, gateway_to: Serve):
    """A client that tries again gets what it got then: the error, then the reply."""
    error = json.dumps({"error": {"message": "slow down", "type": "rate_limit"}}).encode()
    replies = [Raw(429, error), Reply("Hello"), Raw(500, b"<html>no</html>"), Raw(body=b"no json")]
    asked = [("/v1/chat/completions", CHAT)] * 4
    before, trajectories = await recorded(captured, gateway_to, clients.serve(replies), asked)
    assert [answer.status for answer in before] == [429, 200, 500, 200]
    async with ReplayServer(trajectories) as replay:
        same(await answers(replay.url, asked), before)


async def test_a_model_server_that_is_away(captured: Recording, gateway_to: Serve):
    """The gateway's own answer is given again."""
    server = ModelServer().start()
    gateway = await gateway_to(server.base_url)
    server.stop()
    asked = [("/v1/chat/completions", CHAT)]
    with rollout("agent"):
        before = await answers(gateway.base_url().removesuffix("/v1"), asked)
    async with ReplayServer(reconstruct(captured.spans)) as replay:
        same(await answers(replay.url, asked), before)
    assert before[0].status == 502


async def test_a_stream_that_broke_off(captured: Recording, clients: Clients, gateway_to: Serve):
    """It breaks off again, after the same bytes."""
    server = clients.serve(Reply("some words, said one by one", cut_after=3))
    asked = [("/v1/chat/completions", {**CHAT, "stream": True})]
    before, trajectories = await recorded(captured, gateway_to, server, asked)
    assert not before[0].whole
    async with ReplayServer(trajectories) as replay:
        same(await answers(replay.url, asked), before)


async def test_a_stream_that_its_reader_left(captured: Recording, clients: Clients):
    """It gets what it had read, and no end; one that reads on is a difference."""
    client = clients.asynchronous(clients.serve(Reply("some words, said one by one")))

    async def begin(client: openai.AsyncOpenAI) -> list[Any]:
        reply: Any = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        found = [(await anext(reply)).to_dict() for _ in range(3)]
        await reply.close()
        return found

    with rollout("agent"):
        before = await begin(client)
    async with ReplayServer(reconstruct(captured.spans)) as replay:
        async with openai.AsyncOpenAI(base_url=replay.base_url, api_key="k") as again:
            assert await begin(again) == before
        assert replay.difference is None


async def test_reading_on_where_the_reader_left(
    captured: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch
):
    """A reader that waits for more than was read is cut off, which is a difference."""
    monkeypatch.setattr("otel_rollout.gateway.replaying._GRACE", 0.05)
    client = clients.asynchronous(clients.serve(Reply("some words, said one by one")))
    with rollout("agent"):
        reply: Any = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        await anext(reply)
        await reply.close()
    async with ReplayServer(reconstruct(captured.spans)) as replay:
        body = {"messages": ASK, "model": "m", "stream": True}
        answer = await send(replay.base_url + "/chat/completions", body)
        assert not answer.whole
        assert replay.difference is not None
        assert replay.difference.kind == "reply"


async def test_parallel_sub_agents_in_any_order(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Each conversation is told by what it says, however the calls are mixed; all at once."""
    server = clients.serve(
        lambda body: f"{body['messages'][0]['content']}, {len(body['messages'])}"
    )
    asked = [
        ("/v1/chat/completions", {"model": "m", "messages": [user(f"agent {n}")] * turns})
        for n in range(5)
        for turns in (1, 2, 3)
    ]
    before, trajectories = await recorded(captured, gateway_to, server, asked)
    order = random.Random(1).sample(range(len(asked)), len(asked))
    async with ReplayServer(trajectories) as replay:
        again = await asyncio.gather(*(send(replay.url + asked[n][0], asked[n][1]) for n in order))
    same(again, [before[n] for n in order])
    assert replay.unasked == []


async def test_http_1_0(captured: Recording, clients: Clients, gateway_to: Serve):
    """A stream without chunks, which ends by closing."""
    body = {**CHAT, "stream": True}
    asked = [("/v1/chat/completions", body)]
    (before,), trajectories = await recorded(captured, gateway_to, clients.serve("a b"), asked)
    async with ReplayServer(trajectories) as replay:
        reader, writer = await open_to(replay.url)
        request = request_bytes(f"{replay.url}{asked[0][0]}", json.dumps(body).encode(), "POST", {})
        writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        again = await read_answer(reader)
        writer.close()
    assert "transfer-encoding" not in again.headers
    same([again], [before])


async def test_equal_requests(captured: Recording, clients: Clients, gateway_to: Serve):
    """Their replies come in the order of the recording; one more is a difference."""
    asked = [("/v1/chat/completions", CHAT)] * 3
    server = clients.serve(["one", "two", "three"])
    before, trajectories = await recorded(captured, gateway_to, server, asked)
    async with ReplayServer(trajectories) as replay:
        same(await answers(replay.url, asked), before)
        (more,) = await answers(replay.url, asked[:1])
    assert difference(more)["kind"] == "repeated"
    assert "recorded 3 times, and came once more" in more.json()["error"]["message"]


async def test_the_spelling_of_a_request_is_no_difference(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Members in another order, other white space, escapes, a compressed or a chunked body."""
    body = {**CHAT, "messages": [user("✓")]}
    asked = [("/v1/chat/completions", body)]
    before, trajectories = await recorded(captured, gateway_to, clients.serve("a"), asked)
    text = json.dumps(dict(reversed(body.items())), indent=3, ensure_ascii=False).encode()
    async with ReplayServer(trajectories) as replay:
        same(await answers(replay.url + "/r/any", [("/v1/chat/completions", text)]), before)


# --- what was not


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "temperature": (lambda body: {**body, "temperature": 0.7}, "temperature"),
    "a parameter more": (lambda body: {**body, "top_p": 1}, "top_p"),
    "a parameter less": (lambda body: {k: body[k] for k in body if k != "tools"}, "tools"),
    "a number as true": (lambda body: {**body, "seed": True}, "seed"),
    "message": (
        lambda body: {**body, "messages": [user("hi"), {**body["messages"][1], "content": "no"}]},
        "messages[1].content",
    ),
    "a message more": (
        lambda body: {**body, "messages": [*body["messages"], user("more")]},
        "messages[2]",
    ),
    "a tool": (
        lambda body: {**body, "tools": [{**body["tools"][0], "type": "other"}]},
        "tools[0].type",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_request(
    captured: Recording, clients: Clients, gateway_to: Serve, change: str
):
    """It is answered with 422, its body names the place, and nothing is answered after it."""
    body = {"model": "m", "seed": 1, "tools": TOOLS[:1], "messages": [user("hi"), user("there")]}
    body["temperature"] = 0.5
    other = {**body, "messages": [user("something else")]}
    asked = [("/v1/chat/completions", each) for each in (other, body)]
    _, trajectories = await recorded(captured, gateway_to, clients.serve("a"), asked)
    changed, at = CHANGES[change]
    async with ReplayServer(trajectories) as replay:
        first = await send(replay.base_url + "/chat/completions", changed(body))
        then = await send(replay.base_url + "/chat/completions", body)
    found = difference(first)
    assert [row["at"] for row in found["rows"]] == [at]
    assert found["call"] == f"call 2 of rollout {trajectories[0].id}"
    assert first.headers["x-should-retry"] == "false"
    assert "the replay ended before" in then.json()["error"]["message"]
    assert difference(then) == found
    assert replay.difference is not None
    assert replay.difference.to_dict() == found
    assert len(replay.unasked) == 2


async def test_what_may_differ(captured: Recording, clients: Clients, gateway_to: Serve):
    """Members that are ignored are no difference, and are not shown in one; others still are."""

    def body(session: str, said: str = "hi") -> dict[str, Any]:
        parts = [{"type": "text", "text": said, "id": session}]
        messages = [{"role": "user", "content": parts}, {"role": "user", "content": session}]
        return {"model": "m", "metadata": {"user_id": session, "a": "b"}, "messages": messages}

    asked = [("/v1/chat/completions", body("one"))]
    before, trajectories = await recorded(captured, gateway_to, clients.serve("a"), asked)
    ignore = ["metadata.user_id", "messages[].content[].id", "messages[].name", "other.a"]
    async with ReplayServer(trajectories, ignore=ignore) as replay:
        other = body("one")
        other["metadata"]["user_id"] = other["messages"][0]["content"][0]["id"] = "two"
        same(await answers(replay.url, [("/v1/chat/completions", other)]), before)
        assert replay.unasked == []
    async with ReplayServer(trajectories, ignore=ignore) as replay:
        (answer,) = await answers(replay.url, [("/v1/chat/completions", body("two", "ho"))])
    places = [row["at"] for row in difference(answer)["rows"]]
    assert places == ["messages[0].content[0].text", "messages[1].content"]
    async with ReplayServer(trajectories, ignore=["messages", "metadata"]) as replay:
        same(await answers(replay.url, [("/v1/chat/completions", {"model": "m"})]), before)


async def test_a_difference_in_the_shape_of_its_api(captured: Recording, clients: Clients):
    """Clients raise their own error for it, once."""
    server = clients.serve("Hello")
    with rollout("agent"):
        clients.sync(server).chat.completions.create(model="m", messages=ASK)
    async with ReplayServer(reconstruct(captured.spans)) as replay:
        async with openai.AsyncOpenAI(base_url=replay.base_url, api_key="k") as client:
            with pytest.raises(openai.UnprocessableEntityError, match="differs from call 1"):
                await client.chat.completions.create(model="m", messages=[user("other")])
        async with anthropic.AsyncAnthropic(base_url=replay.url, api_key="k") as client:
            with pytest.raises(anthropic.UnprocessableEntityError, match="differs from call 1"):
                await client.messages.create(model="m", messages=[user("x")], max_tokens=9)
        assert replay.difference is not None
        lines = replay.difference.lines(60)
        assert max(map(len, lines)) <= 60
        assert any(line.startswith("messages[0].content:") for line in lines)
        assert any(line.endswith('| "other"') for line in lines)


async def test_what_is_no_model_call(captured: Recording, clients: Clients, gateway_to: Serve):
    """Models of each form are those that were recorded; health is good; the rest is not there."""
    asked = [("/v1/chat/completions", {**CHAT, "model": name}) for name in ("org/a", "b")]
    _, trajectories = await recorded(captured, gateway_to, clients.serve("a"), asked)
    async with ReplayServer(trajectories) as replay:
        listed = (await send(replay.url + "/v1/models", None, "GET")).json()
        assert [each["id"] for each in listed["data"]] == ["org/a", "b"]
        google = (await send(replay.url + "/v1beta/models", None, "GET")).json()
        assert [each["name"] for each in google["models"]] == ["models/org/a", "models/b"]
        one = await send(replay.url + "/v1/models/org/a", None, "GET")
        assert one.json()["id"] == "org/a"
        gone = await send(replay.url + "/v1/models/c", None, "GET")
        assert (gone.status, gone.json()["error"]["type"]) == (404, "not_found_error")
        assert (await send(replay.url + "/health", None, "GET")).status == 200
        assert (await send(replay.url + "/", None, "HEAD")).status == 200
        counted = await send(replay.url + "/v1/messages/count_tokens", {"messages": []})
        assert counted.status == 404
        assert (await send(replay.url + "/v1/files", None, "DELETE")).status == 404
        page = await send(replay.url + "/v1/models", None, "GET", origin="http://evil.example")
        assert page.status == 403
        assert replay.difference is None
        embedded = await send(replay.url + "/v1/embeddings", {"model": "m", "input": "a"})
    assert difference(embedded)["kind"] == "path"


async def test_passing_on(captured: Recording, clients: Clients, gateway_to: Serve):
    """What was not recorded goes to another server, with its key, and the replay goes on."""
    asked = [("/v1/chat/completions", CHAT)]
    before, trajectories = await recorded(captured, gateway_to, clients.serve("old"), asked)
    live = clients.serve("new")
    served = ReplayServer(trajectories, upstream=live.base_url, api_key="k-of-the-server")
    async with served as replay:
        other = {**CHAT, "temperature": 1}
        new = await send(
            replay.base_url + "/chat/completions", other, authorization="Bearer or-replay"
        )
        same(await answers(replay.url, asked), before)
        models = await send(replay.base_url + "/models", None, "GET")
    assert new.json()["choices"][0]["message"]["content"] == "new"
    assert models.json()["data"][0]["owned_by"] == "test"
    (wire,) = live.exchanges[:1]
    assert wire.request_headers["authorization"] == "Bearer k-of-the-server"
    assert replay.difference is not None
    assert replay.difference.rows[0].at == "temperature"


async def test_the_recorded_pace(captured: Recording, clients: Clients, gateway_to: Serve):
    """With `pace` a reply takes as long as it took; else it comes at once."""
    asked = [("/v1/chat/completions", {**CHAT, "stream": True})]
    server = clients.serve(Reply("some words", delay=0.3))
    _, trajectories = await recorded(captured, gateway_to, server, asked)
    clock, took = asyncio.get_running_loop().time, []
    for pace in (True, False):
        async with ReplayServer(trajectories, pace=pace) as replay:
            began = clock()
            await answers(replay.url, asked)
            took.append(clock() - began)
    assert took[0] >= 0.3 > took[1]


def test_nothing_to_answer_with(clients: Clients, captured: Recording):
    """A file of trajectories has no streams, and a rollout may have no call."""
    with pytest.raises(ConfigurationError, match="there is no recorded call"):
        ReplayServer([])
    with rollout("agent"):
        list(
            clients.sync(clients.serve("a")).chat.completions.create(
                model="m", messages=ASK, stream=True
            )
        )
    line = reconstruct(captured.spans)[0].to_json()
    with pytest.raises(ConfigurationError, match="files of trajectories do: give its spans"):
        ReplayServer([Trajectory.from_json(line)])


# --- any conversation

texts = st.text(max_size=12)
params = st.dictionaries(st.sampled_from(["seed", "user", "stop", "é"]), st.none() | texts)
bodies = st.builds(
    lambda said, more: {"model": "m", "messages": [user(text) for text in said], **more},
    st.lists(texts, max_size=3),
    params,
)
events = st.lists(texts.map(lambda text: f"data: {json.dumps({'id': text})}"), min_size=1)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(bodies, texts | events), min_size=1, max_size=6),
    st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\r\n\n"]),
    st.randoms(),
)
def test_any_conversation(calls: list[tuple[Any, Any]], line_end: str, chance: random.Random):
    """Every byte of every reply comes again, whatever is asked and said, in any order."""
    spans = InMemorySpanExporter()
    provider = otel_rollout.configure(instrumentor=None)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    asked = [json.dumps(body).encode() for body, _ in calls]
    replies = [
        json.dumps({"said": said}).encode()
        if isinstance(said, str)
        else line_end.join([*said, ""]).encode()
        for _, said in calls
    ]
    with rollout("agent"):
        active = current_rollout()
        assert active is not None
        for body, (_, said), raw in zip(asked, calls, replies, strict=True):
            recorder = ExchangeRecorder(active, "/chat/completions")
            recorder.request(body, {})
            kind = "application/json" if isinstance(said, str) else "text/event-stream"
            recorder.response(200, {"content-type": kind})
            recorder.chunk(raw)
            recorder.end()
    otel_rollout.shutdown()
    found = RecordedCalls(reconstruct(spans.get_finished_spans()))
    again: dict[bytes, list[bytes]] = {}
    for body in chance.sample(asked, len(asked)):
        reply = found.take("/v1/chat/completions", body)
        assert isinstance(reply, RecordedReply)
        key = json.dumps(json.loads(body), sort_keys=True).encode()
        again.setdefault(key, []).append(b"".join(reply.pieces))
    for body, raw in zip(asked, replies, strict=True):
        assert again[json.dumps(json.loads(body), sort_keys=True).encode()].pop(0) == raw
    assert found.unasked == []
    assert isinstance(found.take("/v1/chat/completions", asked[0]), Difference)
