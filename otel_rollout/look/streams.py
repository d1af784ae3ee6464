"""Streams: the caller reads the client's own, and an instrumentor is shown copies of its chunks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import openai
from opentelemetry import trace

from otel_rollout import semconv as sc
from otel_rollout.look.gathered import ROOM, GatheredStream

logger = logging.getLogger("otel_rollout")


def log_swallowed(error: BaseException) -> None:
    """Log what an instrumentor raised, which reaches nobody else."""
    logger.debug("an instrumentor left something out: %r", error)


def end_span(span: Any, error: BaseException | None, *, recorded: bool = False) -> None:
    """End the span if the instrumentor has not: it does not for what is cancelled or given up."""
    if span is None or not span.is_recording():
        return
    if error is not None:
        _fail(span, error)
        if not recorded:
            span.record_exception(error)
    span.end()


def _fail(span: Any, error: BaseException) -> None:
    span.set_attribute(sc.ERROR_TYPE, type(error).__name__)
    span.set_status(trace.StatusCode.ERROR, str(error))


class SyncCopy(openai.Stream[Any]):
    """A stream of whatever its `item` is."""

    def __init__(self) -> None:
        self.item: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if isinstance(self.item, BaseException):
            raise self.item
        return self.item


class AsyncCopy(openai.AsyncStream[Any]):
    """An async stream of whatever its `item` is."""

    def __init__(self) -> None:
        self.item: Any = None

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if isinstance(self.item, BaseException):
            raise self.item
        return self.item


class Streamed(Protocol):
    """The call that a stream is the reply of."""

    reads_dicts: bool
    span: Any

    def without_secrets(self, error: BaseException) -> BaseException:
        """The exception as a span may show it."""

    def replied(self, reply: Any) -> None:
        """Take note of the reply."""


class Watcher:
    """Shows the instrumentor what the caller gets, and the end, however it comes.

    Chat and text completions are gathered where the instrumentor reads dicts: it is shown the first
    chunk as it comes, and one with all the others at the end.
    """

    def __init__(self, call: Streamed, stream: Any, copy: Any, returned: Any) -> None:
        self._call = call
        self._copy = copy
        self._returned = returned
        self._span = call.span or getattr(returned, "_span", None)
        self._over = False
        self._began = False
        self._gathered = GatheredStream()
        self._response: Any = None
        """The last state of a response of the Responses API."""
        sync = isinstance(copy, openai.Stream)
        stream._iterator = (_SyncTee if sync else _AsyncTee)(stream._iterator, self)
        owner, close = weakref.proxy(stream), type(stream).close

        def closed() -> Any:
            self.end()
            return close(owner)

        stream.close = closed
        weakref.finalize(stream, self.end)

    def show(self, item: Any) -> None:
        """The caller gets this chunk."""
        if self._over:
            return
        try:
            if self._call.reads_dicts:
                self._gathered.add(item)
                if not self._began:
                    self._began = True
                    self._advance(self._gathered.take())
            else:
                self._keep(item)
                if not _is_absurd(item):
                    self._advance(item)
        except Exception as error:
            log_swallowed(error)

    def _keep(self, item: Any) -> None:
        """Remember of a chunk what the reply is made of."""
        response = getattr(item, "response", None)
        if response is not None:
            self._response = response
        elif getattr(item, "choices", None):
            try:
                self._gathered.add(item)
            except Exception as error:
                log_swallowed(error)

    def end(self, error: BaseException | None = None) -> None:
        """The stream ended, broke with `error`, or is read no further."""
        if self._over:
            return
        self._over = True
        try:
            if self._call.reads_dicts and self._gathered.has_news:
                self._advance(self._gathered.take())
            self._call.replied(self._response or self._gathered.whole())
        except Exception as failure:
            log_swallowed(failure)
        try:
            self._end(error)
        except Exception as failure:
            log_swallowed(failure)
        # An exception holds the frames that it passed, and they the stream.
        self._returned = self._copy.item = self._response = None

    def _end(self, error: BaseException | None) -> None:
        public = None if error is None else self._call.without_secrets(error)
        is_recorded = self._call.reads_dicts
        if public is not None and is_recorded and self._span is not None:
            self._span.record_exception(public)
            _fail(self._span, public)
            self._span.set_status = _ignore  # it would say that all went well
        sync = isinstance(self._copy, openai.Stream)
        self._advance(public or (StopIteration() if sync else StopAsyncIteration()))
        end_span(self._span, public, recorded=is_recorded)

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


def _ignore(*_: Any, **__: Any) -> None: ...


def _is_absurd(item: Any) -> bool:
    """True if an index in it is so large that the instrumentor would fill the memory."""
    choices = getattr(item, "choices", None)
    entries = list(choices) if isinstance(choices, list) else []
    for choice in choices or ():
        calls = getattr(getattr(choice, "delta", None), "tool_calls", None)
        entries += calls if isinstance(calls, list) else []
    return any(
        isinstance(index, int) and index >= ROOM
        for index in (getattr(entry, "index", None) for entry in entries)
    )


class _SyncTee:
    def __init__(self, items: Iterator[Any], watcher: Watcher) -> None:
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
    def __init__(self, items: Any, watcher: Watcher) -> None:
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
