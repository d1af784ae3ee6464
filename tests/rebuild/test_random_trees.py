"""Agents at random: whatever they do, what is rebuilt is what they did, or says what it lacks.

A simulated agent forks, retries, edits, compacts, drops reasoning, samples several choices and
fails, in several rollouts at once, with calls that end in any order. It knows what each request
really continued; the spans that it leaves behind go through the real writer and reader.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Completion, History, Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord, sealed
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.trajectory.histories import link
from otel_rollout.wire.json import dumps

Wire = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"x": "y" * 300}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "add"}}]


# --- the agent, and what is true of what it did


@dataclass(frozen=True)
class Meaning:
    """What a message says to a model: the same for all forms that a client may send it in."""

    role: str
    text: str
    call: str = ""
    """Arguments of its tool call, in one canonical form."""
    refusal: str = ""


@dataclass(eq=False)
class Choice:
    """One sampled reply."""

    call: Call
    index: int
    meaning: Meaning
    wire: Wire

    @property
    def name(self) -> tuple[str, int]:
        return self.call.id, self.index


@dataclass
class Turn:
    """One message of a conversation as the agent has it."""

    meaning: Meaning
    wire: Wire
    sampled: Choice | None = None
    """The choice that it really is, in the place where it was sampled."""
    is_break: bool = False


@dataclass(eq=False)
class Call:
    """One model call, as it really was."""

    number: int
    rollout: Rollout
    turns: list[Turn]
    tools: list[Any] | None
    choices: list[Choice]
    started: int
    status: str
    ended: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"c{self.number}"

    @property
    def context(self) -> tuple[str, tuple[Meaning, ...]]:
        return dumps(self.tools), tuple(turn.meaning for turn in self.turns)


class Rollout:
    """A rollout as it leaves its spans."""

    def __init__(self, number: int, parent: Rollout | None) -> None:
        self.id = f"{number}" * 32
        self.parent = parent
        self.writer = ExchangeWriter()
        self.clock = 0
        self.calls: list[Call] = []

    def begin(self, turns: list[Turn], tools: Any, replies: Sequence[Wire], status: str) -> Call:
        self.clock += 1
        call = Call(len(self.calls), self, list(turns), tools, [], self.clock, status)
        call.choices = [Choice(call, i, meaning_of(m), m) for i, m in enumerate(replies)]
        body = {"model": "m", "messages": [turn.wire for turn in turns]}
        body |= {"tools": tools} if tools else {}
        call.attributes = {
            sc.EXCHANGE_VERSION: 1,
            sc.ROLLOUT_ID: self.id,
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: call.started,
            sc.REQUEST_PATH: "/chat/completions",
            **self.writer.request(json.dumps(body).encode()),
        }
        self.calls.append(call)
        return call

    def end(self, call: Call) -> None:
        call.ended = self.clock
        call.attributes |= {sc.EXCHANGE_ENDED: call.ended, sc.EXCHANGE_STATUS: call.status}
        if call.status == "error":
            call.attributes[sc.EXCHANGE_ERROR] = dumps({"type": "E", "message": "failed"})
        if call.choices:
            finish = "stop" if call.status == "complete" else None
            choices = [
                {"index": c.index, "finish_reason": finish, "message": c.wire} for c in call.choices
            ]
            body = {"id": call.id, "prompt_token_ids": [1, 2, call.number], "choices": choices}
            call.attributes |= self.writer.response(json.dumps(body).encode())
            call.attributes[sc.RESPONSE_ID] = call.id

    def spans(self) -> list[SpanRecord]:
        """The rollout's own span, then those of its calls in their order."""
        own = {
            sc.ROLLOUT_SCHEMA_VERSION: 1,
            sc.ROLLOUT_ID: self.id,
            sc.ROLLOUT_PROCESS: "p",
            sc.ROLLOUT_STATUS: "complete",
            sc.ROLLOUT_TRAINABLE: True,
            sc.ROLLOUT_EXCHANGE_COUNT: len(self.calls),
            sc.ROLLOUT_OPEN_COUNT: 0,
            **({sc.ROLLOUT_PARENT_ID: self.parent.id} if self.parent else {}),
        }
        spans = [self._span(0, own)]
        return spans + [self._span(call.number + 1, call.attributes) for call in self.calls]

    def _span(self, number: int, attributes: dict[str, Any]) -> SpanRecord:
        return SpanRecord(
            name="span",
            trace_id="1" * 32,
            span_id=f"{self.id[:8]}{number:08x}",
            parent_span_id=None,
            # Wall clocks that tell nothing: within a process they are not asked.
            start_time_ns=10_000 - number,
            end_time_ns=20_000,
            attributes=sealed(attributes),
        )

    # --- what is true

    def choices(self) -> list[Choice]:
        return [choice for call in self.calls for choice in call.choices]

    def choice(self, completion: Completion) -> Choice:
        """The choice that this completion is of."""
        return self.calls[int(completion.id[1:])].choices[completion.choice_index]

    def histories(self, there: Callable[[Call], bool] = lambda _: True) -> Counter[Any]:
        """The histories of the calls that are there: wire messages, and who sampled which.

        For agents that never say the same twice.
        """
        choices = [choice for choice in self.choices() if there(choice.call)]
        continued = {last_sampled(choice.call, there) for choice in choices if choice.call.choices}
        return Counter(
            (
                (*(dumps(turn.wire) for turn in choice.call.turns), dumps(choice.wire)),
                (
                    *(
                        turn.sampled.name if turn.sampled and there(turn.sampled.call) else None
                        for turn in choice.call.turns
                    ),
                    choice.name,
                ),
            )
            for choice in choices
            if choice not in continued
        )

    def equals(self, call: Call) -> list[Choice]:
        """The choices that `call` may continue, by nothing but what was said before it."""
        tools, meanings = call.context
        for length in range(len(meanings), 0, -1):
            found = [
                choice
                for choice in self.choices()
                if choice.call.ended is not None
                and choice.call.ended < call.started
                and choice.call.context == (tools, meanings[: length - 1])
                and choice.meaning == meanings[length - 1]
            ]
            if found:
                return found
        return []


