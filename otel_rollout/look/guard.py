"""A guard between an instrumentor of the OpenAI client and its user.

The one idea: an instrumentor only watches. Its wrappers get copies of the caller's arguments and
of the client's result, and whatever they raise or return is dropped; the caller gets the client's
own result or exception. The invariant: a call does the same with an instrumentor and without one,
its arguments are not changed, and no secret of the request is on a span.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import traceback
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import openai
import wrapt
from openai._legacy_response import LegacyAPIResponse
from openai._response import BaseAPIResponse
from opentelemetry import trace
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.instrumentation.openai.shared.config import Config

from otel_rollout import semconv as sc
from otel_rollout.look.shapes import UNSET, as_function_call, dumped, plain, shown_message
from otel_rollout.record import Secrets, is_drawn_around, noting_requests, process_state

logger = logging.getLogger("otel_rollout")

_NO_CALLBACK = inspect.signature(OpenAIInstrumentor).parameters["upload_base64_image"].default
_UNREAD = ("extra_headers", "extra_body", "extra_query", "timeout")
"""Arguments that the instrumentor does not read, or should not."""
_ROOM = 1024
"""The most choices, or tool calls of a choice, that are shown of a stream."""


def log_swallowed(error: BaseException) -> None:
    logger.debug("an instrumentor left something out: %r", error)


class Guard:
    """Takes the place of the instrumentor's wrapper around a method, and calls it with copies."""

    def __init__(self, owner: type, guarded: Any, *, reads_dicts: bool) -> None:
        self.guarded = guarded
        self.over = False
        """True if it was taken out. A client's `with_raw_response` still calls it then."""
        self._wrapper = guarded._self_wrapper
        self._asynchronous = owner.__name__.startswith("Async")
        self._reads_dicts = reads_dicts

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if self.over or (process_state.llm_spans == "outer" and is_drawn_around()):
            return wrapped(*args, **kwargs)
        # Messages may be an iterator, which can be read once.
        kwargs = {
            name: list(value) if isinstance(value, Iterator) else value
            for name, value in kwargs.items()
        }
        call = _Call(wrapped, instance, args, kwargs, self._reads_dicts)
        return self._watch_async(call) if self._asynchronous else self._watch(call)

    def _watch(self, call: _Call) -> Any:
        returned = None
        try:
            call.prepare()
            returned = self._wrapper(call.make, call.instance, call.args, call.shown)
        except BaseException as error:
            call.swallow(error)
        if not call.made:
            return call.wrapped(*call.args, **call.kwargs)
        return call.end(returned)

    async def _watch_async(self, call: _Call) -> Any:
        returned = None
        try:
            call.prepare()
            returned = await self._wrapper(call.make_async, call.instance, call.args, call.shown)
        except BaseException as error:
            call.swallow(error)
        if not call.made:
            return await call.wrapped(*call.args, **call.kwargs)
        return call.end(returned)


