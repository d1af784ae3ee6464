"""A rollout in short, for people who open its span: its task, its answer, what it used.

Backends show these attributes in their lists and search by them. Nothing is rebuilt from them, and
losing them loses nothing. They cost little: the first request is read for its task, a reply only
for its count of tokens, and the last reply once, at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.look.metrics import labels_of, rollout_metrics
from otel_rollout.record import (
    ActiveRollout,
    ExchangeRecorder,
    Observer,
    present,
    process_state,
    reward_numbers,
)
from otel_rollout.wire import (
    Json,
    ModelApi,
    TokenCounts,
    dumps,
    loads,
    path_messages,
    reply_text,
    shown_message,
    token_counts,
)

SHOWN = 4000
"""Bytes of text that each of the attributes with messages shows."""
_SYSTEM_ROLES = ("system", "developer")
"""Roles of messages that are instructions."""


_Task = tuple[int, list[Json]]
"""When a rollout was asked first, and the last message of that, as the conventions have it."""


class Summary:
    """Task, answer and usage of one rollout's calls, with those of the rollouts inside it."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls of models that were asked to generate."""
        self.lock = threading.Lock()
        self._counted = 0
        """Calls whose tokens are in the sums."""
        self._tokens = [0, 0]
        """Tokens of prompts and replies."""
        self._task: _Task | None = None
        self._own_task = False
        """True if `_task` is of a call of its own, not of a rollout inside it."""
        self._last: tuple[bytes, str, bool] | None = None
        """The last reply, the path that was asked, and True if it has events."""
        self._answer_inside: tuple[int, str] | None = None
        """When the rollout inside it that ended last did so, and its answer."""

    # --- calls

    def asked(self, api: ModelApi, body: bytes) -> None:
        """A request was sent. body: as it may be recorded."""
        if not self._own_task and process_state.content.exported:
            self._own_task = True
            self._task = _task_of(api, loads(body))

    def replied(self, path: str, body: bytes, counts: TokenCounts | None, *, events: bool) -> None:
        """A reply has come, which counts its tokens so. body: as it may be recorded."""
        with self.lock:
            if counts is not None:
                self._counted += 1
                self._tokens[0] += counts.input
                self._tokens[1] += counts.output
        if process_state.content.exported:
            self._last = body, path, events

    def include(self, inner: Summary, answer: str | None) -> None:
        """Take in a rollout inside it that has ended. answer: its last reply, or its output."""
        with self.lock:
            self.calls += inner.calls
            self._counted += inner._counted
            self._tokens = [sum(pair) for pair in zip(self._tokens, inner._tokens, strict=True)]
            if not self._own_task:
                asked = filter(None, (self._task, inner._task))
                self._task = min(asked, key=lambda task: task[0], default=None)
            if answer is not None:
                self._answer_inside = time.time_ns(), answer

    # --- the end

    def answer(self, output: Json) -> str | None:
        """The last reply of the rollout, or its output where that has more."""
        reply = None
        if self._last is not None:
            body, path, events = self._last
            reply = reply_text(body, path, events=events)
        elif self._answer_inside is not None:
            reply = self._answer_inside[1]
        if not process_state.content.exported or output in (None, "", [], {}):
            return reply
        text = output if isinstance(output, str) else dumps(output)
        if reply is not None and (isinstance(output, bool | int | float) or text in reply):
            return reply
        return text

    def attributes(self, answer: str | None) -> dict[str, Any]:
        """The attributes that show it. None: not known."""
        task, counted = self._task[1] if self._task else [], self._counted > 0
        return {
            sc.GEN_AI_INPUT_MESSAGES: dumps(task) if task else None,
            sc.GEN_AI_OUTPUT_MESSAGES: None if answer is None else dumps([_message(answer)]),
            sc.INPUT_VALUE: _last_text(task),
            sc.OUTPUT_VALUE: None if answer is None else _cut(answer),
            sc.GEN_AI_USAGE_INPUT_TOKENS: self._tokens[0] if counted else None,
            sc.GEN_AI_USAGE_OUTPUT_TOKENS: self._tokens[1] if counted else None,
            sc.ROLLOUT_CALL_COUNT: self.calls,
            sc.ROLLOUT_USAGE_COUNT: self._counted if counted else None,
        }


class Sums(Observer):
    """Puts the summary of each rollout on its span, and counts its tokens."""

    def rollout_began(self, rollout: ActiveRollout) -> None:
        rollout.observed[self] = Summary()

    def call_began(self, call: ExchangeRecorder) -> None:
        summary: Summary | None = call.rollout.observed.get(self)
        if summary is not None and call.api is not None:
            with summary.lock:
                summary.calls += 1

    def requested(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        summary: Summary | None = call.rollout.observed.get(self)
        if summary is not None and call.api is not None:
            summary.asked(call.api, body)

    def replied(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        summary: Summary | None = call.rollout.observed.get(self)
        if summary is None or call.api is None or (call.status_code or 0) >= 400:
            return
        events = sc.RESPONSE_EVENTS in written
        counts = token_counts(body, call.api, events=events)
        call.observed[TokenCounts] = counts  # for other observers
        summary.replied(call.path, body, counts, events=events)
        if counts is not None and (found := rollout_metrics()) is not None:
            found.tokens(labels_of(call.rollout), counts.input, counts.output)

    def rollout_ends(self, rollout: ActiveRollout, attributes: dict[str, Any]) -> None:
        summary: Summary | None = rollout.observed.get(self)
        if summary is None:
            return
        trajectory = rollout.trajectory
        answer = summary.answer(trajectory.output)
        around = rollout.parent.observed.get(self) if rollout.parent is not None else None
        if around is not None:
            around.include(summary, answer)
        is_workflow = rollout.operation == sc.OPERATION_INVOKE_WORKFLOW
        kind = {sc.OPENINFERENCE_KIND: sc.OPENINFERENCE_CHAIN if is_workflow else None}
        numbers = reward_numbers(trajectory.all_rewards.all())
        shown = present({**numbers, **summary.attributes(answer), **kind})
        attributes |= process_state.content.shown(shown)

    def rollout_ended(self, rollout: ActiveRollout) -> None:
        rollout.observed.pop(self, None)


def _task_of(api: ModelApi, params: Json) -> _Task | None:
    """The task that a request has."""
    if not isinstance(params, dict):
        return None
    messages = params.get(api.conversation)
    if not isinstance(messages, list):
        messages = path_messages(api.asked(params, None))
    return _task(messages)


def _task(messages: Iterable[Json]) -> _Task:
    """The task of a conversation: its last message that is no instruction."""
    asked = [each for each in messages if _role(each) not in _SYSTEM_ROLES][-1:]
    shown = [_message(shown_message(each, reasoning=False), _role(each)) for each in asked]
    return time.time_ns(), shown


def _role(message: Json) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        return "user"
    return "assistant" if role == "model" else role


def _message(text: str, role: str = "assistant") -> dict[str, Json]:
    """A message as the conventions have it."""
    return {"role": role, "parts": [{"type": "text", "content": _cut(text)}]}


def _last_text(messages: list[Json]) -> str | None:
    return str(messages[-1]["parts"][0]["content"]) if messages else None


def _cut(text: str, size: int = SHOWN) -> str:
    """The text, or as much of it as has room, with a mark."""
    if len(text) <= size and (text.isascii() or 4 * len(text) <= size):
        return text
    data = text.encode("utf-8", "replace")
    if len(data) <= size:
        return text
    return f"{data[:size].decode('utf-8', 'ignore')}… (cut: {len(text)} characters in all)"
