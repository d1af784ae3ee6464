"""The bytes of a response without their `Content-Encoding`."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable


def decoded(body: bytes, encoding: str | None) -> bytes:
    """The body, decoded as far as it has come; an encoding that is not known is left.

    An exception of the decoder for a body that is not what its encoding says; ImportError if
    Brotli or Zstandard is not installed.
    """
    for name in reversed((encoding or "").split(",")):
        decoder = _DECODERS.get(name.strip().lower())
        if decoder is not None and body:
            body = decoder(body)
    return body


def _gzip(body: bytes) -> bytes:
    return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(body)


def _deflate(body: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(body)
    except zlib.error:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(body)  # without zlib's header


def _brotli(body: bytes) -> bytes:
    try:
        found: bytes = importlib.import_module("brotli").Decompressor().process(body)
    except ImportError:
        found = importlib.import_module("brotlicffi").Decompressor().decompress(body)
    return found


def _zstandard(body: bytes) -> bytes:
    decoder = importlib.import_module("zstandard").ZstdDecompressor()
    found = b""
    while body:  # one frame after the other
        frame = decoder.decompressobj()
        found += frame.decompress(body)
        body = frame.unused_data
    return found


_DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstandard,
}
