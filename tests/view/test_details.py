"""Details: the tree of messages, histories and how they relate, bounded JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory, get_current_trajectory, rollout
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.view import Overview
from otel_rollout.view.built_page import as_json
from otel_rollout.view.details import MOST_CHARACTERS, Opened
from otel_rollout.view.fields import COLUMNS, row_of
from otel_rollout.view.tree import MOST_HISTORIES, MOST_MESSAGES, Tree
from otel_rollout.wire import normalised_key
from otel_rollout.wire.json import DEEPEST
from tests.kit.conversations import ASK, chat, said, system, user
from tests.kit.recording import Clients, Recording
from tests.view.made import Call, made

HI, MORE, LESS = user("hi"), user("more"), user("less")


def relations(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """Of each history its relation, where it is from, and how many messages it shares."""
    found = Opened(trajectory).detail()["histories"]
    return [(each["relation"], each["from"], each["common"]) for each in found]


def texts(opened: Opened, history: int) -> list[str]:
    """The texts on the way to the last message of a history."""
    detail = opened.detail()
    path, node = [], detail["histories"][history]["leaf"]
    while node is not None:
        path.append(detail["nodes"][node]["text"])
        node = detail["nodes"][node]["parent"]
    return path[::-1]


def test_a_conversation_is_one_history_of_messages_that_are_there_once():
    """Its replies are the nodes of their completions, also where they are replayed."""
    opened = Opened(made(Call([HI], "one"), Call([HI, said("one"), MORE], "two")))
    detail = opened.detail()
    assert [node["text"] for node in detail["nodes"]] == ["hi", "one", "more", "two"]
    assert [node["completion"] for node in detail["nodes"]] == [None, 0, None, 1]
    assert [(c["promptNode"], c["node"]) for c in detail["completions"]] == [(0, 1), (2, 3)]
    (history,) = detail["histories"]
    assert history["relation"] == "main"
    assert history["trains"] == history["completions"] == [0, 1]
    assert history["length"] == 4


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        # goes on otherwise after a reply
        ([Call([HI, said("one"), LESS], "three")], ("fork", 0, 2)),
        # after messages that both sent after that reply
        ([Call([HI, said("one"), MORE, LESS], "three")], ("fork", 0, 3)),
        # the same prompt again
        ([Call([HI], "other")], ("resample", 0, 1)),
        ([Call([HI, said("one"), MORE], "other")], ("resample", 0, 3)),
        # the same reply again
        ([Call([HI, said("one"), MORE], "two")], ("resample", 0, 3)),
        # the past in other words
        ([Call([HI, user("in short: one"), LESS], "three")], ("restart", 0, 1)),
        ([Call([HI, said("One!"), MORE], "three")], ("restart", 0, 1)),
        # another conversation
        ([Call([user("other")], "three")], ("separate", None, 0)),
    ],
)
def test_how_a_history_relates_to_one_before(calls: list[Call], expected: tuple[Any, ...]):
    """Fork, resample, restart or separate, from which history, after how many messages."""
    first = [Call([HI], "one"), Call([HI, said("one"), MORE], "two")]
    assert relations(made(*first, *calls)) == [("main", None, 0), expected]


def test_a_failed_call_keeps_its_prompt():
    """It has no node of its own and is in no history."""
    detail = Opened(made(Call([HI], None), Call([HI], "one"))).detail()
    failed, answered = detail["completions"]
    assert (failed["node"], failed["promptNode"], failed["error"]["type"]) == (None, 0, "Timeout")
    assert (answered["node"], answered["promptNode"]) == (1, 0)
    assert detail["histories"][0]["completions"] == [1]


def test_tokens_of_what_does_not_train_are_shown():
    """A failed rollout without a reward: its rows, with a mask of zeros; no message trains."""
    calls = (
        Call([HI], "one", prompt_ids=[1, 2], ids=[3, 4]),
        Call([HI, said("one"), MORE], "two", prompt_ids=[1, 2, 3, 4, 5], ids=[6]),
    )
    failed = Opened(made(*calls, status="error", error={"type": "E", "message": "no"}))
    detail = failed.detail()
    (row,) = failed.shown_rows
    assert (row.token_ids, row.sampled) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    assert row.loss_mask == [0] * 6
    assert [(r["row"], r["trained"], r["length"]) for r in detail["rows"]] == [(0, 0, 6)]
    assert [(c["row"], c["rowStart"], c["trains"]) for c in detail["completions"]] == [
        (0, 2, False),
        (0, 5, False),
    ]
    assert detail["histories"][0]["trains"] == []
    assert detail["overview"]["rows"] == 0
    complete = Opened(made(*calls))
    assert complete.shown_rows == list(complete.rows)
    assert complete.detail()["histories"][0]["trains"] == [0, 1]


def test_what_lacks_only_its_ids_trains_as_a_message():
    """Its history says that it trains, and the completion what is missing."""
    detail = Opened(made(Call([HI], "one"))).detail()
    assert detail["histories"][0]["trains"] == [0]
    (completion,) = detail["completions"]
    assert completion["trains"] is False
    assert "no token ids" in completion["dropped"]


def test_whole_numbers_keep_their_digits():
    """A browser would round them: beyond 2**53 they are texts; times stay numbers."""
    big = 2**53
    opened = Opened(
        made(
            Call([{"role": "user", "content": "hi", "n": [big, -big, 1, True]}]),
            metadata={"seed": big},
            output=[big - 1, big, 1 - big],
        )
    )
    detail = opened.detail()
    assert detail["overview"]["metadata"] == {"seed": str(big)}
    assert detail["output"] == [big - 1, str(big), 1 - big]
    assert opened.message(0)["message"]["n"] == [str(big), str(-big), 1, True]
    assert isinstance(detail["overview"]["start_time_ns"], int)


def test_what_is_nested_deep_is_shown():
    """As deep as requests and replies may be."""
    deep: Any = []
    for _ in range(DEEPEST - 10):
        deep = [deep]
    asked = {"role": "user", "content": "hi", "deep": deep}
    opened = Opened(made(Call([asked]), metadata={"deep": deep}, output=deep))
    assert opened.message(0)["message"] == asked
    detail = opened.detail()
    assert detail["overview"]["metadata"] == {"deep": deep}
    assert detail["output"] == deep
    as_json([detail, math.nan])
    row = dict(zip(COLUMNS, row_of(Overview.of(opened.trajectory)), strict=True))
    assert json.loads(str(row["metadata"])) == {"deep": deep}


def test_reasoning_that_was_dropped_is_a_break():
    """The node shows the message as it was sampled."""
    thought = {**said("one"), "reasoning_content": "hm"}
    detail = Opened(made(Call([HI], thought), Call([HI, said("one"), MORE], "two"))).detail()
    assert detail["histories"][0]["breaks"] == [1]
    assert detail["nodes"][1]["reasoning"] == "hm"
    kept = made(Call([HI], thought), Call([HI, thought, MORE], "two"))
    assert Opened(kept).detail()["histories"][0]["breaks"] == []


def test_messages_that_were_appended_are_at_the_end():
    """A tool's result that no call followed is the last message."""
    answer = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    trajectory = made(Call([HI], "one"), appended=[["t1-0", 0, [answer]]])
    opened = Opened(trajectory)
    assert texts(opened, 0) == ["hi", "one", "42"]
    assert opened.detail()["nodes"][2]["toolCallId"] == "c1"