def last_sampled(call: Call, there: Callable[[Call], bool]) -> Choice | None:
    sampled = (turn.sampled for turn in reversed(call.turns))
    return next((choice for choice in sampled if choice and there(choice.call)), None)


def meaning_of(wire: Wire) -> Meaning:
    calls = wire.get("tool_calls") or []
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    return Meaning(
        wire["role"],
        wire.get("content") or "",
        json.dumps(arguments, sort_keys=True),
        wire.get("refusal") or "",
    )


def turn(role: str, text: str) -> Turn:
    return Turn(Meaning(role, text), {"role": role, "content": text})


def resent(choice: Choice, form: int, reasoning: int) -> Turn:
    """A reply as clients send it back: the same to the model, not the same bytes."""
    wire = dict(choice.wire)
    for call in wire.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        spaced = json.dumps(arguments, sort_keys=form % 2 == 0, indent=form % 3 or None)
        function = {**call["function"], "arguments": spaced}
        wire["tool_calls"] = [{**call, "function": function}]
    if form == 1:
        wire |= {"refusal": wire.get("refusal"), "annotations": [], "audio": None}
    elif form == 2:
        wire = {key: value for key, value in wire.items() if value is not None}
    elif form == 3 and wire.get("content"):
        wire["content"] = [{"type": "text", "text": wire["content"]}]
    elif form == 4:
        wire = {**wire, "function_call": None, "content": wire.get("content") or ""}
    elif form == 5:
        wire = dict(reversed(wire.items()))
    thought = wire.pop("reasoning_content", None)
    if thought is not None and reasoning == 0:
        wire["reasoning_content"] = thought
    elif thought is not None and reasoning == 1:
        wire["reasoning_content"] = "another thought"
    elif thought is not None and reasoning == 2:
        wire["reasoning"] = thought  # as another server names it
    is_break = thought is not None and reasoning not in (0, 2)
    return Turn(choice.meaning, wire, choice, is_break)


