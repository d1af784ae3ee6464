"""What LLM spans show of the calls of a rollout: messages, tools, turn, usage; for people to read.

One writer, from what the recorder has: it writes onto the span that an instrumentor has put
around the call (`guard.py`), or onto one of its own where nobody did. Spans of frameworks are left
as they are. Nothing is rebuilt from these spans.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeGuard

from opentelemetry import trace
from opentelemetry.context import get_value

from otel_rollout import semconv as sc
from otel_rollout.record import (
    ActiveRollout,
    ExchangeRecorder,
    Observer,
    is_model_call,
    present,
    process_state,
)
from otel_rollout.wire import (
    Json,
    Media,
    ModelApi,
    Other,
    Reasoning,
    ShownReply,
    TokenCounts,
    ToolCall,
    ToolResult,
    api_of,
    dumps,
    loads,
    message_parts,
    shown_message,
    shown_replies,
    token_counts,
)

_SMALL = 2000
"""Bytes up to which a conversation is shown whole."""
_HEAD = 1 << 10
"""Bytes of a reply in which the model is named."""
_NAMED = rb'"%b"\s*:\s*"([^"\\]+)"'
_SUPPRESSED = "suppress_language_model_instrumentation"
"""Set in the context by libraries that write the span of a call from callbacks."""
_STATUSES_OF_ERRORS = ("error", "cancelled")


class ReplyFacts(NamedTuple):
    """What a span without messages shows of a reply."""

    id: str | None = None
    model: str | None = None
    counts: TokenCounts | None = None


class InstrumentedCall(Protocol):
    """A call that is made inside an instrumentor's wrapper."""

    def is_recorded_in(self, span: trace.Span) -> bool:
        """True if this is its span, and the call the first that begins in it; `ended` follows."""

    def ended(self, reply: ReplyFacts, ended_ns: int, *, failed: bool) -> None:
        """The call has ended, and its span shows it."""


INSTRUMENTED: ContextVar[InstrumentedCall | None] = ContextVar(
    "otel-rollout-llm-span", default=None
)
"""The call in whose instrumentor's wrapper this runs. None: in none."""


