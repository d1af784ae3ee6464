"""JSON answers of the HTTP APIs of backends, bounded in bytes and in time."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from otel_rollout.errors import SpanFormatError

LONGEST = 1 << 30
"""Bytes of an answer, at most."""
_WHOLE = 10
"""How many times as long as for its next bytes an answer may take as a whole."""


def get_json(
    backend: str,
    url: str,
    address: str,
    *,
    api: str,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The answer at an address of a backend; None for 404.

    backend, url, api: what errors call it, where it is, and which of its APIs is asked.
    timeout: seconds to wait for the next bytes; a whole answer may take ten times as long.
    SpanFormatError for an answer that is no JSON or too long, and for any other status; OSError if
    there is no answer.
    """
    if not address.startswith(("http://", "https://")):
        raise SpanFormatError(f"expected the http address of {backend}, got {url!r}")
    request = urllib.request.Request(address, headers=dict(headers or {}))  # noqa: S310 - checked
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - checked
            body = _whole(answer, address, time.monotonic() + _WHOLE * timeout)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise SpanFormatError(
                f"{backend} at {url} answered {error.code}: {error.read(200)!r}"
            ) from None
    except urllib.error.URLError as error:
        raise OSError(
            f"{backend} at {url} does not answer ({error.reason}): check the address, and that it "
            f"runs there"
        ) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise SpanFormatError(f"{address} is not {api}: it answered {body[:80]!r}") from None


def _whole(answer: Any, address: str, deadline: float) -> bytes:
    """The body of an answer. TimeoutError or SpanFormatError for one that has no end."""
    pieces: list[bytes] = []
    length = 0
    while piece := answer.read1(1 << 20):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise SpanFormatError(f"{address} answered with more than {LONGEST} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{address}: its answer took too long: {length} bytes came in time")
    return b"".join(pieces)
