"""Side calls: what a harness asks beside its agent is kept, told apart, and not trained."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_rollout
from otel_rollout import (
    Completion,
    Trajectory,
    known_side_call,
    reconstruct,
    rollout,
    without_tools,
)
from otel_rollout.command.tree import format_trajectory
from otel_rollout.testing import Reply
from otel_rollout.trajectory import SideCalls
from tests.kit.comparing import replayed
from tests.kit.conversations import TOOLS, ask, said, system, user
from tests.kit.recording import Clients, Recording
from tests.rebuild.random_agents import Rollout, operations, turn

TITLE = (
    system("You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>"),
    user("Generate a title for this conversation:\n"),
    user("What is the capital of France?"),
)
"""What opencode asks on every run."""
TASK = (system("You are an agent."), user("What is the capital of France?"))
TOPIC = "Analyze if this message indicates a new conversation topic. If it does, extract a title."


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


KNOWN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "opencode's title": (TITLE, {}),
    "claude-code's topic": ((system(TOPIC), user("hello"), said("{")), {}),
    "claude-code's title": (
        (user("Please write a 5-10 word title for the following conversation: a"),),
        {},
    ),
    "a list of no tools": (TITLE, {"tools": []}),
    "instructions in parts": (
        ({"role": "system", "content": [text_part("x"), text_part(f"\n{TOPIC}")]}, user("a")),
        {},
    ),
    "claude-code's quota": ((user("quota"),), {"max_tokens": 1}),
    "claude-code's check": (
        (system("Your task is to process Bash commands that an AI coding agent wants to run."),),
        {},
    ),
}
"""Requests of side calls, and further parameters of them."""


async def harness(client: Any, beside: Callable[[], Any]) -> None:
    """An agent with tools, and what is called beside it."""
    with rollout("agent"):
        first = asyncio.ensure_future(beside())
        await asyncio.sleep(0)
        reply = await ask(client, *TASK, tools=TOOLS)
        await first
        await ask(client, *TASK, reply, user("And of Spain?"), tools=TOOLS)


async def played(recording: Recording, clients: Clients, *messages: Any, **more: Any) -> Trajectory:
    """The trajectory of a harness that makes one further call first, beside its agent."""
    client = clients.asynchronous(clients.serve())
    await harness(client, lambda: ask(client, *messages, **more))
    return replayed(recording)


def side(trajectory: Trajectory) -> list[Completion]:
    return [c for c in trajectory.completions if c.side_call is not None]


@pytest.mark.parametrize("name", KNOWN)
async def test_known_side_calls_are_found(recording: Recording, clients: Clients, name: str):
    """Each request of a known harness that is none of its agent's is told, with a reason."""
    messages, more = KNOWN[name]
    trajectory = await played(recording, clients, *messages, **more)
    (found,) = side(trajectory)
    assert found is trajectory.completions[0]
    assert found.side_call
    assert found.side_call.startswith("it asks")
    assert not found.trainable
    assert all(c.trainable for c in trajectory.completions[1:])


async def test_a_side_call_is_kept_and_does_not_train(recording: Recording, clients: Clients):
    """It is in `completions` and in a history of its own, and in no row, unless asked for."""
    trajectory = await played(recording, clients, *TITLE)
    (found,) = side(trajectory)
    assert len(trajectory.completions) == 3
    main, beside = trajectory.histories
    assert main.side_call is None
    assert len(main.completions) == 2
    assert beside.side_call == found.side_call
    assert beside.completions == [found]
    assert not any(item.trainable for item in beside.items)
    assert trajectory.messages() == main.messages()
    rows = trajectory.token_sequences()
    assert [row.completions for row in rows] == [main.completions]
    assert [str(dropped) for dropped in rows.dropped] == [
        f"{found.id}: it is a side call: it asks for a title"
    ]
    kept = trajectory.token_sequences(on_side_call="keep")
    assert kept.dropped == []
    assert found in [c for row in kept for c in row.completions]
    assert [step.completion for step in trajectory.steps] == main.completions
    assert trajectory.warnings == []


async def test_the_tree_says_why(recording: Recording, clients: Clients):
    """Who looks at the trajectory reads the reason, and how many there are."""
    lines = format_trajectory(await played(recording, clients, *TITLE)).splitlines()
    assert "├─ history 2 (side call: it asks for a title)" in lines
    assert lines[-1].startswith("└─ 2 of 3 completions train, 1 side call, ")