class _Call:
    """One call, made from within the instrumentor's wrapper, which sees copies."""

    def __init__(
        self, wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any], reads_dicts: bool
    ) -> None:
        self.wrapped = wrapped
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self.shown: dict[str, Any] = {}
        self.made = False
        self._reads_dicts = reads_dicts
        self._outer = trace.get_current_span()
        self._span: Any = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._told: BaseException | None = None
        self._stream: Any = None
        self._copy: Any = None
        self._requests: list[Any] = []
        """The HTTP requests of the call."""

    def prepare(self) -> None:
        if Config.upload_base64_image is _NO_CALLBACK:  # anybody's OpenAIInstrumentor() sets it
            Config.upload_base64_image = None  # type: ignore[assignment]
        client = self.instance._client
        url = str(client.base_url)
        if "@" in url or "?" in url:
            self.instance = SimpleNamespace(_client=_PublicClient(client))
        self.shown = {
            name: plain(value)
            for name, value in self.kwargs.items()
            if value is not None and not isinstance(value, UNSET) and name not in _UNREAD
        }
        if not process_state.content.is_whole:
            self.shown = {n: v for n, v in self.shown.items() if n == "model" or _is_number(v)}
        for name in ("prompt", "input"):
            tokens = self.shown.get(name)
            if isinstance(tokens, list) and tokens and isinstance(tokens[0], int):
                self.shown[name] = f"({len(tokens)} token ids)"
        if isinstance(self.shown.get("messages"), list):
            self.shown["messages"] = [
                shown_message(message)
                for message in self.shown["messages"]
                if isinstance(message, dict)
            ]
        self.shown["extra_headers"] = {}  # where it puts `traceparent`; no other is for spans

    def make(self, *_: Any, **kwargs: Any) -> Any:
        sent = self._sent(kwargs)
        try:
            with noting_requests(self._requests):
                self._result = self.wrapped(*self.args, **sent)
        except BaseException as error:
            self._raise_to_watcher(error)
        return self._view()

    async def make_async(self, *_: Any, **kwargs: Any) -> Any:
        sent = self._sent(kwargs)
        try:
            with noting_requests(self._requests):
                self._result = await self.wrapped(*self.args, **sent)
        except BaseException as error:
            self._raise_to_watcher(error)
        return self._view()

    def _sent(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.made = True
        span = trace.get_current_span()
        self._span = None if span is self._outer else span
        own, added = self.kwargs.get("extra_headers") or {}, kwargs.get("extra_headers") or {}
        if not isinstance(own, Mapping):
            return self.kwargs  # the client will say what is wrong with it
        names = {str(name).lower() for name in own}
        added = {name: value for name, value in added.items() if name.lower() not in names}
        return {**self.kwargs, "extra_headers": {**own, **added}} if added else self.kwargs

    def _raise_to_watcher(self, error: BaseException) -> None:
        self._error = error
        self._told = self._without_secrets(error)
        if self._told is error:
            raise
        raise self._told from None

    def _without_secrets(self, error: BaseException) -> BaseException:
        """The exception, or one of the same name without the keys that signed the request."""
        try:
            text = "".join(traceback.format_exception(error))
            if process_state.content.is_whole and self._secrets(error).scrub(text) == text:
                return error
            text = self._public_text(str(error), error)
        except Exception:
            text = "(no text)"
        return _public_error(type(error), text)

    def _public_text(self, text: str, error: BaseException | None = None) -> str:
        """The text of an error as a span may show it."""
        content = process_state.content
        return content.text(content.recorded(self._secrets(error).scrub(text)))

    def _secrets(self, error: BaseException | None = None) -> Secrets:
        secrets = Secrets()
        client = self.instance._client
        secrets.learn(client.default_headers, str(client.base_url))
        secrets.learn({"api-key": getattr(client, "api_key", None)})
        extra = self.kwargs.get("extra_headers")
        secrets.learn(extra if isinstance(extra, Mapping) else {})
        for request in (*self._requests, getattr(error, "request", None)):
            if request is not None:
                secrets.learn(request.headers, str(request.url))
        return secrets

    def _view(self) -> Any:
        """The copy of the result that the instrumentor sees."""
        try:
            seen = self._result
            if isinstance(seen, LegacyAPIResponse):
                seen = seen.parse()  # it keeps what it parsed for whoever asks next
            elif isinstance(seen, BaseAPIResponse):
                return {}  # its body is the caller's to read
            if isinstance(seen, openai.Stream | openai.AsyncStream):
                if not hasattr(seen, "_iterator"):
                    return {}
                self._stream = seen
                self._copy = _SyncCopy() if isinstance(seen, openai.Stream) else _AsyncCopy()
                return self._copy
            return self._reply(seen) if self._reads_dicts else seen
        except Exception as error:
            log_swallowed(error)
            return {}

    def _reply(self, reply: Any) -> Any:
        if not Config.use_legacy_attributes:
            return reply  # it makes log records, from objects
        data = dumped(reply)
        for choice in data.get("choices") or ():
            if isinstance(choice.get("message"), dict):
                choice["message"] = shown_message(choice["message"])
        if data.get("error"):
            data["error"] = self._public_text(json.dumps(data["error"]))
        return data

    def swallow(self, error: BaseException) -> None:
        """The instrumentor's wrapper raised: what the client raised, or something of its own."""
        if error is self._told:
            return
        if not isinstance(error, Exception):
            raise error
        log_swallowed(error)

    def end(self, returned: Any) -> Any:
        """Give the caller what the client gave."""
        error, self._error, self._told = self._error, None, None
        if error is not None:
            _end_span(self._span, self._without_secrets(error))
            context = error.__context__
            try:
                raise error
            finally:
                error.__context__ = context
                del error
        if self._copy is not None:
            try:
                _Watcher(self, self._stream, self._copy, returned)
            except Exception as failure:
                log_swallowed(failure)
        # The watcher lives as long as the stream, and must not be what keeps it.
        result, self._result, self._stream = self._result, None, None
        return result


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _end_span(span: Any, error: BaseException | None, *, recorded: bool = False) -> None:
    """End the span if the instrumentor has not: it does not for what is cancelled or given up."""
    if span is None or not span.is_recording():
        return
    if error is not None:
        span.set_attribute(sc.ERROR_TYPE, type(error).__name__)
        if not recorded:
            span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, str(error))
    span.end()


def _public_error(kind: type[BaseException], text: str) -> Exception:
    """An exception with this text, which spans show under the name of `kind`."""

    class PublicError(Exception):
        pass

    PublicError.__name__ = kind.__name__
    PublicError.__qualname__ = kind.__qualname__
    PublicError.__module__ = kind.__module__
    public = PublicError(text)
    public.__suppress_context__ = True
    return public