def test_tools_and_sides_are_told(recording: Recording, clients: Clients):
    """Names of the tools of a history, and tool calls with their results, of a real client."""
    call = ToolCall("add", '{"a": 1}')
    server = clients.serve([Reply(tool_calls=[call]), "2"])
    client = clients.sync(server)
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with rollout("agent"):
        first = client.chat.completions.create(model="m", messages=ASK, tools=[tool])
        message: Any = first.choices[0].message
        (asked,) = message.tool_calls
        result: Any = {"role": "tool", "tool_call_id": asked.id, "content": "2"}
        client.chat.completions.create(
            model="m", messages=[*ASK, message.model_dump(exclude_none=True), result], tools=[tool]
        )
    detail = Opened(recording.trajectory).detail()
    (history,) = detail["histories"]
    assert history["tools"] == ["add"]
    sampled = detail["nodes"][detail["completions"][0]["node"]]
    assert sampled["toolCalls"] == [{"id": asked.id, "name": "add", "arguments": '{"a": 1}'}]
    assert detail["nodes"][sampled["id"] + 1]["toolCallId"] == asked.id


async def test_replies_that_name_the_one_before_follow_it(recording: Recording, clients: Clients):
    """`previous_response_id`: a request has only what is new, the history all."""
    client = clients.asynchronous(clients.serve(["one", "two", "three"]))
    async with rollout("agent"):
        first = await client.responses.create(model="m", input="hi")
        for text in ("more", "less"):
            await client.responses.create(model="m", input=text, previous_response_id=first.id)
    opened = Opened(recording.trajectory)
    assert texts(opened, 0) == ["hi", "one", "less", "three"]
    assert texts(opened, 1) == ["hi", "one", "more", "two"]
    assert relations(recording.trajectory)[1] == ("fork", 0, 2)


async def test_side_calls_are_named(recording: Recording, clients: Clients):
    """A history that is only a side call says why."""
    client = clients.asynchronous(clients.serve())
    async with rollout("agent"):
        await chat(client)
        trajectory = get_current_trajectory()
        trajectory.log("a line")
    detail = Opened(recording.trajectory).detail()
    assert detail["logs"] == ["a line"]
    assert detail["histories"][0]["sideCall"] is None


