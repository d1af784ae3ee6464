"""What the model says to every stack, by where each conversation is; the tools; and the judge.

A lead calls two tools at once, one of which fails; its second request is refused once; it asks two
helpers at once, each of which calls a tool and answers; it answers.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout import Completion, Trajectory
from otel_rollout import semconv as sc
from otel_rollout.testing import ModelServer, Raw, Reply, ToolCall, WireExchange
from otel_rollout.trajectory import sentences
from tests.frameworks.wire import said, sampled
from tests.kit.comparing import replayed
from tests.kit.recording import Recording

TASK = "Compare them."
ANSWER = "They are alike."
LEAD = "You lead."
HELPER = "You help."
ADD = ToolCall("add", ' {"b": 3,  "a": 2} ')
"""Arguments as models write them: nobody's `json.dumps` gives this text."""
DIVIDE = ToolCall("divide", '{"a": 1, "b" :0}')


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number

    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divide one number by another.

    Args:
        a: the number that is divided
        b: the number that it is divided by

    """
    return a / b


def task_of(who: str) -> str:
    """What a helper is asked."""
    return f"Look at {who}."


class Script:
    """Replies to requests, each by its conversation and how often that was answered."""

    def __init__(self, *, ask: str = "ask", text: str = "who", tool: ToolCall = ADD) -> None:
        self.turns: Counter[str] = Counter()
        self.refused = 0
        self.ask, self.text = ask, text
        self.tool = tool
        self.lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Reply | Raw:
        who = self._who(body)
        with self.lock:
            if who == "lead" and self.turns[who] == 1 and not self.refused:
                self.refused += 1
                refusal = b'{"error": {"message": "slow down", "type": "rate_limit"}}'
                return Raw(429, refusal, headers={"retry-after-ms": "10"})
            self.turns[who] += 1
            return self._reply(who, self.turns[who], json.dumps(body))

    def _who(self, body: dict[str, Any]) -> str:
        asked = body.get("messages") or body["input"]
        first = next((m for m in asked if m.get("role") == "user"), asked[-1])
        found = re.search(r"Look at (left|right)", json.dumps(first))
        return found[1] if found else "lead"

    def _reply(self, who: str, turn: int, text: str) -> Reply:
        if who != "lead":
            calls = [self.tool]
            return Reply(tool_calls=calls) if turn == 1 else self.final(f"{who} is 5.", text)
        if turn == 1:
            return Reply(tool_calls=[self.tool, DIVIDE])
        if turn == 2:
            asks = [
                ToolCall(self.ask, f' {{"{self.text}":"{self.named(who)}"}}')
                for who in ("left", "right")
            ]
            return Reply(tool_calls=asks)
        return self.final(ANSWER, text)

    def named(self, who: str) -> str:
        """The argument that a helper is asked with."""
        return who

    def final(self, answer: str, body: str) -> Reply:
        """The last reply of a conversation."""
        return Reply(answer)


REQUESTS = 8
"""Of which one is refused."""
TOOLS = 6
"""Runs of tools, the helpers among them."""


@dataclass
class Node:
    """A reply in the forest that the log of the server gives."""

    id: str
    path: list[Any]
    tools: str
    parent: Node | None
    is_leaf: bool = True


def forest(wire: Sequence[WireExchange]) -> list[list[str]]:
    """The conversations of the log: each the ids of its replies. No code of the library."""
    nodes: list[Node] = []
    for exchange in wire:
        body, reply = json.loads(exchange.request), said(exchange.response)
        asked = [canonical(message) for message in body["messages"]]
        tools = json.dumps(body.get("tools"))
        parent = max(
            (n for n in nodes if n.tools == tools and asked[: len(n.path)] == n.path),
            key=lambda node: len(node.path),
            default=None,
        )
        calls = [(name, text) for _, name, text in reply["calls"]]
        own = ("assistant", reply["content"], [(name, parsed(text)) for name, text in calls])
        nodes.append(Node(reply["id"], [*asked, own], tools, parent))
        if parent is not None:
            parent.is_leaf = False
    return sorted(_ids(node) for node in nodes if node.is_leaf)


def _ids(node: Node) -> list[str]:
    return [*(_ids(node.parent) if node.parent else ()), node.id]


def canonical(message: dict[str, Any]) -> Any:
    """A message as a server tells it from another one."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = [
        (call["function"]["name"], parsed(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], content, calls


def parsed(text: str) -> Any:
    return json.loads(text)


def judge(recording: Recording, server: ModelServer, *, rewrites: bool) -> Trajectory:
    """The only trajectory, which is what the log of the server says, and nothing else.

    rewrites: whether the stack replays what was sampled in other words, which a warning says.
    """
    trajectory = replayed(recording)
    said = [warning for warning in trajectory.warnings if warning != sentences.NOT_ASKED()]
    assert [warning for warning in said if "in other words" not in warning] == []
    assert len(said) == rewrites
    answered = [exchange for exchange in server.exchanges if exchange.status == 200]
    complete = [c for c in trajectory.completions if c.status == "complete"]
    assert len(complete) == len(answered)
    for completion, exchange in zip(complete, _in_order(complete, answered), strict=True):
        assert json.dumps(completion.request) == json.dumps(json.loads(exchange.request))
        if not completion.stream:
            assert json.dumps(completion.response) == json.dumps(json.loads(exchange.response))
        assert completion.trainable
    trained = Counter(
        item.completion.id
        for history in trajectory.histories
        for item in history.items
        if item.completion and item.trainable
    )
    assert trained == Counter(c.id for c in complete)
    return trajectory


def judge_spans(recording: Recording, *, tools_run: int) -> None:
    """What people look at: each model call is drawn once at most, and each run of a tool once."""
    spans = {span.context.span_id: span for span in recording.spans if span.context}
    drawn: Counter[int] = Counter()
    for span in recording.spans:
        if span.name.startswith(sc.OPERATION_EXCHANGE):
            above = [each for each in _above(span, spans) if _is_call(each)]
            assert len(above) <= 1, (span.name, [each.name for each in above])
            drawn.update(each.context.span_id for each in above if each.context)
    assert not drawn or max(drawn.values()) == 1
    tools = [span for span in recording.spans if span.name.startswith(sc.OPERATION_EXECUTE_TOOL)]
    ids = Counter((span.attributes or {}).get(sc.GEN_AI_TOOL_CALL_ID) for span in tools)
    ids.pop(None, None)
    assert not ids or max(ids.values()) == 1
    assert len([span for span in tools if "merged" not in span.name]) == tools_run


def _above(span: ReadableSpan, spans: Mapping[int, ReadableSpan]) -> Iterator[ReadableSpan]:
    while span.parent is not None and span.parent.span_id in spans:
        span = spans[span.parent.span_id]
        yield span


def _is_call(span: ReadableSpan) -> bool:
    attributes = span.attributes or {}
    operation = attributes.get(sc.GEN_AI_OPERATION_NAME) or attributes.get(sc.LLM_REQUEST_TYPE)
    return operation in sc.MODEL_OPERATIONS


def judge_conversations(trajectory: Trajectory, server: ModelServer) -> None:
    """The histories are the conversations of the log, and each reply is what was said."""
    answered = [exchange for exchange in server.exchanges if exchange.status == 200]
    complete = [c for c in trajectory.completions if c.status == "complete"]
    for completion, exchange in zip(complete, _in_order(complete, answered), strict=True):
        assert sampled(completion) == said(exchange.response)
    assert sorted(history.completion_ids for history in trajectory.histories) == forest(answered)


def _in_order(
    completions: Sequence[Completion], wire: Sequence[WireExchange]
) -> Iterator[WireExchange]:
    """The exchange of the log that each completion is."""
    for completion in completions:
        (found,) = [e for e in wire if completion.id.encode() in e.response]
        yield found
