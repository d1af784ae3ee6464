"""requests, and the libraries of which calls are counted: their bodies are not looked at.

These are urllib3 and Python's `http.client`, on which urllib and others are; botocore, on which
boto3 is; and lm15, the client on sockets of its own that DSPy brings.
"""

from __future__ import annotations

import functools
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.encoding import decoded
from otel_rollout.record.transports.model_post import ModelPost, model_path


class RequestsPost(ModelPost):
    """A POST as a prepared request of requests."""

    library = "requests"
    hides_count = False

    def replace(self, body: bytes) -> None:
        request = self.request.copy()  # the user may send the old one again
        request.body = body
        request.headers["Content-Length"] = str(len(body))
        self.send_instead(request)

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        status, headers, content = response.status_code, response.headers, response._content
        if isinstance(content, bytes):
            recorder.response(status, headers, content)
        elif recorder.response(status, headers):
            _record(response.raw, recorder)

    def refusal(self, response: Any) -> Any:
        if response._content is False:
            raw, body = response.raw, response.raw.read(decode_content=False)
            about = {name: getattr(raw, name) for name in ("headers", "status", "reason")}
            response.raw = type(raw)(io.BytesIO(body), preload_content=False, **about)
            return decoded(body, raw.headers.get("content-encoding")).decode("utf-8", "replace")
        return response.text


class CountedPost(ModelPost):
    """A POST as a request of botocore or lm15, which is counted."""

    def __init__(self, instance: Any, args: Any, kwargs: Any) -> None:
        super().__init__(instance, args, kwargs)
        self.library = "lm15" if "lm15" in type(self.request).__module__ else "botocore"
        self.headers = dict(self.headers)

    @property
    def body(self) -> bytes | None:
        return None


class Urllib3Post(CountedPost):
    """A POST whose HTTP method and address, or path, are the first arguments: it is counted."""

    library = "urllib3"

    def __init__(self, instance: Any, args: Any, kwargs: Any) -> None:
        self.url = _address(args, kwargs)
        self.headers = {}

    @classmethod
    def path(cls, _: Any, args: Any, kwargs: Any) -> str | None:
        """The path, if the method is asked for a POST to a model."""
        method = args[0] if args else kwargs.get("method")
        return model_path(_address(args, kwargs)) if method == "POST" else None


class HttpClientPost(Urllib3Post):
    library = "http.client"


def _address(args: Any, kwargs: Any) -> str:
    return str(args[1] if len(args) > 1 else kwargs.get("url"))


def _record(response: Any, recorder: ExchangeRecorder) -> None:
    """Record what is read of a response of urllib3, for `response` of this recorder.

    It stays the object that it is, and becomes one of a subclass of its class: whoever reads it
    (requests, the user) does that by the methods there.
    """
    kind: Any = type(response)
    response.__class__ = _recorded_class(kind)
    response._otel_rollout_recorder = recorder
    weakref.finalize(response, recorder.dropped).atexit = False


@functools.cache
def _recorded_class(kind: Any) -> type[Any]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    recorded = _RecordedWithRead1 if hasattr(kind, "read1") else _Recorded
    return type(kind.__name__, (recorded, kind), names)


class _Recorded:
    """The methods of a urllib3 response that take bytes of its body, and by which it ends."""

    _otel_rollout_recorder: ExchangeRecorder
    _otel_rollout_began = False

    def read(
        self: Any, amt: Any = None, decode_content: Any = None, cache_content: bool = False
    ) -> Any:
        read = super().read  # type: ignore[misc]
        data = self._otel_rollout_take(
            lambda: read(amt, decode_content, cache_content), decode_content, amt
        )
        if amt is None or amt < 0:
            self._otel_rollout_recorder.end()
        return data

    def read_chunked(self: Any, amt: Any = None, decode_content: Any = None) -> Iterator[bytes]:
        chunks = super().read_chunked(amt, decode_content)  # type: ignore[misc]
        while data := self._otel_rollout_take(lambda: next(chunks, b""), decode_content):
            yield data

    def stream(self: Any, amt: Any = 2**16, decode_content: Any = None) -> Iterator[bytes]:
        yield from super().stream(amt, decode_content)  # type: ignore[misc]
        self._otel_rollout_recorder.end()

    def close(self: Any) -> None:
        super().close()  # type: ignore[misc]
        self._otel_rollout_recorder.dropped()

    def _otel_rollout_take(
        self: Any, read: Callable[[], bytes], decode: bool | None, amt: int | None = None
    ) -> bytes:
        """Read, and record what was read. amt: how much is asked for; nothing may be, with 0."""
        recorder: ExchangeRecorder = self._otel_rollout_recorder
        encoding = self.headers.get("content-encoding", "").lower()
        if not self._otel_rollout_began:  # only now is it known whether urllib3 decodes the body
            self._otel_rollout_began = True
            known = all(name.strip() in self.CONTENT_DECODERS for name in encoding.split(","))
            if known and (self.decode_content if decode is None else decode):
                recorder.encoding = None
        try:
            data = read()
        except BaseException as error:
            recorder.end(error=error)
            raise
        recorder.chunk(data)
        # A decoder may return nothing for what came, and hold more when the response is closed.
        if amt != 0 and (not data and self.closed if encoding else not data or self.closed):
            recorder.end()
        return data


class _RecordedWithRead1(_Recorded):
    """The same, of a version of urllib3 that has `read1`."""

    def read1(self: Any, amt: Any = None, decode_content: Any = None) -> Any:
        read1 = super().read1  # type: ignore[misc]
        return self._otel_rollout_take(lambda: read1(amt, decode_content), decode_content, amt)