class _ShownBefore:
    """What the LLM spans of one rollout have shown."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turns: dict[str, int] = {}
        """The turn of the call that asked with a conversation, by the conversation's digest, and by
        the id of the reply."""
        self.values: set[int] = set()
        """Hashes of the tools, instructions and replies."""
        self.tools: dict[str, int] = {}
        """Number of tools in a list of them that is only named by its digest, by that digest."""
        self.prompt = ""
        """The last prompt that is one text, and its reply."""
        self.prompts = 0
        """Number of such prompts that follow each other."""

    def add(self, value: object) -> bool:
        """Take in what is shown; True if it is new."""
        key = hash(value if isinstance(value, str) else dumps(value))
        is_new = key not in self.values
        self.values.add(key)
        return is_new


class LlmSpans(Observer):
    """Writes what the LLM span of each call of a rollout shows."""

    def rollout_began(self, rollout: ActiveRollout) -> None:
        rollout.observed[self] = _ShownBefore()

    def rollout_ended(self, rollout: ActiveRollout) -> None:
        rollout.observed.pop(self, None)

    def call_begins(self, call: ExchangeRecorder) -> None:
        shown: _ShownBefore | None = call.rollout.observed.get(self)
        api = api_of(call.path)
        if shown is None or api is None:
            return
        around, made = trace.get_current_span(call.context), INSTRUMENTED.get()
        if made is not None and made.is_recorded_in(around):
            call.observed[self] = _LlmSpan(shown, api, around, made)
        elif _is_to_write(around, call):
            span = _begin(api, call)
            call.context = trace.set_span_in_context(span, call.context)
            call.observed[self] = _LlmSpan(shown, api, span, None)

    def requested(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        span: _LlmSpan | None = call.observed.get(self)
        if span is not None:
            span.requested(call, written)

    def replied(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        span: _LlmSpan | None = call.observed.get(self)
        if span is not None and (call.status_code or 0) < 400:
            span.replied(call, body, written)

    def call_ended(self, call: ExchangeRecorder, status: str) -> None:
        span: _LlmSpan | None = call.observed.pop(self, None)
        if span is not None:
            span.end(call, status)


def _is_to_write(around: trace.Span, call: ExchangeRecorder) -> bool:
    """Whether a span of our own is to be around the call: no library writes one."""
    settings = process_state.settings
    if settings.instrumentor is None or get_value(_SUPPRESSED, call.context):
        return False
    attributes = getattr(around, "attributes", None) or {}
    return settings.llm_spans == "both" or not is_model_call(attributes)


def _begin(api: ModelApi, call: ExchangeRecorder) -> trace.Span:
    operation = _operation(api)
    attributes = {sc.GEN_AI_OPERATION_NAME: operation}
    if (provider := api.provider_of(call.path.partition("?")[0])) is not None:
        attributes[sc.GEN_AI_PROVIDER_NAME] = provider
    return call.rollout.tracer.start_span(
        operation, context=call.context, kind=trace.SpanKind.CLIENT, attributes=attributes
    )


def _operation(api: ModelApi) -> str:
    return sc.OPERATION_TEXT_COMPLETION if api.conversation == "prompt" else sc.OPERATION_CHAT


class _LlmSpan:
    """The LLM span of one call. made: the call whose instrumentor's span it is. None: our own."""

    def __init__(
        self, shown: _ShownBefore, api: ModelApi, span: trace.Span, made: InstrumentedCall | None
    ) -> None:
        self._shown = shown
        self._api = api
        self._span = span
        self._made = made
        self._turn = 1
        self._prompt = ""
        """Its prompt, if that is one text."""
        self._reply = ReplyFacts()

    def requested(self, call: ExchangeRecorder, written: Mapping[str, Any]) -> None:
        digests: dict[str, str] = loads(written.get(sc.REQUEST_SHARED, "{}"))
        params, attributes = _params(written, digests), dict[str, Any]()
        model = self._api.request_model(call.path.partition("?")[0], params)
        if model is not None and self._made is None:
            self._span.update_name(f"{_operation(self._api)} {model}")
            attributes[sc.GEN_AI_REQUEST_MODEL] = model
        if params.get("stream"):
            attributes[sc.GEN_AI_REQUEST_STREAM] = True
        with self._shown.lock:
            self._turn = self._turn_of(call, params, written.get(sc.REQUEST_DIGEST))
            attributes[sc.TURN] = self._turn
            if process_state.content.is_whole:
                attributes |= self._context(params, digests) | self._messages(call, params)
        self._span.set_attributes(attributes)

    def _turn_of(self, call: ExchangeRecorder, params: Mapping[str, Json], digest: object) -> int:
        turns = self._shown.turns
        before = turns.get(str(self._api.previous_reply(params)))
        if not isinstance(digest, str):
            return (before or self._prompts_in(params)) + 1
        if before is not None:
            return before + 1
        known_digest, known_count = call.known
        known = turns.get(known_digest)
        if known is None and known_count > 1:  # a prefix that no call ended with: an edit
            replies = (b'"role":"assistant"', b'"role": "assistant"')
            known = sum(map(call.messages.count, replies))
        return turns.setdefault(digest, (known or 0) + (digest != known_digest))

    def _prompts_in(self, params: Mapping[str, Json]) -> int:
        """Number of earlier prompts that this one, a text, begins with."""
        known, prompt = self._shown.prompt, params.get(self._api.conversation)
        if isinstance(prompt, str) and self._api.conversation == "prompt":
            self._prompt = prompt
            return self._shown.prompts if known and prompt.startswith(known) else 0
        return 0

    def _context(self, params: Mapping[str, Json], digests: Mapping[str, str]) -> dict[str, Any]:
        """Instructions and tools that no span has shown."""
        attributes: dict[str, Any] = {}
        is_full = process_state.content.shows == "full"
        for message in self._api.instructions_of(params):
            if self._shown.add(message) or is_full:
                attributes[sc.GEN_AI_SYSTEM_INSTRUCTIONS] = dumps(_parts(message))
        tools, counts = self._api.tools(params), self._shown.tools
        digest = digests.get("tools", "")
        count = counts.get(digest) if tools is None else len(tools)
        if digest and count:
            counts[digest] = count
        if tools and (self._shown.add(tools) or is_full):
            attributes[sc.GEN_AI_TOOL_DEFINITIONS] = dumps(tools)
        elif count:
            attributes[sc.ELIDED_TOOLS] = count
        return attributes

    def _messages(self, call: ExchangeRecorder, params: Mapping[str, Json]) -> dict[str, Any]:
        """The messages that no span has shown."""
        is_full = process_state.content.shows == "full"
        if not call.messages:
            asked: Json = params.get(self._api.conversation) or params.get(self._api.text)
            if self._turn > 1 and len(self._prompt) > _SMALL and not is_full:
                new = self._prompt.removeprefix(self._shown.prompt)
                return self._after(2 * self._turn - 2, [new])
            return self._after(0, _prompts(asked)) if asked else {}
        elided, text = 0, call.messages
        if len(text) > _SMALL and not is_full:
            elided, text = call.known[1], call.added or text
        messages: list[Json] = loads(b"[" + text.strip(b" ,\t\r\n") + b"]")
        if elided and not call.added:  # a call that is made again
            messages, elided = messages[-1:], elided - 1
        elif elided:  # replies that come back were shown by the calls that got them
            back = 0
            while back < len(messages) - 1 and _key(messages[back]) in self._shown.values:
                back += 1
            messages, elided = messages[back:], elided + back
        return self._after(elided, messages)

    def _after(self, elided: int, messages: list[Json]) -> dict[str, Any]:
        """Messages as attributes, after a line in place of those that are left out."""
        if not elided:
            return {sc.GEN_AI_INPUT_MESSAGES: dumps(list(map(_message, messages)))}
        before = {"type": "text", "content": _before(elided, self._turn - 1)}
        shown = dumps([{"role": "system", "parts": [before]}, *map(_message, messages)])
        return {sc.ELIDED_MESSAGES: elided, sc.GEN_AI_INPUT_MESSAGES: shown}

    def replied(self, call: ExchangeRecorder, body: bytes, written: Mapping[str, Any]) -> None:
        is_events = sc.RESPONSE_EVENTS in written
        if TokenCounts not in call.observed:
            call.observed[TokenCounts] = token_counts(body, self._api, events=is_events)
        counts: TokenCounts | None = call.observed[TokenCounts]
        replies = shown_replies(body, call.path, events=is_events)
        model = _named(self._api.model_name, body)
        reply_id = written.get(sc.RESPONSE_ID) or _named(self._api.id_name, body)
        self._reply = ReplyFacts(reply_id, model, counts)
        self._note_replies(reply_id, replies)
        # The conventions say `error` of a choice whose reason did not come.
        ends = [reply.finish_reason or "error" for reply in replies]
        attributes: dict[str, Any] = {
            sc.GEN_AI_RESPONSE_ID: reply_id,
            sc.GEN_AI_RESPONSE_MODEL: model,
            sc.GEN_AI_RESPONSE_FINISH_REASONS: ends or None,
        }
        if counts is not None:
            attributes[sc.GEN_AI_USAGE_INPUT_TOKENS] = counts.input
            attributes[sc.GEN_AI_USAGE_OUTPUT_TOKENS] = counts.output
        if replies and process_state.content.is_whole:
            attributes[sc.GEN_AI_OUTPUT_MESSAGES] = dumps(
                [_sampled(reply.items) for reply in replies]
            )
        if self._span.is_recording():  # of a body that the agent reads itself it may have ended
            self._span.set_attributes(present(attributes))

    def _note_replies(self, reply_id: str | None, replies: list[ShownReply]) -> None:
        """Note what is shown of a reply."""
        with self._shown.lock:
            self._shown.values.update(_key(item) for reply in replies for item in reply.items)
            if self._prompt and replies:
                self._shown.prompt = self._prompt + replies[0].text
                self._shown.prompts = self._turn
            if reply_id is not None:
                self._shown.turns[reply_id] = self._turn

    def end(self, call: ExchangeRecorder, status: str) -> None:
        failed = call.error if status in _STATUSES_OF_ERRORS else None
        if failed is not None and self._span.is_recording():
            self._span.set_attribute(sc.ERROR_TYPE, failed[0])
            message = failed[1] if process_state.content.exported else ""
            self._span.set_status(trace.StatusCode.ERROR, message)
        if self._made is None:
            self._span.end(call.ended_ns)
        else:
            self._made.ended(self._reply, call.ended_ns, failed=failed is not None)


