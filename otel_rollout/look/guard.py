"""A guard between an instrumentor of the OpenAI client and its user.

The one idea: an instrumentor only watches. Of a call that is recorded it is shown a request without
messages and a reply without content, since `llm_spans.py` writes those; the caller gets the
client's own result or exception, and whatever the instrumentor raises or returns is dropped. The
invariant: a call does the same with an instrumentor and without one, and no secret of the request
is on a span.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import wrapt
from openai._response import BaseAPIResponse
from openai.types.chat import ChatCompletionChunk
from opentelemetry import trace
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.instrumentation.openai.shared.config import Config

from otel_rollout import semconv as sc
from otel_rollout.look.llm_spans import INSTRUMENTED, ReplyFacts
from otel_rollout.record import (
    ActiveRollout,
    Secrets,
    current_rollout,
    is_inside_llm_span,
    process_state,
    public_address,
)

logger = logging.getLogger("otel_rollout")

_NO_CALLBACK = inspect.signature(OpenAIInstrumentor).parameters["upload_base64_image"].default
_UNREAD = ("extra_headers", "extra_body", "extra_query", "timeout")
"""Arguments that the instrumentor does not read, or should not."""
_UNSET = tuple(kind for name in ("NotGiven", "Omit") if (kind := getattr(openai, name, None)))


def log_swallowed(error: BaseException) -> None:
    """Log what an instrumentor raised, which reaches nobody else."""
    logger.debug("an instrumentor left something out: %r", error)


class Guard:
    """Takes the place of the instrumentor's wrapper around a method, and calls it."""

    def __init__(self, owner: type, guarded: Any, *, is_genai: bool) -> None:
        self.guarded = guarded
        self.over = False
        """True if it was taken out. A client's `with_raw_response` still calls it then."""
        self.operation, self.is_recorded = _operation(owner)
        """The operation of its calls, by the conventions, and True if they are recorded."""
        self._wrapper = guarded._self_wrapper
        self.is_async = owner.__name__.startswith("Async")
        self.is_responses = "Responses" in owner.__name__
        self.is_genai = is_genai

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if self.over or (process_state.settings.llm_spans == "outer" and is_inside_llm_span()):
            return wrapped(*args, **kwargs)
        rollout = current_rollout() if self.is_recorded else None
        if rollout is None:  # messages may be an iterator, which can be read once
            kwargs = {
                name: list(value) if isinstance(value, Iterator) else value
                for name, value in kwargs.items()
            }
        elif self.is_responses:  # the span of these calls is our own
            return wrapped(*args, **kwargs)
        call = _WatchedCall(self, rollout, wrapped, instance, args, kwargs)
        return self._watch_async(call) if self.is_async else self._watch(call)

    def _watch(self, call: _WatchedCall) -> Any:
        returned = None
        with call:
            call.prepare()
            returned = self._wrapper(call.make, call.instance, call.args, call.shown)
        if not call.made:
            return call.wrapped(*call.args, **call.kwargs)
        return call.end(returned)

    async def _watch_async(self, call: _WatchedCall) -> Any:
        returned = None
        with call:
            call.prepare()
            returned = await self._wrapper(call.make_async, call.instance, call.args, call.shown)
        if not call.made:
            return await call.wrapped(*call.args, **call.kwargs)
        return call.end(returned)


