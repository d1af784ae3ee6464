"""Tool spans without a change of the agent: from the requests that bring results of tool calls.

The model asked for it in a reply of the rollout, and the next request brings its result. The
time between becomes a span, unless a span of that call is on the trace already. These spans
are for people: a trajectory is made of exchange spans alone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context

from otel_rollout import semconv as sc
from otel_rollout.record import (
    ActiveRollout,
    ExchangeRecorder,
    Observer,
    process_state,
    text_of,
    with_number,
)
from otel_rollout.wire import (
    Json,
    ToolCall,
    ToolResult,
    api_of,
    dumps,
    events_of,
    loads,
    may_have_results,
    merge,
    normalised_content,
    tool_calls,
    tool_results,
)

_KEPT = 64
"""The last replies, and tool spans without an id, in which a call is looked for."""


@dataclass(slots=True, eq=False)
class _AskingReply:
    """A reply that may ask for tools, as it is on its span: nothing is read until it has to be."""

    text: str
    """Packed if it has events."""
    is_events: bool
    path: str
    ended_ns: int
    answered: set[str] = field(default_factory=set)
    """Ids of its calls that have a span."""

    def calls(self) -> dict[str, ToolCall]:
        """The calls in it, by id."""
        api = api_of(self.path)
        if self.is_events:
            reply = merge(events_of(self.text), path=self.path).body
        else:
            reply = loads(self.text)
        if api is None or not isinstance(reply, dict):
            return {}
        return _calls_in(item for one in api.sampled({}, None, reply) for item in one.items)


def _calls_in(messages: Iterable[Json]) -> dict[str, ToolCall]:
    """The calls by id; not those whose id several have, which a result would not tell apart."""
    calls = [call for each in messages for call in tool_calls(each)]
    counts = Counter(call.id for call in calls)
    return {call.id: call for call in calls if call.id and counts[call.id] == 1}


class ToolSpans(Observer):
    """Creates the spans of the tools that the requests of each rollout bring results of."""

    def rollout_began(self, rollout: ActiveRollout) -> None:
        rollout.observed[self] = _AnsweredTools()

    def requested(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        tools: _AnsweredTools | None = call.rollout.observed.get(self)
        if tools is None or not tools.replies or not may_have_results(call.added):
            return
        with tools.lock:
            tools.write_spans(call.rollout, call.added, call.began_ns)

    def replied(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        tools: _AnsweredTools | None = call.rollout.observed.get(self)
        if tools is not None:
            is_events = sc.RESPONSE_EVENTS in written
            text = str(written[sc.RESPONSE_EVENTS if is_events else sc.RESPONSE_BODY])
            reply = _AskingReply(text, is_events, call.path, call.ended_ns)
            with tools.lock:
                tools.replies.append(reply)

    def tool_began(self, rollout: ActiveRollout, call_id: object, name: str, at_ns: int) -> None:
        tools: _AnsweredTools | None = rollout.observed.get(self)
        if tools is not None:
            tools.note_span(call_id, name, at_ns)

    def rollout_ended(self, rollout: ActiveRollout) -> None:
        rollout.observed.pop(self, None)


class _AnsweredTools:
    """The tools that one rollout's requests brought results of, each with one span."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.replies: deque[_AskingReply] = deque(maxlen=_KEPT)
        self._with_span: set[str] = set()
        """Ids of calls that have a span of somebody else."""
        self._unnamed: deque[tuple[str, int]] = deque(maxlen=_KEPT)
        """Name and start of tool spans of somebody else, without the id of their call."""

    def note_span(self, call_id: object, name: object, start_ns: int) -> None:
        """Somebody else, such as `tool` or a framework, creates the span of a tool."""
        if call_id is not None:
            self._with_span.add(str(call_id))
        elif isinstance(name, str):
            self._unnamed.append((name, start_ns))

    def write_spans(self, active: ActiveRollout, added: bytes, started_ns: int) -> None:
        """Write the spans of the tools whose results are in these messages of a request.

        added: those of its messages that no request had before, as JSON.
        """
        messages: list[Json] = loads(b"[%b]" % added.strip(b" ,\t\r\n"))
        results = [found for message in messages for found in tool_results(message)]
        replayed = _calls_in(messages)
        for call_id, result in results:
            reply = self._reply_of(call_id)
            if reply is None:
                continue
            reply.answered.add(call_id)
            call = replayed.get(call_id) or reply.calls().get(call_id)
            if call is not None and not self._has_span(call, reply.ended_ns):
                number = _number(call, replayed if call_id in replayed else reply.calls(), reply)
                _write_span(active, call, number, result, reply.ended_ns, started_ns)

    def _reply_of(self, call_id: str) -> _AskingReply | None:
        """The last reply that asked for this call; None if none did, or it was answered."""
        quoted = dumps(call_id)
        for reply in reversed(self.replies):
            if quoted in reply.text and call_id not in reply.answered:
                return reply
        return None

    def _has_span(self, call: ToolCall, since_ns: int) -> bool:
        if call.id in self._with_span:
            return True
        for entry in list(self._unnamed):
            if entry[0] == call.name and entry[1] >= since_ns:
                self._unnamed.remove(entry)
                return True
        return False


def _number(call: ToolCall, calls: dict[str, ToolCall], reply: _AskingReply) -> int:
    """The place of a call, from 1, among those of the same tool in its reply."""
    names = (call_id for call_id, other in calls.items() if other.name == call.name)
    beside = [id_ for id_ in names if dumps(id_) in reply.text]
    return beside.index(call.id) + 1 if call.id in beside else 1


def _write_span(
    active: ActiveRollout,
    call: ToolCall,
    number: int,
    result: ToolResult,
    start_ns: int,
    end_ns: int,
) -> None:
    """The span of a tool, from the end of the reply to the start of the request."""
    text = text_of(normalised_content(result.content))
    attributes: dict[str, Any] = {
        sc.GEN_AI_OPERATION_NAME: sc.OPERATION_EXECUTE_TOOL,
        sc.GEN_AI_TOOL_NAME: call.name,
        sc.GEN_AI_TOOL_TYPE: "function",
        sc.GEN_AI_TOOL_CALL_ID: str(call.id),
        sc.GEN_AI_TOOL_CALL_ARGUMENTS: text_of(call.arguments),
        sc.GEN_AI_TOOL_CALL_RESULT: text,
        sc.ROLLOUT_ID: active.id,
        sc.TOOL_INFERRED: True,
    }
    content = process_state.content
    span = active.tracer.start_span(
        with_number(f"{sc.OPERATION_EXECUTE_TOOL} {call.name}", number),
        context=trace.set_span_in_context(active.span, Context()),
        attributes=content.shown(attributes),
        start_time=min(start_ns, end_ns),
    )
    if result.failed:
        span.set_attribute(sc.ERROR_TYPE, sc.ERROR_OTHER)
        span.set_status(trace.StatusCode.ERROR, content.text(active.scrub(text))[:_SHOWN])
    span.end(end_ns)


_SHOWN = 1000
"""Characters of a failed tool's result that its status repeats."""
