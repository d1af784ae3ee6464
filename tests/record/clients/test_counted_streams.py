"""Streams are asked for their count of tokens, and who reads them sees what they always saw."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from otel_rollout import request_token_ids, rollout
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall
from otel_rollout.wire import sampled_count
from tests.kit.calling import BOTH, Caller, done, entered, outcome, read, structured
from tests.kit.comparing import replayed
from tests.kit.conversations import ASK, TOOLS
from tests.kit.recording import Clients, Recording

Json = dict[str, Any]
COUNTED = {"include_usage": True}


async def _create(client: Any) -> Any:
    return await read(
        await done(client.chat.completions.create(model="m", messages=ASK, stream=True))
    )


async def _raw(client: Any) -> Any:
    create = client.chat.completions.with_raw_response.create
    response = await done(create(model="m", messages=ASK, stream=True))
    return await read(response.parse())


async def _lines(client: Any) -> Any:
    create = client.chat.completions.with_streaming_response.create
    async with entered(create(model="m", messages=ASK, stream=True)) as response:
        return await read(response.iter_lines())


async def _bytes(client: Any) -> Any:
    create = client.chat.completions.with_streaming_response.create
    async with entered(create(model="m", messages=ASK, stream=True)) as response:
        return b"".join(await read(response.iter_bytes()))


async def _helper(client: Any) -> Any:
    async with entered(structured(client).stream(model="m", messages=ASK)) as stream:
        return [[e.type for e in await read(stream)], await done(stream.get_final_completion())]


async def _text(client: Any) -> Any:
    return await read(await done(client.completions.create(model="m", prompt="hi", stream=True)))


WAYS: dict[str, Callable[[Any], Any]] = {
    "create": _create,
    "raw": _raw,
    "lines": _lines,
    "bytes": _bytes,
    "stream helper": _helper,
    "text completions": _text,
}


@BOTH
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("way", WAYS)
async def test_the_agent_sees_no_count(
    recording: Recording, clients: Clients, caller: Caller, way: str, compress: bool
) -> None:
    """The count is on the completion; what comes to the agent is what comes to a bare client."""
    script = WAYS[way]

    async def in_rollout(client: Any) -> Any:
        with request_token_ids(), rollout("agent"):
            return await script(client)

    # A server that always sends ids, so that a request that asks for them has the same reply.
    servers = [clients.serve(Reply("Paris, à côté. 🗼"), compress=compress) for _ in range(2)]
    bare = await outcome(caller.run(script(caller.client(clients, servers[0]))))
    seen = await outcome(caller.run(in_rollout(caller.client(clients, servers[1]))))
    assert seen == bare
    assert seen[0] == "returned"
    assert json.loads(servers[1].exchanges[0].request)["stream_options"] == COUNTED
    trajectory = replayed(recording)
    (completion,) = trajectory.completions
    assert completion.status == "complete"
    assert (completion.usage or {})["completion_tokens"] == len(completion.token_ids or ())
    assert len(trajectory.token_sequences()) == 1


def sse(*chunks: Any, done: bool = True, end: str = "\n\n") -> bytes:
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}{end}" for chunk in chunks]
    return "".join([*lines, *([f"data: [DONE]{end}"] if done else [])]).encode()


def chunk(delta: Json | None, finish: str | None = None, **more: Any) -> Json:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": choices, **more}


USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
CHUNKS = [
    chunk({"role": "assistant", "content": "é"}, usage=None),
    chunk({"content": "b"}, "stop", usage=None),
    chunk(None, usage=USAGE),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
def test_it_is_kept_back_wherever_the_network_cuts(
    recording: Recording, clients: Clients, size: int, end: str, encoding: str | None
) -> None:
    """Byte by byte, at once, or anything between; compressed or not."""
    body = sse(*CHUNKS, end=end)
    encode: Any = {None: bytes, "gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    sent = encode(body)
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    headers = {"content-encoding": encoding} if encoding else {}
    server = clients.serve(Raw(chunks=pieces, content_type="text/event-stream", headers=headers))
    with request_token_ids(), rollout("agent"):
        create = clients.sync(server).chat.completions.with_streaming_response.create
        with create(model="m", messages=ASK, stream=True) as response:
            seen = b"".join(response.iter_bytes())
    assert seen == sse(*CHUNKS[:2], end=end)
    (completion,) = recording.trajectory.completions
    assert completion.message == {"role": "assistant", "content": "éb"}
    assert completion.usage == USAGE


@pytest.mark.parametrize(
    ("said", "sent", "counts"),
    [
        ({"include_usage": True}, {"include_usage": True}, True),
        ({"include_usage": False}, {"include_usage": False}, False),
        (
            {"include_obfuscation": False},
            {"include_usage": True, "include_obfuscation": False},
            False,
        ),
    ],
)
@pytest.mark.parametrize("in_extra", [False, True], ids=["argument", "extra body"])
def test_what_the_agent_says_of_the_count_stays(
    recording: Recording, clients: Clients, said: Json, sent: Json, counts: bool, in_extra: bool
) -> None:
    """Who asks for the count sees it; who asks for none gets none; other options are kept."""
    server = clients.serve("hello")
    options: Json = (
        {"extra_body": {"stream_options": said}} if in_extra else {"stream_options": said}
    )
    with request_token_ids(), rollout("agent"):
        chunks = list(
            clients.sync(server).chat.completions.create(
                model="m", messages=ASK, stream=True, **options
            )
        )
    assert json.loads(server.exchanges[0].request)["stream_options"] == sent
    assert [chunk.usage is not None for chunk in chunks if not chunk.choices] == [True] * counts


def test_whom_nobody_asks(recording: Recording, clients: Clients) -> None:
    """No count is asked for without `request_token_ids`, unstreamed, or where it is said not to."""
    server = clients.serve("hello")
    client = clients.sync(server)
    with rollout("agent"):
        list(client.chat.completions.create(model="m", messages=ASK, stream=True))
        with request_token_ids():
            client.chat.completions.create(model="m", messages=ASK)
        with request_token_ids(stream_options={"include_usage": False}):
            list(client.chat.completions.create(model="m", messages=ASK, stream=True))
    said = [json.loads(wire.request).get("stream_options") for wire in server.exchanges]
    assert said == [None, None, {"include_usage": False}]


@pytest.mark.parametrize("chunk", [chunk(None, prompt_filter_results=[]), chunk(None)])
def test_other_chunks_without_choices_are_the_agents(
    recording: Recording, clients: Clients, chunk: Json
) -> None:
    """Azure begins its streams with one."""
    body = sse(chunk, *CHUNKS)
    server = clients.serve(Raw(chunks=[body], content_type="text/event-stream"))
    with request_token_ids(), rollout("agent"):
        seen = list(
            clients.sync(server).chat.completions.create(model="m", messages=ASK, stream=True)
        )
    assert [len(chunk.choices) for chunk in seen] == [0, 1, 1]


def test_a_stream_that_breaks_inside_an_event(recording: Recording, clients: Clients) -> None:
    """What came of the event is the agent's too, as are the events before it."""
    part = sse(*CHUNKS[:1], done=False) + b'data: {"id"'
    server = clients.serve(Raw(chunks=[part], content_type="text/event-stream"))
    with request_token_ids(), rollout("agent"):
        create = clients.sync(server).chat.completions.with_streaming_response.create
        with create(model="m", messages=ASK, stream=True) as response:
            assert b"".join(response.iter_bytes()) == part
    (completion,) = recording.trajectory.completions
    assert completion.status == "error"