@dataclass
class Conversation:
    """What an agent has in hand: it asks with this, and goes on from there."""

    rollout: Rollout
    turns: list[Turn]
    tools: list[Any] | None


@st.composite
def plays(draw: st.DrawFn, *, repeats: bool = False) -> list[Rollout]:
    """Some rollouts; with `repeats` models say the same, and agents ask the same, again."""
    rollouts = [Rollout(1, None)]
    if draw(st.booleans()):
        rollouts.append(Rollout(2, rollouts[0]))
    conversations: list[Conversation] = []
    pending: list[Call] = []
    count = 0

    def fresh(what: str) -> str:
        nonlocal count
        count += 1
        if repeats and draw(st.integers(0, 2)):
            return what
        return f"{what} {count}"

    def pick(n: int) -> int:
        return draw(st.integers(0, n - 1))

    def reply() -> Wire:
        kind = pick(6)
        wire: Wire = {"role": "assistant", "content": fresh("reply")}
        if kind == 0:
            arguments = json.dumps({"b": 1.50, "a": [fresh("argument"), True]})
            function = {"name": "find", "arguments": arguments}
            wire |= {"content": None, "tool_calls": [{"id": "call_1", "function": function}]}
        elif kind == 1:
            wire["reasoning_content"] = fresh("thought")
        elif kind == 2:
            wire |= {"content": None, "refusal": fresh("no")}
        elif kind == 3 and repeats:
            wire["content"] = ""
        return wire

    def ask(conversation: Conversation) -> None:
        status = draw(st.sampled_from(["complete"] * 5 + ["error", "cancelled", "abandoned"]))
        n = {"complete": 1 + pick(3) // 2 + pick(4) // 3, "abandoned": pick(2)}.get(status, 0)
        replies = [reply() for _ in range(n)]
        call = conversation.rollout.begin(conversation.turns, conversation.tools, replies, status)
        pending.append(call)

    def finish() -> None:
        call = pending.pop(pick(len(pending)))
        call.rollout.end(call)
        if not call.choices or call.status != "complete":
            return
        for choice in call.choices[: 1 + pick(len(call.choices))]:
            turns = [*call.turns, resent(choice, pick(6), pick(4))]
            conversations.append(Conversation(call.rollout, turns, call.tools))

    for _ in range(draw(st.integers(1, 20))):
        action = pick(14)
        if action < 4 and pending:
            finish()
            continue
        if not conversations or action == 4:
            turns = [turn("system", fresh("system")), turn("user", fresh("user"))]
            tools = draw(st.sampled_from([None, TOOLS, OTHER_TOOLS]))
            conversation = Conversation(rollouts[pick(len(rollouts))], turns, tools)
        else:
            earlier = conversations[pick(len(conversations))]
            turns = [*earlier.turns, turn("user", fresh("user"))]
            conversation = Conversation(earlier.rollout, turns, earlier.tools)
            last = max(i for i, each in enumerate(turns) if each.meaning.role == "assistant")
            if action == 5:  # the reply is sent back edited
                turns[last] = turn("assistant", fresh("edited"))
            elif action == 6:  # compaction
                conversation.turns = [turns[0], turn("user", fresh("summary")), turns[-1]]
                unsampled(conversation.turns)
            elif action == 7 and len(turns) > 3:  # something in the middle is left out
                cut = 1 + pick(len(turns) - 2)
                conversation.turns = turns[:cut] + unsampled(turns[cut + 1 :])
            elif action == 8:
                conversation.turns = [turn("system", fresh("other system"))]
                conversation.turns += unsampled(turns[1:])
            elif action == 9:
                conversation.tools = [{"type": "function", "function": {"name": fresh("tool")}}]
                conversation.turns = unsampled(turns)
            elif action == 10:  # words that the agent put into the model's mouth
                turns += [turn("assistant", fresh("agent")), turn("user", fresh("user"))]
            elif action == 11:  # a prefilled reply
                turns.append(turn("assistant", fresh("prefill")))
        ask(conversation)
        if action == 12:  # asked once more before, or after, the first is answered
            if draw(st.booleans()):
                finish()
            ask(conversation)
    while pending:
        finish()
    return rollouts


def unsampled(turns: list[Turn]) -> list[Turn]:
    """The turns in a place where no model said them."""
    return [replace(each, sampled=None, is_break=False) for each in turns]


def all_spans(rollouts: list[Rollout]) -> list[SpanRecord]:
    return [span for each in rollouts for span in each.spans()]


def shown(history: History) -> tuple[tuple[str, ...], tuple[tuple[str, int] | None, ...]]:
    """The history as `Rollout.histories` tells it."""
    return (
        tuple(dumps(item.message) for item in history.items),
        tuple(
            (item.completion.id, item.completion.choice_index) if item.completion else None
            for item in history.items
        ),
    )


def trained(trajectory: Trajectory) -> Counter[tuple[str, int]]:
    """How often each completion is trained."""
    return Counter(
        (item.completion.id, item.completion.choice_index)
        for history in trajectory.histories
        for item in history.items
        if item.trainable and item.completion
    )


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
        assert trajectory.warnings == []
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
        assert len(trajectory.warnings) == len(several)
        for call, warning in zip(several, trajectory.warnings, strict=True):
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
    return replace(span, attributes=sealed({**attributes, **changes}))


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


# --- time


def operations(work: Callable[[], object]) -> int:
    """Function calls, of Python and of C, that the work takes."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def growing(rollout: Rollout, turns: int) -> None:
    """One conversation, each turn on top of the last."""
    messages = [turn("system", "s")]
    for number in range(turns):
        messages = [*messages, turn("user", f"{number}")]
        reply = {"role": "assistant", "content": f"reply {number}"}
        call = rollout.begin(messages, TOOLS, [reply], "complete")
        rollout.end(call)
        messages = [*messages, resent(call.choices[0], number % 6, 0)]


def compacted(rollout: Rollout, turns: int) -> None:
    """A conversation that begins anew after every ten turns."""
    for number in range(turns // 10):
        messages = [turn("system", "s"), turn("user", f"summary {number}")]
        for step in range(10):
            reply = {"role": "assistant", "content": f"reply {number} {step}"}
            call = rollout.begin(messages, None, [reply], "complete")
            rollout.end(call)
            messages = [*messages, resent(call.choices[0], 0, 0), turn("user", f"{step}")]


def resampled(rollout: Rollout, turns: int) -> None:
    """A prompt that is asked again and again, and answered in other words each time."""
    messages = [turn("user", f"{number}") for number in range(20)]
    for number in range(turns):
        reply = {"role": "assistant", "content": f"reply {number}"}
        rollout.end(rollout.begin(messages, None, [reply], "complete"))


@pytest.mark.parametrize("agent", [growing, compacted, resampled])
def test_time_is_linear(agent: Callable[[Rollout, int], None]) -> None:
    """Twice the turns take about twice the operations to rebuild, whatever the agent does."""

    def rebuild(turns: int) -> int:
        rollout = Rollout(1, None)
        agent(rollout, turns)
        spans = rollout.spans()

        def work() -> None:
            (trajectory,) = reconstruct(spans)
            assert trajectory.warnings == []
            assert len(trajectory.completions) == turns

        return operations(work)

    assert rebuild(400) < 2.4 * rebuild(200)


def test_a_long_prompt_is_walked_once() -> None:
    """What thousands of samples of a long prompt continue is found without a walk for each."""

    def search(samples: int) -> int:
        rollout = Rollout(1, None)
        messages = [turn("user", f"{number}") for number in range(1000)]
        for number in range(samples):
            reply = {"role": "assistant", "content": f"reply {number}"}
            rollout.end(rollout.begin(messages, None, [reply], "complete"))
        (trajectory,) = reconstruct(rollout.spans())
        completions = trajectory.completions
        return operations(lambda: link(completions))

    assert search(100) - search(50) < 5000
