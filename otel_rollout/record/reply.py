"""How the reply of a model call ended, by its bytes, and what of it is recorded.

A stream is parsed only if it ended abnormally: whether it is whole is seen in its last bytes.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from otel_rollout.record.boundary import guarded
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.encoding import decoded
from otel_rollout.wire import (
    TAIL,
    Framing,
    Merged,
    ModelApi,
    api_of,
    apis_of,
    as_events,
    dumps,
    error_text,
    is_events,
    is_json_object,
    merge,
    object_in,
    without_tokens,
)

_ERROR_TAIL = 1 << 16
"""Bytes at the end of a stream in which an error that ended it is looked for."""
_has_error = re.compile(rb'"error"\s*:\s*[^n\s]').search
begins_with_id = re.compile(rb'\s*(?:data:\s*)?\{\s*"id"\s*:\s*"([^"\\]+)"').match
"""Finds the id that a reply, or its first event, begins with."""
_is_of_model = re.compile(rb'"(?:choices|output|content|data)"\s*:').search


class ErrorResponse(Exception):  # noqa: N818 - the name that a completion's error has
    """An error that the server answered with: as a reply, or inside a stream that began well."""


class InvalidResponse(Exception):  # noqa: N818 - the name that a completion's error has
    """A reply that is no JSON object, or a stream with an event that is none."""


@cache
def _last_marks(apis: tuple[ModelApi, ...]) -> frozenset[bytes]:
    return frozenset(mark for api in apis for mark in api.last_marks)


class Asked:
    """What a call asked for: its path, and the body of its request, which says how many choices."""

    body: bytes | None = None
    """None: it was not sent yet, or is not recorded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.api = api_of(path)
        """The API that is asked. None: none generates at the path."""
        self._apis = apis_of(path)
        """The API that is asked; all of them where the path does not show which."""
        self.last_marks = _last_marks(self._apis)
        """One of these is in the last event of a whole reply."""

    def is_last(self, tail: bytes) -> bool:
        """True if the last event of a whole reply is in its last `TAIL` bytes."""
        return any(api.is_last(tail) for api in self._apis)

    def merged(self, events: bytes) -> Merged:
        """The reply that a stream of events is."""
        return merge(events.decode("utf-8", "replace"), self._choices(), self.path)

    def _choices(self) -> int:
        params = object_in(self.body or b"{}")
        return 1 if params is None else max(api.choices_asked(params) for api in self._apis)


@dataclass(slots=True)
class Ending:
    """How a reply ended."""

    body: bytes
    """Its bytes, a stream's as server-sent events."""
    is_events: bool
    """True if it is a stream."""
    status: str
    """`complete`, `error`, `cancelled` or `abandoned`."""
    error: BaseException | None


def ending_of(
    asked: Asked,
    body: bytes,
    framing: Framing | None,
    error: BaseException | None,
    *,
    declared: bool,
    ended: bool,
) -> Ending:
    """How a reply ended; of a stream of events, the text shows if it is complete.

    body: decoded, as far as it came. error: of whoever read it. None: none.
    declared: True if the content type is that of a stream. ended: True if it was read to its
        end.
    """
    complete, reported = ended, None
    body = body.removeprefix(codecs.BOM_UTF8)  # as clients do
    body, declared = framed_as_events(body, framing, declared=declared)
    found = Ending(body, is_events(body, declared), "", error)
    if found.is_events:
        with guarded("a streamed reply was not understood; it is kept as it came"):
            has_last = asked.is_last(body[-TAIL:] if len(body) > TAIL else b"\n" + body)
            complete = ended or has_last
            # In a long text, forwards costs half of backwards.
            if not has_last or body.find(b'"error"', -_ERROR_TAIL) >= 0:
                merged = asked.merged(body)
                complete = ended if merged.complete is None else merged.complete
                reported = merged.error
                if merged.malformed and (error is None or isinstance(error, Exception)):
                    error = InvalidResponse("an event of the stream is not JSON")
    found.status, found.error = _status_and_error(error, reported, complete=complete, ended=ended)
    return found


def is_no_reply(asked: Asked, reply: Ending) -> bool:
    """True if this whole reply is none of a model: not every way of calling parses it."""
    return not (reply.is_events or asked.api is None or is_json_object(reply.body))


def framed_as_events(body: bytes, framing: Framing | None, *, declared: bool) -> tuple[bytes, bool]:
    """The reply with its chunks as server-sent events, if it is a stream of another framing.

    Also True if it is a stream. said: True if the content type says so.
    """
    if framing not in (None, "events"):
        with guarded("a streamed reply could not be read", level=logging.DEBUG):
            events = as_events(body, framing, declared=declared)
            if events is not None:
                return events, True
    return body, declared


def joined(chunks: Sequence[bytes], encoding: str | None) -> bytes:
    """Chunks decoded; those that cannot be stay as they are."""
    body = b"".join(chunks)
    with guarded("a streamed reply could not be decoded", level=logging.DEBUG):
        return decoded(body, encoding)
    return body


def redacted(asked: Asked, body: bytes, *, is_events: bool, is_known: bool) -> bytes | None:
    """The reply to record where something of it, or of its request, is redacted; else None.

    A stream is redacted as the reply that it merges to: what is redacted may be split over its
    chunks. One that merges to none, or contradicts itself, is not recorded. What is redacted in a
    text must not be told by its tokens. is_known: True if something of the request was redacted.
    """
    merged = asked.merged(body) if is_events else None
    if merged is not None and merged.body is None:
        return b""
    whole = body if merged is None else dumps(merged.body).encode()
    rest, changed = process_state.content.body(whole)
    if not changed and not is_known:
        return None
    return b"" if merged is not None and merged.contradictions else without_tokens(rest)


def may_be_error(body: bytes) -> bool:
    """True if a reply reports an error, or is none of a model."""
    if not _is_of_model(body):
        return True
    # A member of the reply itself is before its choices, or after them: nearly all of a long reply
    # is the log-probabilities in between.
    # The last list may be long, too; if it has no string, it is one of numbers.
    after = body.rfind(b"]")
    before = body.rfind(b"[", 0, after)
    if before < 0 or body.find(b'"', before, after) >= 0:
        before = after = len(body)
    start, end = body.find(b'"choices"'), body.rfind(b'"finish_reason"', 0, before)
    if not 0 <= start < end:
        start = end = 0
    # A search for the plain text is faster than one for the pattern, and backwards twice as fast.
    is_named = (
        body.rfind(b'"error"', end, before) >= 0
        or body.rfind(b'"error"', after) >= 0
        or body.rfind(b'"error"', 0, start) >= 0
    )
    return is_named and _has_error(body) is not None


def _status_and_error(
    error: BaseException | None, reported: object, *, complete: bool, ended: bool
) -> tuple[str, BaseException | None]:
    """The status and the error of a reply. reported: the error that the server sent in it."""
    if reported is not None:
        return "error", error or ErrorResponse(error_text(reported))
    if isinstance(error, Exception):  # the agent got it, and perhaps nothing else
        return "error", error
    if complete:
        return "complete", None
    if error is not None:
        return status_of(error), error
    if ended:
        return "error", EOFError("the stream ended before the reply was complete")
    return "abandoned", None


def status_of(error: BaseException) -> str:
    """The status of a call that this exception ended."""
    if isinstance(error, GeneratorExit):
        return "abandoned"
    # CancelledError, KeyboardInterrupt, SystemExit, trio's Cancelled: who called gave up.
    return "error" if isinstance(error, Exception) else "cancelled"
