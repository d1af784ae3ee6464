"""Exchange spans around the client's own request method: one call, its retries, its whole life.

The hooks are on the client's base class (`openai._base_client`), so every client has them, also
those made before and those of user subclasses. `request` is the life of the call, `_build_request`
shows each attempt's body exactly as it is sent, `_process_response` the HTTP response: read, or
about to be streamed, in which case its byte stream is teed. Outside a rollout nothing is done.

Nothing in here raises into the call or changes what it gives back: every step is guarded, and a
step that fails costs the exchange span a part, never the user anything.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import wrapt
from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.active import ActiveRollout, current_rollout
from otel_rollout.errors import ConfigurationError
from otel_rollout.messages import dumps, loads
from otel_rollout.streams import merge

logger = logging.getLogger("otel_rollout")
F = TypeVar("F", bound=Callable[..., Any])

_current: ContextVar[weakref.ref[_Call] | None] = ContextVar("otel-rollout-call", default=None)
"""The call that is being made here. A weak reference: a connection that the call opens keeps its
context for as long as it lives."""
_SECRET_HEADERS = ("authorization", "api-key", "x-api-key", "proxy-authorization")
_SHORTEST_SECRET = 8
_ERROR_TAIL = 1 << 16
"""Bytes at the end of a stream in which an error that ended it is looked for."""
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]").search
_ID = re.compile(rb'\s*(?:data:\s*)?\{\s*"id"\s*:\s*"([^"\\]+)"').match
_MODULE = "openai._base_client"


def _guarded(step: F) -> F:
    """The boundary between capture and the user's call: nothing passes it."""

    @functools.wraps(step)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except Exception:
            logger.exception("a model call was not captured completely")
            return None

    return guarded  # type: ignore[return-value]


class ErrorResponse(Exception):  # noqa: N818 - the name that a completion's error has
    """An error that the server reported inside a stream that had begun well."""


