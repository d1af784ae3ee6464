"""What is new in a call: exactly the messages after the longest conversation shown before."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from otel_rollout.look.news import ChatNews, ResponsesNews, Shown, TextNews
from otel_rollout.look.prefixes import SMALL, Prefixes, Texts, chat_key, item_key

LONG = "x" * SMALL
SAID = st.sampled_from(["a", "b", "c"])
TURNS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.lists(SAID, max_size=3), SAID),
    min_size=1,
    max_size=12,
)
"""Calls: which earlier conversation each goes on from, after how many of its messages, with which
messages of the user, and what the model replies."""


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text + LONG}


def common(first: list[Any], second: list[Any]) -> int:
    """How many messages two conversations begin with alike."""
    same = 0
    for mine, theirs in zip(first, second, strict=False):
        if mine != theirs:
            break
        same += 1
    return same


@settings(max_examples=300, deadline=None)
@given(TURNS)
def test_any_tree_of_conversations_is_shown_whole_and_once(turns: list[Any]):
    """What is left out was shown before, what is new is shown, and the last message always is."""
    shown, conversations = Shown(), list[list[Any]]()
    for parent, kept, added, reply in turns:
        base = conversations[parent % len(conversations)] if conversations else []
        base = base[: kept % (len(base) + 1)]
        messages = [*base, *(said("user", text) for text in added)] or [said("user", "first")]
        news = ChatNews(shown, {"messages": messages})
        longest = max((common(messages, other) for other in conversations), default=0)
        assert news.elided == min(longest, len(messages) - 1)
        given = news.arguments()["messages"]
        assert given[1 if news.elided else 0 :] == messages[news.elided :]
        answer = said("assistant", reply)
        news.replied({"choices": [{"message": answer}]})
        conversations.append([*messages, answer])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=20))
def test_a_linear_conversation_shows_nothing_twice(turns: list[tuple[int, bool]]):
    """Along one conversation each message is shown once, but for the last one of a retry."""
    shown, messages, seen = Shown(), list[Any](), list[str]()
    for turn, (added, is_retried) in enumerate(turns, 1):
        messages += [said("user", f"{turn}.{number}") for number in range(added)]
        for attempt in range(1 + is_retried):
            news = ChatNews(shown, {"messages": messages})
            assert news.turn == turn
            own = news.arguments()["messages"][1 if news.elided else 0 :]
            assert own == (messages[-1:] if attempt else messages[-added:])
            seen += [] if attempt else [message["content"] for message in own]
        answer = said("assistant", f"{turn}")
        news.replied({"choices": [{"message": answer}]})
        seen.append(answer["content"])
        messages.append(answer)
    assert seen == [message["content"] for message in messages]


def test_turns_are_counted_per_conversation():
    """A retry is the same turn, an edited reply goes on, another task begins anew."""
    shown = Shown()
    system, task = said("system", "s"), said("user", "t")

    def ask(*messages: Any) -> int:
        news = ChatNews(shown, {"messages": list(messages)})
        news.replied({"choices": [{"message": said("assistant", f"r{len(messages)}")}]})
        return news.turn

    assert ask(system, task) == 1
    assert ask(system, task) == 1
    reply = said("assistant", "r2")
    assert ask(system, task, reply, said("user", "more")) == 2
    assert ask(system, said("user", "another task")) == 1
    edited = said("assistant", "r2 edited")
    assert ask(system, task, edited, said("user", "more")) == 2
    assert ask(system, said("user", "examples"), said("assistant", "x"), said("user", "t")) == 1


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SAME: list[tuple[Any, Any]] = [
    ({"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
    ({"content": None}, {"content": ""}),
    ({"content": "a"}, {"content": "a", "reasoning_content": "why", "tool_calls": None}),
    ({"content": None, "tool_calls": [CALL]}, {"tool_calls": [{**CALL, "index": 0}]}),
    (
        {"content": "a", "tool_calls": [CALL]},
        ChatCompletionMessage.model_validate(
            {"role": "assistant", "content": "a", "tool_calls": [CALL]}
        ),
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_a_reply_is_known_in_every_form(one: Any, other: Any):
    """By its text and tool calls; reasoning and empty members do not count."""
    if isinstance(other, dict):
        other = {"role": "assistant", **other}
    assert chat_key({"role": "assistant", **one}) == chat_key(other)


def test_other_messages_have_other_keys():
    """Text, role, name of a user, and each part of a tool call make another message."""
    function = CALL["function"]
    assert isinstance(function, dict)
    others = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
        {"role": "assistant", "content": None, "refusal": "a"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{**CALL, "id": "d"}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {**function, "name": "g"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
    ]
    assert len({chat_key(message) for message in others}) == len(others)


def test_items_of_responses_are_known_in_every_form():
    """The client's objects, and the dicts that agents send back; reasoning is skipped."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    own = ResponseFunctionToolCall.model_validate({**call, "id": "fc_1", "status": "completed"})
    assert item_key(call) == item_key(own)
    text = {"type": "output_text", "text": "a", "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed"}
    reply = ResponseOutputMessage.model_validate({**message, "content": [text]})
    assert item_key(reply) == item_key({"role": "assistant", "content": "a"})
    assert item_key({"type": "reasoning", "summary": []}) is None