class _WatchedCall:
    """One call, made from within the instrumentor's wrapper.

    rollout: the one that records the call. None: none does, and the instrumentor is shown the
        arguments and the reply themselves, but for streams.
    """

    def __init__(
        self,
        guard: Guard,
        rollout: ActiveRollout | None,
        wrapped: Any,
        instance: Any,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self.wrapped = wrapped
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self.shown: dict[str, Any] = {}
        self.made = False
        self._span: trace.Span | None = None
        self._guard = guard
        self._rollout = rollout
        self._outer = trace.get_current_span()
        self._result: Any = None
        self._error: BaseException | None = None
        self._raised: BaseException | None = None
        self._is_recorded = False
        self._reply: _BareReply | None = None
        """What is shown of the reply, once the call has ended. None: nothing."""
        self._stream: Any = None
        """The stand-in for a stream. None: the reply is none, or the call has ended."""
        self._returned: Any = None
        """What the instrumentor made of that stream. None: it is at work still."""

    def _name(self) -> str | None:
        """Name of its span. None: the instrumentor's own."""
        operation, model = self._guard.operation, self.shown.get("model")
        return f"{operation} {model}" if operation and isinstance(model, str) else operation

    def __enter__(self) -> None:
        """The instrumentor's wrapper begins."""
        self._token = INSTRUMENTED.set(self)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """It has ended. What it raised is dropped: what the client raised, or its own error."""
        with suppress(ValueError):  # a coroutine that the garbage collector closes
            INSTRUMENTED.reset(self._token)
        if error is None or error is self._raised:
            return True
        if isinstance(error, Exception):
            log_swallowed(error)
            return True
        return False

    def prepare(self) -> None:
        if Config.upload_base64_image is _NO_CALLBACK:  # anybody's OpenAIInstrumentor() sets it
            Config.upload_base64_image = None  # type: ignore[assignment]
        self.instance = SimpleNamespace(_client=_PublicClient(self.instance._client))
        is_bare = self._rollout is not None or not process_state.content.is_whole
        self.shown = {
            name: value
            for name, value in self.kwargs.items()
            if value is not None
            and (
                name == "model" or isinstance(value, int | float)
                if is_bare
                else not isinstance(value, _UNSET) and name not in _UNREAD
            )
        }
        self.shown["extra_headers"] = {}  # where it puts `traceparent`; no other is for spans

    def make(self, *_: Any, **kwargs: Any) -> Any:
        sent = self._sent(kwargs)
        try:
            self._result = self.wrapped(*self.args, **sent)
        except BaseException as error:
            self._raise_to_watcher(error)
        return self._view()

    async def make_async(self, *_: Any, **kwargs: Any) -> Any:
        sent = self._sent(kwargs)
        try:
            self._result = await self.wrapped(*self.args, **sent)
        except BaseException as error:
            self._raise_to_watcher(error)
        return self._view()

    def _sent(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.made = True
        span = trace.get_current_span()
        self._span = None if span is self._outer else span
        if self._span is not None and (name := self._name()) is not None:
            self._span.update_name(name)
        own, added = self.kwargs.get("extra_headers") or {}, kwargs.get("extra_headers") or {}
        if not isinstance(own, Mapping):
            return self.kwargs  # the client raises a better error
        names = {str(name).lower() for name in own}
        added = {name: value for name, value in added.items() if name.lower() not in names}
        return {**self.kwargs, "extra_headers": {**own, **added}} if added else self.kwargs

    def _raise_to_watcher(self, error: BaseException) -> None:
        self._error, self._raised = error, self._public(error)
        raise self._raised from None

    def _public(self, error: BaseException) -> BaseException:
        """An exception of the same name without the keys that signed the request."""
        try:
            content, text = process_state.content, str(error)
            if self._rollout is not None:
                text = content.text(self._rollout.scrub(text))
            else:
                text = content.text(content.recorded(self._secrets(error).scrub(text)))
        except Exception:
            text = "(no text)"
        return _public_error(type(error), text)

    def _secrets(self, error: BaseException) -> Secrets:
        secrets, client = Secrets(), self.instance._client
        secrets.learn(client.default_headers, str(client.base_url))
        secrets.learn({"api-key": getattr(client, "api_key", None)})
        extra = self.kwargs.get("extra_headers")
        secrets.learn(extra if isinstance(extra, Mapping) else {})
        if (request := getattr(error, "request", None)) is not None:
            secrets.learn(request.headers, str(request.url))
        return secrets

    def _view(self) -> Any:
        """What the instrumentor sees of the result."""
        result = self._result
        if self._rollout is None:
            is_open = isinstance(result, openai.Stream | openai.AsyncStream | BaseAPIResponse)
        else:
            is_open = bool(self.shown.get("stream")) or self._reply is None
        if not is_open:
            return result if self._reply is None else self._reply
        self._stream = _AsyncStandIn(self) if self._guard.is_async else _StandIn(self)
        return self._stream

    # --- the end

    def is_recorded_in(self, span: trace.Span) -> bool:
        """True if this is its span, and the call the first that begins in it."""
        if self._is_recorded or span is not self._span:
            return False
        self._is_recorded = True
        return True

    def ended(self, reply: ReplyFacts, ended_ns: int, *, failed: bool) -> None:
        """The call has ended, and its span shows it."""
        self._reply = _shown_reply(reply)
        if self._stream is None:
            return
        span: Any = self._span
        span.end = partial(span.end, ended_ns)  # it may be later by now
        if failed:
            span.set_status = lambda *_: None  # the instrumentor would set OK
        if self._returned is not None:
            self._finish()

    def end(self, returned: Any) -> Any:
        """Return to the caller what the client returned, or raise what it raised."""
        error, public, self._error, self._raised = self._error, self._raised, None, None
        result, self._result = self._result, None
        # A stream may live for long, and with it this, but not what the call was made with.
        self.wrapped = self.instance = self._rollout = None
        self.args, self.kwargs = (), {}
        if error is not None:
            _end_span(self._span, public)
            context = error.__context__
            try:
                raise error
            finally:
                error.__context__ = context
                del error
        if self._stream is not None:
            self._returned = returned
            if self._reply is not None or not self._is_recorded:
                self._finish()
        return result

    def next_item(self) -> Any:
        """The only item of the stand-in for a stream; None the second time."""
        item, self._reply = self._reply, None
        if item is not None and self._guard.is_genai:  # it reads nothing else
            return ChatCompletionChunk.model_construct(**item)
        return item

    def _finish(self) -> None:
        """Let the instrumentor read its stream to the end."""
        returned, self._returned, self._stream = self._returned, None, None
        try:
            if self._guard.is_async:
                _read_async(returned)
            else:
                for _ in returned:
                    pass
        except Exception as error:
            log_swallowed(error)
        _end_span(self._span, None)


class _BareReply(dict[str, Any]):
    """A reply without content, or a part of it: one instrumentor reads members, one attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _shown_reply(reply: ReplyFacts) -> _BareReply:
    """What is shown of a reply, or of all chunks of one."""
    counts, shown = reply.counts, _BareReply(id=reply.id, model=reply.model, choices=[], usage=None)
    if counts is not None:
        shown["usage"] = _BareReply(
            prompt_tokens=counts.input,
            completion_tokens=counts.output,
            total_tokens=counts.input + counts.output,
            prompt_tokens_details={"cached_tokens": counts.cached or 0},
        )
    return shown


def _read_async(stream: Any) -> None:
    """Read an async stream that never waits."""
    while True:
        try:
            stream.__anext__().send(None)
        except StopIteration:
            pass
        except StopAsyncIteration:
            return


class _StandIn(openai.Stream[Any]):
    """Shown to an instrumentor in place of a stream."""

    def __init__(self, call: _WatchedCall) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (item := self._call.next_item()) is None:
            raise StopIteration
        return item


class _AsyncStandIn(openai.AsyncStream[Any]):
    """The same for an async client."""

    def __init__(self, call: _WatchedCall) -> None:
        self._call = call

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if (item := self._call.next_item()) is None:
            raise StopAsyncIteration
        return item


def _end_span(span: trace.Span | None, error: BaseException | None) -> None:
    """End the span if the instrumentor has not: it does not for what is cancelled."""
    if span is None or not span.is_recording():
        return
    if error is not None:
        span.set_attribute(sc.ERROR_TYPE, type(error).__name__)
        span.set_status(trace.StatusCode.ERROR, str(error))
        span.record_exception(error)
    span.end()


def _operation(owner: type) -> tuple[str | None, bool]:
    """The operation of a method's class, and True if its calls are recorded with messages."""
    kind = owner.__name__.removeprefix("Async")
    if kind == "Completions":
        return ("chat" if ".chat" in owner.__module__ else sc.OPERATION_TEXT_COMPLETION), True
    if kind == "Responses":
        return "chat", True
    return (sc.OPERATION_EMBEDDINGS if kind == "Embeddings" else None), False


def _public_error(kind: type[BaseException], text: str) -> Exception:
    """An exception with this text, which spans show under the name of `kind`."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    public: Exception = type(kind.__name__, (Exception,), names)(text)
    public.__suppress_context__ = True
    return public


class _PublicClient(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The client without what its address may hold of credentials.

    The address is a text, since the instrumentor asks for it three times a call.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._self_base_url = public_address(str(client.base_url))

    @property
    def base_url(self) -> str:
        return self._self_base_url
