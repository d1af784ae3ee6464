"""Drift: forks by tokens of conversations whose messages go on, and why they are."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_rollout
from otel_rollout import rollout, to_token_rows
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.trajectory import Drift
from tests.kit.conversations import ask, said, system, user
from tests.kit.recording import Clients, Recording
from tests.kit.templates import Calls, Message, Toy, calling

CAUSED: dict[str, tuple[Toy, str]] = {
    "the template leaves reasoning out": (Toy(drops_reasoning=True), "reasoning_dropped"),
    "and opens it in the prompt": (
        Toy(drops_reasoning=True, opens_reasoning=True),
        "reasoning_dropped",
    ),
    "the template writes arguments anew": (
        Toy(rewrites_arguments=True),
        "arguments_reformatted",
    ),
    "the tokenizer merges digits": (Toy(merges_digits=True), "tokens_merged"),
    "the prefix has the number of the call": (Toy(counts_calls=True), "template_changed"),
    "the template trims contents": (Toy(trims=True), "template_changed"),
}
ARGUMENTS = st.sampled_from(['{"a":1}', '{"a": "b"}', '{ "a" : [ ] }'])
REPLIES = st.fixed_dictionaries(
    {"content": st.sampled_from(["yes", "12 of 345", " no ", "7"])},
    optional={
        "reasoning_content": st.sampled_from(["hm", "1 + 23 is 24, and so it is"]),
        "tool_calls": ARGUMENTS.map(calling),
    },
)


def talk(calls: Calls, replies: list[Message]) -> tuple[int, int]:
    """An agent that appends every reply and an answer; how many calls went on, and merged."""
    messages: list[Message] = [system("s"), user("12 and 3?")]
    held: list[int] | None = None
    merged = 0
    for number, reply in enumerate(replies):
        for call in reply.get("tool_calls", ()):
            call["id"] = f"call_{number}"
        prompt, sampled = calls.call(messages, reply)
        merged += held is not None and prompt[: len(held)] == held
        held = prompt + sampled
        messages.append({"role": "assistant", **reply})
        messages.append(user(f"go on {number}"))
    return len(replies) - 1, merged


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("name", CAUSED)
@given(data=st.data())
def test_each_fork_has_its_cause(name: str, texts: bool, data: st.DataObject) -> None:
    """Whatever is said, forks are exactly where the ids differ, of the class that drifts."""
    toy, cause = CAUSED[name]
    if toy.trims and not texts:
        return  # that the text differs cannot be known without texts
    toy = copy.deepcopy(toy)
    if toy.opens_reasoning:
        replies = REPLIES.filter(lambda reply: "reasoning_content" in reply)
    else:
        replies = REPLIES
    if toy.merges_digits and not texts:  # other forms of arguments would be the likelier cause
        replies = replies.filter(lambda reply: "tool_calls" not in reply)
    calls = Calls(toy, texts=texts)
    continued, merged = talk(calls, data.draw(st.lists(replies, min_size=1, max_size=6)))
    drift = calls.trajectory().drift()
    assert (drift.continued, drift.merged, drift.unknown) == (continued, merged, 0)
    assert [fork.cause for fork in drift.forks] == [cause] * (continued - merged)
    assert calls.trajectory(backwards=True).drift() == drift
    rows = calls.trajectory().token_sequences()
    assert len(rows) == 1 + len(drift.forks)


@given(st.lists(REPLIES, min_size=1, max_size=6))
def test_an_append_only_agent_does_not_drift(replies: list[Message]) -> None:
    """Where the template renders what was said as it was sampled, every call merges."""
    calls = Calls()
    talk(calls, replies)
    drift = calls.trajectory().drift()
    assert drift == Drift(continued=len(replies) - 1, merged=len(replies) - 1)
    assert drift.merge_ratio == (1.0 if len(replies) > 1 else None)


def test_what_a_fork_says() -> None:
    """The two completions, the first differing place and ids, and what was read again."""
    calls = Calls(Toy(merges_digits=True))
    prompt, sampled = calls.call([user("hi")], said("a12b"))
    again, _ = calls.call([user("hi"), said("a12b"), user("so?")], said("c"))
    drift = calls.trajectory().drift()
    (fork,) = drift.forks
    assert (fork.before_id, fork.after_id) == ("c1", "c2")
    assert (fork.before.id, fork.after.id) == ("c1", "c2")
    place = len(prompt) + 1
    assert (fork.position, fork.held, fork.prompt) == (place, len(prompt + sampled), len(again))
    assert (fork.held_id, fork.prompt_id) == (sampled[1], again[place])
    assert calls.toy.texts([sampled[1], again[place]]) == ["1", "12"]
    assert fork.prefilled_again == drift.prefilled_again == len(prompt + sampled) - place
    assert drift.merge_ratio == 0.0
    assert drift.causes == {"tokens_merged": 1}
    assert json.loads(json.dumps(drift.to_dict()))["forks"][0]["before"] == ["c1", 0]


def test_a_client_that_drops_reasoning() -> None:
    """What the messages tell goes before what the ids tell."""
    calls = Calls(texts=False)
    calls.call([user("hi")], {"content": "a", "reasoning_content": "long thoughts"})
    calls.call([user("hi"), said("a"), user("so?")], said("b"))
    assert calls.trajectory().drift().causes == {"reasoning_dropped": 1}


def test_a_client_that_writes_arguments_anew() -> None:
    """A client that parses arguments and writes them in its own form."""
    calls = Calls(texts=False)
    calls.call([user("hi")], {"content": None, "tool_calls": calling('{"a": 1}')})
    replayed = {"role": "assistant", "tool_calls": calling('{"a":1}')}
    calls.call([user("hi"), replayed, user("so?")], said("b"))
    assert calls.trajectory().drift().causes == {"arguments_reformatted": 1}


def test_reasoning_that_is_dropped_later() -> None:
    """A template may drop the reasoning of all turns when the user speaks again."""
    calls = Calls()
    first = {"content": "a", "reasoning_content": "hm", "tool_calls": calling("{}")}
    second = {"content": "b", "reasoning_content": "aha"}
    tool = {"role": "tool", "tool_call_id": "call_0", "content": "4"}
    messages = [user("hi"), {"role": "assistant", **first}, tool]
    calls.call(messages[:1], first)
    calls.call(messages, second)
    calls.toy.drops_reasoning = True
    calls.call([*messages, {"role": "assistant", **second}, user("so?")], said("c"))
    drift = calls.trajectory().drift()
    assert (drift.merged, drift.causes) == (1, {"reasoning_dropped": 1})
    assert drift.forks[0].position == len(calls.toy.prompt(messages[:1], 1)), "of the first turn"


def test_reasoning_in_the_content() -> None:
    """Reasoning that the server did not parse is dropped from the content by the template."""
    calls = Calls(texts=False)
    text = "<think>hm</think>a"
    prompt, sampled = calls.call([user("hi")], said(text))
    rendered = [*prompt, *calls.toy.encode("a<|end|><|user|>so?<|end|><|assistant|>")]
    calls.call([user("hi"), said(text), user("so?")], said("b"), prompt=rendered)
    assert calls.trajectory().drift().causes == {"reasoning_dropped": 1}
    assert sampled[0] == calls.toy.ids["<think>"]


def test_tokens_that_are_known_to_spell_the_same() -> None:
    """Texts go before the form of arguments: where both spell the same, tokens were merged."""
    for texts, cause in ((True, "tokens_merged"), (False, "arguments_reformatted")):
        calls = Calls(Toy(merges_digits=True), texts=texts)
        calls.call([user("other")], said("12"), sampled=calls.toy.encode("12<|end|>"))
        called = {"content": None, "tool_calls": calling('{"a":12}')}
        calls.call([user("hi")], called)
        calls.call([user("hi"), {"role": "assistant", **called}, user("so?")], said("b"))
        assert calls.trajectory().drift().causes == {cause: 1}


def test_a_prompt_that_opens_what_no_reply_has() -> None:
    """What a prompt adds to begin a reply is not in a replay: the template did it."""
    calls = Calls(Toy(opens_reasoning=True))
    prompt, _ = calls.call([user("hi")], said("a"))
    calls.call([user("hi"), said("a"), user("so?")], said("b"))
    (fork,) = calls.trajectory().drift().forks
    assert (fork.cause, fork.position) == ("template_changed", len(prompt) - 1)


def test_a_change_between_replies_is_the_templates() -> None:
    """Ids that differ in a message of the user, between two replies, are no reply's."""
    calls = Calls(texts=False)
    messages = [user("hi"), said("a"), user("12")]
    calls.call(messages[:1], {"content": "a"})
    calls.call(messages, {"content": "b"})
    calls.toy.merges_digits = True
    calls.call([*messages, said("b"), user("so?")], said("c"))
    drift = calls.trajectory().drift()
    assert (drift.merged, drift.causes) == (1, {"template_changed": 1})