class _Call:
    """One exchange, from the moment the client is asked to the moment its reply is all there."""

    def __init__(self, active: ActiveRollout, options: Any) -> None:
        self._active = active
        self._options = options
        self._lock = threading.Lock()
        self.finished = False
        self._attempts = 0
        self._last_status: int | None = None
        self._choices = 1
        self._body: bytes | None = None
        self._headers: Any = {}
        self._received = 0
        self._status_code: int | None = None
        self.stream: _Received | None = None
        """What a streamed reply has brought so far; None while, or if, it is not streamed."""
        began = active.begin_call()
        self._late = not active.running
        path = str(options.url)
        if "://" not in path:
            path = "/" + path.lstrip("/")  # the client takes `chat/completions` too
        attributes: dict[str, Any] = {
            sc.EXCHANGE_VERSION: sc.SCHEMA_VERSION,
            sc.ROLLOUT_ID: active.id,
            sc.EXCHANGE_PROCESS: active.process,
            sc.EXCHANGE_STARTED: began,
            sc.REQUEST_PATH: path,
        }
        if active.options.policy_version is not None:
            attributes[sc.EXCHANGE_POLICY_VERSION] = active.options.policy_version
        self.span = active.tracer.start_span(
            f"{sc.OPERATION_EXCHANGE} {path.split('?')[0]}", attributes=attributes
        )

    @_guarded
    def attempt(self, request: Any) -> None:
        """The client built the HTTP request of an attempt."""
        self._attempts += 1
        if self._attempts > 1:
            status = {} if self._last_status is None else {"http_status": self._last_status}
            self.span.add_event(sc.EVENT_RETRY, status)
            return
        self._headers = request.headers
        options = self._options
        if options.files or (
            options.json_data is None and "json" not in request.headers.get("content-type", "")
        ):
            return  # a file that is uploaded; its bytes are not a conversation
        self._write_request(request.content)

    def _write_request(self, body: bytes) -> None:
        options = self._options.json_data
        if isinstance(options, dict) and isinstance(options.get("n"), int):
            self._choices = options["n"]
        with self._active.lock:
            self.span.set_attributes(self._active.writer.request(body))

    @_guarded
    def failed_attempt(self, status: int | None) -> None:
        """The client is about to try again."""
        self._last_status = status

    @_guarded
    def received(self, response: Any) -> None:
        """The HTTP response is here; its body has been read, or will be streamed."""
        self._status_code = response.status_code
        self._received = self._active.clock
        if response.is_stream_consumed or response.is_closed:
            self._body = response.content
        else:
            self.stream = _Received(self, response)
            self._active.streams.add(self)

    @_guarded
    def returned(self) -> None:
        """The client gave its caller a result."""
        if self.stream is None:
            self.finish("complete")

    def _learn_secrets(self) -> None:
        """What must not be recorded, should the server or an exception repeat it."""
        for header in _SECRET_HEADERS:
            secret = self._headers.get(header, "").removeprefix("Bearer ").strip()
            if len(secret) >= _SHORTEST_SECRET:
                self._active.secrets.add(secret)

    @_guarded
    def failed(self, error: BaseException) -> None:
        """The client raised."""
        self._learn_secrets()
        response = getattr(error, "response", None)
        if self._body is None and response is not None:
            self._status_code = response.status_code
            try:
                self._body = self._active.scrub(response.text).encode()
            except Exception:
                self._body = None
        if not self._attempts:
            self._fall_back()
        self.finish(_status_of(error), error)

    def _fall_back(self) -> None:
        """Keep what was asked for where the client could not, or did not, build a request."""
        body = self._options.json_data
        extra = getattr(self._options, "extra_json", None)
        if isinstance(body, dict) and isinstance(extra, dict):
            body = {**body, **extra}
        if body is not None:
            text = json.dumps(body, default=repr, separators=(",", ":"), skipkeys=True)
            self._write_request(text.encode())

    def finish(self, status: str, error: BaseException | None = None) -> None:
        """End the exchange span; only the first call counts."""
        with self._lock:
            if self.finished:
                return
            self.finished = True
        active = self._active
        attributes: dict[str, Any] = {
            sc.EXCHANGE_STATUS: status,
            sc.EXCHANGE_ATTEMPTS: self._attempts,
            sc.EXCHANGE_ENDED: self.stream.last if self.stream else self._received or active.clock,
        }
        try:
            if self._status_code is not None:
                attributes[sc.RESPONSE_STATUS_CODE] = self._status_code
            if self.stream is not None:
                attributes[sc.RESPONSE_STREAM] = True
            if self._body is not None:
                body = self._body
                if error is not None or b'"error"' in body[:64]:
                    self._learn_secrets()
                    body = _without_secrets(body, active)
                events = self.stream is not None and self.stream.is_events
                with active.lock:
                    attributes |= active.writer.response(body, events=events)
                found = _ID(body)
                if found:
                    attributes[sc.RESPONSE_ID] = found[1].decode("utf-8", "backslashreplace")
            if error is not None:
                attributes |= _error_attributes(error, active)
                if status == "error":
                    self.span.set_status(trace.StatusCode.ERROR, active.scrub(str(error)))
        except Exception:
            logger.exception("a model call was not captured completely")
        finally:
            with active.lock:
                if self._late or not active.running:
                    attributes[sc.EXCHANGE_LATE] = True
                else:
                    active.open -= 1
                self.span.set_attributes(attributes)
                self.span.end()
            active.streams.discard(self)
            self._let_go()

    def leave(self) -> None:
        """The rollout ends while the reply is still being read: what has come of it is kept."""
        stream = self.stream
        if stream is not None:
            stream.stopped()

    def _let_go(self) -> None:
        """Hold nothing any more: some clients keep a response, and with it this, for long."""
        if self.stream is not None:
            self.stream.release()
        self.stream = self._body = self._options = None
        self._headers = {}

    def finish_stream(
        self, received: _Received, error: BaseException | None, *, ended: bool
    ) -> None:
        """End the exchange of a stream that ended, was cut, or is read no further."""
        with self._lock:
            if self.finished:
                return
        body = received.raw()
        complete, reported = ended, None
        try:
            body = received.content()
            # Only what does not end as it should has to be understood here and now.
            said_done = received.is_events and _DONE(body[-64:]) is not None
            complete = ended or said_done
            if received.is_events and (not said_done or b'"error"' in body[-_ERROR_TAIL:]):
                merged = merge(body.decode("utf-8", "replace"), self._choices)
                complete, reported = merged.complete, merged.error
        except Exception:
            logger.exception("a streamed reply was not understood; it is kept as it came")
        if reported is not None:
            message = reported.get("message") if isinstance(reported, dict) else None
            error = error or ErrorResponse(str(message or reported))
            status = "error"
        elif complete:
            status, error = "complete", None
        elif error is not None:
            status = _status_of(error)
        elif ended:
            status = "error"
            error = EOFError("the stream ended before the reply was complete")
        else:
            status = "abandoned"
        self._body = body or None
        self.finish(status, error)