class _PublicClient(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The client without what its address may hold of credentials."""

    @property
    def base_url(self) -> str:
        return re.sub(r"//[^/@]*@", "//", str(self.__wrapped__.base_url)).partition("?")[0]


# --- streams: the caller reads the client's own, the instrumentor a copy


class _SyncCopy(openai.Stream[Any]):
    def __init__(self) -> None:
        self.item: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if isinstance(self.item, BaseException):
            raise self.item
        return self.item


class _AsyncCopy(openai.AsyncStream[Any]):
    def __init__(self) -> None:
        self.item: Any = None

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if isinstance(self.item, BaseException):
            raise self.item
        return self.item


class _Watcher:
    """Shows the instrumentor each item that the caller gets, and the end, however it comes."""

    def __init__(self, call: _Call, stream: Any, copy: Any, returned: Any) -> None:
        self._call = call
        self._copy = copy
        self._returned = returned
        self._span = call._span or getattr(returned, "_span", None)
        self._over = False
        self._last: dict[str, Any] = {}
        self._choices = 0
        self._tool_calls: dict[int, int] = {}
        sync = isinstance(copy, openai.Stream)
        stream._iterator = (_SyncTee if sync else _AsyncTee)(stream._iterator, self)
        owner, close = weakref.proxy(stream), type(stream).close

        def closed() -> Any:
            self.end()
            return close(owner)

        stream.close = closed
        weakref.finalize(stream, self.end)

    def show(self, item: Any) -> None:
        if not self._over:
            try:
                if self._call._reads_dicts:
                    self._advance(self._chunk(item))
                elif not _is_absurd(item):
                    self._advance(item)
            except Exception as error:
                log_swallowed(error)

    def end(self, error: BaseException | None = None) -> None:
        if self._over:
            return
        self._over = True
        try:
            public = None if error is None else self._call._without_secrets(error)
            if public is not None and self._call._reads_dicts and self._span is not None:
                self._span.record_exception(public)  # it would say that all went well
            sync = isinstance(self._copy, openai.Stream)
            self._advance(public or (StopIteration() if sync else StopAsyncIteration()))
            _end_span(self._span, public, recorded=self._call._reads_dicts)
        except Exception as failure:
            log_swallowed(failure)
        # An exception holds the frames that it passed, and they the stream.
        self._returned = self._copy.item = None

    def _advance(self, item: Any) -> None:
        self._copy.item = item
        try:
            if isinstance(self._copy, openai.Stream):
                next(self._returned)
            else:
                self._returned.__anext__().send(None)  # a copy is never waited for
        except (StopIteration, StopAsyncIteration):
            pass
        except BaseException as error:
            if error is not item:
                raise

    def _chunk(self, item: Any) -> dict[str, Any]:
        """The chunk as it can be read: its lists grow in order, and one entry at a time."""
        chunk = dumped(item)
        self._last |= {name: chunk[name] for name in ("id", "model") if chunk.get(name)}
        choices: list[dict[str, Any]] = []
        for choice in chunk.get("choices") or ():
            index = choice.get("index") or 0
            choices += [{"index": missing} for missing in range(self._choices, min(index, _ROOM))]
            self._choices = max(self._choices, min(index + 1, _ROOM))
            if index < _ROOM:
                delta = self._delta(index, choice.get("delta") or {})
                choices.append({**choice, "index": index, "delta": delta})
        return {**chunk, **self._last, "choices": choices}

    def _delta(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        old = delta.get("function_call")
        for call in delta.get("tool_calls") or ([{"function": old}] if old else ()):
            known = self._tool_calls.get(choice, 0)
            index = call.get("index")
            if index is None:
                index = known if call.get("id") else max(known - 1, 0)
            calls += [{"index": missing} for missing in range(known, min(index, _ROOM))]
            self._tool_calls[choice] = max(known, min(index + 1, _ROOM))
            if index < _ROOM:
                calls.append({**as_function_call(call), "index": index})
        return {
            **delta,
            "content": delta.get("content") or delta.get("refusal"),
            "reasoning_content": delta.get("reasoning_content") or delta.get("reasoning"),
            "tool_calls": calls,
        }


def _is_absurd(item: Any) -> bool:
    """True if an index in it is so large that the instrumentor would fill the memory."""
    choices = getattr(item, "choices", None)
    entries = list(choices) if isinstance(choices, list) else []
    for choice in choices or ():
        calls = getattr(getattr(choice, "delta", None), "tool_calls", None)
        entries += calls if isinstance(calls, list) else []
    return any(
        isinstance(index, int) and index >= _ROOM
        for index in (getattr(entry, "index", None) for entry in entries)
    )


class _SyncTee:
    def __init__(self, items: Iterator[Any], watcher: _Watcher) -> None:
        self._items = items
        self._watcher = watcher

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except BaseException as error:
            self._watcher.end(None if isinstance(error, StopIteration) else error)
            raise
        self._watcher.show(item)
        return item


class _AsyncTee:
    def __init__(self, items: Any, watcher: _Watcher) -> None:
        self._items = items
        self._watcher = watcher

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self._items.__anext__()
        except BaseException as error:
            self._watcher.end(None if isinstance(error, StopAsyncIteration) else error)
            raise
        self._watcher.show(item)
        return item