def test_a_reply_that_was_truncated() -> None:
    """A truncated reply goes on as long as its ids do; where they do not, that is the class."""
    for sampled, causes in (("abc", {}), ("abc\n", {"truncated": 1})):
        calls = Calls(texts=False)
        calls.call([user("hi")], said("abc"), finish="length", sampled=calls.toy.encode(sampled))
        calls.call([user("hi"), said("abc"), user("so?")], said("d"))
        assert calls.trajectory().drift().causes == causes


def test_a_prompt_that_the_server_cut() -> None:
    """A prompt that ends before the ids differ has no id at the place of the fork."""
    calls = Calls(texts=False)
    prompt, _ = calls.call([user("hi")], said("abc"))
    cut = [*prompt, *calls.toy.encode("a")]
    calls.call([user("hi"), said("abc"), user("so?")], said("d"), prompt=cut)
    (fork,) = calls.trajectory().drift().forks
    assert (fork.cause, fork.position, fork.prompt_id) == ("other", len(cut), None)
    assert fork.prefilled_again == 0


def test_what_is_not_known_is_no_fork() -> None:
    """Calls without ids, and those of another model, count as unknown, and in no ratio."""
    calls = Calls()
    one, two = user("hi"), user("so?")
    calls.call([one], said("a"), ids=False)
    calls.call([one, said("a"), two], said("b"))
    calls.call([one, said("a"), two, said("b"), two], said("c"), model="other")
    drift = calls.trajectory().drift()
    assert (drift.continued, drift.unknown, drift.merged) == (2, 2, 0)
    assert drift.merge_ratio is None
    assert not drift.forks


