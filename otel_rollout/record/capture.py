"""Exchange spans around the client's own request method: one call, its retries, its whole life.

The hooks are on the client's base class (`openai._base_client`, and the same module of the
libraries that one generator makes alike), so every client has them, also those made before and
those of user subclasses. `request` is the life of the call, `_build_request` shows each attempt's
body exactly as it is sent, `_process_response` the HTTP response: read, or about to be streamed,
in which case its byte stream is teed. Outside a rollout nothing is done.

LiteLLM asks many providers with an HTTP client of its own: there `post` is all of these at once.

Nothing in here raises into the call or changes what it gives back: every step is guarded, and a
step that fails costs the exchange span a part, never the user anything.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import wrapt
from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.record.litellm import Post
from otel_rollout.record.running import (
    TOKEN_FIELDS,
    ActiveRollout,
    current_rollout,
    detach,
    later,
    settle,
)
from otel_rollout.spans import label, sealed
from otel_rollout.wire import (
    TAIL,
    api_of,
    apis_of,
    dumps,
    events_of_frames,
    loads,
    merge,
    retrieval_of,
)

logger = logging.getLogger("otel_rollout")
F = TypeVar("F", bound=Callable[..., Any])

_current: ContextVar[weakref.ref[_Call] | None] = ContextVar("otel-rollout-call", default=None)
"""The call that is being made here. A weak reference: a connection that the call opens keeps its
context for as long as it lives."""
_SECRET_HEADER = re.compile(r"auth|key|token|cookie|secret|password|credential", re.I).search
_SHORTEST_SECRET = 8
_ERROR_TAIL = 1 << 16
"""Bytes at the end of a stream in which an error that ended it is looked for."""
_ID = re.compile(rb'\s*(?:data:\s*)?\{\s*"id"\s*:\s*"([^"\\]+)"').match
_OPENAI = "openai._base_client"
_OTHERS = (
    "anthropic._base_client",
    "cerebras.cloud.sdk._base_client",
    "groq._base_client",
    "together._base_client",
)
"""Further libraries from the generator that made openai's: the same classes and methods. They are
not needed; who imports one has its calls captured."""
_LITELLM = "litellm.llms.custom_httpx.http_handler"
"""LiteLLM's own HTTP client, which is not needed either."""


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


