"""The Responses API: conversations that the server keeps, background, how a response ends."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from openai.resources.responses import Responses

from otel_rollout import Trajectory, rollout
from otel_rollout.testing import Raw, Reply, ToolCall
from tests.kit.calling import BOTH, STREAMED, Caller, Configure, as_bare, done, read
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

Json = dict[str, Any]
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "sql"},
]
NEWER = pytest.mark.skipif(
    "conversation" not in inspect.signature(Responses.create).parameters,
    reason="this openai knows no conversations, templates, background responses, custom tools",
)


async def respond(client: Any, **request: Any) -> Any:
    """Ask; of a stream, the response that its last event has."""
    result = await done(client.responses.create(**{"model": "m", **request}))
    if not request.get("stream"):
        return result
    return (await read(result))[-1].response


def shape(trajectory: Trajectory) -> list[list[str]]:
    """The histories as the ids of their completions."""
    return [history.completion_ids for history in trajectory.histories]


def kinds(items: list[Any]) -> list[str]:
    return [item.get("type") or item["role"] for item in items]


# --- tool loops


def tool_results(response: Any) -> list[Any]:
    """What the agent answers to the calls of a response."""
    results = {
        "function_call": "function_call_output",
        "custom_tool_call": "custom_tool_call_output",
    }
    return [
        {"type": results[item.type], "call_id": item.call_id, "output": f"done {item.name}"}
        for item in response.output
        if item.type in results
    ]


CALLS = Reply(
    "Let me see.",
    reasoning="What to call?",
    tool_calls=[ToolCall("add", '{ "a" :1.50}'), ToolCall("sql", "select 'ä'\n", custom=True)],
)


@NEWER
@BOTH
@STREAMED
@pytest.mark.parametrize("keeps", ["items", "references", "id", "conversation"])
async def test_a_tool_loop_is_one_history(
    configure: Configure, clients: Clients, caller: Caller, stream: bool, keeps: str
) -> None:
    """Whoever keeps the conversation, client or server, its turns are one history."""
    options: Json = {"tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    if stream:
        options["stream"] = True

    async def script(client: Any) -> Any:
        given: list[Any] = [{"role": "user", "content": "Go"}]
        name: Json = {"conversation": {"id": "conv_7"}} if keeps == "conversation" else {}
        said = []
        for _ in range(3):
            response = await respond(client, input=given, **name, **options)
            said.append(response)
            if keeps == "items":
                given = [*given, *response.output, *tool_results(response)]
            elif keeps == "references":
                kept = [{"type": "item_reference", "id": item.id} for item in response.output]
                given = [*given, *kept, *tool_results(response)]
            else:
                given = tool_results(response)
                name = name or {"previous_response_id": response.id}
                name = {"previous_response_id": response.id} if keeps == "id" else name
        return said

    def replies() -> list[Reply]:
        return [CALLS, CALLS, Reply("Done.")]

    recording, server, seen = await as_bare(configure, clients, caller, replies, script)
    assert seen[0] == "returned", seen
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    assert shape(trajectory) == [["resp_000001", "resp_000002", "resp_000003"]]
    (history,) = trajectory.histories
    turn = ["reasoning", "message", "function_call", "custom_tool_call"]
    results = ["function_call_output", "custom_tool_call_output"]
    assert kinds(history.messages()) == ["user", *turn, *results, *turn, *results, "message"]
    calls = [i for i in history.messages() if kinds([i])[0].endswith("_call")]
    assert [c.get("arguments", c.get("input")) for c in calls] == [
        '{ "a" :1.50}',
        "select 'ä'\n",
    ] * 2
    assert [i.message for i in history.items if i.trainable] == [
        item for completion in trajectory.completions for item in completion.items
    ]
    assert history.items[1].message["encrypted_content"]
    assert not any(item.is_break for item in history.items)
    for completion, wire in zip(trajectory.completions, server.exchanges, strict=True):
        assert json.dumps(completion.request) == json.dumps(json.loads(wire.request))
        assert completion.trainable


@BOTH
@pytest.mark.parametrize("how", ["text", "items without reasoning"])
async def test_reasoning_that_the_client_drops(
    recording: Recording, clients: Clients, caller: Caller, how: str
) -> None:
    """A client that replays only what was said goes on with its history; the break is noted."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            given: list[Any] = [{"role": "user", "content": "Go"}]
            for _ in range(3):
                reply = await respond(client, input=given)
                if how == "text":
                    said: list[Any] = [{"role": "assistant", "content": reply.output_text}]
                else:
                    said = [item for item in reply.output if item.type != "reasoning"]
                given = [*given, *said, {"role": "user", "content": "And?"}]

    server = clients.serve([Reply(f"Said {i}", reasoning=f"Hm {i}") for i in range(3)])
    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    assert shape(trajectory) == [["resp_000001", "resp_000002", "resp_000003"]]
    (history,) = trajectory.histories
    replies = [item for item in history.items if item.completion is not None]
    assert [item.is_break for item in replies] == [True, True, False, False]
    assert all(item.trainable for item in replies)


