"""Histories: random trees of conversations are played, and exactly those come back."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter

pytestmark = pytest.mark.slow

ROLLOUT = "r" * 32


@dataclass
class Call:
    """One call that was played, and what is true of it."""

    number: int
    messages: list[Any]
    parent: Call | None
    reply: dict[str, Any] | None
    tools: list[Any] | None
    started: int
    ended: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"c{self.number}"


class Play:
    """A rollout as its spans: what calls were made, when each began and ended."""

    def __init__(self) -> None:
        self.writer = ExchangeWriter()
        self.clock = 0
        self.calls: list[Call] = []

    def begin(
        self, messages: list[Any], parent: Call | None, reply: str | None, tools: Any = None
    ) -> Call:
        self.clock += 1
        message = None if reply is None else {"role": "assistant", "content": reply}
        call = Call(len(self.calls), copy.deepcopy(messages), parent, message, tools, self.clock)
        body = {"messages": messages, "model": "m"} | ({"tools": tools} if tools else {})
        call.attributes = self.writer.request(json.dumps(body).encode())
        self.calls.append(call)
        return call

    def end(self, call: Call) -> None:
        call.ended = self.clock
        attributes: dict[str, Any] = {sc.EXCHANGE_STATUS: "error", sc.EXCHANGE_ERROR: "{}"}
        if call.reply is not None:
            choice = {"index": 0, "finish_reason": "stop", "message": call.reply}
            attributes = {sc.EXCHANGE_STATUS: "complete", sc.RESPONSE_ID: call.id}
            body = json.dumps({"id": call.id, "choices": [choice]}).encode()
            attributes |= self.writer.response(body)
        call.attributes |= attributes

    def spans(self) -> list[SpanRecord]:
        def span(number: int, name: str, start: int, end: int, attributes: Any) -> SpanRecord:
            return SpanRecord(
                name=name,
                trace_id="1" * 32,
                span_id=f"{number:016x}",
                parent_span_id=None,
                start_time_ns=start,
                end_time_ns=end,
                attributes=with_lengths({sc.ROLLOUT_ID: ROLLOUT, **attributes}),
            )

        spans = [
            span(
                0,
                "invoke_agent x",
                0,
                10_000,
                {
                    sc.ROLLOUT_SCHEMA_VERSION: 1,
                    sc.ROLLOUT_STATUS: "complete",
                    sc.ROLLOUT_PROCESS: "p",
                    sc.ROLLOUT_EXCHANGE_COUNT: len(self.calls),
                    sc.ROLLOUT_OPEN_COUNT: 0,
                },
            )
        ]
        for call in self.calls:
            assert call.ended is not None
            spans.append(
                span(
                    call.number + 1,
                    "exchange",
                    5000 - call.number,
                    6000,
                    {
                        sc.EXCHANGE_VERSION: 1,
                        sc.EXCHANGE_PROCESS: "p",
                        sc.EXCHANGE_STARTED: call.started,
                        sc.EXCHANGE_ENDED: call.ended,
                        sc.REQUEST_PATH: "/chat/completions",
                        **call.attributes,
                    },
                )
            )
        return spans

    def expected(self) -> set[tuple[tuple[str, ...], tuple[str | None, ...]]]:
        """The histories that were played: texts, and which completion is where."""
        good = [call for call in self.calls if call.reply is not None]
        continued = {call.parent.number for call in good if call.parent}
        histories = set()
        for leaf in good:
            if leaf.number in continued:
                continue
            assert leaf.reply is not None
            texts = [*leaf.messages, leaf.reply]
            where: list[str | None] = [None] * len(texts)
            call: Call | None = leaf
            while call is not None:
                where[len(call.messages)] = call.id
                call = call.parent
            histories.add((tuple(text_of(m) for m in texts), tuple(where)))
        return histories


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = content[0]["text"]
    return f"{message['role']}:{content or ''}"


def histories_of(
    trajectory: Trajectory,
) -> set[tuple[tuple[str, ...], tuple[str | None, ...]]]:
    return {
        (
            tuple(text_of(item.message) for item in history.items),
            tuple(item.completion.id if item.completion else None for item in history.items),
        )
        for history in trajectory.histories
    }


def replayed(message: dict[str, Any], style: int) -> dict[str, Any]:
    """A reply as clients send it back: the same to the model, not the same bytes."""
    content = message["content"]
    forms: list[dict[str, Any]] = [
        message,
        {**message, "tool_calls": None, "refusal": None, "annotations": []},
        {"content": [{"type": "text", "text": content}], "role": "assistant"},
        {**message, "audio": None, "function_call": None, "tool_calls": []},
    ]
    return forms[style % len(forms)]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 300}}}]


@st.composite
def plays(draw: st.DrawFn) -> Play:
    """New conversations, continued, forked, retried, edited, failing; calls overlap at will."""
    play = Play()
    users = st.sampled_from(["go on", "why", "stop"])
    pending: list[Call] = []
    for step in range(draw(st.integers(1, 25))):
        done = [c for c in play.calls if c.ended is not None and c.reply is not None]
        kind = draw(
            st.sampled_from(["new", "continue", "again", "edit", "drop", "end", "end", "fail"])
        )
        if kind == "end":
            if pending:
                call = pending.pop(draw(st.integers(0, len(pending) - 1)))
                play.end(call)
            continue
        reply = None if kind == "fail" else f"reply {step}"
        if kind == "new" or not done:
            messages = [
                {"role": "system", "content": draw(st.sampled_from(["a", "b"]))},
                {"role": "user", "content": draw(users)},
            ]
            call = play.begin(messages, None, reply, draw(st.sampled_from([None, TOOLS])))
        else:
            earlier = draw(st.sampled_from(done))
            assert earlier.reply is not None
            tools = earlier.tools
            if kind == "again":  # the same request: a sibling of the earlier call
                messages, parent = earlier.messages, earlier.parent
            else:
                answer = replayed(earlier.reply, draw(st.integers(0, 3)))
                messages = [*earlier.messages, answer, {"role": "user", "content": draw(users)}]
                parent = earlier
                if kind == "edit":  # not what was sampled: continues what came before it
                    messages[-2] = {"role": "assistant", "content": f"edited {step}"}
                    parent = earlier.parent
                elif kind == "drop":  # compaction: a conversation of its own
                    messages = [{"role": "system", "content": f"summary {step}"}, *messages[-1:]]
                    parent = None
            call = play.begin(messages, parent, reply, tools)
        pending.append(call)
    for call in pending:
        play.end(call)
    return play


@given(plays(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_what_was_played_comes_back(play: Play, order: random.Random) -> None:
    """Exactly the conversations that were played come back, for any order of the spans."""
    spans = play.spans()
    (trajectory,) = reconstruct(spans)
    # Of what is edited, a warning may say that.
    assert [each for each in trajectory.warnings if "in other words" not in each] == []
    assert histories_of(trajectory) == play.expected()
    shuffled = spans + spans[:3]
    order.shuffle(shuffled)
    assert reconstruct(shuffled) == [trajectory]
    assert [h.to_list() for h in reconstruct(shuffled)[0].histories] == [
        h.to_list() for h in trajectory.histories
    ]


@given(plays())
@settings(deadline=None)
def test_each_completion_trains_once(play: Play) -> None:
    """Every sampled completion is trainable in exactly one history, once."""
    (trajectory,) = reconstruct(play.spans())
    trained = [
        item.completion.id
        for history in trajectory.histories
        for item in history.items
        if item.trainable and item.completion
    ]
    assert sorted(trained) == sorted(c.id for c in play.calls if c.reply is not None)


@given(plays(), st.data())
@settings(deadline=None)
def test_lost_spans_never_make_a_wrong_history(play: Play, data: st.DataObject) -> None:
    """Of any subset of the spans, each history that is given was played; the loss is said."""
    spans = play.spans()
    root, exchanges = spans[0], spans[1:]
    every = st.sampled_from(exchanges) if exchanges else st.nothing()
    kept = data.draw(st.lists(every, unique_by=lambda span: span.span_id))
    (trajectory,) = reconstruct([root, *kept])
    by_id = {call.id: call for call in play.calls}
    for history in trajectory.histories:
        last = history.completions[-1]
        call = by_id[last.id]
        assert [text_of(m) for m in history.messages()][:-1] == [text_of(m) for m in call.messages]
    if len(kept) < len(exchanges):
        missing = len(exchanges) - len(kept)
        assert any(f"{missing} of {len(exchanges)} model calls" in w for w in trajectory.warnings)


@given(plays())
@settings(max_examples=50, deadline=None)
def test_to_dict_is_read_back(play: Play) -> None:
    """A trajectory goes through JSON and is equal afterwards, histories included."""
    (trajectory,) = reconstruct(play.spans())
    again = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    assert again == trajectory
    assert again.histories == trajectory.histories


def test_a_reply_under_way_cannot_be_continued() -> None:
    """A request that began before a reply had come does not continue it, equal text or not."""
    play = Play()
    user = {"role": "user", "content": "u"}
    first = play.begin([user], None, "same")
    second = play.begin([user, {"role": "assistant", "content": "same"}, user], None, "t")
    play.end(second)
    play.end(first)
    (trajectory,) = reconstruct(play.spans())
    assert histories_of(trajectory) == play.expected()
    assert len(trajectory.histories) == 2


def test_identical_samples_are_reported() -> None:
    """Of two equal replies the later one is continued, and it is said to be a guess."""
    play = Play()
    user = {"role": "user", "content": "u"}
    first = play.begin([user], None, "same")
    play.end(first)
    second = play.begin([user], None, "same")
    play.end(second)
    assert second.reply is not None
    third = play.begin([user, second.reply, user], second, "t")
    play.end(third)
    (trajectory,) = reconstruct(play.spans())
    assert histories_of(trajectory) == play.expected()
    (warning,) = trajectory.warnings
    assert "'c0'" in warning
    assert "'c1'" in warning


@pytest.fixture
def few_frames() -> Iterator[None]:
    """Python allows few calls inside calls."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield
    sys.setrecursionlimit(limit)


def test_long_conversations_are_no_recursion(few_frames: None) -> None:
    """A conversation of more turns than there may be frames is rebuilt, its last span first."""
    turns = 600
    play = Play()
    messages: list[Any] = []
    parent = None
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}"})
        parent = play.begin(messages, parent, f"reply {turn}")
        play.end(parent)
        messages = [*messages, parent.reply]
    (trajectory,) = reconstruct(play.spans()[::-1])
    (history,) = trajectory.histories
    assert len(history.items) == 2 * turns
    assert len(history.completions) == turns
    again = Trajectory.from_dict(trajectory.to_dict())
    assert again.histories == trajectory.histories
