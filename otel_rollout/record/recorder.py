"""One model call as an exchange span, recorded from the bytes that were sent and received.

The recorder knows no client: a hook of a client library feeds it, or anything else that sees the
bytes, such as a gateway. The span ends once, however the call ends, and nothing in here raises: a
step that fails costs the span a part, never the user's call anything.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.record.added_fields import Added
from otel_rollout.record.attributes import message_of, sentence
from otel_rollout.record.boundary import INCOMPLETE, NOT_SHOWN, guarded
from otel_rollout.record.privacy.secrets import public_path
from otel_rollout.record.reply import (
    Asked,
    ErrorResponse,
    InvalidResponse,
    begins_with_id,
    ending_of,
    framed_as_events,
    is_no_reply,
    joined,
    may_be_error,
    redacted,
    status_of,
)
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.span_names import recording_name
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.sessions import may_name_session, session_of
from otel_rollout.record.transports.wire_form import WireForm
from otel_rollout.spans import with_lengths
from otel_rollout.wire import TAIL, Framing, dumps

_Headers: TypeAlias = Mapping[str, str]


class ExchangeRecorder:
    """Records one model call of a rollout, its retries included.

        call = ExchangeRecorder(rollout, "/v1/chat/completions")
        call.request(body, headers)
        call.response(200, headers)
        for chunk in reply:
            call.chunk(chunk)
        call.end()                       # or call.end(error=...), or call.leave()

    path: the path that the model is asked at, which names the span.
    Headers are mappings whose names are in lower case, or do not depend on it.
    """

    finished = False
    """True if the span has ended."""
    attempts = 0
    """HTTP requests that were sent."""
    responses = 0
    """Responses that have begun: of two, only the last one counts."""
    hides_count = False
    """True if a stream's count of tokens was requested for the recording alone: the reader of the
    stream does not get the chunk that has it."""
    status_code: int | None = None
    """HTTP status of the last response. None: none has come."""
    framing: Framing | None = None
    """How the chunks of the reply are told apart, if it is a stream. None: it is none, or not
    known."""
    is_events = False
    """True if the reply is a stream: by its content type, and at its end by its bytes."""
    known: tuple[str, int] = "", 0
    """Digest and number of the messages that an earlier one had."""
    error: tuple[str, str] | None = None
    """The name of the error that it ended with, and a sentence. None: it ended with none."""
    _asks_anew = False
    """True if the next attempt is of another body, and recorded instead."""
    _recorded: tuple[bytes, slice, slice] = b"", slice(0), slice(0)
    """The request's body as it may be recorded, where its messages are, and the new ones."""
    _is_redacted = False
    """True if the request or the response was redacted."""
    encoding: str | None = None
    """`Content-Encoding` of the bytes of the response. None: they come without one."""
    _chunks: list[bytes] | None = None
    """The reply as it comes, encoded. None: it is not streamed, or not recorded."""
    _tail = b"\n"
    """The last bytes of the reply so far, after a line break."""
    _body: bytes | None = None
    """The whole reply, decoded. None: it has not come, or is not recorded."""
    _last = 0
    """The rollout's logical clock when the last bytes came; 0: nothing has come."""
    _checksums: Mapping[str, int] = {}
    _left_ns: int | None = None
    """When a stream was read no further, if its end has to wait. None: it has not to."""

    def __init__(self, rollout: ActiveRollout, path: str) -> None:
        self.rollout = rollout
        self.path = public_path(path)
        self._asked = Asked(self.path)
        self.api = self._asked.api
        """The API that is asked. None: none generates at the path."""
        self._form = WireForm()
        self._lock = threading.Lock()
        self._written = rollout.begin_call(self.path)
        """Attributes that the span has so far."""
        self._late = not rollout.running
        """True if the rollout had ended before the call began."""
        context = otel_context.get_current()
        if not trace.get_current_span(context).get_span_context().is_valid:
            context = trace.set_span_in_context(rollout.span, context)
        self.context = context
        """Where its span begins; an observer may put another one around it."""
        self.observed: dict[object, Any] = {}
        """What each observer keeps of it."""
        self._observers = process_state.observers
        self._observers.notify("call_begins", self)
        self.span = rollout.tracer.start_span(
            recording_name(self.path), context=self.context, attributes=self._written
        )
        self.began_ns = time.time_ns()
        above: trace.SpanContext | None = getattr(self.span, "parent", None)
        span_id, flags = above.span_id if above else 0, self.span.get_span_context().trace_flags
        self._call = rollout.others.called(span_id, self.began_ns, is_exported=flags.sampled)
        self._observers.notify("call_began", self)

    # --- the request

    @guarded(INCOMPLETE)
    def request(self, body: bytes | None, headers: _Headers, url: str = "") -> None:
        """An attempt is sent. A retry is only counted, unless `asks_without` came before it.

        body: as it is sent. None: it is not recorded, such as a file that is uploaded.
        headers, url: not recorded, but for the id of a session; what they hold is a secret, should
        an error repeat it.
        """
        self.attempts += 1
        self.rollout.secrets.of_request(headers, url, self)
        if self.attempts > 1:
            self.span.add_event(sc.EVENT_RETRY, self._form.asks_again())
            if not self._asks_anew:
                return
            self._asks_anew = False
        if body is not None:
            self._write_request(body)

    @guarded(INCOMPLETE)
    def supplied(self, held: int, ids: Sequence[int]) -> None:
        """The request was sent with these ids for its messages; `held` of them it continues."""
        with self.rollout.lock:
            attributes = self.rollout.writer.supplied(held, ids)
        self._written |= attributes
        self.span.set_attributes(attributes)

    @guarded(INCOMPLETE)
    def unsent(self, body: object) -> None:
        """The client could not build a request; `body` is the one that it was asked to send."""
        text = json.dumps(body, default=repr, separators=(",", ":"), skipkeys=True)
        self._write_request(text.encode())

    def asks_for(self, added: Added) -> None:
        """These fields are added to the request, or are not, because the server refuses them."""
        self._form.added, self.hides_count = added.before, added.asks_for_count
        if added.refused is not None:
            self.asks_without(added.refused)

    @guarded(INCOMPLETE)
    def asks_without(self, fields: str, status: int | None = None) -> None:
        """The server refuses fields that are added to ask for token ids, so they are left out.

        fields: their names, with commas. status: it has refused them just now, and the next attempt
        is recorded in the place of this one. None: it has refused them before.
        """
        self._written[sc.EXCHANGE_REFUSED] = fields
        self.span.set_attribute(sc.EXCHANGE_REFUSED, fields)
        if status is not None:
            self.attempt_failed(status)
            self.hides_count, self._asks_anew, self._form.added = False, True, {}

    def attempt_failed(
        self, status: int | None, headers: _Headers | None = None, text: str | None = None
    ) -> None:
        """Another attempt follows, after this response, as far as the client got it; or none."""
        text = None if text is None else process_state.content.recorded(self.rollout.scrub(text))
        self._form.failed(status, headers, text)

    @guarded(NOT_SHOWN, level=logging.DEBUG)
    def _name_session(self, attributes: dict[str, Any]) -> None:
        """Write the id of a session that the last request's headers have."""
        headers, names = self.rollout.secrets.close(self), self.rollout.secrets.names
        if may_name_session(names) and (session := session_of(headers)) is not None:
            attributes[sc.EXCHANGE_SESSION] = process_state.content.recorded(session)

    def _write_request(self, body: bytes) -> None:
        self._asked.body = body
        if process_state.content.redact is not None:
            body, self._is_redacted = process_state.content.body(body)
        with self.rollout.lock:
            writer = self.rollout.writer
            attributes = writer.request(body)
            added, messages = slice(*writer.added), slice(*writer.conversation)
            self.known = writer.known_digest, writer.known_count
        self._recorded = body, messages, added
        self._written |= attributes
        self.span.set_attributes(attributes)
        self._observers.notify("requested", self, body, attributes)

    # --- the response

    @guarded(INCOMPLETE)
    def response(self, status: int, headers: _Headers, body: bytes | None = None) -> bool:
        """A response is here; True if its bytes are to be shown as they come (`chunk`).

        body: the whole body, decoded, where somebody has read it already. Binary bodies, such as
        speech, are not recorded: they are large, and no conversation.
        """
        self.status_code = status
        framing, is_binary = self._form.begins(status, headers)
        path = self.path.partition("?")[0]
        self.framing = framing or (None if self.api is None else self.api.framing(path))
        self.is_events = framing is not None
        self._last = self.rollout.clock
        self._chunks = self._body = self._left_ns = None
        self._tail = b"\n"
        self.responses += 1
        if is_binary:
            return False
        if body is not None:
            self._body = body
            return False
        self.encoding = headers.get("content-encoding")
        self._chunks = []
        self.rollout.streams.add(self)
        return True

    @property
    def messages(self) -> bytes:
        """The messages of its request, as JSON without brackets."""
        return self._recorded[0][self._recorded[1]]

    @property
    def added(self) -> bytes:
        """Those messages of its request that no earlier one of the rollout had, as JSON."""
        return self._recorded[0][self._recorded[2]]

    @property
    def ended_ns(self) -> int:
        """When the reply was read to its end, or no further; now, if it is read still."""
        return self._left_ns or time.time_ns()

    @property
    def is_streaming(self) -> bool:
        """True if bytes of the reply are still to come."""
        return self._chunks is not None

    @property
    def has_events(self) -> bool:
        """True if the content type says that the reply is a stream of text, such as events."""
        return self.is_events and self.framing != "frames"

    def chunk(self, chunk: bytes, response: int | None = None) -> None:
        """Bytes of the response, as they came, with their `Content-Encoding`.

        response: the number of the response that is meant (`responses`). None: the last one.
        """
        chunks = self._chunks
        if chunks is None or response not in (None, self.responses):
            return
        chunks.append(chunk)
        self._last = self.rollout.clock
        if self.is_events:
            tail = chunk if len(chunk) > TAIL else self._tail + chunk
            tail = self._tail = tail[-TAIL:]
            for mark in self._asked.last_marks:  # `in` raises inside where it is given bytes
                if tail.partition(mark)[1] and self._asked.is_last(tail):
                    self.end()  # nothing comes after it
                    break

    @guarded(INCOMPLETE)
    def refused(self, status: int, text: str | None, headers: _Headers | None = None) -> None:
        """The answer is an error that the client raised. text: its body. None: it was not read."""
        if self._body is None:
            self.status_code, self._chunks = status, None
            if headers is not None:
                self._form.begins(status, headers)
            if text is not None:
                self._body = self.rollout.scrub(text).encode()

    # --- the end

    @guarded(INCOMPLETE)
    def end(self, status: str | None = None, error: BaseException | None = None) -> None:
        """The whole reply has come, or the call failed. Only the first end counts.

        status: `complete`, `error`, `cancelled` or `abandoned`, from a caller that knows how the
        call ended. None: the reply and the error show it.
        error: the exception that the call, or the reading of its reply, ended with. None: none; an
        error that the server answered with is found in the reply.
        """
        if status is not None:
            body = joined(self._chunks or (), self.encoding) if self.is_streaming else self._body
            if body is not None:
                self._form.body = body
                body, self.is_events = framed_as_events(body, self.framing, declared=self.is_events)
            self._body = body
            self._finish(status, error)
        elif error is None and (self.status_code or 0) >= 400:
            self._end_refused(self.status_code or 0)
        elif self._chunks is not None:
            self._end_stream(error, ended=error is None)
        elif error is None and self._body is not None:
            self._end_reply(self._body, None, ended=True)
        else:
            self._finish("complete" if error is None else status_of(error), error)

    @guarded(INCOMPLETE)
    def leave(self, response: int | None = None, error: BaseException | None = None) -> None:
        """The reply is read no further, or its rollout ends: what has come of it is kept.

        response: the number of the response that is meant (`responses`). None: the last one.
        error: what the last reading of it raised. None: nothing.
        """
        if self.is_streaming and response in (None, self.responses):
            if error is None and (self.status_code or 0) >= 400:
                self._end_refused(self.status_code or 0)
            else:
                self._end_stream(error, ended=False)

    def dropped(self, error: BaseException | None = None) -> None:
        """The reply is read no further. May be called by the garbage collector: the end waits.

        error: what the last reading of it raised. None: nothing.
        """
        if self.is_streaming and self._left_ns is None:
            self._left_ns = time.time_ns()
            process_state.waiting.append(partial(self.leave, self.responses, error))

    def _end_stream(self, error: BaseException | None, *, ended: bool) -> None:
        with self._lock:
            if self.finished:
                return
        self._end_reply(joined(self._chunks or (), self.encoding), error, ended=ended)

    def _end_refused(self, status: int) -> None:
        """End a call whose whole reply is an error that no client has raised."""
        body = joined(self._chunks or (), self.encoding) if self.is_streaming else self._body or b""
        text = body.decode("utf-8", "replace")
        self._body = None
        self.refused(status, text)
        self._finish("error", ErrorResponse(f"HTTP {status}: {text}"))

    def _end_reply(self, body: bytes, error: BaseException | None, *, ended: bool) -> None:
        declared = self.is_events
        found = ending_of(self._asked, body, self.framing, error, declared=declared, ended=ended)
        self.is_events = found.is_events
        self._body, self._form.body = found.body or None, body
        if found.status == "complete" and is_no_reply(self._asked, found):
            # Scrubbed before it is cut: half a secret would not be found.
            text = self.rollout.scrub(found.body.decode("utf-8", "replace"))[:200]
            found.status = "error"
            found.error = InvalidResponse(f"the response is not a JSON object: {text!r}")
        self._finish(found.status, found.error)

    def _finish(self, status: str, error: BaseException | None) -> None:
        """End the exchange span."""
        with self._lock:
            if self.finished:
                return
            self.finished = True
        rollout = self.rollout
        attributes: dict[str, Any] = {
            sc.EXCHANGE_STATUS: status,
            sc.EXCHANGE_ATTEMPTS: self.attempts,
            sc.EXCHANGE_ENDED: self._last or rollout.clock,
        }
        self._call.ended_ns = self._left_ns or time.time_ns()
        try:
            self._write_reply(attributes, error)
            if error is not None:
                self._write_error(attributes, status, error)
            self._name_session(attributes)
            if callable(rollout.versioned.options.policy_version):
                attributes |= rollout.last_version(self._written)
        finally:
            with rollout.lock:
                if self._late or not rollout.running:
                    attributes[sc.EXCHANGE_LATE] = True
                else:
                    rollout.open -= 1
                last = with_lengths(attributes, self._written, self._checksums)
                self.span.set_attributes(last)
                rollout.ending = self._written | last
                self.span.end(self._left_ns)
            self._observers.notify("call_ended", self, status)
            rollout.streams.discard(self)
            # Some clients keep a response, and with it this, for long.
            self._chunks = self._body = self._asked.body = None
            self._recorded = b"", slice(0), slice(0)
            self._form, self._written, self.context = WireForm(), {}, otel_context.Context()

    @guarded(INCOMPLETE)
    def _write_reply(self, attributes: dict[str, Any], error: BaseException | None) -> None:
        if self.status_code is not None:
            attributes[sc.RESPONSE_STATUS_CODE] = self.status_code
        if self.is_events:
            attributes[sc.RESPONSE_STREAM] = True
        if self._form.added or self.attempts > 1:
            self._form.write(attributes)
        if (body := self._body) is None:
            return
        if error is not None or (not self.is_events and may_be_error(body)):
            body = self.rollout.secrets.scrub_reply(body)
        if found := begins_with_id(body):
            attributes[sc.RESPONSE_ID] = found[1].decode("utf-8", "backslashreplace")
        is_events = self.is_events
        if process_state.content.redact is not None:
            known = self._is_redacted
            rest = redacted(self._asked, body, is_events=is_events, is_known=known)
            if rest is not None:
                body, is_events, self._is_redacted = rest, False, True
        form = self._form.of_reply(self._body, body, is_events=is_events)
        with self.rollout.lock:
            writer = self.rollout.writer
            written = writer.response(body, events=is_events, form=form)
            self._checksums = writer.checksums
        self.rollout.replies += 1
        attributes |= written
        if self._is_redacted:
            attributes[sc.EXCHANGE_REDACTED] = True
        self._observers.notify("replied", self, body, attributes)

    @guarded(INCOMPLETE)
    def _write_error(self, attributes: dict[str, Any], status: str, error: BaseException) -> None:
        code = self.status_code if (self.status_code or 0) >= 400 else None
        kind, message = type(error).__qualname__, self.rollout.scrub(message_of(error, code))
        written = dumps({"type": kind, "message": message})
        attributes |= {sc.ERROR_TYPE: kind, sc.EXCHANGE_ERROR: written}
        self.error = kind, sentence(error, message)
        if status == "error":
            self.span.set_status(trace.StatusCode.ERROR, self.error[1])
