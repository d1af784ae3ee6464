"""A byte stream that shows the recorder its bytes, and is otherwise the stream that it wraps.

httpx, and httpx2, check that a stream is of their own class: there is a tee for each library.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

from otel_rollout.record.recorder import ExchangeRecorder

_LIBRARIES = ("httpx", "httpx2")


def tee(stream: Any, recorder: ExchangeRecorder) -> Any:
    """The stream of a response, shown to the recorder whose `response` has just been called."""
    reading = _Reading(recorder)
    shown = _tee_class(stream)(stream, reading)
    # Finalizer: ends the recording of a stream that is dropped unread.
    weakref.finalize(shown, reading.dropped).atexit = False
    return shown


class _Reading:
    """The reading of one response; it shows nothing once the recorder has another one."""

    def __init__(self, recorder: ExchangeRecorder) -> None:
        self._recorder = recorder
        self._response = recorder.responses

    @property
    def _is_current(self) -> bool:
        return self._response == self._recorder.responses

    def chunk(self, chunk: bytes) -> None:
        if self._is_current:
            self._recorder.chunk(chunk)

    def end(self, error: BaseException | None = None) -> None:
        if self._is_current:
            self._recorder.end(error=error)

    def dropped(self) -> None:
        if self._is_current:
            self._recorder.dropped()


class _SyncTee:
    def __init__(self, stream: Any, reading: _Reading) -> None:
        self._stream = stream
        self._reading = reading

    def __iter__(self) -> Iterator[bytes]:
        reading = self._reading
        try:
            for chunk in self._stream:
                reading.chunk(chunk)
                yield chunk
        except GeneratorExit:
            raise  # the reader stopped: `close` follows, or the garbage collector
        except BaseException as error:
            reading.end(error)
            raise
        reading.end()

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._reading.dropped()


class _AsyncTee:
    def __init__(self, stream: Any, reading: _Reading) -> None:
        self._stream = stream
        self._reading = reading

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reading = self._reading
        try:
            async for chunk in self._stream:
                reading.chunk(chunk)
                yield chunk
        except GeneratorExit:
            raise
        except BaseException as error:
            reading.end(error)
            raise
        reading.end()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._reading.dropped()


@functools.cache
def _tee_classes(library: str) -> tuple[type[_SyncTee], type[_AsyncTee]]:
    """The tees that are byte streams of this library, which is imported."""
    streams: Any = importlib.import_module(library)

    class SyncTee(_SyncTee, streams.SyncByteStream):  # type: ignore[misc]
        pass

    class AsyncTee(_AsyncTee, streams.AsyncByteStream):  # type: ignore[misc]
        pass

    return SyncTee, AsyncTee


def _tee_class(stream: object) -> type[_SyncTee | _AsyncTee]:
    for library in _LIBRARIES:
        if library in sys.modules:
            streams: Any = sys.modules[library]
            sync, asynchronous = _tee_classes(library)
            if isinstance(stream, streams.AsyncByteStream):
                return asynchronous
            if isinstance(stream, streams.SyncByteStream):
                return sync
    return _AsyncTee if hasattr(stream, "__aiter__") else _SyncTee
