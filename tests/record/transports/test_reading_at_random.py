"""Any sequence of reads gives the bytes in order, and what was taken is what is recorded."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import configure, rollout
from otel_rollout.record.current import current_rollout
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports import aiohttp as of_aiohttp
from otel_rollout.record.transports import urllib3 as of_urllib3

EVENT = st.sampled_from(
    [b'data: {"choices":[{"delta":{}}]}\n\n', b": ping\n\n", b"data: x\r\n\r\n"]
)
END = st.sampled_from([b"", b"data: cut"])
BODIES = st.one_of(
    st.tuples(st.just("application/json"), st.binary(max_size=80)),
    st.tuples(
        st.just("text/event-stream"), st.builds(lambda a, b: b"".join(a) + b, st.lists(EVENT), END)
    ),
)
"""Content type and body."""
SIZES = st.one_of(st.none(), st.integers(0, 40))


class Chunks:
    """Stands where the recorder is, and keeps what it is shown."""

    def __init__(self, recorder: ExchangeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown = b""
        monkeypatch.setattr(recorder, "chunk", self.chunk)

    def chunk(self, piece: bytes, _: int | None = None) -> None:
        self.shown += piece


def begun(kind: str) -> ExchangeRecorder:
    """A recorder that has a request and a response of this content type."""
    active = current_rollout()
    assert active is not None
    recorder = ExchangeRecorder(active, "/chat/completions")
    recorder.request(b"{}", {})
    recorder.response(200, {"content-type": kind})
    return recorder


@pytest.fixture(autouse=True)
def configured() -> None:
    configure(exporters=[], instrumentor=None)


@pytest.mark.not_replayed("many rollouts, of which only the bytes are looked at")
@settings(max_examples=150)
@given(BODIES, st.lists(st.tuples(st.sampled_from(["read", "read1", "into"]), SIZES)))
def test_urllib3(body: tuple[str, bytes], reads: list[tuple[str, int | None]]):
    kind, data = body
    with rollout("agent"), pytest.MonkeyPatch.context() as monkeypatch:
        recorder = begun(kind)
        chunks = Chunks(recorder, monkeypatch)
        raw: Any = urllib3.HTTPResponse(io.BytesIO(data), preload_content=False)
        of_urllib3._record(raw, recorder)
        taken = b""
        for how, size in reads:
            if how == "into":
                buffer = bytearray(size or 1)
                piece = bytes(buffer[: raw.readinto(buffer)])
            else:
                piece = getattr(raw, how)(size)
            assert size is None or len(piece) <= max(size, 1)
            taken += piece
            assert data.startswith(taken)
            assert chunks.shown == taken
        taken += b"".join(raw.stream(7)) if len(reads) % 2 else raw.read()
        assert taken == data
        assert chunks.shown == data
        assert recorder.finished


@pytest.mark.framework
@pytest.mark.not_replayed("many rollouts, of which only the bytes are looked at")
@settings(max_examples=150)
@given(
    BODIES,
    st.lists(st.tuples(st.sampled_from(["read", "readany", "readline", "readchunk"]), SIZES)),
    st.integers(1, 30),
)
def test_aiohttp(body: tuple[str, bytes], reads: list[tuple[str, int | None]], cut: int):
    streams: Any = pytest.importorskip("aiohttp.streams")
    protocols: Any = pytest.importorskip("aiohttp.base_protocol")
    kind, data = body

    async def run() -> None:
        loop = asyncio.get_running_loop()
        protocol = protocols.BaseProtocol(loop)
        protocol.transport = asyncio.Transport()
        reader = streams.StreamReader(protocol, 1 << 16, loop=loop)
        of_aiohttp._record(reader, recorder)
        for start in range(0, len(data), cut):
            loop.call_later(0, reader.feed_data, data[start : start + cut])
        loop.call_later(0, reader.feed_eof)
        taken = b""
        for how, size in reads:
            if how == "read":
                taken += await reader.read(-1 if size is None else size)
            elif how == "readchunk":
                taken += (await reader.readchunk())[0]
            else:
                taken += await getattr(reader, how)()
            assert data.startswith(taken)
            assert chunks.shown == taken
        taken += await reader.read()
        assert taken == data
        assert reader.at_eof()

    with rollout("agent"), pytest.MonkeyPatch.context() as monkeypatch:
        recorder = begun(kind)
        chunks = Chunks(recorder, monkeypatch)
        asyncio.run(run())
        assert chunks.shown == data
        assert recorder.finished
