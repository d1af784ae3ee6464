"""When a message that is sent back is the one that was sampled, and when it is another.

Each case is a reply and the form in which a client sends it back. The same: one conversation, in
which the reply trains. Another: the reply trains where it was said, what was sent is context.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.testing import Raw, Reply
from tests.kit.comparing import replayed
from tests.kit.conversations import TOOLS, ask, chat, said, system, table, user
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow

Message = dict[str, Any]


def answer(number: int, *messages: Message) -> Raw:
    """A response with these choices, exactly as a server would have written them."""
    choices = [
        {"index": index, "finish_reason": "stop", "message": {"role": "assistant", **message}}
        for index, message in enumerate(messages)
    ]
    body = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": "m"}
    return Raw(200, json.dumps({**body, "choices": choices}).encode())


def calling(*calls: tuple[str, Any], **message: Any) -> Message:
    """A reply that calls tools: (id, arguments as the text that the model wrote)."""
    return {
        "content": None,
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": text}}
            for name, text in calls
        ],
        **message,
    }


def parsed(message: Message) -> Message:
    """The same as the OpenAI client's `parse` gives it."""
    (call,) = message["tool_calls"]
    function = {**call["function"], "parsed_arguments": {"a": 1}}
    return {**message, "tool_calls": [{**call, "index": 0, "function": function}]}


