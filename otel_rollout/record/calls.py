"""A model call that a client makes, and the recorder that follows it.

The call is current while the client makes it, so that the client's inner steps (an attempt, a
response) find its recorder, and the spans of HTTP libraries are below the call's own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout.record.added_fields import Added, refusal_in, status_of
from otel_rollout.record.boundary import INCOMPLETE, guarded
from otel_rollout.record.context import detach
from otel_rollout.record.current import current_rollout
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.state import process_state
from otel_rollout.record.transports.tee import tee, without_count

_UNREAD = "an error response was not read"


class Unrecorded:
    """Stands for a call that is not recorded, and for its recorder, which it has not."""

    def __call__(self) -> None: ...


UNRECORDED = Unrecorded()
_current: ContextVar[Callable[[], ExchangeRecorder | None] | None] = ContextVar(
    "otel-rollout-call", default=None
)
"""The call that is being made here. A weak reference: a connection that the call opens keeps its
context for as long as it lives. `UNRECORDED` if it is not recorded. None: there is none."""


@dataclass(slots=True)
class ClientCall:
    """A model call that is recorded."""

    recorder: ExchangeRecorder
    asked: Callable[[], object]
    """The body that the client was asked to send, should it fail to build a request."""
    added: Added
    """What was added to its request."""
    plain: Callable[[], tuple[Any, Any]]
    """Takes that out of the request; returns the arguments that the call is then made with."""
    received: Callable[[ExchangeRecorder, Any], None] | None = None
    """Shows the recorder the HTTP response that the call gives. None: the client's steps do."""
    refusal: Callable[[Any], Any] | None = None
    """Reads the body of a response, which its reader finds unread: a text, or what is awaited for
    it. None: the client has read it."""

    @guarded(_UNREAD, level=logging.DEBUG)
    def text(self, outcome: Any) -> Any:
        """The text of a refusal, as `refusal` returns it. None: it is none, or not known."""
        if refusal_in(outcome) is None:
            return None
        return (self.refusal or text_of)(getattr(outcome, "response", outcome))

    @guarded(INCOMPLETE)
    def again(self, outcome: Any, text: str | None) -> tuple[Any, Any] | None:
        """The arguments to make the call with once more, where the server may refuse what we added.

        outcome: the response, or the error that was raised. text: its body. None: it is the call's
        outcome.
        """
        status = refusal_in(outcome)
        if status is None or (names := self.added.take_back(text, status)) is None:
            return None
        self.recorder.asks_without(names, status)
        return self.plain()

    def ended(self, result: Any) -> None:
        """The client gave its caller this result."""
        if self.added.refusals is not None:
            with guarded(INCOMPLETE):
                self.added.ended(status_of(result))
        if self.received is not None:
            with guarded(INCOMPLETE):
                self.received(self.recorder, result)
        if not self.recorder.is_streaming:
            self.recorder.end()

    def failed(self, error: BaseException) -> None:
        """The client raised."""
        with guarded(INCOMPLETE):
            response = getattr(error, "response", None)
            if response is not None:
                headers = getattr(response, "headers", None)
                self.recorder.refused(response.status_code, text_of(response), headers)
            body = None if self.recorder.attempts else self.asked()
            if body is not None:
                self.recorder.unsent(body)
        self.recorder.end(error=error)


def is_in_call() -> bool:
    """True if what is sent here is part of a call that a client is making, recorded or not."""
    current = _current.get()
    if current is None:
        return False
    if current is UNRECORDED:
        return True
    recorder = current()
    return recorder is not None and not recorder.finished


def recording_rollout() -> ActiveRollout | None:
    """The rollout that a call made now is recorded in. None: the call is not recorded."""
    if process_state.waiting:
        process_state.do_waiting()
    active = current_rollout()
    return active if active is not None and active.recording else None


def current_recorder() -> ExchangeRecorder | None:
    """The recorder of the call that is being made here. None: none is, or it is not recorded."""
    current = _current.get()
    return None if current is None else current()


