"""The LLM span around a model call that no instrumentor draws.

Instrumentors draw the calls of the clients that they know. Any other call of a rollout (another
client's, one over plain HTTP, one that a gateway passes on) gets this span, so that people see the
same of each. It shows what is new in its call; nothing is rebuilt from it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.context import Context

from otel_rollout import semconv as sc
from otel_rollout.record.boundary import NOT_SHOWN, guarded
from otel_rollout.record.names import stand_before
from otel_rollout.record.others import is_model_call
from otel_rollout.record.state import process_state
from otel_rollout.spans import ExchangeWriter
from otel_rollout.wire import (
    Json,
    ModelApi,
    api_of,
    dumps,
    loads,
    shown_message,
    shown_replies,
    token_counts,
)

_SMALL = 2000
"""Bytes up to which a conversation is shown whole."""
_INSTRUCTIONS = ("system", "instructions", "systemInstruction", "system_instruction")
"""Members of a request that are instructions."""


class Shown:
    """What the drawn calls of one rollout have shown."""

    def __init__(self) -> None:
        self.turns: dict[str, int] = {}
        """The turn of the call that asked with a conversation, by the conversation's digest."""
        self.values: set[int] = set()
        """Hashes of the tools, instructions and replies."""
        self.tools: dict[str, int] = {}
        """Number of tools in a list of them that is only named by its digest, by that digest."""


class Rollout(Protocol):
    """The part of a running rollout that is used here."""

    tracer: trace.Tracer
    writer: ExchangeWriter
    drawn: Shown


def is_to_draw(path: str, context: Context) -> bool:
    """True if the call at this path is to be drawn: a model generates, and nobody draws it yet."""
    if not process_state.draws_calls or api_of(path) is None:
        return False
    if process_state.llm_spans == "both":
        return True
    around = trace.get_current_span(context)
    return not is_model_call(getattr(around, "attributes", None) or {})