async def test_a_rollout_that_runs_knows_its_side_calls(recording: Recording, clients: Clients):
    """As soon as a call with tools tells that there is an agent beside."""
    client = clients.asynchronous(clients.serve())
    with rollout("agent") as trajectory:
        await ask(client, *TITLE)
        assert side(trajectory) == []
        await ask(client, *TASK, tools=TOOLS)
        assert side(trajectory) == [trajectory.completions[0]]
        assert trajectory.messages()[:2] == list(TASK)
    assert len(side(replayed(recording))) == 1


async def test_a_chat_without_tools_has_none(recording: Recording, clients: Clients):
    """An agent that writes titles is trained to: nothing of the rollout has tools."""
    client = clients.asynchronous(clients.serve())
    with rollout("agent"):
        for messages, more in KNOWN.values():
            await ask(client, *messages, **more)
    trajectory = replayed(recording)
    assert side(trajectory) == []
    assert trajectory.token_sequences().dropped == []


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ((system("You summarise files."), user("Here is a file."), user("Summarise it.")), {}),
        ((user("Why does it say 'You are a title generator'?"),), {}),
        ((user("quota"),), {}),
        ((user("quota"),), {"max_tokens": 2}),
        ((user("the quota"),), {"max_tokens": 1}),
        ((system("hello"), user("quota")), {"max_tokens": 1}),
        (TITLE, {"tools": TOOLS[:1]}),
        ((user("hello"), said("You are a title generator. You output"), user("no")), {}),
        ((*TITLE, *(user(f"{n}") for n in range(6))), {}),
    ],
)
async def test_what_is_not_known_trains(
    recording: Recording, clients: Clients, messages: Any, more: dict[str, Any]
):
    """A sub-agent without tools, and what only resembles a side call, is none by default."""
    trajectory = await played(recording, clients, *messages, **more)
    assert side(trajectory) == []
    assert trajectory.token_sequences().dropped == []


async def test_a_conversation_that_goes_on_is_none(recording: Recording, clients: Clients):
    """Nobody answers a title: who does has an agent that writes them."""
    client = clients.asynchronous(clients.serve())

    async def beside() -> None:
        reply = await ask(client, *TITLE)
        await ask(client, *TITLE, reply, user("Shorter."))

    await harness(client, beside)
    assert side(replayed(recording)) == []


async def test_a_retry_of_a_side_call_is_one(recording: Recording, clients: Clients):
    """Also where the first attempt failed, or said the same."""
    replies = iter([Reply("Capital", finish_reason="stop"), Reply("Capital"), "Paris.", "Madrid."])
    client = clients.asynchronous(clients.serve(replies))

    async def beside() -> None:
        await ask(client, *TITLE)
        await ask(client, *TITLE)

    with rollout("agent"):
        await beside()
        await ask(client, *TASK, tools=TOOLS)
    trajectory = replayed(recording)
    assert [c.side_call for c in trajectory.completions] == ["it asks for a title"] * 2 + [None]


async def test_another_model_than_the_policy(clients: Clients):
    """Only where the user says which model the policy is."""
    client = clients.asynchronous(clients.serve())
    for policy, expected in (
        (None, [None, None]),
        ("m", ["it asks the model 'small', and the policy is 'm'", None]),
    ):
        exporter = otel_rollout.InMemoryTrajectoryExporter()
        otel_rollout.configure(exporters=[exporter], policy_model=policy)
        with rollout("agent"):
            await ask(client, *TASK, model="small")
            await ask(client, *TASK)
        otel_rollout.shutdown()
        (trajectory,) = exporter.get_finished_trajectories()
        assert [c.side_call for c in trajectory.completions] == expected


async def test_other_rules_for_spans_that_were_recorded(recording: Recording, clients: Clients):
    """A copy is judged by other rules, from spans and from JSON; the trajectory stays."""
    words = (system("You summarise files."), user("Here is a file."))
    trajectory = await played(recording, clients, *words)
    assert side(trajectory) == []
    copy = trajectory.with_side_calls([known_side_call, without_tools])
    assert [c.side_call for c in side(copy)] == ["it has no tools, and other calls do"]
    assert side(trajectory) == []
    assert copy != trajectory
    assert Trajectory.from_dict(copy.to_dict()) == copy
    assert side(copy.with_side_calls(())) == []
    (found,) = reconstruct(recording.spans)
    assert found.with_side_calls([without_tools]).to_dict() != found.to_dict()
    assert found.with_side_calls() == trajectory.with_side_calls()


