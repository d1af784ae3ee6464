"""A guard between an instrumentor of the OpenAI client and its user.

The one idea: an instrumentor only watches. Its wrappers get copies of the caller's arguments and
of the client's result, and whatever they raise or return is dropped; the caller gets the client's
own result or exception. The invariant: a call does the same with an instrumentor and without one,
its arguments are not changed, and no secret of the request is on a span.
"""

from __future__ import annotations

import inspect
import json
import re
import traceback
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import openai
import wrapt
from openai._legacy_response import LegacyAPIResponse
from openai._response import BaseAPIResponse
from opentelemetry import trace
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.instrumentation.openai.shared.config import Config
from opentelemetry.sdk.trace import TracerProvider

from otel_rollout import semconv as sc
from otel_rollout.look.elided import cut_at_source
from otel_rollout.look.naming import drawing
from otel_rollout.look.news import News, news_of
from otel_rollout.look.shapes import UNSET, dumped, plain, shown_message
from otel_rollout.look.span_queue import SpanQueue
from otel_rollout.look.streams import AsyncCopy, SyncCopy, Watcher, end_span, log_swallowed
from otel_rollout.record import (
    Secrets,
    TrajectorySpanProcessor,
    current_rollout,
    is_drawn_around,
    noting_requests,
    process_state,
    without_token,
)

_NO_CALLBACK = inspect.signature(OpenAIInstrumentor).parameters["upload_base64_image"].default
_UNREAD = ("extra_headers", "extra_body", "extra_query", "timeout")
"""Arguments that the instrumentor does not read, or should not."""


class Guard:
    """Takes the place of the instrumentor's wrapper around a method, and calls it with copies.

    provider: the provider on which the instrumentor draws. None: it is not known.
    """

    def __init__(
        self, owner: type, guarded: Any, *, reads_dicts: bool, provider: TracerProvider | None
    ) -> None:
        self.guarded = guarded
        self.over = False
        """True if it was taken out. A client's `with_raw_response` still calls it then."""
        self.reads_dicts = reads_dicts
        self.operation, self.key = _operation(owner)
        """The operation of its calls, by the conventions, and the argument with the messages."""
        self._wrapper = guarded._self_wrapper
        self._asynchronous = owner.__name__.startswith("Async")
        self._provider = provider
        self._processors: tuple[Any, ...] | None = None
        self._is_ours_alone = False

    @property
    def is_ours_alone(self) -> bool:
        """True if no span processor but ours gets the spans that are drawn."""
        active = getattr(self._provider, "_active_span_processor", None)
        processors = getattr(active, "_span_processors", None)
        if processors is not self._processors:
            self._processors = processors
            self._is_ours_alone = processors is not None and all(
                isinstance(processor, TrajectorySpanProcessor | SpanQueue)
                for processor in processors
            )
        return self._is_ours_alone

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if self.over or (process_state.llm_spans == "outer" and is_drawn_around()):
            return wrapped(*args, **kwargs)
        # Messages may be an iterator, which can be read once.
        kwargs = {
            name: list(value) if isinstance(value, Iterator) else value
            for name, value in kwargs.items()
        }
        call = _Call(self, wrapped, instance, args, kwargs)
        return self._watch_async(call) if self._asynchronous else self._watch(call)

    def _watch(self, call: _Call) -> Any:
        returned = None
        try:
            call.prepare()
            with drawing(call):
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
            with drawing(call):
                wrapper = self._wrapper
                returned = await wrapper(call.make_async, call.instance, call.args, call.shown)
        except BaseException as error:
            call.swallow(error)
        if not call.made:
            return await call.wrapped(*call.args, **call.kwargs)
        return call.end(returned)