@st.composite
def conversations(draw: st.DrawFn) -> list[Call]:
    """Calls that go on from the ends of earlier ones, or from anywhere in them."""
    calls: list[Call] = []
    ends: list[list[Any]] = [[]]
    for _ in range(draw(st.integers(1, 12))):
        start = draw(st.sampled_from(ends))
        prompt = [*start[: draw(st.integers(0, len(start)))], user(draw(st.sampled_from("abc")))]
        text = draw(st.sampled_from(["x", "y", None]))
        calls.append(Call(prompt, text))
        if text is not None:
            ends.append([*prompt, said(text)])
    return calls


@given(conversations())
def test_the_way_to_the_end_of_a_history_is_its_messages(calls: list[Call]):
    """For any conversation; each completion trains in one history, and has a node of its own."""
    trajectory = made(*calls)
    tree = Tree(trajectory)
    assert len(tree.histories) == len(trajectory.histories)
    for way, history in zip(tree.histories, trajectory.histories, strict=True):
        path = [tree.nodes[node].message for node in tree.path(way.leaf)]
        assert list(map(normalised_key, path)) == list(map(normalised_key, history.messages()))
        if way.source is not None:
            other = tree.path(tree.histories[way.source].leaf)
            assert tree.path(way.leaf)[: way.common] == other[: way.common]
    trained = [number for way in tree.histories for number in way.trains]
    replies = [number for number, call in enumerate(calls) if call.says is not None]
    assert sorted(trained) == replies
    assert len({tree.ends[number] for number in replies}) == len(replies)


def test_long_texts_are_cut_and_can_be_asked_for():
    """A node says its size, and its message is given in full."""
    opened = Opened(made(Call([user("x" * 50_000_000)], "one")))
    detail = opened.detail()
    assert len(json.dumps(detail)) < 100_000
    node = detail["nodes"][0]
    assert (len(node["text"]), node["whole"], node["size"]) == (MOST_CHARACTERS, False, 50_000_000)
    assert len(opened.message(0)["message"]["content"]) == 50_000_000
    with pytest.raises(LookupError, match="expected 0 to 1, got 7"):
        opened.message(7)


def test_many_forks_are_bounded():
    """Ten thousand forks: two thousand histories are told apart, the number of all is known."""
    calls = [Call([HI], "one"), *(Call([HI, said("one"), user(str(n))]) for n in range(10_000))]
    detail = Opened(made(*calls)).detail()
    assert len(detail["histories"]) == MOST_HISTORIES
    assert detail["historiesTotal"] == 10_000
    assert len(detail["nodes"]) == 20_002
    assert detail["histories"][-1]["common"] == 2


def test_forks_of_a_long_conversation_are_bounded():
    """Their messages together are no more than so many; the overview counts all of them."""
    start: list[Any] = []
    calls = []
    for number in range(100):
        start = [*start, user(str(number))]
        calls.append(Call(start, "ok"))
        start = [*start, said("ok")]
    calls += [Call([*start, user(f"fork {number}")]) for number in range(2_000)]
    trajectory = made(*calls)
    detail = Opened(trajectory).detail()
    assert detail["historiesTotal"] == len(trajectory.histories) == 2_000
    assert len(detail["histories"]) == MOST_MESSAGES // 202
    assert detail["histories"][-1]["common"] == 200


def test_many_long_messages_are_bounded():
    """Beyond ten million characters only the beginning of each is there."""
    calls, messages = [], [system("s")]
    for number in range(700):
        messages = [*messages, user(f"{number} " + "x" * 19_000), said("ok")]
        calls.append(Call(messages[:-1], "ok"))
    detail = Opened(made(*calls[-1:])).detail()
    assert len(json.dumps(detail)) < 13_000_000
    assert detail["nodes"][-2]["text"].startswith("699 x")
    assert not detail["nodes"][-2]["whole"]


def test_what_a_trajectory_says_of_itself_is_bounded():
    """Output, logs, errors and parameters of a request are cut."""
    long = "x" * 1_000_000
    trajectory = made(
        Call([HI], "one", params={"logit_bias": {str(n): 1 for n in range(100_000)}}),
        output=long,
        logs=[long] * 3,
        error={"type": "E", "message": long},
        metadata={},
    )
    assert len(json.dumps(Opened(trajectory).detail())) < 300_000


def test_messages_are_searched_in_full():
    """Also beyond what is shown, in any case, in tool calls and reasoning."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "add", "arguments": '{"q": "Oslo"}'},
    }
    reply = {**said(""), "tool_calls": [call], "reasoning_content": "Rome?"}
    opened = Opened(made(Call([user("x" * 30_000 + "Paris")], reply)))
    assert opened.search("pARIS") == [0]
    assert opened.search("oslo") == opened.search("rome") == [1]
    assert opened.search("nowhere") == []
