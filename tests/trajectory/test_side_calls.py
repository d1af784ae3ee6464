"""Side calls: what a harness asks beside its agent is kept, told apart, and not trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import otel_rollout
from otel_rollout import Completion, Trajectory, reconstruct, rollout
from otel_rollout.side_calls import known_side_call, without_tools
from otel_rollout.testing import Reply
from otel_rollout.trajectory import SideCalls
from otel_rollout.view import format_trajectory
from tests.kit.comparing import replayed
from tests.kit.conversations import TASK, TITLE, TOOLS, ask, said, system, user
from tests.kit.recording import Clients, Recording

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