class _Call:
    """One call, made from within the instrumentor's wrapper, which sees copies."""

    def __init__(
        self, guard: Guard, wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.wrapped = wrapped
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self.shown: dict[str, Any] = {}
        self.made = False
        self.reads_dicts = guard.reads_dicts
        self.news: News | None = None
        """What is new in it. None: it is in no rollout, or of an API without conversations."""
        self.span: Any = None
        """Its span, if that is current while the client makes the call."""
        self._guard = guard
        self._is_cut = False
        """True if the instrumentor is shown what is new."""
        self._outer = trace.get_current_span()
        self._result: Any = None
        self._error: BaseException | None = None
        self._told: BaseException | None = None
        self._stream: Any = None
        self._copy: Any = None
        self._requests: list[Any] = []
        """The HTTP requests of the call."""

    @cached_property
    def span_name(self) -> str | None:
        """Name of its span. None: the instrumentor's own."""
        operation = self._guard.operation
        if operation is None:
            return None
        model = self.shown.get("model") or getattr(self._result, "model", None)
        return f"{operation} {model}" if isinstance(model, str) and model else operation

    @property
    def span_attributes(self) -> dict[str, Any]:
        """Further attributes that its span begins with."""
        found = {} if self.news is None else self.news.attributes(is_cut=self._is_cut)
        if self._guard.key == "input":  # the former name said so
            found[sc.OPENAI_API_TYPE] = "responses"
            found[sc.GEN_AI_OPERATION_NAME] = self._guard.operation
        return found

    def drawn(self, span: trace.Span) -> None:
        """Its span has begun."""
        if self._is_cut:
            cut_at_source.note(span.get_span_context().span_id)

    def prepare(self) -> None:
        if Config.upload_base64_image is _NO_CALLBACK:  # anybody's OpenAIInstrumentor() sets it
            Config.upload_base64_image = None  # type: ignore[assignment]
        client = self.instance._client
        url = str(client.base_url)
        if "@" in url or "?" in url or url != without_token(url):
            self.instance = SimpleNamespace(_client=_PublicClient(client))
        given = {
            name: value
            for name, value in self.kwargs.items()
            if value is not None and not isinstance(value, UNSET) and name not in _UNREAD
        }
        if not process_state.content.is_whole:
            self._find_news(given)
            given = {n: v for n, v in given.items() if n == "model" or _is_number(v)}
        else:
            given = self._find_news(given)
        self.shown = {name: plain(value) for name, value in given.items() if value is not None}
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

    def _find_news(self, given: dict[str, Any]) -> dict[str, Any]:
        """Find what is new in the call; its arguments as they are to be shown."""
        key = self._guard.key
        rollout = current_rollout()
        if rollout is None or key is None or key not in given:
            return given
        try:
            self.news = news_of(rollout, key, given)
            content = process_state.content
            if content.is_whole and content.shows == "new" and self._guard.is_ours_alone:
                given = self.news.arguments()
                self._is_cut = True
        except Exception as error:
            log_swallowed(error)
        return given

    def replied(self, reply: Any) -> None:
        """Take note of the reply, which the span shows."""
        if self.news is not None:
            try:
                self.news.replied(reply)
            except Exception as error:
                log_swallowed(error)

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
        self.span = None if span is self._outer else span
        own, added = self.kwargs.get("extra_headers") or {}, kwargs.get("extra_headers") or {}
        if not isinstance(own, Mapping):
            return self.kwargs  # the client will say what is wrong with it
        names = {str(name).lower() for name in own}
        added = {name: value for name, value in added.items() if name.lower() not in names}
        return {**self.kwargs, "extra_headers": {**own, **added}} if added else self.kwargs

    def _raise_to_watcher(self, error: BaseException) -> None:
        self._error = error
        self._told = self.without_secrets(error)
        if self._told is error:
            raise
        raise self._told from None

    def without_secrets(self, error: BaseException) -> BaseException:
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
                self._copy = SyncCopy() if isinstance(seen, openai.Stream) else AsyncCopy()
                return self._copy
            self.replied(seen)
            return self._reply(seen) if self.reads_dicts else seen
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
            end_span(self.span, self.without_secrets(error))
            context = error.__context__
            try:
                raise error
            finally:
                error.__context__ = context
                del error
        if self._copy is not None:
            try:
                Watcher(self, self._stream, self._copy, returned)
            except Exception as failure:
                log_swallowed(failure)
        # The watcher lives as long as the stream, and must not be what keeps it.
        result, self._result, self._stream = self._result, None, None
        return result


def _operation(owner: type) -> tuple[str | None, str | None]:
    """The operation of a method's class, and the argument that has its messages. None: neither."""
    kind = owner.__name__.removeprefix("Async")
    if kind == "Completions":
        is_chat = ".chat" in owner.__module__
        return ("chat", "messages") if is_chat else (sc.OPERATION_TEXT_COMPLETION, "prompt")
    if kind == "Responses":
        return "chat", "input"
    return (sc.OPERATION_EMBEDDINGS if kind == "Embeddings" else None), None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


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
        address = re.sub(r"//[^/@]*@", "//", str(self.__wrapped__.base_url)).partition("?")[0]
        return without_token(address)