TEXT: Message = {"content": "r"}
ONE = calling(("1", '{"a": 1, "b": [true, null, "x"]}'))
DEEP = '{"a": ' * 60 + "1" + "}" * 60
SAME: dict[str, tuple[Message, Message]] = {
    "as it is": (TEXT, TEXT),
    "one text part": (TEXT, {"content": [{"type": "text", "text": "r"}]}),
    "fields that say nothing": (TEXT, {**TEXT, "refusal": None, "tool_calls": [], "audio": None}),
    "fields that servers add": ({**TEXT, "annotations": [], "reasoning": None, "x": 1}, TEXT),
    "an empty reply": ({"content": ""}, {"content": None}),
    "a reply of nothing": ({"content": None}, {}),
    "reasoning kept": ({**TEXT, "reasoning_content": "hm"}, {**TEXT, "reasoning_content": "hm"}),
    "reasoning renamed": ({**TEXT, "reasoning_content": "hm"}, {**TEXT, "reasoning": "hm"}),
    "spaces in arguments": (ONE, calling(("1", '{"a":1,"b":[true,null,"x"]}'))),
    "order of arguments": (ONE, calling(("1", '{"b": [true, null, "x"], "a": 1}'))),
    "1 as 1.0": (ONE, calling(("1", '{"a": 1.0, "b": [true, null, "x"]}'))),
    "1 as 1e0": (ONE, calling(("1", '{"a": 1e0, "b": [true, null, "x"]}'))),
    "escapes in arguments": (calling(("1", '{"a": "é"}')), calling(("1", '{"a": "\\u00e9"}'))),
    "the last of equal keys": (calling(("1", '{"a": 1, "a": 2}')), calling(("1", '{"a": 2}'))),
    "no arguments": (calling(("1", "")), calling(("1", "{}"))),
    "arguments that are no JSON": (calling(("1", "{a: 1")), calling(("1", "{a: 1"))),
    "deep arguments": (calling(("1", DEEP)), calling(("1", DEEP.replace(" ", "")))),
    "text dropped beside a call": (ONE, {**ONE, "content": ""}),
    "legacy function call": (
        {"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"function_call": {"name": "f", "arguments": '{"a":1}'}},
    ),
    "a refusal": ({"content": None, "refusal": "no"}, {"refusal": "no"}),
    "a name": ({**TEXT, "name": "bot"}, {**TEXT, "name": "bot"}),
    "arguments that the client parsed": (ONE, parsed(ONE)),
    "arguments that another client parsed": (parsed(ONE), ONE),
    "members that a client adds": (TEXT, {**TEXT, "id": "run-1", "metadata": {}, "parsed": {}}),
}
RENAMED: dict[str, tuple[Message, Message]] = {
    "a name that was added": (TEXT, {**TEXT, "name": "bot"}),
    "a name that was dropped": ({**TEXT, "name": "bot"}, TEXT),
    "another name": ({**TEXT, "name": "bot"}, {**TEXT, "name": "alice"}),
    "a name beside a call": (ONE, {**ONE, "name": "bot"}),
}
OTHER: dict[str, tuple[Message, Message]] = {
    "edited": (TEXT, {"content": "r."}),
    "a space more": (TEXT, {"content": "r "}),
    "another case": (TEXT, {"content": "R"}),
    "another normal form of unicode": ({"content": "é"}, {"content": "e\u0301"}),
    "two text parts": ({"content": "ab"}, {"content": [{"type": "text", "text": t} for t in "ab"]}),
    "a call that was dropped": (ONE, {"content": None}),
    "another call id": (ONE, calling(("2", ONE["tool_calls"][0]["function"]["arguments"]))),
    "1 as true": (ONE, calling(("1", '{"a": true, "b": [true, null, "x"]}'))),
    "1 as text": (ONE, calling(("1", '{"a": "1", "b": [true, null, "x"]}'))),
    "null dropped": (ONE, calling(("1", '{"a": 1, "b": [true, "x"]}'))),
    "NaN as text": (calling(("1", '{"a": NaN}')), calling(("1", '{"a": "NaN"}'))),
    "arguments that are no object": (calling(("1", "abc")), calling(("1", '"abc"'))),
    "large numbers": (
        calling(("1", '{"a": 9007199254740993}')),
        calling(("1", '{"a": 9007199254740992}')),
    ),
    "the first of equal keys": (calling(("1", '{"a": 1, "a": 2}')), calling(("1", '{"a": 1}'))),
    "parallel calls in another order": (
        calling(("1", "{}"), ("2", "{}")),
        calling(("2", "{}"), ("1", "{}")),
    ),
    "one of two calls": (calling(("1", "{}"), ("2", "{}")), calling(("1", "{}"))),
    "a refusal as text": ({"content": None, "refusal": "no"}, {"content": "no"}),
    "another role": (TEXT, {**TEXT, "role": "user"}),
}


async def play(clients: Clients, first: Message, again: Message) -> None:
    """A call that is answered with `first`, and one that sends it back as `again`."""
    client = clients.asynchronous(clients.serve([answer(1, first), answer(2, {"content": "t"})]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"), {"role": "assistant", **again}, user("u2"))


@pytest.mark.parametrize("case", SAME)
async def test_the_same_message(recording: Recording, clients: Clients, case: str) -> None:
    """What says the same to a model is the reply that was sampled, in one history."""
    first, again = SAME[case]
    await play(clients, first, again)
    trajectory = replayed(recording)
    table(trajectory)  # each completion trains once
    (history,) = trajectory.histories
    assert [c.id for c in history.completions] == ["chatcmpl-1", "chatcmpl-2"]
    assert not any(item.is_break for item in history.items)
    assert trajectory.completions[0].message == {"role": "assistant", **first}
    assert history.messages()[1] == {"role": "assistant", **again}
    assert trajectory.warnings == []


@pytest.mark.parametrize("case", RENAMED)
async def test_a_reply_with_another_name(recording: Recording, clients: Clients, case: str) -> None:
    """It is the reply that was sampled; without token ids it is not known if the model saw it."""
    first, again = RENAMED[case]
    await play(clients, first, again)
    trajectory = replayed(recording)
    table(trajectory)
    (history,) = trajectory.histories
    assert [c.id for c in history.completions] == ["chatcmpl-1", "chatcmpl-2"]
    assert [item.is_break for item in history.items] == [False, True, False, False]
    assert history.messages()[1] == {"role": "assistant", **again}
    assert trajectory.warnings == []


@pytest.mark.parametrize("rendered", [False, True])
async def test_token_ids_tell_if_a_name_is_rendered(
    recording: Recording, clients: Clients, rendered: bool
) -> None:
    """Where the next prompt begins with the ids of the reply, the name was nothing to the model."""

    def ids(number: int, prompt: list[int]) -> Raw:
        body = json.loads(answer(number, {"content": "r"}).body)
        body["choices"][0]["token_ids"] = [number]
        return Raw(200, json.dumps({**body, "prompt_token_ids": prompt}).encode())

    replies = [ids(1, [7, 8]), ids(2, [7, 8, 9, 1, 5] if rendered else [7, 8, 1, 5])]
    client = clients.asynchronous(clients.serve(replies))
    async with rollout("agent"):
        await ask(client, user("u"))
        named = {"role": "assistant", "content": "r", "name": "bot"}
        await ask(client, user("u"), named, user("u2"))
    trajectory = replayed(recording)
    (history,) = trajectory.histories
    assert [item.is_break for item in history.items] == [False, rendered, False, False]
    assert len(trajectory.token_sequences()) == (2 if rendered else 1)


@pytest.mark.parametrize("case", OTHER)
async def test_another_message(recording: Recording, clients: Clients, case: str) -> None:
    """What says something else is not sampled: context, in a history of its own."""
    said_first, again = OTHER[case]
    await play(clients, said_first, again)
    trajectory = replayed(recording)
    table(trajectory)
    main, first = trajectory.histories
    assert [main.completion_ids, first.completion_ids] == [["chatcmpl-2"], ["chatcmpl-1"]]
    context = main.items[1]
    assert context.message == {"role": "assistant", **again}
    assert context.completion is None
    assert not context.trainable
    assert trajectory.warnings == []


# --- what stands before the reply

BEFORE: dict[str, tuple[list[Message], list[Message], bool]] = {
    "content as parts": ([user("u")], [user([{"type": "text", "text": "u"}])], True),
    "another system prompt": ([system("s"), user("u")], [system("S"), user("u")], False),
    "a system prompt that came": ([user("u")], [system("s"), user("u")], False),
    "developer for system": (
        [system("s"), user("u")],
        [{"role": "developer", "content": "s"}, user("u")],
        False,
    ),
    "a name": ([user("u")], [{**user("u"), "name": "bob"}], False),
    "the middle trimmed": ([user("a"), said("b"), user("u")], [user("u")], False),
    "a picture": (
        [user([{"type": "text", "text": "u"}, {"type": "image_url", "image_url": {"url": "x"}}])],
        [user([{"type": "text", "text": "u"}, {"type": "image_url", "image_url": {"url": "y"}}])],
        False,
    ),
}


@pytest.mark.parametrize("case", BEFORE)
async def test_what_stands_before(recording: Recording, clients: Clients, case: str) -> None:
    """A reply is what was sampled only behind the conversation that it was sampled for."""
    first, again, same = BEFORE[case]
    client = clients.asynchronous(clients.serve(["r", "t"]))
    async with rollout("agent"):
        await ask(client, *first)
        await ask(client, *again, said("r"), user("u2"))
    trajectory = replayed(recording)
    table(trajectory)
    assert [len(h.completions) for h in trajectory.histories] == ([2] if same else [1, 1])
    assert trajectory.warnings == []


@pytest.mark.parametrize("depth", [100, 400, 800])
async def test_deep_messages(recording: Recording, clients: Clients, depth: int) -> None:
    """A message may be as deep as its client can send it: it is kept, compared and handed back."""
    client = clients.asynchronous(clients.serve(["r", "t"]))
    deep = json.loads('{"a":' * depth + "1" + "}" * depth)
    question = user([{"type": "x", "x": deep}])
    async with rollout("agent"):
        await ask(client, question)
        await ask(client, question, said("r"), user("u2"))
    trajectory = replayed(recording)
    (history,) = trajectory.histories
    assert history.messages()[:-1] == [question, said("r"), user("u2")]
    assert trajectory.completions[1].request_messages == [question, said("r"), user("u2")]
    assert trajectory.warnings == []


async def test_tool_results_in_another_order(recording: Recording, clients: Clients) -> None:
    """Results of parallel calls are not sampled: each order of them is a way to go on."""
    calls = calling(("1", "{}"), ("2", "{}"))
    script = [answer(1, calls), answer(2, {"content": "a"}), answer(3, {"content": "b"})]
    client = clients.asynchronous(clients.serve(script))
    results = [{"role": "tool", "tool_call_id": n, "content": f"result {n}"} for n in "12"]
    async with rollout("agent"):
        await ask(client, user("u"))
        for given in (results, results[::-1]):
            await ask(client, user("u"), {"role": "assistant", **calls}, *given)
    assert table(replayed(recording)) == [
        "user u, 0* f() f(), tool result 2, tool result 1, 2* b",
        "user u, 0 f() f(), tool result 1, tool result 2, 1* a",
    ]


# --- prefilled and continued replies


@pytest.mark.parametrize("merged", [False, True], ids=["two messages", "merged"])
async def test_a_prefilled_reply_that_is_sent_back(
    recording: Recording, clients: Clients, merged: bool
) -> None:
    """The sampled part is one where it stands alone; a message that is only partly sampled is not.

    Who trains on the second call still sees every sampled token, in the history of the first.
    """
    client = clients.asynchronous(clients.serve([" is Paris", "t"]))
    again = [said("It is Paris")] if merged else [said("It"), said(" is Paris")]
    async with rollout("agent"):
        await ask(client, user("u"), said("It"))
        await ask(client, user("u"), *again, user("u2"))
    assert table(replayed(recording)) == (
        ["user u, assistant It is Paris, user u2, 1* t", "user u, assistant It, 0*  is Paris"]
        if merged
        else ["user u, assistant It, 0*  is Paris, user u2, 1* t"]
    )


@pytest.mark.parametrize("merged", [False, True], ids=["two messages", "merged"])
async def test_a_truncated_reply_that_is_continued(
    recording: Recording, clients: Clients, merged: bool
) -> None:
    """Both parts of a reply that was cut train once, however they are sent back afterwards."""
    cut = Reply("Par", finish_reason="length")
    client = clients.asynchronous(clients.serve([cut, "is", "t"]))
    again = [said("Paris")] if merged else [said("Par"), said("is")]
    options = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"), said("Par"), **options)
        await ask(client, user("u"), *again, user("u2"))
    assert table(replayed(recording)) == (
        ["user u, assistant Paris, user u2, 2* t", "user u, 0* Par, 1* is"]
        if merged
        else ["user u, 0* Par, 1* is, user u2, 2* t"]
    )


# --- several choices, and the same said twice


async def test_identical_choices(recording: Recording, clients: Clients) -> None:
    """Of equal choices of one response the first is taken to be continued, and that is said."""
    two = answer(1, {"content": "r"}, {"content": "r"})
    client = clients.asynchronous(clients.serve([two, answer(2, {"content": "t"})]))
    async with rollout("agent"):
        await ask(client, user("u"), n=2)
        await ask(client, user("u"), said("r"), user("u2"))
    trajectory = replayed(recording)
    assert table(trajectory) == ["user u, 0* r, user u2, 2* t", "user u, 1* r"]
    (warning,) = trajectory.warnings
    assert "'chatcmpl-1' (choice 0), 'chatcmpl-1' (choice 1)" in warning


async def test_reasoning_tells_equal_samples_apart(recording: Recording, clients: Clients) -> None:
    """Of two samples that say the same, reasoning that is sent back names the one it is of."""
    script = [Reply("r", reasoning=thought) for thought in ("first", "second")]
    client = clients.asynchronous(clients.serve([*script, "t"]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"))
        await ask(client, user("u"), {**said("r"), "reasoning_content": "first"}, user("u2"))
    trajectory = replayed(recording)
    assert table(trajectory) == ["user u, 0* r, user u2, 2* t", "user u, 1* r"]
    assert trajectory.warnings == []


async def test_reasoning_that_was_edited(recording: Recording, clients: Clients) -> None:
    """Other reasoning than was sampled is a break, as is none: its tokens were not seen again."""
    client = clients.asynchronous(clients.serve([Reply("r", reasoning="hm"), "t"]))
    async with rollout("agent"):
        await ask(client, user("u"))
        await ask(client, user("u"), {**said("r"), "reasoning_content": "edited"}, user("u2"))
    assert table(replayed(recording)) == ["user u, 0*! r, user u2, 1* t"]


async def test_a_history_that_is_sent_as_it_is(recording: Recording, clients: Clients) -> None:
    """Only what is on spans counts: to send what `get_history` gave is no hint which sample it is.

    Another process, or a backend, would not know.
    """
    client = clients.asynchronous(clients.serve(["same", "same", "t"]))
    async with rollout("agent") as live:
        first = await chat(client, messages=[user("u")])
        await ask(client, user("u"))
        messages: list[Any] = live.get_history(first.id).messages()
        await ask(client, *messages, user("u2"))
    trajectory = replayed(recording)
    assert table(trajectory) == ["user u, 1* same, user u2, 2* t", "user u, 0* same"]
    assert len(trajectory.warnings) == 1


async def test_many_identical_samples_are_not_all_listed(
    recording: Recording, clients: Clients
) -> None:
    """The sentence about an ambiguity stays a sentence."""
    client = clients.asynchronous(clients.serve(["same"] * 15 + ["t"]))
    async with rollout("agent"):
        for _ in range(15):
            await ask(client, user("u"))
        await ask(client, user("u"), said("same"), user("u2"))
    (warning,) = replayed(recording).warnings
    assert warning.count("chatcmpl") <= 12
    assert "5 more" in warning


# --- tools


@pytest.mark.parametrize("inline", [True, False], ids=["short", "long"])
async def test_instructions_and_tools_are_part_of_the_conversation(
    recording: Recording, clients: Clients, inline: bool
) -> None:
    """Long tools, which spans name by digest, hide no difference in what stands beside them."""
    client = clients.asynchronous(clients.serve(["r", "t"]))
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    if not inline:
        tools[0]["description"] = "what it does, at length. " * 20
    async with rollout("agent"):
        turns: list[tuple[str, Any]] = [
            ("be short", [user("u")]),
            ("be long", [user("u"), said("r"), user("u2")]),
        ]
        for instructions, items in turns:
            options: dict[str, Any] = {"tools": tools, "instructions": instructions}
            await client.responses.create(model="m", input=items, **options)
    trajectory = replayed(recording)
    assert table(trajectory) == ["user u, assistant r, user u2, 1* t", "user u, 0* r"]


async def test_tools_that_come_back(recording: Recording, clients: Clients) -> None:
    """With its first tools again, a conversation goes on from what was said with them."""
    client = clients.asynchronous(clients.serve(["r", "s", "t"]))
    async with rollout("agent"):
        await ask(client, user("u"), tools=TOOLS)
        await ask(client, user("u"), said("r"), user("v"))
        await ask(client, user("u"), said("r"), user("v"), said("s"), user("w"), tools=TOOLS)
    assert table(replayed(recording)) == [
        "user u, 0* r, user v, assistant s, user w, 2* t",
        "user u, assistant r, user v, 1* s",
    ]
