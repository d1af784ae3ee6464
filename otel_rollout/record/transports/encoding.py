"""The bytes of a response, or of a request, without their `Content-Encoding`."""

from __future__ import annotations

import importlib
import logging
import zlib
from collections.abc import Callable
from typing import Any

from otel_rollout.record.boundary import guarded

_PIECE = 64
"""Bytes that are decoded at a time: a few can become many, and the bound is seen after each."""


def decoded(body: bytes, encoding: str | None) -> bytes:
    """The body, decoded as far as it has come; an encoding that is not known is left.

    An exception of the decoder for a body that is not what its encoding says; ImportError if
    Brotli or Zstandard is not installed.
    """
    for name in reversed((encoding or "").lower().split(",")):
        begin = _DECODERS.get(name.strip())
        if begin is not None and body:
            feed, decoder = begin(body)
            found: bytes = feed(body)
            # Zstandard's frames may follow each other.
            while name.strip() == "zstd" and (body := decoder.unused_data):
                feed, decoder = begin(body)
                found += feed(body)
            body = found
    return body


def decoded_whole(body: bytes, encoding: str, most: int) -> bytes | None:
    """A whole body, decoded.

    None: it is not what its encoding says, its encoding is not known or has no library here, or it
    is longer than `most` bytes.
    """
    with guarded("a request could not be decoded", level=logging.DEBUG):
        for name in reversed(encoding.lower().split(",")):
            if name.strip() not in ("", "identity"):
                body = _whole(*_DECODERS[name.strip()](body), body, most)
        return body
    return None


def _whole(feed: Callable[[bytes], bytes], decoder: Any, body: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    left = most
    for at in range(0, len(body), _PIECE):
        parts.append(feed(body[at : at + _PIECE]))
        left -= len(parts[-1])
        if left < 0:
            raise ValueError(f"longer than {most} bytes once it is decoded")
    is_ended: bool = decoder.is_finished() if hasattr(decoder, "is_finished") else decoder.eof
    rest: bytes = getattr(decoder, "unused_data", b"")
    if not is_ended or rest:
        raise ValueError("expected to end with the body")
    return b"".join(parts)


def _inflater(_: bytes, window: int = zlib.MAX_WBITS | 16) -> tuple[Any, Any]:
    decoder = zlib.decompressobj(window)
    return decoder.decompress, decoder


def _deflate_inflater(body: bytes) -> tuple[Any, Any]:
    has_header = len(body) < 2 or (body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0)
    return _inflater(body, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _brotli_decoder(_: bytes) -> tuple[Any, Any]:
    try:
        decoder = importlib.import_module("brotli").Decompressor()
    except ImportError:
        decoder = importlib.import_module("brotlicffi").Decompressor()
        return decoder.decompress, decoder
    return decoder.process, decoder


def _zstandard_decoder(_: bytes) -> tuple[Any, Any]:
    decoder = importlib.import_module("zstandard").ZstdDecompressor().decompressobj()
    return decoder.decompress, decoder


_DECODERS: dict[str, Callable[[bytes], tuple[Any, Any]]] = {
    "gzip": _inflater,
    "x-gzip": _inflater,
    "deflate": _deflate_inflater,
    "br": _brotli_decoder,
    "zstd": _zstandard_decoder,
}
"""What decodes a piece of a body that begins so, and the decoder that knows its end."""