def make(
    call: ClientCall | Unrecorded | None, wrapped: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Make the call. Of one that is not recorded (None: nobody asks) neither are the steps."""
    if call is None and _current.get() is None:
        return wrapped(*args, **kwargs)
    tokens = _enter(call)
    try:
        result = _made(call, wrapped, args, kwargs)
    except BaseException as error:
        if isinstance(call, ClientCall):
            call.failed(error)
        raise
    finally:
        _leave(tokens)
    if isinstance(call, ClientCall):
        call.ended(result)
    return result


async def make_async(
    call: ClientCall | Unrecorded | None, wrapped: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Make the call of an async client, as `make` does."""
    if call is None and _current.get() is None:
        return await wrapped(*args, **kwargs)
    tokens = _enter(call)
    try:
        result = await _made_async(call, wrapped, args, kwargs)
    except BaseException as error:
        if isinstance(call, ClientCall):
            call.failed(error)
        raise
    finally:
        _leave(tokens)
    if isinstance(call, ClientCall):
        call.ended(result)
    return result


def _made(
    call: ClientCall | Unrecorded | None, wrapped: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The result of the call; of a second one without what we added, where that is refused."""
    if not isinstance(call, ClientCall) or not call.added.fields:
        return wrapped(*args, **kwargs)
    try:
        result = wrapped(*args, **kwargs)
        if (again := call.again(result, call.text(result))) is None:
            return result
        with guarded(INCOMPLETE):
            result.close()
    except Exception as error:
        if (again := call.again(error, call.text(error))) is None:
            raise
    return wrapped(*again[0], **again[1])


async def _made_async(
    call: ClientCall | Unrecorded | None, wrapped: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """`_made`, of an async client."""
    if not isinstance(call, ClientCall) or not call.added.fields:
        return await wrapped(*args, **kwargs)
    try:
        result = await wrapped(*args, **kwargs)
        if (again := call.again(result, await _text(call.text(result)))) is None:
            return result
        with guarded(INCOMPLETE):
            await result.aclose() if hasattr(result, "aclose") else result.close()
    except Exception as error:
        if (again := call.again(error, await _text(call.text(error)))) is None:
            raise
    return await wrapped(*again[0], **again[1])


@guarded(INCOMPLETE)
def received(recorder: ExchangeRecorder, response: Any) -> None:
    """A response of httpx is here; its body has been read, or is shown as it is read."""
    status, headers = response.status_code, response.headers
    content = getattr(response, "_content", None)
    if isinstance(content, bytes):
        recorder.response(status, headers, content)
        response._content = without_count(recorder, content)
    elif response.is_closed or response.is_stream_consumed:  # by a hook of the user's
        recorder.response(status, headers)
        recorder.leave()
    elif recorder.response(status, headers):
        response.stream = tee(response, recorder)


def text_of(response: Any) -> str | None:
    """The body of an error response. None: it was not read."""
    if not isinstance(getattr(response, "_content", None), bytes):
        return None  # requests would read it now
    with guarded(_UNREAD, level=logging.DEBUG):
        return str(response.text)
    return None


async def _text(found: Any) -> Any:
    """The text of a refusal of an async client."""
    with guarded(_UNREAD, level=logging.DEBUG):
        return await found if isawaitable(found) else found


def _enter(call: ClientCall | Unrecorded | None) -> tuple[Any, Any]:
    if not isinstance(call, ClientCall):
        return _current.set(UNRECORDED), None
    current = _current.set(weakref.ref(call.recorder))
    if not process_state.content.exported:
        return current, None  # what is below a span that is not exported would not be either
    return current, otel_context.attach(trace.set_span_in_context(call.recorder.span))


def _leave(tokens: tuple[Any, Any]) -> None:
    try:
        _current.reset(tokens[0])
    except ValueError:
        return  # a coroutine that the garbage collector closes ends in a context not its own
    if tokens[1] is not None:
        detach(tokens[1])