def secrets_in(headers: Mapping[str, Any]) -> set[str]:
    """What of a request's headers must not be recorded, should a server or an exception repeat it.

    The values of headers that sound secret, and their parts: what follows `Bearer `, each cookie.
    """
    found = set[str]()
    for name, value in headers.items():
        if isinstance(value, str) and _SECRET_HEADER(str(name)):
            for part in re.split(r"[;,\s]+", value):
                found |= {part, part.partition("=")[2]}
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


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
        self.is_events = False
        """Whether the reply is a stream of server-sent events."""
        self._headers: Any = {}
        self._signed = ""
        """The `Authorization` of the first attempt; credentials in an address replace it later."""
        self._received = 0
        self._status_code: int | None = None
        self.stream: _Received | None = None
        """What a streamed reply has brought so far; None while, or if, it is not streamed."""
        began = active.begin_call()
        self._late = not active.running
        path = str(options.url)
        if "://" not in path:
            path = "/" + path.lstrip("/")  # the client takes `chat/completions` too
        self._path = path
        self.apis = apis_of(path)
        """The API that is asked; all of them where the path tells nothing."""
        attributes: dict[str, Any] = {
            sc.EXCHANGE_VERSION: sc.SCHEMA_VERSION,
            sc.ROLLOUT_ID: active.id,
            sc.EXCHANGE_PROCESS: active.process,
            sc.EXCHANGE_STARTED: began,
            sc.REQUEST_PATH: path,
        }
        attributes |= label(sc.EXCHANGE_POLICY_VERSION, active.policy_version)
        if not active.trajectory.trainable:
            attributes[sc.ROLLOUT_TRAINABLE] = False  # the rollout's own span may be lost
        self._written = attributes
        """Attributes that the span has so far."""
        context = otel_context.get_current()
        if not trace.get_current_span(context).get_span_context().is_valid:
            context = trace.set_span_in_context(active.span, context)
        self.span = active.tracer.start_span(
            f"{sc.OPERATION_EXCHANGE} {path.split('?')[0]}", context=context, attributes=attributes
        )

    @_guarded
    def attempt(self, request: Any) -> None:
        """The client built the HTTP request of an attempt."""
        self._attempts += 1
        if self._attempts > 1:
            status = {} if self._last_status is None else {"http_status": self._last_status}
            self._last_status = None  # what fails without a response has none
            self.span.add_event(sc.EVENT_RETRY, status)
            return
        self._headers = request.headers
        self._signed = request.headers.get("authorization", "")
        options = self._options
        if options.files or (
            options.json_data is None and "json" not in request.headers.get("content-type", "")
        ):
            return  # a file that is uploaded; its bytes are not a conversation
        self._write_request(request.content)

    def _set(self, attributes: dict[str, Any]) -> None:
        self._written |= attributes
        self.span.set_attributes(attributes)

    def _write_request(self, body: bytes) -> None:
        for options in (self._options.json_data, getattr(self._options, "extra_json", None)):
            if isinstance(options, dict):
                asked = (api.choices_asked(options) for api in self.apis)
                self._choices = max(self._choices, *asked)
        with self._active.lock:
            self._set(self._active.writer.request(body))

    @_guarded
    def failed_attempt(self, status: int | None) -> None:
        """The client is about to try again."""
        self._last_status = status

    @_guarded
    def received(self, response: Any) -> None:
        """The HTTP response is here; its body has been read, or will be streamed."""
        if not response.is_success:
            return  # shown to a client's middleware; what comes of it, another attempt or `failed`
        self._status_code = response.status_code
        self._received = self._active.clock
        content_type = response.headers.get("content-type", "")
        self.is_events = "event-stream" in content_type or bool(_is_framed(content_type))
        self.stream = self._body = None
        if _is_binary(content_type):
            pass  # such as speech: no conversation, and large
        elif response.is_stream_consumed or response.is_closed:
            self._body = response.content
        else:
            self.stream = _Received(self, response)
            self._active.streams.add(self)

    @_guarded
    def returned(self) -> None:
        """The client gave its caller a result."""
        if self.stream is not None:
            return
        if self.is_events and self._body is not None:
            # A stream that was read before it came here, by a hook or transport of the client.
            self._finish_with(self._body, None, ended=True)
        else:
            self.finish("complete")

    def _learn_secrets(self) -> None:
        """What must not be recorded, should the server or an exception repeat it."""
        self._active.secrets |= secrets_in(self._headers)
        self._active.secrets |= secrets_in({"authorization": self._signed})

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
            if self.is_events:
                attributes[sc.RESPONSE_STREAM] = True
            if self._body is not None:
                body = self._body
                if error is not None or b'"error"' in body[:64]:
                    self._learn_secrets()
                    body = _without_secrets(body, active)
                with active.lock:
                    attributes |= active.writer.response(body, events=self.is_events)
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
                self.span.set_attributes(sealed(attributes, self._written))
                self.span.end(self.stream.left_ns if self.stream else None)
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
        self._headers = self._written = {}

    def finish_stream(
        self, received: _Received, error: BaseException | None, *, ended: bool
    ) -> None:
        """End the exchange of a stream that ended, was cut, or is read no further."""
        with self._lock:
            if self.finished or received is not self.stream:
                return  # a middleware may have asked again
        self._finish_with(received.content(), error, ended=ended)

    def _finish_with(self, body: bytes, error: BaseException | None, *, ended: bool) -> None:
        complete, reported = ended, None
        try:
            # Only what does not end as it should has to be understood here and now.
            tail = body[-TAIL:] if len(body) > TAIL else b"\n" + body
            said_done = self.is_events and any(api.is_last(tail) for api in self.apis)
            complete = ended or said_done
            if self.is_events and (not said_done or b'"error"' in body[-_ERROR_TAIL:]):
                text = body.decode("utf-8", "replace")
                merged = merge(text, self._choices, self._path)
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
        self._tail = b"\n"
        """The last bytes of the stream so far, after a line break."""
        self._over = False
        self._response_class = type(response)
        self._encoding = response.headers.get("content-encoding")
        self._framed = _is_framed(response.headers.get("content-type", ""))
        self.last = call._received
        """The rollout's logical clock when the last bytes came."""
        self.left_ns: int | None = None
        """When it was read no further, where its end has to wait."""
        tee = _tee(response.stream, self)
        # Streams that nobody reads to the end have no other end than this.
        weakref.finalize(tee, self.left).atexit = False
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
        if self._call.is_events:
            tail = self._tail = (self._tail + chunk[-TAIL:])[-TAIL:]
            for api in self._call.apis:
                if api.is_last(tail):
                    self.stopped(ended=True)  # nothing comes after it
                    return

    @_guarded
    def stopped(self, error: BaseException | None = None, *, ended: bool = False) -> None:
        self._call.finish_stream(self, error, ended=ended)

    def left(self) -> None:
        """It is read no further; that may be the garbage collector who says so."""
        if not self._over and self.left_ns is None:
            self.left_ns = time.time_ns()
            later(self.stopped)

    def raw(self) -> bytes:
        return b"".join(self._chunks)

    def content(self) -> bytes:
        """The bytes decoded; those that cannot be stay as they are."""
        raw = self.raw()
        try:
            if self._encoding is not None:
                headers = {"content-encoding": self._encoding}
                raw = bytes(self._response_class(200, headers=headers, content=raw).content)
            return events_of_frames(raw) if self._framed else raw
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
            self._received.left()


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
            self._received.left()


