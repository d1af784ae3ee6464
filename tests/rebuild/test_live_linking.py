"""Conversations of a running rollout are linked as calls end; the result is that of all at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Completion, reconstruct
from otel_rollout.rebuild import Assembly
from otel_rollout.trajectory import Conversations
from tests.kit.random_agents import Rollout, operations, plays, turn


def by_end(completions: list[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda c: (c.exchange.ended, c.exchange.started))


@given(plays(repeats=True), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_added_one_by_one_or_all_at_once(rollouts: list[Rollout], order: random.Random) -> None:
    """In the order in which calls end, asked in between or not, and in any other order."""
    for rollout in rollouts:
        spans = rollout.spans()
        (whole,) = [t for t in reconstruct(spans) if t.id == rollout.id]
        expected = [history.to_list() for history in whole.histories]
        shuffled = list(whole.completions)
        order.shuffle(shuffled)
        for completions in (by_end(whole.completions), shuffled):
            growing = Conversations()
            for completion in completions:
                growing.add(completion)
                if order.random() < 0.7:
                    assert growing.get(completion.id, completion.choice_index) is not None
                    growing.history(completion, {})
                    growing.histories({})
            assert [history.to_list() for history in growing.histories({})] == expected
            assert growing.completions == whole.completions
            together = Conversations(completions)
            assert sorted(growing.ambiguities) == sorted(together.ambiguities)


@given(plays(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_an_assembly_that_is_asked_while_spans_come(
    rollouts: list[Rollout], order: random.Random
) -> None:
    """Asked after each span, in any order and with duplicates, it ends with the same."""
    for rollout in rollouts:
        own, *calls = rollout.spans()
        assembly = Assembly(rollout.id)
        spans = [*calls, *calls[::2]]
        order.shuffle(spans)
        for span in spans:
            assembly.add(span)
            assembly.conversations().histories({})
        assembly.add(own)
        (whole,) = [t for t in reconstruct([own, *calls]) if t.id == rollout.id]
        assert assembly.trajectory() == whole
        shown = [history.to_list() for history in assembly.conversations().histories({})]
        assert shown == [history.to_list() for history in whole.histories]


@pytest.mark.parametrize("turns", [2, 20])
def test_a_look_at_one_conversation_costs_its_own_length(turns: int) -> None:
    """However many calls the rollout has made besides."""

    def look(others: int) -> int:
        rollout = Rollout(1, None)
        messages = []
        for number in range(turns):
            messages.append(turn("user", f"question {number}"))
            reply = {"role": "assistant", "content": f"answer {number}"}
            rollout.end(rollout.begin(messages, None, [reply], "complete"))
            messages.append(turn("assistant", f"answer {number}"))
        for number in range(others):
            reply = {"role": "assistant", "content": f"other {number}"}
            rollout.end(rollout.begin([turn("user", f"ask {number}")], None, [reply], "complete"))
        assembly = Assembly(rollout.id)
        for span in rollout.spans()[1:]:
            assembly.add(span)
        assembly.conversations().histories({})

        def get_history() -> None:
            conversations = assembly.conversations()
            completion = conversations.get(f"c{turns - 1}", 0)
            assert completion is not None
            history = conversations.history(completion, {})
            assert len(history.items) == 2 * turns

        return operations(get_history)

    assert look(300) <= look(3) + 5