def _before(messages: int, turns: int) -> str:
    """The text in place of messages that earlier spans show, the last of them in turn `turns`."""
    are = "message is" if messages == 1 else "messages are"
    if turns == 0:
        return f"({messages} earlier {are} not repeated: an LLM span before this one shows them)"
    shown = "turn 1" if turns == 1 else f"turns 1 to {turns}"
    return f"({messages} earlier {are} not repeated: see {shown} of this conversation)"


def _params(written: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Json]:
    """The members of a request but its conversation: those that are long, where they are new."""
    params: dict[str, Json] = loads(written.get(sc.REQUEST_PARAMS, "{}"))
    if sc.REQUEST_SHARED_VALUES not in written:
        return params
    values: dict[str, Json] = loads(written[sc.REQUEST_SHARED_VALUES])
    return params | {n: values[d] for n, d in digests.items() if d in values}


def _named(name: str | None, body: bytes) -> str | None:
    """The first text in a reply that is a member of this name; None where it is not at its head."""
    found = re.search(_NAMED % name.encode(), body[:_HEAD]) if name else None
    return found[1].decode("utf-8", "replace") if found else None


def _prompts(asked: Json) -> list[Json]:
    """What a request asks that has no list of messages: one text, several, or token ids."""
    rows = asked if isinstance(asked, list) and not _is_ids(asked) else [asked]
    return [f"({len(row)} token ids)" if _is_ids(row) else row for row in rows]


