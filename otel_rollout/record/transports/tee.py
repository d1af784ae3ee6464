"""The bytes of a response, shown to the recorder as their reader takes them.

The chunks of a stream are handed on, and recorded, one by one: what is recorded of a stream that is
left early is what its reader took, however the network cut it. `shown` and `shown_async` are that
for plain iterators. httpx, and httpx2, check that a stream is of their own class: a tee is, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.wire import Cutter, EventCutter, cutter_of, is_count


def tee(response: Any, recorder: ExchangeRecorder) -> Any:
    """The stream of a response, shown to the recorder whose `response` has just been called."""
    decoder = _decoder_of(response) if recorder.has_events else None
    if decoder is not None:
        recorder.encoding = None
    reading = Reading(recorder, decoder)
    kind: Any = type(response.stream)
    stream = _tee_class(kind)(response.stream, reading)
    weakref.finalize(stream, reading.dropped).atexit = False
    return stream


def without_count(recorder: ExchangeRecorder, body: bytes) -> bytes:
    """A whole body, decoded, as its reader is to see it."""
    if not (recorder.hides_count and recorder.has_events):
        return body
    cutter = EventCutter()
    events = [*cutter.cut(body), cutter.rest()]
    return b"".join(event for event in events if not is_count(event))


class Reading:
    """The reading of one response; it shows nothing once the recorder has another one."""

    def __init__(self, recorder: ExchangeRecorder, decoder: Any = None) -> None:
        self._recorder = recorder
        self._response = recorder.responses
        self._hides_count = recorder.hides_count
        self._cutter: Cutter | _DecodingCutter | None = None
        """None: the bytes are handed on as they come."""
        framing = recorder.framing or ("events" if recorder.hides_count else None)
        is_encoded = (recorder.encoding or "identity").lower() != "identity"
        if framing is not None and (decoder is not None or not is_encoded):
            cutter = cutter_of(framing)
            self._cutter = cutter if decoder is None else _DecodingCutter(cutter, decoder)
        self.cut: Callable[[bytes], Iterable[bytes]] = (
            _whole if self._cutter is None else self._cutter.cut
        )
        """The pieces that the reader may take of these bytes."""

    def take(self, piece: bytes) -> bool:
        """Record a piece that is taken now; True if the reader is to get it."""
        self._recorder.chunk(piece, self._response)
        return not (self._hides_count and is_count(piece))

    def end(self, error: BaseException | None = None) -> Iterator[bytes]:
        """What is left of a stream that came to its end, or broke by an error; then it is over."""
        is_broken = error is not None and not isinstance(error, Exception)
        rest = b"" if self._cutter is None or is_broken else self._cutter.rest()
        if rest and self.take(rest):
            yield rest
        if self._response == self._recorder.responses:
            self._recorder.end(error=error)

    def dropped(self) -> None:
        """The bytes are read no further, or the stream is dropped unread."""
        if self._response == self._recorder.responses:
            self._recorder.dropped()


def _whole(chunk: bytes) -> Iterable[bytes]:
    return (chunk,)


def shown(stream: Iterable[bytes], reading: Reading) -> Iterator[bytes]:
    """The bytes of a stream, shown as they are taken."""
    try:
        for chunk in stream:
            for piece in reading.cut(chunk):
                if reading.take(piece):
                    yield piece
    except GeneratorExit:
        raise  # the reader stopped: `close` follows, or the garbage collector
    except BaseException as error:
        for piece in reading.end(error):
            yield piece
        raise
    for piece in reading.end():
        yield piece


async def shown_async(stream: AsyncIterable[bytes], reading: Reading) -> AsyncIterator[bytes]:
    """The bytes of an async stream, shown as they are taken."""
    try:
        async for chunk in stream:
            for piece in reading.cut(chunk):
                if reading.take(piece):
                    yield piece
    except GeneratorExit:
        raise
    except BaseException as error:
        for piece in reading.end(error):
            yield piece
        raise
    for piece in reading.end():
        yield piece


class _SyncTee:
    def __init__(self, stream: Any, reading: Reading) -> None:
        self._stream = stream
        self._reading = reading

    def __iter__(self) -> Iterator[bytes]:
        return shown(self._stream, self._reading)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._reading.dropped()


class _AsyncTee:
    def __init__(self, stream: Any, reading: Reading) -> None:
        self._stream = stream
        self._reading = reading

    def __aiter__(self) -> AsyncIterator[bytes]:
        return shown_async(self._stream, self._reading)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._reading.dropped()


class _DecodingCutter:
    """A cutter that takes the `Content-Encoding` off first, with the decoder of httpx."""

    def __init__(self, cutter: Cutter, decoder: Any) -> None:
        self._cutter = cutter
        self._decoder = decoder

    def cut(self, chunk: bytes) -> Iterator[bytes]:
        """The chunks that these bytes end."""
        return self._cut(self._decoder.decode(chunk))

    def rest(self) -> bytes:
        """The bytes of the unfinished chunk. The decoder's exception if they are cut off."""
        return b"".join(self._cut(self._decoder.flush())) + self._cutter.rest()

    def _cut(self, decoded: bytes | Iterable[bytes]) -> Iterator[bytes]:
        for part in (decoded,) if isinstance(decoded, bytes) else decoded:  # httpx's, httpx2's
            yield from self._cutter.cut(part)


def _decoder_of(response: Any) -> Any:
    """The decoder of an encoded response, which then does not decode again. None: not encoded."""
    if not hasattr(response, "_get_content_decoder"):
        return None
    identity = type(response)(200)._get_content_decoder()
    decoder = response._get_content_decoder()
    if type(decoder) is type(identity):
        return None
    response._decoder = identity
    return decoder


@functools.cache
def _tee_class(kind: Any) -> type[_SyncTee | _AsyncTee]:
    """The tee for streams of this class: a byte stream of its library, too, if it is one."""
    for base, tee in (("AsyncByteStream", _AsyncTee), ("SyncByteStream", _SyncTee)):
        for known in kind.mro():
            if known.__name__ == base:
                return type(tee.__name__, (tee, known), {})
    return _AsyncTee if hasattr(kind, "__aiter__") else _SyncTee
