"""The conversations that other libraries get wrong, as tables of what their histories must be."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from typing import Any

import openai
import pytest

from otel_rollout import get_current_trajectory, no_capture, record_reward, rollout
from otel_rollout.testing import Raw, Reply, ToolCall
from tests.kit.calling import STREAMED, read
from tests.kit.comparing import exchange_spans, replayed, replays
from tests.kit.conversations import TOOLS, ask, chat, said, system, table, user
from tests.kit.recording import Clients, Recording


def _model(message: Any) -> Any:
    return message


def _dump(message: Any) -> Any:
    return message.model_dump()


def _dump_known(message: Any) -> Any:
    return message.model_dump(exclude_none=True)


def _empty_text(message: Any) -> Any:
    return {**message.model_dump(exclude_none=True), "content": ""}


def _null_text(message: Any) -> Any:
    return {**message.model_dump(exclude_none=True), "content": None}


def _no_text(message: Any) -> Any:
    fields = message.model_dump(exclude_none=True)
    fields.pop("content", None)
    return fields


def _compact_arguments(message: Any) -> Any:
    fields = message.model_dump(exclude_none=True)
    for call in fields["tool_calls"]:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        function["arguments"] = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return fields


def _decorated(message: Any) -> Any:
    return {**message.model_dump(), "annotations": [], "audio": None, "function_call": None}


REPLAYS = [
    _model,
    _dump,
    _dump_known,
    _empty_text,
    _null_text,
    _no_text,
    _compact_arguments,
    _decorated,
]


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.__name__.strip("_"))
async def test_a_tool_turn_is_one_history(
    recording: Recording, clients: Clients, replay: Any
) -> None:
    """However the tool call is replayed, it is the message that was sampled."""
    call = ToolCall("add", ' {"b": 1.50, "a": 1} ', id="call_1")
    client = clients.asynchronous(clients.serve([Reply(tool_calls=[call]), "2.5"]))
    async with rollout("agent"):
        reply = await ask(client, user("1 + 1.5?"), tools=TOOLS)
        result = {"role": "tool", "tool_call_id": "call_1", "content": "2.5"}
        await ask(client, user("1 + 1.5?"), replay(reply), result, tools=TOOLS)
    trajectory = replayed(recording)
    assert table(trajectory) == ["user 1 + 1.5?, 0* add(), tool 2.5, 1* 2.5"]
    assert trajectory.warnings == []
    assert trajectory.histories[0].tools == TOOLS


@pytest.mark.parametrize("arguments", ["", None, "{}", " { } "])
async def test_a_tool_call_without_arguments(
    recording: Recording, clients: Clients, arguments: str | None
) -> None:
    """A model that writes no arguments at all is replayed as having written `{}`, and the like."""
    server = clients.serve([Reply(tool_calls=[ToolCall("now", "", id="call_1")]), "noon"])
    client = clients.asynchronous(server)
    async with rollout("agent"):
        fields = (await ask(client, user("?"), tools=TOOLS)).model_dump(exclude_none=True)
        function = fields["tool_calls"][0]["function"]
        function["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
        await ask(client, user("?"), fields, result, tools=TOOLS)
    assert table(replayed(recording)) == ["user ?, 0* now(), tool 12:00, 1* noon"]


async def test_arguments_of_the_responses_api(recording: Recording, clients: Clients) -> None:
    """Items of the Responses API compare as messages do: arguments as JSON, no names of items."""
    call = ToolCall("add", ' {"b": 1.0, "a": 1} ', id="call_1")
    client: Any = clients.asynchronous(clients.serve([Reply(tool_calls=[call]), "2"]))
    async with rollout("agent"):
        await client.responses.create(model="m", input=[{"role": "user", "content": "1 + 1?"}])
        replayed_call: Any = {"type": "function_call", "call_id": "call_1", "name": "add"}
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
        await client.responses.create(
            model="m",
            input=[
                {"role": "user", "content": "1 + 1?"},
                {**replayed_call, "arguments": '{"a":1,"b":1}'},
                result,
            ],
        )
    (history,) = replayed(recording).histories
    assert len(history.completions) == 2


@pytest.mark.parametrize("replayed_as", ["said", "emptied", "dropped"])
async def test_reasoning_items_of_the_responses_api(
    recording: Recording, clients: Clients, replayed_as: str
) -> None:
    """Reasoning that is an item of its own may be emptied or left out: one history, with a break.

    Of equal replies, the one that was sampled with the reasoning that is replayed goes on.
    """
    call = ToolCall("add", "{}", id="call_1")
    replies = [
        Reply("Wait.", tool_calls=[call], reasoning="hm"),
        Reply("Wait.", tool_calls=[call], reasoning="other"),
        "2",
    ]
    client: Any = clients.asynchronous(clients.serve(replies))
    question: Any = {"role": "user", "content": "1 + 1?"}
    async with rollout("agent"):
        first = await client.responses.create(model="m", input=[question])
        await client.responses.create(model="m", input=[question])
        items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        if replayed_as == "emptied":
            items[0] |= {"content": [], "status": "in_progress"}
        elif replayed_as == "dropped":
            del items[0]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
        await client.responses.create(model="m", input=[question, *items, result])
    trajectory = replayed(recording)
    whole = replayed_as == "said"
    assert len(trajectory.histories) == 2
    (continued,) = [h for h in trajectory.histories if len(h.completions) == 2]
    assert continued.completions[0] is trajectory.completions[0 if whole else 1]
    of_reply = [item for item in continued.items if item.completion is continued.completions[0]]
    assert [item.message for item in of_reply] == items
    assert [item.is_break for item in of_reply] == [not whole] * len(items)
    assert [item.completion for item in continued.items].count(None) == 2
    assert bool(trajectory.warnings) == (not whole)


async def test_nothing_but_reasoning(recording: Recording, clients: Clients) -> None:
    """A reply that was cut while it reasoned is not what the same question asked again goes on."""
    client: Any = clients.asynchronous(
        clients.serve([Reply(reasoning="hm", finish_reason="length"), "2"])
    )
    async with rollout("agent"):
        for _ in range(2):
            await client.responses.create(model="m", input=[user("1 + 1?")])
    trajectory = replayed(recording)
    first, second = trajectory.completions
    assert [h.completions for h in trajectory.histories] == [[second], [first]]


async def test_interleaved_subagents(recording: Recording, clients: Clients) -> None:
    """Two conversations whose calls take turns are two histories."""
    client = clients.asynchronous(clients.serve(["a1", "b1", "a2", "b2"]))
    async with rollout("agent"):
        first, second = [system("A"), user("go")], [system("B"), user("go")]
        for turn in (1, 2):
            for conversation in (first, second):
                conversation.append(await ask(client, *conversation))
                conversation.append(user(f"more {turn}"))
    trajectory = replayed(recording)
    assert table(trajectory) == [
        "system B, user go, 1* b1, user more 1, 3* b2",
        "system A, user go, 0* a1, user more 1, 2* a2",
    ]
    assert trajectory.warnings == []


async def test_an_older_sample_is_continued(recording: Recording, clients: Clients) -> None:
    """Of two samples of one prompt the first is continued: the second stays a history."""
    client = clients.asynchronous(clients.serve(["s1", "s2", "t"]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"))
        await ask(client, user("u"), said("s1"), user("u2"))
    assert table(replayed(recording)) == [
        "user u, 0* s1, user u2, 2* t",
        "user u, 1* s2",
    ]


async def test_identical_samples(recording: Recording, clients: Clients) -> None:
    """Which of two equal samples is continued cannot be known: the last one, and a warning."""
    client = clients.asynchronous(clients.serve(["same", "same", "t"]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"))
        await ask(client, user("u"), said("same"), user("u2"))
    trajectory = replayed(recording)
    assert table(trajectory) == [
        "user u, 1* same, user u2, 2* t",
        "user u, 0* same",
    ]
    (warning,) = trajectory.warnings
    ids = [c.id for c in trajectory.completions]
    assert all(repr(name) in warning for name in ids)
    assert f"taken to continue {ids[1]!r}" in warning


async def test_a_fork_after_a_sampled_turn(recording: Recording, clients: Clients) -> None:
    """Two ways to go on from one reply share it, and it is trained once."""
    client = clients.asynchronous(clients.serve(["r", "one", "two"]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"), said("r"), user("x"))
        await ask(client, user("u"), said("r"), user("y"))
    assert table(replayed(recording)) == [
        "user u, 0* r, user y, 2* two",
        "user u, 0 r, user x, 1* one",
    ]


async def test_a_tree_of_forks(recording: Recording, clients: Clients) -> None:
    """Every sampled turn of a search tree is trained once, however many leaves share it."""
    client = clients.asynchronous(clients.serve(lambda body: f"r{len(body['messages'])}"))

    async def grow(messages: list[Any], depth: int) -> None:
        reply = await ask(client, *messages)
        for branch in ("x", "y") if depth else ():
            await grow([*messages, reply, user(branch)], depth - 1)

    async with rollout("agent"):
        await grow([user("u")], 2)
    assert table(replayed(recording)) == [
        "user u, 0* r1, user y, 4* r3, user y, 6* r5",
        "user u, 0 r1, user x, 1* r3, user x, 2* r5",
        "user u, 0 r1, user x, 1 r3, user y, 3* r5",
        "user u, 0 r1, user y, 4 r3, user x, 5* r5",
    ]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
@STREAMED
async def test_reasoning(recording: Recording, clients: Clients, kept: bool, stream: bool) -> None:
    """Reasoning that is not replayed leaves one history, with a mark where it is missing."""
    client = clients.asynchronous(clients.serve([Reply("r", reasoning="hm"), "t"]))
    options = {"stream": True} if stream else {}
    async with rollout("agent"):
        await ask(client, user("u"), **options)
        reply = {**said("r"), **({"reasoning_content": "hm"} if kept else {})}
        await ask(client, user("u"), reply, user("u2"))
    trajectory = replayed(recording)
    assert table(trajectory) == [f"user u, 0*{'' if kept else '!'} r, user u2, 1* t"]
    assert trajectory.completions[0].message is not None
    assert trajectory.completions[0].message["reasoning_content"] == "hm"
    assert trajectory.warnings == []


async def test_compaction(recording: Recording, clients: Clients) -> None:
    """A summary begins a new history; the call that wrote it continues the old one."""
    client = clients.asynchronous(clients.serve(["a1", "a2", "summary", "a9"]))
    async with rollout("agent"):
        messages = [system("s"), user("u1")]
        messages += [await ask(client, *messages), user("u2")]
        messages += [await ask(client, *messages), user("summarise")]
        summary = await ask(client, *messages)
        await ask(client, system("s"), user(summary.content), user("u9"))
    assert table(replayed(recording)) == [
        "system s, user summary, user u9, 3* a9",
        "system s, user u1, 0* a1, user u2, 1* a2, user summarise, 2* summary",
    ]


async def test_an_edited_reply(recording: Recording, clients: Clients) -> None:
    """A reply that the agent edited is context; what was sampled is trained where it was said."""
    client = clients.asynchronous(clients.serve(["a1", "a2"]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"), said("a1, edited"), user("u2"))
    assert table(replayed(recording)) == [
        "user u, assistant a1, edited, user u2, 1* a2",
        "user u, 0* a1",
    ]


async def test_text_that_the_agent_wrote_is_not_trained(
    recording: Recording, clients: Clients
) -> None:
    """An assistant message that no model sampled is context: provenance decides, not the role."""
    client = clients.asynchronous(clients.serve(["a1", "a2"]))
    shots = [user("1 + 1?"), said("2"), user("2 + 2?")]
    async with rollout("agent"):
        await ask(client, *shots)
        await ask(client, *shots, said("a1"), user("u"), said("Sorry, I hit a limit."), user("go"))
    assert table(replayed(recording)) == [
        "user 1 + 1?, assistant 2, user 2 + 2?, 0* a1, user u, "
        "assistant Sorry, I hit a limit., user go, 1* a2"
    ]


@pytest.mark.parametrize("delays", [(0.0, 0.1, 0.2), (0.2, 0.1, 0.0), (0.1, 0.0, 0.2)], ids=str)
async def test_concurrent_calls_that_share_a_prefix(
    recording: Recording, clients: Clients, delays: tuple[float, ...]
) -> None:
    """In whatever order concurrent calls end, their histories are the same."""
    waits = dict(zip("abc", delays, strict=True))

    def reply(body: Any) -> Reply:
        last = body["messages"][-1]["content"]
        return Reply(f"re {last}", delay=waits.get(last[0], 0))

    client = clients.asynchronous(clients.serve(reply))

    async def branch(name: str) -> None:
        first = await ask(client, system("s"), user("u"), said("re u"), user(name))
        await ask(client, system("s"), user("u"), said("re u"), user(name), first, user(f"{name}2"))

    async with rollout("agent"):
        await ask(client, system("s"), user("u"))
        await asyncio.gather(*(branch(name) for name in "abc"))
    trajectory = replayed(recording)
    asked = [c.request_messages[-1]["content"] for c in trajectory.completions]
    assert asked[:4] == ["u", "a", "b", "c"]
    position = {text: number for number, text in enumerate(asked)}
    lines = table(trajectory)
    (main,) = {name for name in "abc" if f"user {name}2" in lines[0]}
    assert lines == [
        f"system s, user u, 0{'*' if name == main else ''} re u, user {name}, "
        f"{position[name]}* re {name}, user {name}2, {position[name + '2']}* re {name}2"
        for name in sorted("abc", key=lambda name: name != main)
    ]
    assert trajectory.warnings == []


async def test_a_concurrent_sample_is_not_continued_before_it_was_said(
    recording: Recording, clients: Clients
) -> None:
    """A call that was under way when another began cannot be what that one continues."""
    slow, fast = Reply("same", delay=0.3), Reply("same")
    client = clients.asynchronous(
        clients.serve(lambda body: slow if body["model"] == "slow" else fast)
    )
    async with rollout("agent"):
        task = asyncio.ensure_future(ask(client, user("u"), model="slow"))
        await asyncio.sleep(0.05)
        await ask(client, user("u"), model="fast")
        await ask(client, user("u"), said("same"), user("u2"), model="fast")
        await task
    trajectory = replayed(recording)
    assert table(trajectory) == [
        "user u, 1* same, user u2, 2* same",
        "user u, 0* same",
    ]
    assert trajectory.warnings == []


async def test_failed_calls_are_data(recording: Recording, clients: Clients) -> None:
    """Retried, failed, cancelled and abandoned calls are completions; only whole ones train."""
    busy = Raw(500, b'{"error": {"message": "busy"}}', headers={"retry-after-ms": "1"})
    server = clients.serve(
        [
            busy,
            "retried",
            Raw(400, b'{"error": {"message": "too long"}}'),
            Reply("slow", delay=5),
            Reply("a long reply, left early", chunk_delay=0.03),
            Reply("cut in the middle", cut_after=2),
            "at last",
        ]
    )
    client = clients.asynchronous(server, max_retries=1)
    async with rollout("agent"):
        await ask(client, user("u"))
        with pytest.raises(openai.BadRequestError):
            await ask(client, user("u"), said("retried"), user("u2"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(client, user("u"), said("retried"), user("u2")), 0.2)
        create: Any = client.chat.completions.create
        stream = await create(model="m", messages=[user("left")], stream=True)
        await read(stream, 2)
        await stream.close()
        with contextlib.suppress(Exception):
            await ask(client, user("cut"), stream=True)
        await ask(client, user("u"), said("retried"), user("u2"))
    trajectory = replayed(recording)
    assert [(c.status, c.exchange.attempts) for c in trajectory.completions] == [
        ("complete", 2),
        ("error", 1),
        ("cancelled", 1),
        ("abandoned", 1),
        ("error", 1),
        ("complete", 1),
    ]
    left = (trajectory.completions[3].message or {})["content"]
    assert table(trajectory) == [
        "user u, 0* retried, user u2, 5* at last",
        f"user left, 3 {left}",
        "user cut, 4 cut in t",
    ]
    assert trajectory.warnings == []
    assert len(exchange_spans(recording)) == 6


async def test_judges_embeddings_and_nested_rollouts(
    recording: Recording, clients: Clients
) -> None:
    """Foreign calls are not trained, nested rollouts are their own, rewards go where they point."""
    client = clients.asynchronous(clients.serve(lambda b: f"re {b['messages'][-1]['content']}"))

    @rollout(name="helper")
    async def helper() -> None:
        await ask(client, user("help"))
        get_current_trajectory().reward = 0.5

    async with rollout("agent"):
        first, second = await asyncio.gather(
            chat(client, messages=[user("a")]), chat(client, messages=[user("b")])
        )
        record_reward(0.0, completion_id=second.id)
        record_reward(1.0, completion_id=first.id)
        with no_capture():
            await ask(client, user("judge this"))
            await helper()
        await client.embeddings.create(model="e", input="x")
        await helper()
        await ask(client, user("last"))
        record_reward(0.75)
    outer, *nested = replays(recording)
    assert table(outer) == [
        "user last, 2* re last",
        "user a, 0* re a",
        "user b, 1* re b",
    ]
    assert {c.id: c.reward for c in outer.completions[:2]} == {first.id: 1.0, second.id: 0.0}
    assert outer.completions[2].reward is None
    assert outer.reward == 0.75
    assert [e.path for e in outer.exchanges].count("/embeddings") == 1
    assert outer.warnings == []
    assert [table(t) for t in nested] == [["user help, 0* re help"]] * 2
    assert [(t.parent_id, t.reward) for t in nested] == [(outer.id, 0.5)] * 2


async def test_tools_that_change(recording: Recording, clients: Clients) -> None:
    """A request with other tools is another conversation: the model saw another prompt."""
    client = clients.asynchronous(clients.serve(["a1", "a2", "a3"]))
    messages = [user("u"), said("a1"), user("u2"), said("a2"), user("u3")]
    async with rollout("agent"):
        await ask(client, *messages[:1], tools=TOOLS)
        await ask(client, *messages[:3], tools=TOOLS[:1])
        await ask(client, *messages, tools=TOOLS[:1])
    trajectory = replayed(recording)
    assert table(trajectory) == [
        "user u, assistant a1, user u2, 1* a2, user u3, 2* a3",
        "user u, 0* a1",
    ]
    assert [history.tools for history in trajectory.histories] == [TOOLS[:1], TOOLS]


async def test_prefill_and_continue(recording: Recording, clients: Clients) -> None:
    """A reply that goes on from a prefilled or from a truncated one is a turn behind it."""
    cut = Reply("The capital", finish_reason="length")
    client = clients.asynchronous(clients.serve([" is Paris", cut, " is Rome"]))
    async with rollout("agent"):
        await ask(client, user("France?"), said("Its capital"))
        await ask(client, user("Italy?"))
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        await ask(client, user("Italy?"), said("The capital"), extra_body=extra)
    trajectory = replayed(recording)
    assert table(trajectory) == [
        "user Italy?, 1* The capital, 2*  is Rome",
        "user France?, assistant Its capital, 0*  is Paris",
    ]
    assert [c.finish_reason for c in trajectory.completions] == ["stop", "length", "stop"]


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
async def test_a_text_and_one_text_part_are_the_same(
    recording: Recording, clients: Clients, role: str
) -> None:
    """Content as a string, or as one part of text, is the same message."""
    client = clients.asynchronous(clients.serve(["a1", "a2"]))
    messages = [system("s"), user("u"), said("a1"), user("u2")]
    parted = copy.deepcopy(messages)
    for message in parted:
        if message["role"] == role:
            message["content"] = [{"type": "text", "text": message["content"]}]
    async with rollout("agent"):
        await ask(client, *messages[:2])
        await ask(client, *parted)
    trajectory = replayed(recording)
    assert table(trajectory) == ["system s, user u, 0* a1, user u2, 1* a2"]
    # What is stored and handed back is what was sent last.
    assert trajectory.messages()[:-1] == parted


async def test_the_second_of_two_choices_is_continued(
    recording: Recording, clients: Clients
) -> None:
    """Choices of one response share its id, and either of them can be continued."""
    two = Reply(choices=[Reply("one"), Reply("two")])
    client = clients.asynchronous(clients.serve([two, "on"]))
    async with rollout("agent") as live:
        _, second = await ask(client, user("u"), n=2)
        await ask(client, user("u"), second, user("go on"))
        name = live.completions[0].id
        assert live.get_history(name, 1).messages()[-1]["content"] == "two"
    trajectory = replayed(recording)
    assert table(trajectory) == [
        "user u, 1* two, user go on, 2* on",
        "user u, 0* one",
    ]
    assert [(c.id == name, c.choice_index) for c in trajectory.completions] == [
        (True, 0),
        (True, 1),
        (False, 0),
    ]
    assert trajectory.warnings == []


async def test_a_stream_that_is_still_read_is_not_continued(
    recording: Recording, clients: Clients
) -> None:
    """A call that began before a stream's last bytes came does not continue that stream."""
    text = "a reply of several chunks"
    client: Any = clients.asynchronous(clients.serve([Reply(text, chunk_delay=0.02), "b"]))
    async with rollout("agent"):
        stream = await client.chat.completions.create(model="m", messages=[user("u")], stream=True)
        await anext(stream)
        await ask(client, user("u"), said(text), user("u2"))
        async for _ in stream:
            pass
    trajectory = replayed(recording)
    assert table(trajectory) == [f"user u, assistant {text}, user u2, 1* b", f"user u, 0* {text}"]