def _is_ids(prompt: Json) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _key(message: Json) -> int:
    """The key of a message by what is shown of it."""
    return hash(shown_message(message, reasoning=False))


def _message(message: Json) -> dict[str, Json]:
    """A message as the conventions have it."""
    role = message.get("role") if isinstance(message, dict) else None
    return {"role": role or "user", "parts": _parts(message)}


def _sampled(items: Iterable[Json]) -> dict[str, Json]:
    """A choice of a reply as the conventions have it; its finish reason is an attribute."""
    return {"role": "assistant", "parts": [part for item in items for part in _parts(item)]}


def _parts(message: Json) -> list[Json]:
    """The parts of a message as the conventions have them; what is no text is named."""
    found: list[Json] = []
    for part in message_parts(message):
        if isinstance(part, ToolCall):
            call = {"type": "tool_call", "id": part.id, "name": part.name}
            found.append(call | {"arguments": _loaded(part.arguments)})
        elif isinstance(part, ToolResult):
            found.append({"type": "tool_call_response", "id": part.id, "response": part.shown})
        elif isinstance(part, Reasoning):
            found.append({"type": "reasoning", "content": part.text})
        elif isinstance(part, Media) and part.address is not None:
            found.append(_media(part.address))
        elif isinstance(part, Other):
            generic = {"type": "generic", "generic_type": part.kind}
            found.append(generic | {"content": part.shown})
        else:
            found.append({"type": "text", "content": part.shown})
    return found


def _media(address: str) -> Json:
    head, _, data = address.partition(",")
    if not head.startswith("data:"):
        return {"type": "uri", "uri": address}
    kind = head.removeprefix("data:").partition(";")[0]
    return {"type": "blob", "modality": kind.partition("/")[0], "mime_type": kind, "content": data}


def _loaded(arguments: Json) -> Json:
    """Arguments of a tool as JSON; as the model wrote them where they are none."""
    try:
        return loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