_is_framed = re.compile(r"application/vnd\.amazon\.eventstream").match
_is_binary = re.compile(r"(?:audio|image|video)/|application/octet-stream").match


def _status_of(error: BaseException) -> str:
    if isinstance(error, GeneratorExit):
        return "abandoned"
    # CancelledError, KeyboardInterrupt, SystemExit, trio's Cancelled: who called gave up.
    return "error" if isinstance(error, Exception) else "cancelled"


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
    settle()
    active = current_rollout()
    if active is None or not active.recording:
        return None
    try:
        method = str(options.method).lower()
        # What a background response says has to be asked for.
        if method != "post" and not (method == "get" and retrieval_of(str(options.url))):
            return None
        if method == "post":
            _ask_for_token_ids(options)
        return _Call(active, options)
    except Exception:
        logger.exception("a model call is not captured")
        return None


request_fields: Mapping[str, Any] | None = None
"""What `configure(request_token_ids=True)` adds to requests; the context may say otherwise."""


def _ask_for_token_ids(options: Any) -> None:
    fields = otel_context.get_value(TOKEN_FIELDS)
    if fields is None:
        fields = request_fields
    if not isinstance(fields, Mapping) or not isinstance(options.json_data, dict):
        return
    path = "/" + str(options.url).split("?")[0].lstrip("/")
    api = api_of(path)
    own = api.token_id_params(path) if api else None
    if own is None:
        return
    given = getattr(options, "extra_json", None) or {}
    wanted = {k: v for k, v in {**own, **fields}.items() if k not in options.json_data}
    options.extra_json = {**wanted, **given}


def _options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["options"] if "options" in kwargs else args[1] if len(args) > 1 else None


def _enter(call: _Call | None) -> tuple[Any, Any]:
    if call is None:
        return _current.set(None), None
    current = _current.set(weakref.ref(call))
    return current, otel_context.attach(trace.set_span_in_context(call.span))


def _leave(tokens: tuple[Any, Any]) -> None:
    try:
        _current.reset(tokens[0])
    except ValueError:
        return  # a coroutine that the garbage collector closes ends in a context not its own
    if tokens[1] is not None:
        detach(tokens[1])


def _make(
    call: _Call | None, wrapped: Callable[..., Any], args: Any, kwargs: Any, *, raw: bool = False
) -> Any:
    """Make the call; `raw` if its result is the HTTP response."""
    if call is None and _current.get() is None:
        return wrapped(*args, **kwargs)
    tokens = _enter(call)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        if call is not None:
            call.failed(error)
        raise
    finally:
        _leave(tokens)
    if call is not None:
        if raw:
            call.received(result)
        call.returned()
    return result


async def _make_async(
    call: _Call | None, wrapped: Callable[..., Any], args: Any, kwargs: Any, *, raw: bool = False
) -> Any:
    if call is None and _current.get() is None:
        return await wrapped(*args, **kwargs)
    tokens = _enter(call)
    try:
        result = await wrapped(*args, **kwargs)
    except BaseException as error:
        if call is not None:
            call.failed(error)
        raise
    finally:
        _leave(tokens)
    if call is not None:
        if raw:
            call.received(result)
        call.returned()
    return result


def _request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    return _make(_begin(_options_of(args, kwargs)), wrapped, args, kwargs)


