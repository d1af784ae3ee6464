"""Hooks for aiohttp: on the method that a session's requests go through, redirects included."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.tee import Reading
from otel_rollout.record.transports.post import ModelPost, as_bytes, sending_async
from otel_rollout.wire import asks_a_model


class _AiohttpPost(ModelPost):
    """A POST as the arguments of a session's method."""

    library = "aiohttp"

    def __init__(self, session: Any, url: Any, args: Any, kwargs: Any) -> None:
        self.session, self.args, self.kwargs = session, args, kwargs
        self.path = url.raw_path
        params = kwargs.get("params")
        self.url = str(url % params if params else url)
        headers = session.headers.copy()
        headers.update(kwargs.get("headers") or ())
        self.headers = headers

    @property
    def body(self) -> bytes | None:
        data, parsed = self.kwargs.get("data"), self.kwargs.get("json")
        if parsed is not None:
            dump = getattr(self.session, "_json_serialize_bytes", None)
            data = (dump or self.session.json_serialize)(parsed)
        return as_bytes(data)

    def replace(self, body: bytes) -> None:
        data = self.kwargs.get("data")
        if self.kwargs.get("json") is not None:
            self.kwargs["json"] = json.loads(body)
        else:
            self.kwargs["data"] = body.decode() if isinstance(data, str) else body
        if "Content-Length" in self.headers and self.kwargs.get("headers"):
            headers = self.session.headers.copy()
            headers.clear()
            headers.update(self.kwargs["headers"])
            headers.popall("Content-Length", None)
            self.kwargs["headers"] = headers

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        status, headers, content = response.status, response.headers, response.content
        if response._body is not None or content.at_eof():
            recorder.response(status, headers, response._body or b"")
        elif recorder.response(status, headers):
            decodes = self.kwargs.get("auto_decompress")
            if self.session.auto_decompress if decodes is None else decodes:
                recorder.comes_decoded()
            response.content = _reader_class()(content, Reading(recorder))


def _post(session: Any, args: Any, kwargs: Any) -> functools.partial[_AiohttpPost] | None:
    method = args[0] if args else kwargs.get("method")
    if method not in ("POST", "post"):
        return None
    url = args[1] if len(args) > 1 else kwargs.get("str_or_url")
    path = str(url).partition("?")[0].partition("#")[0]
    if not asks_a_model(f"/{path}"):
        return None
    try:
        url = session._build_url(url)
    except (ValueError, TypeError, AssertionError):  # aiohttp raises it too
        return None
    return (
        functools.partial(_AiohttpPost, session, url, args, kwargs)
        if asks_a_model(url.raw_path)
        else None
    )


class _NoConnection:
    """The connection of a reader that is fed from another reader: there is nothing to pause."""

    connected = True
    _reading_paused = False

    def pause_reading(self) -> None: ...

    def resume_reading(self, resume_parser: bool = True) -> None: ...


@functools.cache
def _reader_class() -> type[Any]:
    """The class of readers that are fed from another one; aiohttp is imported."""
    streams: Any = importlib.import_module("aiohttp.streams")

    class StreamReader(_Fed, streams.StreamReader):  # type: ignore[misc]
        pass

    return StreamReader


class _Fed:
    """A `StreamReader` that takes from the response's own, whenever it would wait for data.

    All ways of reading are those of aiohttp.
    """

    def __init__(self: Any, source: Any, reading: Reading) -> None:
        limit = source.get_read_buffer_limits()[0]
        super().__init__(_NoConnection(), limit, loop=source._loop)  # type: ignore[call-arg]
        self.begin_http_chunk_receiving()
        self._source = source
        self._reading = reading
        self._pieces: Iterator[bytes] = iter(())
        """What came and was not taken yet."""
        self._ends_chunk = False
        """True if an HTTP chunk ends with these pieces."""
        self._is_over = False
        """True if nothing comes after them."""
        self._given_up: BaseException | None = None
        """Why the last reading was given up; the reader may try again."""
        reading.ends_with(self)

    def _advance(self: Any) -> bool:
        """Take what is to be had without waiting: a piece, or the end. False: nothing is."""
        for piece in self._pieces:
            self.feed_data(piece)
            if not self._reading.cuts:
                self._end_chunk()
            return True
        if self._ends_chunk:
            self._end_chunk()
        elif self._is_over:
            self.feed_eof()
            self._reading.end()
        elif self._source.at_eof() and self._source.exception() is None:
            self._is_over = True
            self._pieces = self._reading.rest()
            return bool(self._advance())
        else:
            return False
        return True

    def _end_chunk(self: Any) -> None:
        if self._ends_chunk:
            self._ends_chunk = False
            self.end_http_chunk_receiving()

    async def _wait(self: Any, func_name: str) -> None:
        self._given_up = None
        while not self._advance():
            try:
                data, self._ends_chunk = await self._source.readchunk()
            except asyncio.CancelledError as error:
                self._given_up = error
                raise
            except BaseException as error:
                self._reading.failed(error)
                raise
            self._pieces = self._reading.pieces(data) if data else iter(())

    def at_eof(self: Any) -> bool:
        return bool(
            super().at_eof()  # type: ignore[misc]
            or (not self._buffer and self._source.at_eof() and self._advance() and self.at_eof())
        )

    def is_eof(self: Any) -> bool:
        return bool(self._source.is_eof())

    def on_eof(self: Any, callback: Callable[[], None]) -> None:
        self._source.on_eof(callback)

    async def wait_eof(self: Any) -> None:
        await self._source.wait_eof()

    def read_nowait(self: Any, n: int = -1) -> bytes:
        while not self._eof and (self._advance() or self._take_nowait()):
            pass
        data: bytes = super().read_nowait(n)  # type: ignore[misc]
        return data

    def _take_nowait(self: Any) -> bool:
        data = self._source.read_nowait()
        self._pieces = self._reading.pieces(data) if data else iter(())
        return bool(data)

    def exception(self: Any) -> BaseException | None:
        error: BaseException | None = super().exception() or self._source.exception()  # type: ignore[misc]
        return error

    def set_exception(self: Any, exc: BaseException, *cause: Any) -> None:
        """The response is closed: it is read no further."""
        super().set_exception(exc, *cause)  # type: ignore[misc]
        self._source.set_exception(exc, *cause)
        self._reading.dropped(self._given_up)

    def set_read_chunk_size(self: Any, n: int) -> None:
        super().set_read_chunk_size(n)  # type: ignore[misc]
        self._source.set_read_chunk_size(n)


HOOKS = (Hook("ClientSession", "_request", sending_async(_post)),)
