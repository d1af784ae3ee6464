"""Agents at random: the spans that they leave, and what is true of what they did."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from otel_rollout import Completion, History, Trajectory
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.wire.json import dumps

Wire = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"x": "y" * 300}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "add"}}]


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
            attributes=with_lengths(attributes),
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