# --- what a parser lost


def lossy(server: ModelServer, reply: Reply, body: Json, lose: int) -> Raw:
    """The stream that a server would send, without `lose` chunks from the second one on."""
    import urllib.request

    request = urllib.request.Request(
        f"{server.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        events = response.read().split(b"\n\n")[:-1]
    del events[1 : 1 + lose]
    return Raw(chunks=[event + b"\n\n" for event in events], content_type="text/event-stream")


REPLIES = {
    "a tool call": (Reply(tool_calls=[ToolCall("add", '{"a": 1, "b": 2}')]), True),
    "reasoning": (Reply("4", reasoning="two and two"), True),
    "text, with tools": (Reply("The sum is four."), True),
    "text": (Reply("The sum is four."), False),
}


@pytest.mark.parametrize("lose", [0, 1])
@pytest.mark.parametrize("count", [False, True], ids=["no count", "counted"])
@pytest.mark.parametrize("name", REPLIES)
def test_a_parser_that_lost_chunks(
    recording: Recording, clients: Clients, name: str, count: bool, lose: int
) -> None:
    """A count shows it; without one nothing trains where a parser was at work.

    The lost chunk of a tool call has its name: the stream contradicts itself, count or not.
    """
    reply, parsed = REPLIES[name]
    whole = clients.serve(reply)

    def answer(body: Json) -> Raw:
        return lossy(whole, reply, body, lose)

    server = clients.serve(answer)
    tools: Json = {} if name in ("text", "reasoning") else {"tools": TOOLS}
    fields: Json = {} if count else {"stream_options": {"include_usage": False}}
    with request_token_ids(**fields), rollout("agent"):
        list(
            clients.sync(server).chat.completions.create(
                model="m", messages=ASK, stream=True, **tools
            )
        )
    rows = recording.trajectory.token_sequences()
    reasons = [dropped.reason for dropped in rows.dropped]
    if lose and reply.tool_calls:
        assert rows == []
        assert "a tool call has no name" in reasons[0]
    elif count and lose:
        assert rows == []
        assert "the server says that it sampled" in reasons[0]
    elif count or not parsed:
        assert len(rows) == 1
    else:
        assert rows == []
        assert "its stream has no count of its tokens" in reasons[0]
        assert "request_token_ids()" in reasons[0]


def choice(index: int, ids: list[int], text: str = "x") -> Json:
    logprobs = {"content": [{"token": "x", "logprob": -0.5} for _ in ids]} if ids else None
    return {
        "index": index,
        "delta": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": ids or None,
        "logprobs": logprobs,
    }


@pytest.mark.parametrize(
    ("counted", "trained"), [(10, 0), (4, 0), (2, 1)], ids=["all", "few", "none lost"]
)
def test_one_choice_lost_all_of_its_chunks(
    recording: Recording, clients: Clients, counted: int, trained: int
) -> None:
    """The count is of all choices together: one without ids does not hide what another lost."""
    usage = {"prompt_tokens": 2, "completion_tokens": counted, "total_tokens": counted + 2}
    chunks = [
        {**chunk(None), "choices": [choice(0, [5, 6])], "prompt_token_ids": [1, 2]},
        {**chunk(None), "choices": [choice(1, [])]},
        chunk(None, usage=usage),
    ]
    server = clients.serve(Raw(chunks=[sse(*chunks)], content_type="text/event-stream"))
    with request_token_ids(), rollout("agent"):
        create: Any = clients.sync(server).chat.completions.create
        list(create(model="m", messages=ASK, stream=True, n=2, tools=TOOLS))
    rows = recording.trajectory.token_sequences()
    assert len(rows) == trained
    if not trained:
        reason = f"the server says that it sampled {counted} tokens and sent 2 token ids"
        assert rows.dropped[0].reason == reason


THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
THINKING: dict[str, tuple[Json, bool]] = {
    "an effort": ({"reasoning_effort": "low"}, True),
    "no effort": ({"reasoning_effort": "none"}, False),
    "the template": ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True),
    "not the template": (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        False,
    ),
    "a budget": ({"extra_body": {"thinking": {"type": "enabled", "budget_tokens": 9}}}, True),
    "no budget": ({"extra_body": {"thinking": {"type": "disabled"}}}, False),
    "a setting": ({"extra_body": {"reasoning": {"effort": "none"}}}, False),
    "an earlier reply": ({"messages": [*ASK, THOUGHT, *ASK]}, True),
    "nothing": ({}, False),
}


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_of_which_nothing_is_left(
    recording: Recording, clients: Clients, name: str
) -> None:
    """A parser may have lost all of it: what was asked for, or came before, tells that it may."""
    more, parsed = THINKING[name]
    head = {**chunk(None), "choices": [choice(0, [5, 6])], "prompt_token_ids": [1, 2]}
    server = clients.serve(Raw(chunks=[sse(head)], content_type="text/event-stream"))
    with rollout("agent"):
        create: Any = clients.sync(server).chat.completions.create
        list(create(**{"model": "m", "messages": ASK, "stream": True, **more}))
    rows = recording.trajectory.token_sequences()
    assert len(rows) == (0 if parsed else 1)
    assert all("no count of its tokens" in dropped.reason for dropped in rows.dropped)