async def _async_request(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    return await _make_async(_begin(_options_of(args, kwargs)), wrapped, args, kwargs)


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


@_guarded
def _begin_post(handler: Any, args: Any, kwargs: Any) -> _Call | None:
    """The call that a POST is, unless it belongs to a call that is being made already."""
    post = Post.of(args, kwargs)
    current = _current_call()
    if post is None or (current is not None and not current.finished):
        return None
    call = _begin(post)
    if call is not None:
        try:
            post.extend(kwargs)
            call.attempt(post.request(handler.client))
        except Exception:
            logger.debug("LiteLLM's request cannot be built", exc_info=True)  # nor sent by LiteLLM
    return call


def _post(wrapped: Callable[..., Any], handler: Any, args: Any, kwargs: Any) -> Any:
    return _make(_begin_post(handler, args, kwargs), wrapped, args, kwargs, raw=True)


async def _async_post(wrapped: Callable[..., Any], handler: Any, args: Any, kwargs: Any) -> Any:
    call = _begin_post(handler, args, kwargs)
    return await _make_async(call, wrapped, args, kwargs, raw=True)


def _post_again(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """What `post` does when it could not connect."""
    call = _current_call()
    if call is not None:
        call.attempt(None)
    return wrapped(*args, **kwargs)


_Hooks = tuple[tuple[str, str, Callable[..., Any]], ...]
_HOOKS: _Hooks = (
    ("SyncAPIClient", "request", _request),
    ("AsyncAPIClient", "request", _async_request),
    ("BaseClient", "_build_request", _build_request),
    ("BaseClient", "_should_retry", _should_retry),
    ("SyncAPIClient", "_process_response", _process_response),
    ("AsyncAPIClient", "_process_response", _process_response),
)
_LITELLM_HOOKS: _Hooks = (
    ("HTTPHandler", "post", _post),
    ("AsyncHTTPHandler", "post", _async_post),
    ("AsyncHTTPHandler", "single_connection_request", _post_again),
)
_REQUIRED = {"request", "_build_request", "_process_response", "post"}
_installed: list[tuple[type, str, Any]] = []
_installing = threading.Lock()
_wanted = False
"""Whether a library that is imported from now on is to be hooked."""
_awaited: set[str] = set()
"""Libraries whose import is waited for, once and for good."""


def instrument() -> None:
    """Capture the calls of every client of this process, also of those made before.

    That is OpenAI's; and of `anthropic` and its like (see `_OTHERS`) and LiteLLM's own if they
    are, or once they are, imported. Calling it twice is safe. ConfigurationError if this version
    of the OpenAI client lacks the methods that are hooked; of the others that is only logged.
    """
    global _wanted
    module = importlib.import_module(_OPENAI)
    missing = _missing(module)
    if missing:
        version = importlib.import_module("openai").__version__
        raise ConfigurationError(
            f"capture hooks {', '.join(missing)} of {_OPENAI}, which openai {version} does not "
            f"have: use a version that otel-rollout is tested with (1.66 to 3.x)"
        )
    _wanted = True
    _install(module)
    for name in (*_OTHERS, _LITELLM):
        if name in sys.modules:
            _hook_imported(importlib.import_module(name))  # waits for a thread that imports it
        elif name not in _awaited:
            _awaited.add(name)
            wrapt.register_post_import_hook(_hook_imported, name)


def _hooks_of(module: ModuleType) -> _Hooks:
    return _LITELLM_HOOKS if module.__name__ == _LITELLM else _HOOKS


def _missing(module: ModuleType) -> list[str]:
    return [
        f"{owner}.{name}"
        for owner, name, _ in _hooks_of(module)
        if name in _REQUIRED and not hasattr(getattr(module, owner, None), name)
    ]


@_guarded
def _hook_imported(module: ModuleType) -> None:
    missing = _missing(module)
    if missing:
        logger.warning(
            "calls of %s are not captured: this version has no %s",
            module.__name__.removesuffix("._base_client"),
            ", ".join(missing),
        )
    else:
        _install(module)


def _install(module: ModuleType) -> None:
    with _installing:
        for owner, name, hook in _hooks_of(module) if _wanted else ():
            target = getattr(module, owner)
            original = vars(target).get(name)
            if original is not None and not any(at[:2] == (target, name) for at in _installed):
                setattr(target, name, wrapt.FunctionWrapper(original, hook))
                _installed.append((target, name, original))


def not_hooked() -> list[str]:
    """The methods of the OpenAI client that are not, or no longer, captured."""
    module = importlib.import_module(_OPENAI)
    return [
        f"{owner}.{name}"
        for owner, name, hook in _HOOKS
        if name in _REQUIRED and not _is_hooked(vars(getattr(module, owner)).get(name), hook)
    ]


def _is_hooked(method: Any, hook: Any) -> bool:
    """Whether the hook is anywhere below what others have wrapped around it."""
    while method is not None and getattr(method, "_self_wrapper", None) is not hook:
        method = getattr(method, "__wrapped__", None)
    return method is not None


def uninstrument() -> None:
    """Take the hooks out again."""
    global _wanted
    with _installing:
        _wanted = False
        while _installed:
            target, name, original = _installed.pop()
            setattr(target, name, original)
