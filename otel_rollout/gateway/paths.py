"""Where a request says which rollout it belongs to, and what it asks of the model server.

Three spellings of one carrier: `/r/{token}/v1/...`, an API key `or-{token}`, and the headers
`traceparent` and `baggage`. The path counts before the key, the key before the headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from otel_rollout.record import KEY_PREFIX

KEYS = frozenset((b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"))
"""Headers that an API key is sent in."""
_MARK = b"/r/"

RawHeaders = Iterable[tuple[bytes, bytes]]
"""Headers as ASGI has them: names in lower case."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's path and headers say."""

    path: str
    """The path at the model server, as it came and without its query."""
    token: str | None
    """The token in the path, else that in an API key. None: there is none."""
    key_is_token: bool
    """True if an API key of the request is a token, which is not for the model server."""


def asked_of(raw_path: bytes, headers: RawHeaders) -> Asked:
    """What a request's path and headers say."""
    keys = [token for name, value in headers if name in KEYS if (token := _token_in(value))]
    in_path, path = None, raw_path
    if raw_path.startswith(_MARK):
        in_path, slash, path = raw_path[len(_MARK) :].partition(b"/")
        path = slash + path
    token = keys[0] if keys else None
    if in_path is not None:
        token = in_path.decode("latin-1")
    return Asked(path.decode("latin-1") or "/", token, bool(keys))


def _token_in(value: bytes) -> str | None:
    """The token in the value of a header with an API key; None if the key is none."""
    scheme, _, key = value.decode("latin-1").strip().rpartition(" ")
    if scheme.strip().lower() not in ("", "bearer") or not key.startswith(KEY_PREFIX):
        return None
    return key[len(KEY_PREFIX) :]