def test_no_parser_was_at_work(recording: Recording, clients: Clients) -> None:
    """Tools that may not be called need no parser; an unstreamed reply loses nothing."""
    server = clients.serve("hello")
    client = clients.sync(server)
    with rollout("agent"):
        create: Any = client.chat.completions.create
        list(create(model="m", messages=ASK, stream=True, tools=TOOLS, tool_choice="none"))
        create(model="m", messages=ASK, tools=TOOLS)
    assert recording.trajectory.token_sequences().dropped == []


def test_the_count_of_the_responses_api() -> None:
    """It has another name there, and is compared with the ids all the same."""
    assert sampled_count({"usage": {"input_tokens": 1, "output_tokens": 7}}) == 7
    assert sampled_count({"usage": {"completion_tokens": 0, "output_tokens": 7}}) == 0
    assert sampled_count({"usage": {"prompt_tokens": 3}}) is None
    assert sampled_count({}) is None


def test_the_count_of_llama_cpp() -> None:
    """Its streams have no usage unless asked for it; their last chunk says how long it took."""
    timings = {"prompt_n": 1, "predicted_n": 7}
    assert sampled_count({"timings": timings, "choices": [{}]}) == 7
    assert sampled_count({"timings": timings, "usage": {"completion_tokens": 8}}) == 8
    assert sampled_count({"timings": timings, "choices": [{}, {}]}) is None
    assert sampled_count({"timings": "?", "choices": 5}) is None