class _Received:
    """The bytes of a streamed response as the client reads them."""

    def __init__(self, call: _Call, response: Any) -> None:
        self._call = call
        self._chunks: list[bytes] = []
        self._over = False
        self._response_class = type(response)
        self._encoding = response.headers.get("content-encoding")
        self.is_events = "event-stream" in response.headers.get("content-type", "")
        self.last = call._received
        """The rollout's logical clock when the last bytes came."""
        tee = _tee(response.stream, self)
        # Streams that nobody reads to the end have no other end than this.
        weakref.finalize(tee, self.stopped).atexit = True
        response.stream = tee

    def release(self) -> None:
        """The exchange is over: keep nothing of it, whatever may still come."""
        self._chunks = []
        self._over = True

    def chunk(self, chunk: bytes) -> None:
        if self._over:
            return
        self._chunks.append(chunk)
        self.last = self._call._active.clock
        if self.is_events and b"[DONE]" in chunk[-32:]:  # nothing comes behind it
            recent = b"".join(self._chunks[-2:])
            if _DONE(recent if len(self._chunks) <= 2 else recent[1:]):
                self.stopped(ended=True)

    @_guarded
    def stopped(self, error: BaseException | None = None, *, ended: bool = False) -> None:
        self._call.finish_stream(self, error, ended=ended)

    def raw(self) -> bytes:
        return b"".join(self._chunks)

    def content(self) -> bytes:
        """The bytes decoded; those that cannot be stay as they are."""
        raw = self.raw()
        if self._encoding is None:
            return raw
        try:
            headers = {"content-encoding": self._encoding}
            return bytes(self._response_class(200, headers=headers, content=raw).content)
        except Exception:
            return raw


@functools.lru_cache
def _tee_class(stream_class: type) -> type:
    """A byte stream of the same kind (httpx checks it) that shows what passes through it."""
    sync = next((c for c in stream_class.__mro__ if c.__name__ == "SyncByteStream"), None)
    kind = next((c for c in stream_class.__mro__ if c.__name__ == "AsyncByteStream"), None)
    bases: tuple[type, ...] = (_AsyncTee, kind) if kind is not None else (_SyncTee, sync or object)
    return type(bases[0].__name__, bases, {})


def _tee(stream: object, received: _Received) -> Any:
    return _tee_class(type(stream))(stream, received)  # type: ignore[arg-type]


class _SyncTee:
    def __init__(self, stream: Any, received: _Received) -> None:
        self._stream = stream
        self._received = received

    def __iter__(self) -> Iterator[bytes]:
        received = self._received
        try:
            for chunk in self._stream:
                received.chunk(chunk)
                yield chunk
        except GeneratorExit:
            raise  # the reader stopped: `close` follows, or the garbage collector
        except BaseException as error:
            received.stopped(error)
            raise
        received.stopped(ended=True)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._received.stopped()


class _AsyncTee:
    def __init__(self, stream: Any, received: _Received) -> None:
        self._stream = stream
        self._received = received

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = self._received
        try:
            async for chunk in self._stream:
                received.chunk(chunk)
                yield chunk
        except GeneratorExit:
            raise
        except BaseException as error:
            received.stopped(error)
            raise
        received.stopped(ended=True)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._received.stopped()


def _status_of(error: BaseException) -> str:
    if isinstance(error, GeneratorExit):
        return "abandoned"
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        return "cancelled"
    return "error"


