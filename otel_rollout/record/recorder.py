"""One model call as an exchange span, recorded from the bytes that were sent and received.

The recorder knows no client: a hook of a client library feeds it, or anything else that sees the
bytes, such as a gateway. The span ends once, however the call ends, and nothing in here raises: a
step that fails costs the span a part, never the user's call anything.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.record.attributes import message_of, sentence
from otel_rollout.record.boundary import INCOMPLETE, NOT_SHOWN, guarded
from otel_rollout.record.deferred import later
from otel_rollout.record.privacy.secrets import public_path
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.span_names import recording_name
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.encoding import decoded
from otel_rollout.record.transports.sessions import session_of
from otel_rollout.spans import label, with_lengths
from otel_rollout.wire import (
    TAIL,
    Framing,
    api_of,
    apis_of,
    as_events,
    dumps,
    error_text,
    framing_said,
    is_events,
    is_json_object,
    loads,
    merge,
    without_tokens,
)

_ERROR_TAIL = 1 << 16
"""Bytes at the end of a stream in which an error that ended it is looked for."""
_response_id = re.compile(rb'\s*(?:data:\s*)?\{\s*"id"\s*:\s*"([^"\\]+)"').match
_has_error = re.compile(rb'"error"\s*:\s*[^n\s]').search
_is_of_model = re.compile(rb'"(?:choices|output|content|data)"\s*:').search
_is_binary = re.compile(r"(?:audio|image|video)/|application/octet-stream").match


class ErrorResponse(Exception):  # noqa: N818 - the name that a completion's error has
    """An error that the server answered with: as a reply, or inside a stream that began well."""


class InvalidResponse(Exception):  # noqa: N818 - the name that a completion's error has
    """A reply that is no JSON object, or a stream with an event that is none."""


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

    def __init__(self, rollout: ActiveRollout, path: str) -> None:
        self.finished = False
        """True if the span has ended."""
        self.attempts = 0
        """HTTP requests that were sent."""
        self.responses = 0
        """Responses that have begun: of two, only the last one counts."""
        self.hides_count = False
        """True if a stream's count of tokens was asked for on behalf of the recording alone: who
        reads the stream is not to be shown the chunk that has it."""
        self.rollout = rollout
        self.path = public_path(path)
        self.api = api_of(self.path)
        """The API that is asked. None: none generates at the path."""
        self._apis = apis_of(self.path)
        """The API that is asked; all of them where the path tells nothing."""
        self._last_marks = {mark for api in self._apis for mark in api.last_marks}
        self._lock = threading.Lock()
        self._last_status: int | None = None
        self._request: bytes | None = None
        """The request's body, to be read if the reply has to be."""
        self._is_redacted = False
        """True if the request or the response was redacted."""
        self.status_code: int | None = None
        self.framing: Framing | None = None
        """How the chunks of the reply are told apart, if it is a stream. None: it is none, or it
        is not known."""
        self.is_events = False
        """True if the reply is a stream: by its content type, and at its end by its bytes."""
        self._encoding: str | None = None
        self._chunks: list[bytes] | None = None
        """The reply as it comes, encoded. None: it is not streamed, or not recorded."""
        self._tail = b"\n"
        """The last bytes of the reply so far, after a line break."""
        self._body: bytes | None = None
        """The whole reply, decoded. None: it has not come, or is not recorded."""
        self._last = 0
        """The rollout's logical clock when the last bytes came; 0: nothing has come."""
        self._checksums: dict[str, int] = {}
        self._left_ns: int | None = None
        """When a stream was read no further, if its end has to wait. None: it has not to."""
        began = rollout.begin_call()
        if self.api is not None:
            rollout.providers.add(self.api.provider_of(self.path.partition("?")[0]))
        self._late = not rollout.running
        """True if the rollout had ended before the call began."""
        self._written = _start_attributes(rollout, self.path, began)
        """Attributes that the span has so far."""
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
            recording_name(self.path),
            context=self.context,
            attributes=self._written,
        )
        self.began_ns = time.time_ns()
        above = trace.get_current_span(self.context).get_span_context()
        is_exported = self.span.get_span_context().trace_flags.sampled
        self._call = rollout.others.called(above.span_id, self.began_ns, is_exported=is_exported)
        self.added = b""
        """Those messages of its request that no earlier one of the rollout had, as JSON."""
        self._recorded: tuple[bytes, slice] = b"", slice(0)
        """The request's body as it may be recorded, and where its messages are."""
        self.known: tuple[str, int] = "", 0
        """Digest and number of the messages that an earlier one had."""
        self.error: tuple[str, str] | None = None
        """The name of the error that it ended with, and a sentence. None: it ended with none."""
        self._observers.notify("call_began", self)

    # --- the request

    @guarded(INCOMPLETE)
    def request(self, body: bytes | None, headers: Mapping[str, str], url: str = "") -> None:
        """An attempt is sent. Of a retry no more is recorded than that it was made.

        body: as it is sent. None: it is not recorded, such as a file that is uploaded.
        headers, url: not recorded, but for the id of a session; what they hold is a secret, should
        an error repeat it.
        """
        self.attempts += 1
        self.rollout.secrets.of_request(headers, url, self)
        if self.attempts > 1:
            status = {} if self._last_status is None else {"http_status": self._last_status}
            self._last_status = None  # an attempt that fails without a response has none
            self.span.add_event(sc.EVENT_RETRY, status)
            return
        if body is not None:
            self._write_request(body)

    @guarded(INCOMPLETE)
    def supplied(self, held: int, ids: Sequence[int]) -> None:
        """The request was sent with these token ids for its messages; `held` of them it continues.

        `request` has what the client sent.
        """
        with self.rollout.lock:
            attributes = self.rollout.writer.supplied(held, ids)
        self._written |= attributes
        self.span.set_attributes(attributes)

    @guarded(INCOMPLETE)
    def unsent(self, body: object) -> None:
        """The client could not build a request; `body` is the one that it was asked to send."""
        text = json.dumps(body, default=repr, separators=(",", ":"), skipkeys=True)
        self._write_request(text.encode())

    def attempt_failed(self, status: int | None) -> None:
        """Another attempt follows. status: the HTTP status. None: there was no response."""
        self._last_status = status

    @guarded(NOT_SHOWN, level=logging.DEBUG)
    def _name_session(self, attributes: dict[str, Any]) -> None:
        """The id of a session that the last request's headers have; they are read once."""
        headers = self.rollout.secrets.close(self)
        if headers and (session := session_of(headers)) is not None:
            attributes[sc.EXCHANGE_SESSION] = process_state.content.recorded(session)

    def _write_request(self, body: bytes) -> None:
        self._request = body
        if process_state.content.redact is not None:
            body, self._is_redacted = process_state.content.body(body)
        rollout = self.rollout
        writer = rollout.writer
        with rollout.lock:
            attributes = writer.request(body)
            added, messages = slice(*writer.added), slice(*writer.conversation)
            self.known = writer.known_digest, writer.known_count
        self.added, self._recorded = body[added], (body, messages)
        self._written |= attributes
        self.span.set_attributes(attributes)
        self._observers.notify("requested", self, body, attributes)

    # --- the response

    @guarded(INCOMPLETE)
    def response(self, status: int, headers: Mapping[str, str], body: bytes | None = None) -> bool:
        """A response is here; True if its bytes are to be shown as they come (`chunk`).

        body: the whole body, decoded, where somebody has read it already. Binary bodies, such as
        speech, are not recorded: they are large, and no conversation.
        """
        content_type = headers.get("content-type", "")
        self.status_code = status
        said = framing_said(content_type)
        path = self.path.partition("?")[0]
        self.framing = said or (None if self.api is None else self.api.framing(path))
        self.is_events = said is not None
        self._encoding = headers.get("content-encoding")
        self._last = self.rollout.clock
        self._chunks = self._body = self._left_ns = None
        self._tail = b"\n"
        self.responses += 1
        if _is_binary(content_type):
            return False
        if body is not None:
            self._body = body
            return False
        self._chunks = []
        self.rollout.streams.add(self)
        return True

    @property
    def messages(self) -> bytes:
        """The messages of its request, as JSON without brackets."""
        body, where = self._recorded
        return body[where]

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

    @property
    def is_encoded(self) -> bool:
        """True if the bytes of the response come with a `Content-Encoding`."""
        return (self._encoding or "identity").lower() != "identity"

    def comes_decoded(self) -> None:
        """The bytes of the response come without their `Content-Encoding`."""
        self._encoding = None

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
            for mark in self._last_marks:
                if mark in tail and self._is_last(tail):
                    self.end()  # nothing comes after it
                    break

    def _is_last(self, tail: bytes) -> bool:
        """Whether the last event of a whole reply is in its last `TAIL` bytes."""
        return any(api.is_last(tail) for api in self._apis)

    @guarded(INCOMPLETE)
    def refused(self, status: int, text: str | None) -> None:
        """The answer is an error that the client raised. text: its body. None: it was not read."""
        if self._body is None:
            self.status_code = status
            self._chunks = None
            if text is not None:
                self._body = self.rollout.scrub(text).encode()

    # --- the end

    @guarded(INCOMPLETE)
    def end(self, status: str | None = None, error: BaseException | None = None) -> None:
        """The whole reply has come, or the call failed. Only the first end counts.

        status: `complete`, `error`, `cancelled` or `abandoned`, from a caller that knows how the
        call ended. None: the reply and the error tell.
        error: the exception that the call, or the reading of its reply, ended with. None: none; an
        error that the server answered with is found in the reply.
        """
        if status is not None:
            body = self._received() if self.is_streaming else self._body
            self._body = None if body is None else self._events_of(body)
            self._finish(status, error)
        elif error is None and (self.status_code or 0) >= 400:
            self._end_refused(self.status_code or 0)
        elif self._chunks is not None:
            self._end_stream(error, ended=error is None)
        elif error is None and self._body is not None:
            self._end_reply(self._body, None, ended=True)
        else:
            self._finish("complete" if error is None else _status_of(error), error)

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
            number = self.responses
            later(lambda: self.leave(number, error))

    def _end_stream(self, error: BaseException | None, *, ended: bool) -> None:
        with self._lock:
            if self.finished:
                return
        self._end_reply(self._received(), error, ended=ended)

    def _end_refused(self, status: int) -> None:
        """End a call whose whole reply is an error that no client has raised."""
        body = self._received() if self.is_streaming else self._body or b""
        text = body.decode("utf-8", "replace")
        self._body = None
        self.refused(status, text)
        self._finish("error", ErrorResponse(f"HTTP {status}: {text}"))

    def _received(self) -> bytes:
        """The streamed bytes decoded; those that cannot be stay as they are."""
        body = b"".join(self._chunks or ())
        with guarded("a streamed reply could not be decoded", level=logging.DEBUG):
            return decoded(body, self._encoding)
        return body

    def _events_of(self, body: bytes) -> bytes:
        """The reply with its chunks as server-sent events, if it is a stream of another framing."""
        if self.framing in (None, "events"):
            return body
        with guarded("a streamed reply could not be read", level=logging.DEBUG):
            events = as_events(body, self.framing, said=self.is_events)
            if events is not None:
                self.is_events = True
                return events
        return body

    def _end_reply(self, body: bytes, error: BaseException | None, *, ended: bool) -> None:
        """End a reply; of a stream of events, the text tells if it is complete."""
        complete, reported = ended, None
        body = body.removeprefix(codecs.BOM_UTF8)  # as clients do
        if self.framing not in (None, "events"):
            body = self._events_of(body)
        self.is_events = is_events(body, self.is_events)
        if self.is_events:
            with guarded("a streamed reply was not understood; it is kept as it came"):
                # Parse the stream now only if it ended abnormally.
                said_done = self._is_last(body[-TAIL:] if len(body) > TAIL else b"\n" + body)
                complete = ended or said_done
                if not said_done or b'"error"' in body[-_ERROR_TAIL:]:
                    text = body.decode("utf-8", "replace")
                    merged = merge(text, self._choices(), self.path)
                    complete = ended if merged.complete is None else merged.complete
                    reported = merged.error
                    if merged.malformed and (error is None or isinstance(error, Exception)):
                        error = InvalidResponse("an event of the stream is not JSON")
        status, error = _ending(error, reported, complete=complete, ended=ended)
        if status == "complete" and self._is_invalid(body):
            # Scrubbed before it is cut: half a secret would not be found.
            text = self.rollout.scrub(body.decode("utf-8", "replace"))[:200]
            status = "error"
            error = InvalidResponse(f"the response is not a JSON object: {text!r}")
        self._body = body or None
        self._finish(status, error)

    def _is_invalid(self, body: bytes) -> bool:
        """Whether it is no reply of a model; only some ways of calling parse it, and raise."""
        return not (self.is_events or is_json_object(body) or self.api is None)

    def _choices(self) -> int:
        try:
            params = loads(self._request or b"{}")
        except (ValueError, RecursionError):
            return 1
        if not isinstance(params, dict):
            return 1
        return max(api.choices_asked(params) for api in self._apis)

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
        finally:
            with rollout.lock:
                if self._late or not rollout.running:
                    attributes[sc.EXCHANGE_LATE] = True
                else:
                    rollout.open -= 1
                self.span.set_attributes(with_lengths(attributes, self._written, self._checksums))
                self.span.end(self._left_ns)
            self._observers.notify("call_ended", self, status)
            rollout.streams.discard(self)
            self._let_go()

    @guarded(INCOMPLETE)
    def _write_reply(self, attributes: dict[str, Any], error: BaseException | None) -> None:
        if self.status_code is not None:
            attributes[sc.RESPONSE_STATUS_CODE] = self.status_code
        if self.is_events:
            attributes[sc.RESPONSE_STREAM] = True
        body = self._body
        if body is None:
            return
        writer = self.rollout.writer
        if error is not None or (not self.is_events and _may_be_error(body)):
            body = self.rollout.secrets.scrub_reply(body)
        found = _response_id(body)
        is_events = self.is_events
        if process_state.content.redact is not None:
            body, is_events = self._redacted(body)
        with self.rollout.lock:
            written = writer.response(body, events=is_events)
            self._checksums = writer.checksums
        self.rollout.replies += 1
        attributes |= written
        if self._is_redacted:
            attributes[sc.EXCHANGE_REDACTED] = True
        if found:
            attributes[sc.RESPONSE_ID] = found[1].decode("utf-8", "backslashreplace")
        self._observers.notify("replied", self, body, attributes)

    def _redacted(self, body: bytes) -> tuple[bytes, bool]:
        """The reply to record, and True if it is a stream of events.

        A stream is redacted as the reply that it merges to: what is redacted may be split over its
        chunks. One that merges to none is not recorded. What is redacted in a text must not be told
        by its tokens.
        """
        content = process_state.content
        whole, is_events = body, self.is_events
        if is_events:
            merged = merge(body.decode("utf-8", "replace"), self._choices(), self.path).body
            if merged is None:
                self._is_redacted = True
                return b"", False
            whole, is_events = dumps(merged).encode(), False
        redacted, changed = content.body(whole)
        if not changed and not self._is_redacted:
            return body, self.is_events
        self._is_redacted = True
        return without_tokens(redacted), is_events

    @guarded(INCOMPLETE)
    def _write_error(self, attributes: dict[str, Any], status: str, error: BaseException) -> None:
        code = self.status_code if (self.status_code or 0) >= 400 else None
        kind, message = type(error).__qualname__, self.rollout.scrub(message_of(error, code))
        attributes[sc.ERROR_TYPE] = kind
        attributes[sc.EXCHANGE_ERROR] = dumps({"type": kind, "message": message})
        self.error = kind, sentence(error, message)
        if status == "error":
            self.span.set_status(trace.StatusCode.ERROR, self.error[1])

    def _let_go(self) -> None:
        """Release everything: some clients keep a response, and with it this, for long."""
        self._chunks = self._body = self._request = None
        self.added, self._recorded = b"", (b"", slice(0))
        self.context = otel_context.Context()
        self._written = {}