@BOTH
async def test_forks_by_name(recording: Recording, clients: Clients, caller: Caller) -> None:
    """Two requests that continue the same response are two histories that share it."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            first = await respond(client, input="a")
            for text in ("b", "c"):
                await respond(client, input=text, previous_response_id=first.id)

    await caller.run(script(caller.client(clients, clients.serve())))
    trajectory = replayed(recording)
    assert shape(trajectory) == [["resp_000001", "resp_000003"], ["resp_000001", "resp_000002"]]
    trained = [
        c.id for h in trajectory.histories for i in h.items if i.trainable and (c := i.completion)
    ]
    assert sorted(trained) == ["resp_000001", "resp_000002", "resp_000003"]
    assert trajectory.warnings == []


@NEWER
@BOTH
async def test_conversations_do_not_mix(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """Turns of conversations that take turns stay apart, whichever way their id is written."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            for turn in range(3):
                await respond(client, input=f"a{turn}", conversation="conv_a")
                await respond(client, input=f"b{turn}", conversation={"id": "conv_b"})
            await respond(client, input="a3", conversation={"id": "conv_a"})

    await caller.run(script(caller.client(clients, clients.serve())))
    trajectory = replayed(recording)
    asked = [
        [m["content"] for m in history.messages() if m.get("role") == "user"]
        for history in trajectory.histories
    ]
    assert asked == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2"]]
    assert trajectory.warnings == []


@NEWER
async def test_turns_at_once_continue_what_had_ended(
    recording: Recording, clients: Clients
) -> None:
    """A request continues the last turn of its conversation that was there when it began."""
    began = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    go = asyncio.Event()

    def reply(body: Json) -> Reply:
        if body["input"] != "first":
            loop.call_soon_threadsafe(began.release)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(60)
        return Reply(f"to {body['input']}", id=f"resp_{body['input']}")

    client = clients.asynchronous(clients.serve(reply))
    async with rollout("agent"):
        await respond(client, input="first", conversation="conv")
        tasks = [
            asyncio.create_task(respond(client, input=name, conversation="conv"))
            for name in ("b", "c")
        ]
        for _ in tasks:
            await began.acquire()
        go.set()
        await asyncio.gather(*tasks)
    trajectory = replayed(recording)
    assert sorted(shape(trajectory)) == [["resp_first", "resp_b"], ["resp_first", "resp_c"]]


