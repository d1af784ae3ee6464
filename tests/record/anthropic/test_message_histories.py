"""Histories of Anthropic's messages: tool loops, thinking, edits, cache marks, threads."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.wire import normalised_key
from tests.kit.calling import STREAMED, Caller, done, entered
from tests.kit.comparing import exchange_spans, replayed, sent
from tests.kit.recording import Clients, Recording
from tests.record.anthropic.claude import (
    ASK,
    BOTH,
    CACHE,
    PARIS,
    TOOLS,
    Claude,
    Json,
    ask,
    played,
    result,
    said,
    table,
    user,
)


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
    assert (normalised_key(first) == normalised_key(second)) is same


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
    assert sorted(table(trajectory)) == ["u 0 u 1* u 2*", "u 0* u 3*"]
    assert trajectory.warnings == []
    assert [history.tools for history in trajectory.histories] == [TOOLS, TOOLS]
    assert [message["role"] for message in trajectory.histories[0].messages()] == [
        *("user", "assistant") * 2
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
