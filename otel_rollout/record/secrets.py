"""Secrets of requests: which values must not be recorded, should anybody repeat them in an error.

A server's error may echo the key that a request was signed with, and so may an exception. A
reply that was sampled is never changed.
"""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from otel_rollout.wire import loads

REDACTED = "[redacted]"
_SCHEME = string.ascii_letters + string.digits + "+-."
_SHORTEST_SECRET = 8
_NO_SECRET = re.compile(
    r"(accept|content)(-[\w-]+)?|api-version|anthropic-(version|beta)|connection|date|expect|host|"
    r"idempotency-key|openai-beta|te|traceparent|tracestate|transfer-encoding|user-agent|"
    r"x-stainless-[\w-]+|x-request-id",
    re.I,
).fullmatch
"""Headers, and fields of a query, whose values are no secrets."""

_PATTERNS = (
    (re.compile(r"(://)[^\s/@'\"]+(?=@)"), rf"\1{REDACTED}"),
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{6,}", re.I), rf"\1 {REDACTED}"),
    (re.compile(r"\b(?:sk|pk|rk|gsk|hf|xai)[-_][\w-]{8,}"), REDACTED),
    (
        # An assignment, a field of a query, or a member of JSON.
        re.compile(
            r"""((?:key|token|secret|password|passwd|signature|\bsig|credential)["']?\s*"""
            r"""(?:=\s*["']?|:\s*["']))[^\s"'&,;()\[\]{}]{8,}""",
            re.I,
        ),
        rf"\1{REDACTED}",
    ),
)
"""What looks like a secret in the text of an error, whoever wrote it."""


class Secrets:
    """The secrets of the requests of one rollout. Any thread may add and ask."""

    def __init__(self) -> None:
        self._found: frozenset[str] = frozenset()
        self._requests: dict[tuple[str, str], Mapping[str, Any]] = {}
        """Headers of requests that were not read yet, by `Authorization` and address.

        An HTTP library may replace the `Authorization` as it sends.
        """
        self._lock = threading.Lock()

    def of_request(self, headers: Mapping[str, Any], url: str = "") -> None:
        """Learn the values of a request's headers and address, once somebody asks."""
        self._requests[headers.get("authorization", ""), url] = headers

    def learn(self, headers: Mapping[str, Any], url: str = "") -> None:
        """Add the values of headers and of an address."""
        found = secrets_in(headers) | secrets_of_url(url)
        with self._lock:
            self._found |= found

    def found(self) -> frozenset[str]:
        """All secrets."""
        while self._requests:
            with suppress(KeyError):  # another thread has it
                (signed, url), headers = self._requests.popitem()
                self.learn({"authorization": signed}, url)
                self.learn(headers)
        return self._found

    def scrub(self, text: str) -> str:
        """The text of an error without them, and without what looks like a secret."""
        return scrub(text, self.found())

    def scrub_reply(self, body: bytes) -> bytes:
        """A server's reply without them if it is an error; a sampled reply stays as it is."""
        try:
            reply = loads(body)
        except (ValueError, RecursionError):
            reply = None
        if isinstance(reply, dict) and not reply.get("error"):
            return body
        text = body.decode("utf-8", "surrogateescape")
        scrubbed = _without(text, self.found())
        return body if scrubbed == text else scrubbed.encode("utf-8", "surrogateescape")


def secrets_in(headers: Mapping[str, Any]) -> set[str]:
    """The values of headers, and their parts, but of those that are known to be harmless.

    A part is a word (the key after `Bearer `), a cookie, or what follows its `=`.
    """
    found = set[str]()
    for name, value in headers.items():
        if isinstance(value, str) and not _NO_SECRET(str(name)):
            for part in (value, *re.split(r"[;,\s]+", value)):
                found |= {part, part.partition("=")[2]}
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def secrets_of_url(url: str) -> set[str]:
    """User, password and values of the query in an address, as written and decoded."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return set()
    user_info = parts.netloc.rpartition("@")[0]
    found = {user_info, *user_info.split(":", 1)}
    for field in parts.query.split("&"):
        name, _, value = field.partition("=")
        if not _NO_SECRET(name):
            found |= {value, *(decoded for _, decoded in parse_qsl(field))}
    found |= {unquote(secret) for secret in found}
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def public_path(url: str) -> str:
    """The path of an address, without host and user info; of its query the names of the fields.

        https://me:password@host/v1/chat/completions?api-version=1&key=x
        /v1/chat/completions?api-version&key

    An address without a scheme is a path, with or without the first `/`.
    """
    address, _, query = url.partition("#")[0].partition("?")
    scheme, separator, rest = address.partition("//")
    if separator and not scheme.rstrip(":").strip(_SCHEME):
        address = rest.partition("/")[2]
    names = [field.partition("=")[0] for field in query.split("&") if field]
    return "/" + address.lstrip("/") + ("?" + "&".join(names) if names else "")


def scrub(text: str, secrets: Iterable[str]) -> str:
    """The text of an error with `[redacted]` for each secret, and for what looks like one.

    Lone surrogates are escaped: one would cost the whole batch that its span is exported in.
    """
    return _without(text, secrets).encode("utf-8", "backslashreplace").decode()


def _without(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