def _without_secrets(body: bytes, active: ActiveRollout) -> bytes:
    """Errors may echo the key that the request was signed with; what was sampled stays as it is."""
    if not any(secret.encode() in body for secret in active.secrets):
        return body
    try:
        reply = loads(body)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and not reply.get("error"):
        return body
    text = body.decode("utf-8", "surrogateescape")
    return active.scrub(text).encode("utf-8", "surrogateescape")


def _error_attributes(error: BaseException, active: ActiveRollout) -> dict[str, Any]:
    kind = type(error).__qualname__
    message = active.scrub(str(error))
    return {sc.ERROR_TYPE: kind, sc.EXCHANGE_ERROR: dumps({"type": kind, "message": message})}


# --- the hooks


def _begin(options: Any) -> _Call | None:
    active = current_rollout()
    if active is None or not active.recording:
        return None
    try:
        if str(options.method).lower() != "post":
            return None
        return _Call(active, options)
    except Exception:
        logger.exception("a model call is not captured")
        return None


def _options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["options"] if "options" in kwargs else args[1] if len(args) > 1 else None


def _enter(call: _Call) -> tuple[Any, Any]:
    span = otel_context.attach(trace.set_span_in_context(call.span))
    return span, _current.set(weakref.ref(call))


def _leave(tokens: tuple[Any, Any]) -> None:
    otel_context.detach(tokens[0])
    _current.reset(tokens[1])


def _request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    call = _begin(_options_of(args, kwargs))
    if call is None:
        return wrapped(*args, **kwargs)
    tokens = _enter(call)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        call.failed(error)
        raise
    finally:
        _leave(tokens)
    call.returned()
    return result


async def _async_request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    call = _begin(_options_of(args, kwargs))
    if call is None:
        return await wrapped(*args, **kwargs)
    tokens = _enter(call)
    try:
        result = await wrapped(*args, **kwargs)
    except BaseException as error:
        call.failed(error)
        raise
    finally:
        _leave(tokens)
    call.returned()
    return result


def _current_call() -> _Call | None:
    call = _current.get()
    return None if call is None else call()


def _build_request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    request = wrapped(*args, **kwargs)
    call = _current_call()
    if call is not None:
        call.attempt(request)
    return request


def _process_response(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    call = _current_call()
    if call is not None:
        call.received(kwargs.get("response"))
    return wrapped(*args, **kwargs)


def _should_retry(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    call = _current_call()
    if call is not None and args:
        call.failed_attempt(getattr(args[0], "status_code", None))
    return wrapped(*args, **kwargs)


_HOOKS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("SyncAPIClient", "request", _request),
    ("AsyncAPIClient", "request", _async_request),
    ("BaseClient", "_build_request", _build_request),
    ("BaseClient", "_should_retry", _should_retry),
    ("SyncAPIClient", "_process_response", _process_response),
    ("AsyncAPIClient", "_process_response", _process_response),
)
_REQUIRED = {"request", "_build_request", "_process_response"}
_installed: list[tuple[type, str, Any]] = []
_installing = threading.Lock()


def instrument() -> None:
    """Capture the calls of every OpenAI client of this process, also of those made before.

    Calling it twice is safe. ConfigurationError if this version of the client lacks the methods
    that are hooked.
    """
    with _installing:
        if _installed:
            return
        module = importlib.import_module(_MODULE)
        missing = [
            f"{owner}.{name}"
            for owner, name, _ in _HOOKS
            if name in _REQUIRED and not hasattr(getattr(module, owner, None), name)
        ]
        if missing:
            version = importlib.import_module("openai").__version__
            raise ConfigurationError(
                f"capture hooks {', '.join(missing)} of {_MODULE}, which openai {version} does not "
                f"have: use a version that otel-rollout is tested with (1.66 to 3.x)"
            )
        for owner, name, hook in _HOOKS:
            target = getattr(module, owner)
            original = vars(target).get(name)
            if original is not None:
                setattr(target, name, wrapt.FunctionWrapper(original, hook))
                _installed.append((target, name, original))


def uninstrument() -> None:
    """Take the hooks out again."""
    with _installing:
        while _installed:
            target, name, original = _installed.pop()
            setattr(target, name, original)
