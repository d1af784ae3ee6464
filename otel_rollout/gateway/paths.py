"""Where a request says which rollout it belongs to, and what it may ask of the model server.

Three spellings of one carrier: `/r/{token}/v1/...`, an API key `or-{token}`, and the headers
`traceparent` and `baggage`. The path counts before the key, the key before the headers.

The agent is not trusted: its token opens model calls and a few questions. A path is sent on as it
was understood here, so that the model server cannot read another one in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from otel_rollout.record import KEY_PREFIX
from otel_rollout.wire import endpoint_of, retrieval_of

KEYS = frozenset((b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"))
"""Headers that an API key is sent in."""
_MARK = b"/r/"
_is_plain = re.compile(r"(?:/(?!\.+(?:/|$))[\w.~:@!$&'()*+,=-]+)*/?", re.ASCII).fullmatch
_hides_a_path = re.compile(rb"%2[ef]", re.IGNORECASE).search
_names_a_model = re.compile(rb"(?:(?:/v1|/v1beta)?/models|/model)/[^/]+").fullmatch
_is_question = re.compile(
    r"(?:/v1|/v1beta)?/models(?:/[^/]+){0,2}|(?:/v1)?/(?:health|version|ping)"
).fullmatch
_counts_tokens = re.compile(
    r"(?:/v1)?/(?:messages/count_tokens|responses/input_tokens|(?:de)?tokenize)|.+:countTokens"
).fullmatch
_PROBES = ("/", "/api/hello")
"""Paths that agents ask with HEAD before their first call."""

RawHeaders = Iterable[tuple[bytes, bytes]]
"""Headers as ASGI has them: names in lower case."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's path and headers say."""

    path: str
    """The path at the model server, without its query: letters that were percent-encoded are
    decoded, and Anthropic's `/messages` has its `/v1`."""
    is_plain: bool
    """False: the path is as it came, and a server may understand it as another one."""
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
    plain = plain_path(path)
    if plain is not None and (plain + "/").startswith("/messages/"):
        plain = "/v1" + plain  # a base URL without `/v1` in a client that adds none
    return Asked(plain or path.decode("latin-1") or "/", plain is not None, token, bool(keys))


def plain_path(raw: bytes) -> str | None:
    """A path with ordinary characters that were percent-encoded as they are.

    One with encoded slashes in the name of a model stays as it came.
    None: it has others, or dots, empty segments or slashes that lead elsewhere.
    """
    path = unquote_to_bytes(raw).decode("latin-1")
    before = re.split(rb"%2f", raw, maxsplit=1, flags=re.IGNORECASE)[0]
    if before != raw and _names_a_model(before) and _is_plain(path):
        return raw.decode("latin-1")  # `org/name`, or an ARN: it stays below the same path
    return path if _is_plain(path) and not _hides_a_path(raw) else None


def is_open(method: str, path: str, more: Sequence[str] = ()) -> bool:
    """True if the token of a rollout opens a path.

    more: paths that are opened with all below them.
    """
    if any(f"{path}/".startswith(prefix.rstrip("/") + "/") for prefix in more):
        return True
    if method == "POST":
        return endpoint_of(path) is not None or _counts_tokens(path) is not None
    if _is_question(path) or (method == "HEAD" and path in _PROBES):
        return method in ("GET", "HEAD")
    return method == "GET" and retrieval_of(path) is not None


def name_of(method: str, path: str) -> str | None:
    """The path by which a call is recorded, as a client library names it. None: it is not."""
    if method == "POST":
        return endpoint_of(path)
    path = path.removeprefix("/v1")
    return path if method == "GET" and retrieval_of(path) else None


def raw_path(scope: Mapping[str, Any]) -> bytes:
    """The path as it came, below the path that the application is mounted at."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.removeprefix(scope.get("root_path", "").encode())


def _token_in(value: bytes) -> str | None:
    """The token in the value of a header with an API key; None if the key is none."""
    scheme, _, key = value.decode("latin-1").strip().rpartition(" ")
    if scheme.strip().lower() not in ("", "bearer") or not key.startswith(KEY_PREFIX):
        return None
    return key[len(KEY_PREFIX) :]