def test_small_conversations_are_shown_whole():
    """As long as their text is short, nothing is left out."""
    shown, messages = Shown(), [{"role": "user", "content": "hi"}]
    for _ in range(5):
        news = ChatNews(shown, {"messages": messages})
        assert news.elided == 0
        assert news.arguments()["messages"] == messages
        news.replied({"choices": [{"message": {"role": "assistant", "content": "yes"}}]})
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    messages.append({"role": "user", "content": LONG})
    assert ChatNews(shown, {"messages": messages}).elided > 0


def test_tool_definitions_are_shown_once():
    """The same ones are left out, and counted; others are shown."""
    shown = Shown()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    arguments = {"messages": [said("user", "a")], "tools": tools}
    assert ChatNews(shown, arguments).arguments()["tools"] == tools
    again = ChatNews(shown, {**arguments, "tools": json.loads(json.dumps(tools))})
    assert "tools" not in again.arguments()
    assert again.attributes(is_cut=True)["rollout.elided_tools"] == 1
    other = [*tools, *tools]
    assert ChatNews(shown, {**arguments, "tools": other}).arguments()["tools"] == other


def test_responses_continue_by_id():
    """What stands before a `previous_response_id` is counted, and instructions are shown once."""
    shown = Shown()
    first = ResponsesNews(shown, {"input": "q" + LONG, "instructions": "be terse"})
    assert (first.turn, first.elided) == (1, 0)
    output = [{"type": "message", "role": "assistant", "content": "ok"}]
    first.replied({"id": "r-1", "output": output})
    after = {"previous_response_id": "r-1", "input": "more", "instructions": "be terse"}
    second = ResponsesNews(shown, after)
    assert (second.turn, second.elided) == (2, 3)
    given = second.arguments()
    assert given["instructions"] is None
    assert [item["content"] for item in given["input"][1:]] == ["more"]
    changed = ResponsesNews(shown, {**after, "instructions": "be long"}).arguments()
    assert changed["instructions"] == "be long"


PIECES = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.text(max_size=5)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(PIECES)
def test_a_growing_prompt_shows_what_is_new(pieces: list[tuple[str, str]]):
    """Of a prompt that goes on from an earlier one and its reply, the rest is shown."""
    texts, prompt = Texts(), LONG
    for turn, (added, reply) in enumerate(pieces, 1):
        length, before, found = texts.place(prompt + added)
        assert found == turn
        assert before == 2 * (turn - 1)
        assert length == (0 if turn == 1 else len(prompt))
        prompt += added
        texts.replied(prompt, reply, before, found)
        prompt += reply


def test_a_prompt_that_is_no_text_is_left():
    """Several prompts, or token ids, are shown as they are."""
    for prompt in (["a", "b"], [1, 2], [[1], [2]]):
        assert TextNews(Shown(), {"prompt": prompt}).arguments() == {"prompt": prompt}


def test_a_reply_may_come_while_a_place_is_sought():
    """The garbage collector may end a stream at any time, also in the thread that is at work."""
    prefixes = Prefixes()
    first = prefixes.place([1, 2], lambda _: False)

    def is_said(_: int) -> bool:
        prefixes.replied(first, [3])
        return False

    worker = threading.Thread(target=lambda: prefixes.place([1, 2, 4], is_said), daemon=True)
    worker.start()
    worker.join(10)
    assert not worker.is_alive()
    assert prefixes.place([1, 2, 3, 5], lambda _: False).before == 3
