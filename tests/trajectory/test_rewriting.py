"""A client that replays what was sampled in other words: said in one sentence, and only then."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory, rollout
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.trajectory import Conversations
from tests.kit.comparing import replayed
from tests.kit.recording import Clients, Recording

Message = dict[str, Any]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
"""Tools of the agents."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def agent(client: Any, turns: int, change: Callable[[int, Message], Message]) -> None:
    """A loop that replays each reply as `change` gives it."""
    messages: list[Any] = [user("go")]
    for turn in range(turns):
        reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        said = reply.choices[0].message.model_dump(exclude_none=True)
        messages += [change(turn, said), user(f"{turn}")]


def sentences(trajectory: Trajectory) -> list[str]:
    return [warning for warning in trajectory.warnings if "in other words" in warning]


def as_text(_: int, message: Message) -> Message:
    return {"role": "assistant", "content": f"I call {message.get('tool_calls')}"}


def without_text(_: int, message: Message) -> Message:
    return {**message, "content": None}


@pytest.mark.parametrize("change", [as_text, without_text])
def test_a_client_that_rewrites(
    recording: Recording, clients: Clients, change: Callable[[int, Message], Message]
):
    """Tool calls as text; the text beside a call left out."""
    replies = [Reply("text", tool_calls=[ToolCall("f", "{}", id=f"c{n}")]) for n in range(5)]
    client = clients.sync(clients.serve(replies))
    with rollout("agent") as trajectory:
        agent(client, 5, change)
    first = trajectory.completions[0].id
    assert trajectory.warnings == [
        f"5 replies, 5 histories: the client replays what was sampled in other words, first at "
        f"completion {first!r}"
    ]
    assert len(trajectory.histories) == 5
    assert replayed(recording).warnings == trajectory.warnings


@pytest.mark.parametrize("turns", [2, 3, 5])
def test_an_agent_that_writes_its_past_into_the_prompt(
    recording: Recording, clients: Clients, turns: int
):
    """As DSPy's and LlamaIndex's ReAct do. Of two turns one reply is retold: that is an edit."""
    said = [f"next_thought: I look at page {n}.\nnext_tool: look" for n in range(turns)]
    client = clients.sync(clients.serve(said))
    system, past = {"role": "system", "content": "react"}, ["question: who?"]
    with rollout("agent") as trajectory:
        for turn in range(turns):
            (reply,) = ask(client, system, user("\n".join(past)))
            thought, _, tool = reply["content"].partition("\n")
            past += [f"thought_{turn} = {thought}", f"tool_{turn} = {tool}", f"seen_{turn} = page"]
    assert len(trajectory.histories) == turns
    first = trajectory.completions[0].id
    assert trajectory.warnings == [
        f"{turns} replies, {turns} histories: the client replays what was sampled in other words, "
        f"first at completion {first!r}"
    ] * (turns > 2)
    assert replayed(recording).warnings == trajectory.warnings


def test_markers_of_a_template_are_no_quotation(recording: Recording, clients: Clients):
    """As DSPy's: each prompt asks for the line that each reply ends with."""
    client = clients.sync(clients.serve([f"it is {n}\n[[ ## completed ## ]]" for n in range(4)]))
    system = {"role": "system", "content": "Fill in the fields."}
    with rollout("agent") as trajectory:
        for question in "abcd":
            ask(client, system, user(f"{question}? End with:\n`[[ ## completed ## ]]`."))
    assert len(trajectory.histories) == 4
    assert replayed(recording).warnings == trajectory.warnings == []


@pytest.mark.parametrize(
    ("edited", "said"),
    [((), False), ((1,), False), ((1, 3), False), ((0, 1, 2), True), (range(6), True)],
)
def test_edits_are_no_rewriting(recording: Recording, clients: Clients, edited: Any, said: bool):
    """It is said where more replies come back changed than unchanged, and more than one."""
    client = clients.sync(clients.serve([f"reply {n}" for n in range(6)]))
    with rollout("agent") as trajectory:
        agent(
            client,
            6,
            lambda turn, m: {"role": "assistant", "content": f"e{turn}"} if turn in edited else m,
        )
    assert bool(sentences(trajectory)) is said


def ask(client: Any, *messages: Message, **options: Any) -> list[Message]:
    reply = client.chat.completions.create(model="m", messages=list(messages), **options)
    return [choice.message.model_dump(exclude_none=True) for choice in reply.choices]


def test_what_is_no_rewriting(recording: Recording, clients: Clients):
    """Forks, best of n, retries, first calls, summaries, sub-agents: no client changed a reply."""
    client = clients.sync(clients.serve([f"this is reply {n}" for n in range(40)]))
    with rollout("forks") as forks:
        for text in "abc":
            ask(client, user("go"), user(text))
            ask(client, user("go"))
    with rollout("best of n") as best:
        messages = [user("go")]
        for turn in range(4):
            choices = ask(client, *messages, n=3)
            messages += [choices[turn % 3], user("on")]
    with rollout("sampled again") as again:
        messages = [user("go")]
        for _ in range(4):
            samples = [ask(client, *messages)[0] for _ in range(2)]
            messages += [samples[0], user("on")]
    with rollout("compaction") as compaction:
        messages = [{"role": "system", "content": "s"}, user("go")]
        for turn in range(6):
            (said,) = ask(client, *messages)
            messages += [said, user("on")]
            if turn == 3:
                messages = [*messages[:2], {"role": "assistant", "content": "sum"}, user("on")]
    with rollout("agents") as agents:
        for name in "abc":
            system = {"role": "system", "content": name}
            (said,) = ask(client, system, user("go"))
            ask(client, system, user("go"), said, user("on"))
    with rollout("helpers") as helpers:  # one after the other, and the lead is told what they say
        system = {"role": "system", "content": "help"}
        told = [ask(client, system, user(text))[0]["content"] for text in "abcd"]
        ask(client, {"role": "system", "content": "lead"}, user(" ".join(told)))
    for trajectory in (forks, best, again, compaction, agents, helpers):
        assert sentences(trajectory) == []


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.booleans(), max_size=6), order=st.randoms(use_true_random=False))
def test_the_rule(
    recording: Recording, clients: Clients, changes: list[bool], order: random.Random
):
    """More changed than unchanged, and more than one; whatever the order of the completions."""
    client = clients.sync(clients.serve([f"reply {n}" for n in range(len(changes) + 1)]))
    with rollout("agent") as trajectory:
        agent(
            client,
            len(changes) + 1,
            lambda n, m: {**m, "content": "x"} if n < len(changes) and changes[n] else m,
        )
    changed = sum(changes)
    said = changed > 1 and changed > len(changes) - changed
    assert bool(sentences(trajectory)) is said
    shuffled = list(trajectory.completions)
    order.shuffle(shuffled)
    assert Conversations(shuffled).rewriting == next(iter(sentences(trajectory)), None)
