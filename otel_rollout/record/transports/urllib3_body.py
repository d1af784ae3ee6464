"""The body of a urllib3 response, shown to the recorder however it is read.

The response stays the object that it is, and becomes one of a subclass of its class: whoever
reads it (requests, botocore, the user) goes through the methods here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.tee import Reading, shown


def show(response: Any, recorder: ExchangeRecorder) -> None:
    """Show the recorder, whose `response` has just been called, what is read of the response."""
    kind: Any = type(response)
    response.__class__ = _recorded_class(kind)
    response._otel_rollout_body = _Body(recorder)
    weakref.finalize(response, recorder.dropped).atexit = False


@functools.cache
def _recorded_class(kind: type[object]) -> type[object]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    recorded_kind = _RecordedWithRead1 if hasattr(kind, "read1") else _Recorded
    return type(kind.__name__, (recorded_kind, kind), names)


class _Recorded:
    """The methods of a urllib3 response that return bytes of its body; all others call these."""

    _otel_rollout_body: _Body

    def read(
        self: Any, amt: Any = None, decode_content: Any = None, cache_content: bool = False
    ) -> Any:
        body, read = self._otel_rollout_body, super().read  # type: ignore[misc]
        if body.is_inside or amt == 0:
            return read(amt, decode_content, cache_content)
        data = body.read(
            self, lambda: read(amt, decode_content, cache_content), amt, decode_content
        )
        if cache_content and self._body:
            self._body = data
        return data

    def stream(self: Any, amt: Any = 2**16, decode_content: Any = None) -> Any:
        body, chunks = self._otel_rollout_body, super().stream(amt, decode_content)  # type: ignore[misc]
        return chunks if body.is_inside else body.stream(self, chunks, amt, decode_content)

    def read_chunked(self: Any, amt: Any = None, decode_content: Any = None) -> Any:
        body, chunks = self._otel_rollout_body, super().read_chunked(amt, decode_content)  # type: ignore[misc]
        return chunks if body.is_inside else body.stream(self, chunks, amt, decode_content)

    def close(self: Any) -> None:
        super().close()  # type: ignore[misc]
        self._otel_rollout_body.recorder.dropped()


class _RecordedWithRead1(_Recorded):
    """The same, of a version of urllib3 that has `read1`."""

    def read1(self: Any, amt: Any = None, decode_content: Any = None) -> Any:
        body, read1 = self._otel_rollout_body, super().read1  # type: ignore[misc]
        if body.is_inside or amt == 0:
            return read1(amt, decode_content)
        return body.read(self, lambda: read1(amt, decode_content), amt, decode_content, once=True)


class _Body:
    """What of a response's body has been read, and what waits to be."""

    def __init__(self, recorder: ExchangeRecorder) -> None:
        self.recorder = recorder
        self.is_inside = False
        """True while a method of urllib3 runs, which may call another one."""
        self._reading: Reading | None = None
        self._pieces: Iterator[bytes] = iter(())
        """What came and was not taken yet."""
        self._left = b""
        """The rest of a piece that was longer than was asked for."""
        self._is_over = False
        """True if nothing more comes."""

    def read(
        self, response: Any, more: Callable[[], bytes], amt: Any, decode: Any, *, once: bool = False
    ) -> bytes:
        """At most `amt` bytes (None or less than 0: all); what is there if `once`.

        more: reads as much of the response. decode: what urllib3 was asked to decode.
        """
        reading = self._begin(response, decode)
        limit = amt if amt is not None and amt >= 0 else None
        taken, self._left = self._left, b""
        while limit is None or len(taken) < limit:
            piece = self._next(response, reading, more, reads_all=limit is None and not once)
            taken += piece
            if not piece or once or not reading.cuts:
                break
        if self._is_over and not reading.cuts:
            reading.end()
        if limit is not None:
            taken, self._left = taken[:limit], taken[limit:]
        return taken

    def stream(
        self, response: Any, chunks: Iterable[bytes], amt: Any, decode: Any
    ) -> Iterator[bytes]:
        """The bytes of the response that urllib3 gives as `chunks` of at most `amt`."""
        reading = self._begin(response, decode)
        left, self._left = self._left, b""
        for piece in chain(
            (left,) if left else (), self._pieces, shown(self._inside(chunks), reading)
        ):
            size = amt if amt and amt > 0 and reading.cuts else len(piece)
            yield from (piece[start : start + size] for start in range(0, len(piece), size))

    def _begin(self, response: Any, decode: Any) -> Reading:
        """The reading, which begins once it is known whether urllib3 decodes the bytes."""
        if self._reading is None:
            names = response.headers.get("content-encoding", "").lower().split(",")
            known = all(name.strip() in response.CONTENT_DECODERS for name in names)
            if known and (response.decode_content if decode is None else decode):
                self.recorder.comes_decoded()
            self._reading = Reading(self.recorder)
        return self._reading

    def _next(
        self, response: Any, reading: Reading, more: Callable[[], bytes], *, reads_all: bool
    ) -> bytes:
        """The next piece; empty if there is none, or not yet."""
        while True:
            for piece in self._pieces:
                return piece
            if self._is_over:
                reading.end()
                return b""
            data = self._more(reading, more)
            self._pieces = reading.pieces(data) if data else iter(())
            if reads_all or _is_over(response, data):
                self._is_over = True
                self._pieces = chain(self._pieces, reading.rest())
            elif not data:
                return b""

    def _more(self, reading: Reading, more: Callable[[], bytes]) -> bytes:
        self.is_inside = True
        try:
            return more()
        except BaseException as error:
            reading.failed(error)
            raise
        finally:
            self.is_inside = False

    def _inside(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The chunks; what makes them calls urllib3's own methods."""
        chunks = iter(chunks)
        while True:
            self.is_inside = True
            try:
                chunk = next(chunks, None)
            finally:
                self.is_inside = False
            if chunk is None:
                return
            yield chunk


def _is_over(response: Any, data: bytes) -> bool:
    """True if nothing comes after `data`; a decoder may give no bytes for some that came."""
    if response.headers.get("content-encoding"):
        return bool(response.closed) and not data
    return bool(response.closed) or not data
