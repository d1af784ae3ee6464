"""aiohttp: what a session is asked to send, redirects included, and how a reply is read."""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import Any

from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.model_post import ModelPost, as_bytes, model_path
from otel_rollout.wire import asks_a_model


class AiohttpPost(ModelPost):
    """A POST as the arguments of a session's method."""

    library = "aiohttp"
    hides_count = False

    def __init__(self, instance: Any, args: Any, kwargs: Any) -> None:
        self.session, self.args, self.kwargs = instance, args, kwargs
        url, params = instance._build_url(_address(args, kwargs)), kwargs.get("params")
        self.url = str(url % params if params else url)
        headers = instance.headers.copy()
        headers.update(kwargs.get("headers") or ())
        self.headers = headers

    @classmethod
    def path(cls, instance: Any, args: Any, kwargs: Any) -> str | None:
        """The path; an address may be relative to the session's."""
        if (args[0] if args else kwargs.get("method")) not in ("POST", "post"):
            return None
        address = _address(args, kwargs)
        if model_path(f"/{address}") is None:
            return None
        try:
            path: str = instance._build_url(address).raw_path
        except (ValueError, TypeError, AssertionError):  # aiohttp raises it too
            return None
        return path if asks_a_model(path) else None

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
                recorder.encoding = None
            _record(content, recorder)
            weakref.finalize(response, recorder.dropped).atexit = False

    async def refusal(self, response: Any) -> Any:
        body: bytes = await response.read()
        content, response._body = response.content, None
        content._buffer.append(body)
        content._size, content._cursor = content._size + len(body), content._cursor - len(body)
        return body.decode("utf-8", "replace")


def _address(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("str_or_url")


def _record(content: Any, recorder: ExchangeRecorder) -> None:
    """Record what is taken from the reader of a response.

    It stays the object that it is, and becomes one of a subclass of its class: one of its own,
    since a reader has slots and no place for anything else.
    """
    given_up: BaseException | None = None

    class StreamReader(type(content)):  # type: ignore[misc]
        """The methods that all ways of reading go through."""

        __slots__ = ()

        def _read_nowait_chunk(self, n: int) -> Any:
            data = super()._read_nowait_chunk(n)
            recorder.chunk(data)
            if self.at_eof():
                recorder.end()
            return data

        async def _wait(self, func_name: str) -> None:
            nonlocal given_up
            given_up = None  # who gave a reading up may try again
            try:
                await super()._wait(func_name)
            except asyncio.CancelledError as error:
                given_up = error
                raise

        def feed_eof(self) -> None:
            super().feed_eof()
            if self.at_eof():
                recorder.end()

        def set_exception(self, exc: BaseException, *cause: Any) -> None:
            super().set_exception(exc, *cause)
            if type(exc).__name__ == "ClientConnectionError":  # the response is closed
                recorder.dropped(given_up)
            else:
                recorder.end(error=exc)

    content.__class__ = StreamReader