class DrawnCall:
    """The LLM span of one call; it begins with the call."""

    def __init__(self, rollout: Rollout, path: str, context: Context) -> None:
        api = api_of(path)
        assert api is not None
        self._api: ModelApi = api
        self._rollout = rollout
        self._path = path
        is_text = api.conversation == "prompt"
        self._operation = sc.OPERATION_TEXT_COMPLETION if is_text else sc.OPERATION_CHAT
        attributes: dict[str, Any] = {sc.GEN_AI_OPERATION_NAME: self._operation}
        if (provider := api.provider_of(path.partition("?")[0])) is not None:
            attributes[sc.GEN_AI_PROVIDER_NAME] = provider
        self.span = rollout.tracer.start_span(
            self._operation, context=context, kind=trace.SpanKind.CLIENT, attributes=attributes
        )

    @guarded(NOT_SHOWN, level=logging.DEBUG)
    def asked(self, body: bytes, written: Mapping[str, Any]) -> None:
        """The request was written. body: as it may be recorded. Holds the rollout's lock."""
        params = _params(written)
        model = self._api.request_model(self._path.partition("?")[0], params)
        if model is not None:
            self.span.update_name(f"{self._operation} {model}")
            self.span.set_attribute(sc.GEN_AI_REQUEST_MODEL, model)
        if params.get("stream"):
            self.span.set_attribute(sc.GEN_AI_REQUEST_STREAM, True)
        turn = self._turn(body, written)
        if turn is not None:
            self.span.set_attribute(sc.TURN, turn)
        if process_state.content.is_whole:
            shown = self._context(params, written) | self._messages(body, params, turn or 1)
            self.span.set_attributes(shown)

    def _turn(self, body: bytes, written: Mapping[str, Any]) -> int | None:
        digest = written.get(sc.REQUEST_DIGEST)
        if not isinstance(digest, str):
            return None
        writer, turns = self._rollout.writer, self._rollout.drawn.turns
        known = turns.get(writer.known_digest)
        if known is None and writer.known_count > 1:  # a prefix that no call ended with: an edit
            start, end = writer.conversation
            known = body.count(b'"role":"assistant"', start, end) + body.count(
                b'"role": "assistant"', start, end
            )
        return turns.setdefault(digest, (known or 0) + (digest != writer.known_digest))

    def _context(self, params: Mapping[str, Json], written: Mapping[str, Any]) -> dict[str, Any]:
        """Instructions and tools that no drawn call has shown."""
        attributes: dict[str, Any] = {}
        for name in _INSTRUCTIONS:
            if (value := params.get(name)) and self._is_new((name, value)):
                text = shown_message(_as_message(value))
                attributes[sc.GEN_AI_SYSTEM_INSTRUCTIONS] = dumps(_text_parts(text))
        tools, counts = self._api.tools(params), self._rollout.drawn.tools
        digest = loads(written.get(sc.REQUEST_SHARED, "{}")).get("tools")
        count = counts.get(digest) if tools is None else len(tools)
        if digest and count:
            counts[digest] = count
        if tools and (self._is_new(tools) or process_state.content.shows == "full"):
            attributes[sc.GEN_AI_TOOL_DEFINITIONS] = dumps(tools)
        elif count:
            attributes[sc.ELIDED_TOOLS] = count
        return attributes

    def _is_new(self, value: object) -> bool:
        key = hash(value if isinstance(value, str) else dumps(value))
        shown = self._rollout.drawn.values
        is_new = key not in shown
        shown.add(key)
        return is_new

    def _messages(self, body: bytes, params: Mapping[str, Json], turn: int) -> dict[str, Any]:
        """The messages that no drawn call has shown."""
        writer = self._rollout.writer
        start, end = writer.conversation
        if start == end:
            asked = params.get(self._api.conversation) or params.get(self._api.text)
            return {sc.GEN_AI_INPUT_MESSAGES: dumps([_message(asked)])} if asked else {}
        elided = 0
        if end - start > _SMALL and process_state.content.shows != "full":
            if writer.added != (0, 0):
                start, end = writer.added
            elided = writer.known_count
        messages: list[Json] = loads(b"[" + body[start:end].strip(b" ,\t\r\n") + b"]")
        if elided and writer.added == (0, 0):  # a call that is made again
            messages, elided = messages[-1:], elided - 1
        elif elided:  # replies that come back were shown by the calls that got them
            back = 0
            while back < len(messages) - 1 and _key(messages[back]) in self._rollout.drawn.values:
                back += 1
            messages, elided = messages[back:], elided + back
        shown = [_message(message) for message in messages]
        if not elided:
            return {sc.GEN_AI_INPUT_MESSAGES: dumps(shown)}
        before = _message({"role": "system", "content": stand_before(elided, turn - 1)})
        return {sc.ELIDED_MESSAGES: elided, sc.GEN_AI_INPUT_MESSAGES: dumps([before, *shown])}

    @guarded(NOT_SHOWN, level=logging.DEBUG)
    def replied(self, body: bytes, *, events: bool) -> None:
        """The reply has come. body: as it may be recorded. events: True if it is a stream."""
        attributes: dict[str, Any] = {}
        replies = shown_replies(body, self._path, events=events)
        for reply in replies:
            self._rollout.drawn.values.update(map(_key, reply.items))
        reasons = [reply.finish_reason for reply in replies if reply.finish_reason]
        if reasons:
            attributes[sc.GEN_AI_RESPONSE_FINISH_REASONS] = reasons
        if (counts := token_counts(body, self._path, events=events)) is not None:
            attributes[sc.GEN_AI_USAGE_INPUT_TOKENS] = counts.input
            attributes[sc.GEN_AI_USAGE_OUTPUT_TOKENS] = counts.output
        if replies and process_state.content.is_whole:
            said = [
                {**_message(reply.text, "assistant"), "finish_reason": reply.finish_reason or ""}
                for reply in replies
            ]
            attributes[sc.GEN_AI_OUTPUT_MESSAGES] = dumps(said)
        self.span.set_attributes(attributes)

    def end(self, attributes: Mapping[str, Any], message: str | None, end_ns: int | None) -> None:
        """The call has ended. message: of the error that it ended with, for people. None: none.

        attributes: of the exchange span, of which the id of the reply and the error are shown.
        """
        shown = {sc.GEN_AI_RESPONSE_ID: attributes.get(sc.RESPONSE_ID)}
        shown[sc.ERROR_TYPE] = attributes.get(sc.ERROR_TYPE)
        self.span.set_attributes({name: value for name, value in shown.items() if value})
        if message is not None:
            self.span.set_status(trace.StatusCode.ERROR, message)
        self.span.end(end_ns)


def _params(written: Mapping[str, Any]) -> dict[str, Json]:
    """The members of a request but its conversation: those that are long, where they are new."""
    params: dict[str, Json] = loads(written.get(sc.REQUEST_PARAMS, "{}"))
    digests: dict[str, str] = loads(written.get(sc.REQUEST_SHARED, "{}"))
    values: dict[str, Json] = loads(written.get(sc.REQUEST_SHARED_VALUES, "{}"))
    return params | {n: values[d] for n, d in digests.items() if d in values}


def _key(message: Json) -> int:
    """The key of a message by what is shown of it."""
    return hash(shown_message(message, reasoning=False))


def _as_message(value: Json) -> Json:
    """Instructions as a message: a text, a list of parts, or a message already."""
    return value if isinstance(value, dict) else {"content": value}


def _message(message: Json, role: str = "user") -> dict[str, Json]:
    """A message as the conventions have it."""
    if isinstance(message, str):
        return {"role": role, "parts": _text_parts(message)}
    own = message.get("role") if isinstance(message, dict) else None
    return {"role": own or role, "parts": _text_parts(shown_message(message))}


def _text_parts(text: str) -> list[Json]:
    return [{"type": "text", "content": text}]