def test_the_same_said_twice_in_other_tokens() -> None:
    """A call that begins with the ids of an equal reply has not drifted: it continues that one."""
    calls = Calls()
    (_, first) = calls.call([user("hi")], said("12"))
    calls.toy.merges_digits = True
    calls.call([user("hi")], said("12"), sampled=calls.toy.encode("12<|end|>"))
    calls.toy.merges_digits = False
    calls.call([user("hi"), said("12"), user("so?")], said("b"))
    drift = calls.trajectory().drift()
    assert (drift.continued, drift.merged) == (1, 1)
    assert len(first) == 3


def test_edits_do_not_continue() -> None:
    """A reply that is replayed edited is a fork by messages, and none of drift's."""
    calls = Calls()
    calls.call([user("hi")], said("a"))
    calls.call([user("hi"), said("b"), user("so?")], said("c"))
    assert calls.trajectory().drift() == Drift()


@given(st.lists(st.integers(0, 4), max_size=5), st.lists(st.integers(0, 4), max_size=5))
def test_drifts_add_up(first: list[int], second: list[int]) -> None:
    """The sum of drifts counts what each of them counts."""
    made = [Drift(n, n // 2, n - n // 2) for n in (*first, *second)]
    total = sum(made, Drift())
    assert total == sum(made[: len(first)], Drift()) + sum(made[len(first) :], Drift())
    assert total.continued == sum(first) + sum(second) == total.merged + total.unknown


def test_rows_say_which_calls_drifted() -> None:
    """The rows of a trajectory know its drift, those of several the sum."""
    calls = Calls(Toy(drops_reasoning=True))
    talk(calls, [{"content": "a", "reasoning_content": "hm"}] * 3)
    trajectory = calls.trajectory()
    rows = to_token_rows([trajectory, trajectory])
    assert rows.drift == trajectory.drift() + trajectory.drift()
    assert rows.drift.merge_ratio == 0.0
    assert len(rows) == 2 + len(rows.drift.forks)


async def test_over_http(recording: Recording, clients: Clients) -> None:
    """Calls that were really made: live and rebuilt drift alike, and each cause is found."""
    replies = [
        Reply("a", reasoning="hm"),
        Reply(tool_calls=[ToolCall("f", '{"a":1}')]),
        Reply("b"),
        Reply("c"),
    ]
    client = clients.asynchronous(clients.serve(replies))
    with rollout("agent") as trajectory:
        messages: list[Any] = [user("hi")]
        for _ in replies:
            reply = await ask(client, *messages)
            message = reply.model_dump(exclude_none=True)
            message.pop("reasoning_content", None)
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = '{"a": 1}'
            messages += [message, user("so?")]
        live = trajectory.drift()
    assert [fork.cause for fork in live.forks] == ["reasoning_dropped", "arguments_reformatted"]
    assert (live.continued, live.merged, live.merge_ratio) == (3, 1, 1 / 3)
    (rebuilt,) = otel_rollout.reconstruct(list(recording.spans))
    assert rebuilt.drift() == live == trajectory.drift()