def _may_be_error(body: bytes) -> bool:
    """Whether a reply reports an error, or is none of a model."""
    if not _is_of_model(body):
        return True
    # A search for the plain text costs a fifth of one for the pattern.
    return b'"error' in body and _has_error(body) is not None


def _start_attributes(rollout: ActiveRollout, path: str, began: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        sc.EXCHANGE_VERSION: sc.SCHEMA_VERSION,
        sc.ROLLOUT_ID: rollout.id,
        sc.EXCHANGE_PROCESS: rollout.process,
        sc.EXCHANGE_STARTED: began,
        sc.REQUEST_PATH: path,
    }
    if rollout.options.policy_version is not None:
        attributes |= label(sc.EXCHANGE_POLICY_VERSION, rollout.policy_version)
    if (policy_model := process_state.settings.policy_model) is not None:
        attributes[sc.EXCHANGE_POLICY_MODEL] = policy_model
    if rollout.side_call_rules is not None and rollout.recorder is not None:
        attributes[sc.EXCHANGE_JUDGED] = True
    if not rollout.trajectory.trainable:
        attributes[sc.ROLLOUT_TRAINABLE] = False  # the rollout's own span may be lost
    return attributes


def _ending(
    error: BaseException | None, reported: object, *, complete: bool, ended: bool
) -> tuple[str, BaseException | None]:
    """The status and the error of a reply.

    error: of whoever read it. reported: the error that the server sent in it. None: none.
    """
    if reported is not None:
        return "error", error or ErrorResponse(error_text(reported))
    if complete:
        return "complete", None
    if error is not None:
        return _status_of(error), error
    if ended:
        return "error", EOFError("the stream ended before the reply was complete")
    return "abandoned", None


def _status_of(error: BaseException) -> str:
    if isinstance(error, GeneratorExit):
        return "abandoned"
    # CancelledError, KeyboardInterrupt, SystemExit, trio's Cancelled: who called gave up.
    return "error" if isinstance(error, Exception) else "cancelled"