async def test_models_share_histories(recording: Recording, clients: Clients) -> None:
    """Another model may continue a conversation: the tree of messages is the same."""
    client = clients.asynchronous(clients.serve(["a1", "a2"]))
    async with rollout("agent"):
        await ask(client, user("u"), model="small")
        await ask(client, user("u"), said("a1"), user("u2"), model="large")
    trajectory = replayed(recording)
    assert table(trajectory) == ["user u, 0* a1, user u2, 1* a2"]
    assert [c.model for c in trajectory.completions] == ["small", "large"]


@pytest.mark.parametrize("typed", [False, True], ids=["as sent", "type added"])
async def test_responses_that_replay_items(
    recording: Recording, clients: Clients, typed: bool
) -> None:
    """Output items that are sent back continue what was sampled, with or without `type`.

    The instrumentor adds `type: message` to the caller's own items, after the call.
    """
    call = ToolCall("add", '{"a": 1}', id="call_1")
    client = clients.asynchronous(clients.serve([Reply("Wait.", tool_calls=[call]), "2"]))
    question = {"role": "user", "content": "1 + 1?"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    async with rollout("agent"):
        items: list[Any] = [dict(question)]
        first = await client.responses.create(model="m", input=items)
        items = [{"type": "message", **question} if typed else dict(question)]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append(result)
        await client.responses.create(model="m", input=items)
    trajectory = replayed(recording)
    assert table(trajectory) == ["user 1 + 1?, 0* Wait., 0* add(), function_call_output 2, 1* 2"]


async def test_responses_that_name_the_one_before(recording: Recording, clients: Clients) -> None:
    """`previous_response_id` links by id: the same text twice is no ambiguity."""
    client = clients.asynchronous(clients.serve(["same", "same", "on"]))
    async with rollout("agent"):
        first = await client.responses.create(model="m", input="u")
        await client.responses.create(model="m", input="u")
        await client.responses.create(model="m", input="go on", previous_response_id=first.id)
    trajectory = replayed(recording)
    assert table(trajectory) == ["user u, 0* same, user go on, 2* on", "user u, 1* same"]
    assert trajectory.warnings == []