@BOTH
async def test_a_response_that_is_not_known_is_missed(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """What was said before a response of elsewhere is not known: the trajectory says so."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            await respond(client, input="go on", previous_response_id="resp_elsewhere")

    await caller.run(script(caller.client(clients, clients.serve())))
    trajectory = replayed(recording)
    assert shape(trajectory) == [["resp_000001"]]
    (warning,) = trajectory.warnings
    assert "'resp_elsewhere'" in warning


@BOTH
async def test_a_server_with_one_id_for_all(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """Where ids repeat, a request continues what had been said before it, never itself."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            await respond(client, input="a")
            await respond(client, input="b", previous_response_id="same")
            await respond(client, input="c", previous_response_id="same")

    await caller.run(script(caller.client(clients, clients.serve(Reply("Hm", id="same")))))
    trajectory = replayed(recording)
    assert shape(trajectory) == [["same"] * 3]
    users = [m["content"] for m in trajectory.messages() if m.get("role") == "user"]
    assert users == ["a", "b", "c"]


@NEWER
@BOTH
@STREAMED
async def test_a_prompt_template(
    configure: Configure, clients: Clients, caller: Caller, stream: bool
) -> None:
    """A template that the server has is a parameter, not what was said; it may be all there is."""
    body = response("completed", output=[message("Paris")])
    options: Json = {"stream": True} if stream else {}

    async def script(client: Any) -> Any:
        template = {"id": "pmpt_1", "version": "2", "variables": {"city": "Paris"}}
        first = await respond(client, prompt=template, input="Go", **options)
        return [first, await respond(client, prompt=template, **options)]

    recording, server, seen = await as_bare(
        configure, clients, caller, lambda: reply_with(body, stream=stream), script
    )
    assert seen[0] == "returned", seen
    first, second = replayed(recording).completions
    assert first.request_messages == [{"role": "user", "content": "Go"}]
    assert second.request_messages == []
    for completion, wire in zip((first, second), server.exchanges, strict=True):
        assert json.dumps(completion.request) == json.dumps(json.loads(wire.request))
        assert completion.trainable


# --- background


@NEWER
@BOTH
@pytest.mark.parametrize("how", ["poll", "stream", "raw"])
async def test_a_background_response_is_what_was_retrieved(
    configure: Configure, clients: Clients, caller: Caller, how: str
) -> None:
    """A completion that was begun in the background says what was retrieved of it later."""

    async def script(client: Any) -> Any:
        response = await respond(client, input="Think", background=True, store=True)
        seen = [response.status]
        if how == "stream":
            stream = client.responses.retrieve(response.id, stream=True)
            response = (await read(await done(stream)))[-1].response
        while response.status in ("queued", "in_progress"):
            if how == "raw":
                raw = client.responses.with_raw_response.retrieve(response.id)
                response = (await done(raw)).parse()
            else:
                response = await done(client.responses.retrieve(response.id))
            seen.append(response.status)
        await respond(client, input="And?", previous_response_id=response.id)
        return [seen, response]

    def replies() -> list[Reply]:
        return [Reply("Long thought", reasoning="Hm", polls=2), Reply("So.")]

    recording, server, _ = await as_bare(configure, clients, caller, replies, script)
    trajectory = replayed(recording)
    assert trajectory.warnings == []
    first, second = trajectory.completions
    assert (first.status, first.finish_reason, first.trainable) == ("complete", "completed", True)
    assert [item["type"] for item in first.items] == ["reasoning", "message"]
    assert first.id == "resp_000001"
    assert json.dumps(first.request) == json.dumps(json.loads(server.exchanges[0].request))
    final = server.exchanges[-2].response
    if how == "stream":
        final = final.rpartition(b"data: ")[2]
        assert first.response == json.loads(final)["response"]
    else:
        assert json.dumps(first.response) == json.dumps(json.loads(final))
    assert first.usage is not None
    assert shape(trajectory) == [[first.id, second.id]]
    # Every exchange is still what was on the wire.
    assert len(trajectory.exchanges) == len(server.exchanges)
    assert trajectory.exchanges[0].response()["status"] == "queued"


@NEWER
@BOTH
async def test_a_background_response_is_known_while_the_rollout_runs(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """The agent sees the completion as soon as it has retrieved it, and continues its history."""
    server = clients.serve(Reply("Thought", polls=1))

    async def script(client: Any) -> None:
        with rollout("agent") as live:
            response = await respond(client, input="Think", background=True)
            (completion,) = live.completions
            assert (completion.status, completion.message) == ("abandoned", None)
            await done(client.responses.retrieve(response.id))
            assert live.completions[0].status == "abandoned"
            await done(client.responses.retrieve(response.id))
            (completion,) = live.completions
            assert completion.status == "complete"
            history = live.get_history(response.id)
            assert kinds(history.messages()) == ["user", "message"]
            history.append({"role": "user", "content": "Thanks"})

    await caller.run(script(caller.client(clients, server)))
    trajectory = replayed(recording)
    assert kinds(trajectory.messages()) == ["user", "message", "user"]


@NEWER
@BOTH
async def test_a_background_response_that_nobody_retrieved(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """What it said is not known, so there is nothing to learn from."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            response = await respond(client, input="Think", background=True)
            await done(client.responses.retrieve(response.id))

    await caller.run(script(caller.client(clients, clients.serve(Reply("Thought", polls=5)))))
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.error) == ("abandoned", None)
    assert completion.finish_reason == "queued"
    assert completion.message is None
    assert not completion.trainable
    assert completion.request_messages == [{"role": "user", "content": "Think"}]


@NEWER
@BOTH
async def test_a_background_response_that_was_cancelled(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """The completion ended as the response did; the instrumentor's span can be exported."""

    async def script(client: Any) -> None:
        with rollout("agent"):
            response = await respond(client, input="Think", background=True)
            await done(client.responses.cancel(response.id))

    await caller.run(script(caller.client(clients, clients.serve(Reply("Thought")))))
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.finish_reason) == ("cancelled", "cancelled")
    assert not completion.trainable


@NEWER
@BOTH
async def test_a_background_stream_that_was_taken_up_again(
    recording: Recording, clients: Clients, caller: Caller
) -> None:
    """A stream that broke off is whole again with what was retrieved."""
    server = clients.serve(Reply("A long thought", cut_after=5))

    async def script(client: Any) -> None:
        with rollout("agent"):
            with pytest.raises(Exception, match=r".*"):
                await respond(client, input="Think", background=True, stream=True)
            await done(client.responses.retrieve("resp_000001"))
            await done(client.responses.retrieve("resp_000001"))

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert (completion.id, completion.status, completion.error) == ("resp_000001", "complete", None)
    assert completion.items[0]["content"][0]["text"] == "A long thought"
    assert completion.trainable


# --- how a response ends


def response(status: str, **fields: Any) -> Json:
    """A response as a server sends it."""
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": status}
    rest = {"output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**head, **rest, **fields}


def message(text: str, status: str = "completed") -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    head = {"type": "message", "id": "msg_1", "role": "assistant", "status": status}
    return {**head, "content": content}


def reply_with(body: Json, *, stream: bool) -> Raw:
    """The response, plain or as the only event of a stream."""
    if not stream:
        return Raw(200, json.dumps(body).encode())
    event = {"type": f"response.{body['status']}", "sequence_number": 0, "response": body}
    return Raw(
        200, chunks=[b"data: %b\n\n" % json.dumps(event).encode()], content_type="text/event-stream"
    )


FAILURE = {"code": "server_error", "message": "The model broke."}
MANY_TOKENS = {"reason": "max_output_tokens"}
ENDS: dict[str, tuple[Json, str, bool, Json | None]] = {
    "failed": (
        response("failed", error=FAILURE),
        "error",
        False,
        {"type": "ErrorResponse", "message": "The model broke. (server_error)"},
    ),
    "failed half-way": (
        response("failed", error=FAILURE, output=[message("Par", "incomplete")]),
        "error",
        False,
        {"type": "ErrorResponse", "message": "The model broke. (server_error)"},
    ),
    "incomplete": (
        response("incomplete", incomplete_details=MANY_TOKENS, output=[message("Par")]),
        "complete",
        True,
        None,
    ),
    "incomplete, nothing said": (
        response("incomplete", incomplete_details=MANY_TOKENS),
        "error",
        False,
        {"type": "EmptyResponse", "message": "the response has no message"},
    ),
    "completed": (response("completed", output=[message("Paris")]), "complete", True, None),
}


@BOTH
@STREAMED
@pytest.mark.parametrize("case", ENDS)
async def test_how_a_response_ends(
    capture_only: Configure, clients: Clients, caller: Caller, stream: bool, case: str
) -> None:
    """A response that failed is no completion to learn from, one that was truncated is."""
    body, status, trainable, error = ENDS[case]
    options = {"stream": True} if stream else {}

    async def script(client: Any) -> Any:
        return await respond(client, input="Capital?", **options)

    recording, _, seen = await as_bare(
        capture_only, clients, caller, lambda: reply_with(body, stream=stream), script
    )
    assert seen[0] == "returned", seen
    (completion,) = replayed(recording).completions
    assert (completion.status, completion.trainable, completion.error) == (status, trainable, error)
    assert completion.finish_reason == body["status"]
    assert list(completion.items) == body["output"]
    assert json.dumps(completion.response) == json.dumps(body)
    assert completion.request_messages == [{"role": "user", "content": "Capital?"}]


@BOTH
async def test_an_error_event(capture_only: Configure, clients: Clients, caller: Caller) -> None:
    """An error that is an event of the stream fails the completion; what had come is kept."""
    events: list[Json] = [
        {"type": "response.created", "response": response("in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": message("")},
        {
            "type": "response.output_text.delta",
            "output_index": 0,
            "content_index": 0,
            "delta": "Par",
        },
        {"type": "error", "code": "server_error", "message": "The model broke.", "param": None},
    ]
    reply = Raw(
        200,
        chunks=[b"data: %b\n\n" % json.dumps(event).encode() for event in events],
        content_type="text/event-stream",
    )

    async def script(client: Any) -> Any:
        return await read(await done(client.responses.create(model="m", input="?", stream=True)))

    recording, _, _ = await as_bare(capture_only, clients, caller, lambda: reply, script)
    (completion,) = replayed(recording).completions
    assert completion.error == {
        "type": "ErrorResponse",
        "message": "The model broke. (server_error)",
    }
    assert (completion.status, completion.trainable) == ("error", False)
    assert completion.id == "resp_1"
    assert completion.items[0]["content"][0]["text"] == "Par"


@BOTH
@pytest.mark.parametrize("left", [*range(1, 12), 15, 18, 20])
async def test_a_stream_that_is_left_keeps_what_had_come(
    recording: Recording, clients: Clients, caller: Caller, left: int
) -> None:
    """Of a stream that is read no further the beginning is kept, and it is not learned from."""
    said = Reply("A long answer", reasoning="Why?", tool_calls=[ToolCall("add", '{"a": 1}')])
    server = clients.serve(said, chunk_size=4)
    texts: list[str] = []

    async def script(client: Any) -> None:
        with rollout("agent"):
            create = client.responses.create
            stream = await done(create(model="m", input="?", stream=True))
            for event in await read(stream, left):
                if event.type.endswith(".delta"):
                    texts.append(event.delta)
            await done(stream.close())

    await caller.run(script(caller.client(clients, server)))
    (completion,) = replayed(recording).completions
    assert (completion.id, completion.status) == ("resp_000001", "abandoned")
    assert not completion.trainable
    kept = ""
    for item in completion.items:
        kept += "".join(part.get("text", "") for part in item.get("content", ()))
        kept += item.get("arguments", "")
    assert kept.startswith("".join(texts))
    assert 'Why?A long answer{"a": 1}'.startswith(kept)


@BOTH
async def test_log_probabilities(capture_only: Configure, clients: Clients, caller: Caller) -> None:
    """Those of all texts of the reply, in order; None where the request did not ask for them."""
    texts = [
        {
            "type": "message",
            "id": f"msg_{text}",
            "role": "assistant",
            "status": "completed",
            "content": [
                {
                    "type": "output_text",
                    "text": text,
                    "annotations": [],
                    "logprobs": [
                        {"token": t, "bytes": [], "logprob": -float(n), "top_logprobs": []}
                        for n, t in enumerate(text, 1)
                    ],
                }
            ],
        }
        for text in ("ab", "c")
    ]
    reply = {"id": "resp_1", "object": "response", "status": "completed", "output": texts}
    recording = capture_only()
    server = clients.serve([Raw(body=json.dumps(reply).encode()), Reply("plain")])
    with rollout("x"):
        for _ in range(2):
            await done(caller.client(clients, server).responses.create(model="m", input="hi"))
    first, second = recording.trajectory.completions
    assert first.logprobs == [-1.0, -2.0, -1.0]
    assert second.logprobs is None