async def test_a_side_call_that_continues_the_agent(recording: Recording, clients: Clients):
    """The agent's own replies train in the history that goes on, not in that of a side call."""
    client = clients.asynchronous(clients.serve())
    with rollout("agent"):
        reply = await ask(client, *TASK, tools=TOOLS)
        await ask(client, *TASK, reply, user("[SUGGEST] What next?"), tools=TOOLS)
        await ask(client, *TASK, reply, user("And of Spain?"), tools=TOOLS)

    def suggests(completion: Completion, calls: SideCalls) -> str | None:
        last: Any = completion.request_messages[-1]
        return "it suggests" if "[SUGGEST]" in str(last) and calls.has_tools else None

    trajectory = replayed(recording).with_side_calls([suggests])
    main, beside = trajectory.histories
    assert [item.trainable for item in main.items if item.completion] == [True, True]
    assert [item.trainable for item in beside.items if item.completion] == [False, False]
    assert beside.side_call is None, "one of its completions is the agent's"


SHORT = st.lists(
    st.one_of(
        st.sampled_from([*TITLE, *TASK, user("quota")]),
        st.text(max_size=5).map(user),
        st.text(max_size=5).map(said),
    ),
    min_size=1,
    max_size=4,
)


def plays(requests: list[tuple[list[Any], bool]]) -> Rollout:
    """A rollout that makes these calls: messages, and whether they have tools."""
    made = Rollout(1, None)
    for messages, has_tools in requests:
        turns = [turn(message["role"], message["content"]) for message in messages]
        reply = {"role": "assistant", "content": f"reply {len(made.calls)}"}
        made.end(made.begin(turns, TOOLS if has_tools else None, [reply], "complete"))
    return made


@given(st.lists(st.tuples(SHORT, st.booleans()), max_size=8), st.randoms(use_true_random=False))
def test_the_order_decides_nothing(requests: Any, order: random.Random):
    """However calls come, each is a side call or not; in a rollout without tools none is."""
    (whole,) = reconstruct(plays(requests).spans())
    expected = {c.span_id: c.side_call for c in whole.completions}
    if not any(has_tools for _, has_tools in requests):
        assert set(expected.values()) <= {None}
    shuffled = [*whole.completions, *whole.completions[::2]]
    order.shuffle(shuffled)
    calls = SideCalls()
    for completion in shuffled:
        calls.add(completion)
        calls.reason(completion)
    assert {c.span_id: calls.reason(c) for c in whole.completions} == expected
    assert [h.side_call for h in whole.histories] == sorted(
        (h.side_call for h in whole.histories), key=lambda why: why is not None
    )


@given(st.lists(SHORT, max_size=6))
def test_plain_chats_have_no_side_calls(requests: Any):
    """Whatever they say, as long as no call has tools."""
    (whole,) = reconstruct(plays([(messages, False) for messages in requests]).spans())
    assert all(c.side_call is None for c in whole.completions)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["role", "text", "content", "parts"]), inner),
        ),
        max_leaves=8,
    )
)
def test_content_of_any_shape_is_judged(content: Any):
    """What a request says need not be what a model API takes; nothing raises."""
    (whole,) = reconstruct(plays([([user(content)], False), (list(TASK), True)]).spans())
    assert {c.side_call for c in whole.completions} <= {None, "it asks for a title"}


def test_content_that_is_nested_deep_is_judged():
    """As deep as JSON may be on a span."""
    content: Any = "You are a title generator"
    for _ in range(840):
        content = [content]
    (whole,) = reconstruct(plays([([user(content)], False), (list(TASK), True)]).spans())
    assert [c.side_call for c in whole.completions] == [None, None]


def test_to_judge_is_linear():
    """Twice the calls take about twice the operations, of a chat that grows without tools too."""

    def judge(count: int) -> int:
        made = Rollout(1, None)
        messages = [turn("user", "hello")]
        for number in range(count):
            reply = {"role": "assistant", "content": f"reply {number}"}
            made.end(made.begin(messages, None, [reply], "complete"))
            messages += [turn("assistant", reply["content"]), turn("user", f"{number}")]
            made.end(made.begin([turn("user", "t")], TOOLS, [reply], "complete"))
        (trajectory,) = reconstruct(made.spans())
        completions = trajectory.completions
        fresh = SideCalls()

        def work() -> None:
            for completion in completions:
                fresh.add(completion)
            for completion in completions:
                fresh.reason(completion)

        return operations(work)

    assert judge(200) < 2.4 * judge(100)
