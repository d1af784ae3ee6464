"""Agents at random: whatever they do, what is rebuilt is what they did, or says what it lacks.

A simulated agent forks, retries, edits, compacts, drops reasoning, samples several choices and
fails, in several rollouts at once, with calls that end in any order. It knows what each request
really continued; the spans that it leaves behind go through the real writer and reader.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.wire.json import dumps
from tests.kit.random_agents import (
    Call,
    Choice,
    Rollout,
    all_spans,
    plays,
    shown,
    trained,
    turn,
)

pytestmark = pytest.mark.slow


def doubts(trajectory: Trajectory) -> list[str]:
    """The warnings, but for the one about replies that are sent back edited."""
    return [each for each in trajectory.warnings if "in other words" not in each]


# --- everything is there


@given(plays(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_what_agents_did_comes_back(rollouts: list[Rollout], order: random.Random) -> None:
    """Where nothing is said twice, histories are exactly what was done, for any order of spans."""
    spans = all_spans(rollouts)
    trajectories = {t.id: t for t in reconstruct(spans)}
    assert len(trajectories) == len(rollouts)
    for each in rollouts:
        trajectory = trajectories[each.id]
        assert doubts(trajectory) == []
        assert trajectory.parent_id == (each.parent.id if each.parent else None)
        assert Counter(map(shown, trajectory.histories)) == each.histories()
        assert trained(trajectory) == Counter(
            choice.name for choice in each.choices() if choice.call.status == "complete"
        )
        statuses = {c.id: c.status for c in trajectory.completions if c.items}
        assert statuses == {call.id: call.status for call in each.calls if call.choices}
        for history in trajectory.histories:
            call = each.choice(history.completions[-1]).call
            breaks = [item.is_break for item in history.items]
            assert breaks == [*(turn.is_break for turn in call.turns), False]
            assert history.tools == call.tools
    shuffled = spans + spans[:3]
    order.shuffle(shuffled)
    again = reconstruct(shuffled)
    assert again == list(trajectories.values())
    assert [t.histories for t in again] == [t.histories for t in trajectories.values()]


@given(plays(repeats=True), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_agents_that_repeat_themselves(rollouts: list[Rollout], order: random.Random) -> None:
    """Where the same is said twice, each reply is where one like it was said, and it is reported.

    Nothing tells equal replies apart: one of them is taken, and a sentence says among which.
    """
    spans = all_spans(rollouts)
    order.shuffle(spans)
    for trajectory in reconstruct(spans):
        each = next(r for r in rollouts if r.id == trajectory.id)
        for history in trajectory.histories:
            last = each.choice(history.completions[-1])
            sent = [dumps(turn.wire) for turn in last.call.turns]
            assert [dumps(m) for m in history.messages()] == [*sent, dumps(last.wire)]
            for position, item in enumerate(history.items):
                if item.completion is not None:
                    choice = each.choice(item.completion)
                    meanings = [*(t.meaning for t in last.call.turns), last.meaning]
                    assert choice.call.context[0] == last.call.context[0]
                    assert [*choice.call.context[1], choice.meaning] == meanings[: position + 1]
        assert set(trained(trajectory).values()) <= {1}
        assert set(trained(trajectory)) == {
            choice.name for choice in each.choices() if choice.call.status == "complete"
        }
        asked = [call for call in each.calls if call.choices]
        several = [call for call in asked if len(thought_alike(each, call)) > 1]
        assert len(doubts(trajectory)) == len(several)
        for call, warning in zip(several, doubts(trajectory), strict=True):
            assert f"completion {call.id!r} continues a reply" in warning
            for choice in thought_alike(each, call)[:10]:
                assert f"{choice.call.id!r} (choice {choice.index})" in warning
        continuing = {c for c in asked if each.equals(c)}
        roots = {h.completions[0].id for h in trajectory.histories}
        assert roots == {call.id for call in asked if call not in continuing}


def thought_alike(each: Rollout, call: Call) -> list[Choice]:
    """The choices that nothing tells apart: reasoning that was sent back may."""
    found = each.equals(call)
    if not found:
        return []
    sent = call.turns[len(found[0].call.turns)].wire
    thought = sent.get("reasoning_content") or sent.get("reasoning")
    same = [c for c in found if c.wire.get("reasoning_content") == thought]
    return same or found


# --- spans that did not come


@given(plays(), st.data())
@settings(max_examples=60)
def test_lost_spans_are_said_and_nothing_is_wrong(
    rollouts: list[Rollout], data: st.DataObject
) -> None:
    """Of any subset of the spans, what is given is true, and what is missing is counted."""
    spans = all_spans(rollouts)
    kept = data.draw(st.lists(st.sampled_from(spans), unique_by=lambda s: s.span_id))
    ids = {span.span_id for span in kept}
    for trajectory in reconstruct(kept):
        each = next(r for r in rollouts if r.id == trajectory.id)
        own, *calls = each.spans()
        lost = [call for call in calls if call.span_id not in ids]
        if own.span_id not in ids:
            assert any("own span did not come" in w for w in trajectory.warnings)
            there = [int(name[8:], 16) for name in ids if name[:8] == each.id[:8]]
            gaps = max(there) - len(there)
            sentence = f"at least {gaps} model calls are missing"
            assert bool(gaps) == any(sentence in w for w in trajectory.warnings)
        elif lost:
            sentence = f"{len(lost)} of {len(calls)} model calls are missing"
            assert any(sentence in w for w in trajectory.warnings)
        check_truth(trajectory, each, ids)


def check_truth(trajectory: Trajectory, each: Rollout, ids: set[str]) -> None:
    """All that is given is true: of the calls whose spans came and are whole, nothing is lost."""
    there = {c.id for c in trajectory.completions if c.items and c.exchange.prompt_is_known}
    for completion in trajectory.completions:
        call = each.calls[int(completion.span_id[8:], 16) - 1]
        assert completion.span_id in ids
        if completion.items:
            assert completion.message == each.choice(completion).wire
        if completion.exchange.prompt_is_known:
            assert completion.request_messages == [turn.wire for turn in call.turns]
            assert completion.tools == call.tools
        if completion.exchange.damage:
            assert not completion.trainable
            assert any(completion.span_id in warning for warning in trajectory.warnings)
        if completion.trainable:
            assert completion.prompt_token_ids == [1, 2, call.number]
    assert Counter(map(shown, trajectory.histories)) == each.histories(lambda c: c.id in there)
    assert trained(trajectory) == Counter(
        (c.id, c.choice_index) for c in trajectory.completions if c.trainable
    )


def resealed(span: SpanRecord, changes: dict[str, Any]) -> SpanRecord:
    """The span as if these attributes had been written on it."""
    attributes = {k: v for k, v in span.attributes.items() if k != sc.LENGTHS}
    return replace(span, attributes=with_lengths({**attributes, **changes}))


def test_calls_that_came_too_late_are_replayed_as_such() -> None:
    """A call that ended, or began, after its rollout is no part of it, and is counted."""
    rollout = Rollout(1, None)
    for text in ("in time", "late", "later"):
        reply = {"role": "assistant", "content": text}
        rollout.end(rollout.begin([turn("user", text)], None, [reply], "complete"))
    own, *calls = rollout.spans()
    counts = {sc.ROLLOUT_EXCHANGE_COUNT: 2, sc.ROLLOUT_OPEN_COUNT: 1}
    spans = [resealed(own, counts), calls[0]]
    spans += [resealed(call, {sc.EXCHANGE_LATE: True}) for call in calls[1:]]
    told = {
        2: ["1 model calls had not ended when the rollout did; they are not part of it"],
        3: ["1 model calls had not ended when the rollout did; they are not part of it"],
        4: [
            "1 model calls had not ended when the rollout did; they are not part of it",
            "1 model calls began after the rollout had ended; they are not part of it",
        ],
    }
    for count, sentences in told.items():
        for some in (spans[:count], spans[:count][::-1]):
            (trajectory,) = reconstruct(some)
            assert [c.id for c in trajectory.completions] == ["c0"]
            assert trajectory.warnings == sentences


# --- attributes that were cut


@given(plays(), st.data())
@settings(max_examples=60)
def test_cut_attributes_are_said_and_nothing_is_wrong(
    rollouts: list[Rollout], data: st.DataObject
) -> None:
    """Whatever attribute of whatever spans is cut or dropped, what is given is true, and said."""
    spans = {span.span_id: span for span in all_spans(rollouts)}
    for name in data.draw(st.lists(st.sampled_from(sorted(spans)), min_size=1, unique=True)):
        span = spans[name]
        key = data.draw(st.sampled_from(sorted(span.attributes)))
        length = len(str(span.attributes[key]))
        spans[name] = damaged(span, key, data.draw(st.none() | st.integers(0, max(0, length - 1))))
    for trajectory in reconstruct(spans.values()):
        each = next(r for r in rollouts if r.id == trajectory.id)
        check_truth(trajectory, each, set(spans))
        cut = [span for span in each.spans() if span != spans[span.span_id]]
        assert trajectory.warnings or not cut
    # What was cut on one way may come whole on another.
    whole = [*spans.values(), *all_spans(rollouts)]
    assert reconstruct(whole) == reconstruct(all_spans(rollouts))
    assert reconstruct(whole[::-1]) == reconstruct(all_spans(rollouts))


def damaged(span: SpanRecord, key: str, length: int | None) -> SpanRecord:
    """The span with the attribute cut at that length; None drops it."""
    attributes = dict(span.attributes)
    text = str(attributes.pop(key))
    if length is not None:
        attributes[key] = text[:length]
    return replace(span, attributes=attributes)
