"""Secrets of requests: which values must not be recorded, should anybody repeat them in an error.

A server's error may echo the key that a request was signed with, and so may an exception. A
reply that was sampled is never changed.
"""

from __future__ import annotations

import json
import re
import string
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import product
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from otel_rollout.wire import asks_a_model, endpoint_of, object_in

TOKEN = "[A-Za-z0-9_-]{92,400}"  # noqa: S105 - its shape
"""A token of a gateway, as a regular expression."""
token_in_path = re.compile(f"/r/{TOKEN}(?=/|$)")
REDACTED = "[redacted]"
_SCHEME = string.ascii_letters + string.digits + "+-."
_SHORTEST_SECRET = 8
_PATH_WORDS = frozenset(("endpoints", "locations", "projects", "publishers"))
"""Segments of addresses that are no keys."""
_of_api = re.compile(r"(?:/(?:openai|api|inference|(?:model|deployments)/[^/]+|v\d\w*))+$").search
"""What the path of an API begins with."""
_is_basic = re.compile(r"Basic\s+(\S+)\s*$", re.I).match
_is_odd = re.compile(r"[^\w.~-]").findall
_MOST_ODD = 4
"""Kinds of characters of one secret that JSON may escape, in any combination."""
_URL_SAFE = str.maketrans("+/", "-_")
_escape = re.compile(r"%[0-9A-F]{2}")
_OF_REPLIES = frozenset({"choices", "output", "content", "data", "candidates", "done"})
"""Members of replies that a model made, one of which each has, or a message that is an object."""
_NO_SECRET = re.compile(
    r"(accept|content)(-[\w-]+)?|api-version|anthropic-(version|beta)|connection|date|expect|host|"
    r"idempotency-key|openai-beta|te|traceparent|tracestate|transfer-encoding|user-agent|"
    r"x-stainless-[\w-]+|x-request-id",
    re.I,
).fullmatch
"""Headers, and fields of a query, whose values are no secrets."""


Header = tuple[str | bytes, str | bytes]
"""The name and the value of a header."""
_ADDRESS = ""
"""Stands for the name of a header where the value is an address."""


def headers_of(headers: Mapping[str, Any]) -> Collection[Header]:
    """The headers whose values are texts; httpx's as the bytes that they are sent as.

    To read those as texts costs as much as all else that is done with a call's headers.
    """
    raw = getattr(headers, "raw", None)
    if isinstance(raw, list):
        return raw
    return [(str(name), value) for name, value in headers.items() if isinstance(value, str)]


def text_of(value: str | bytes) -> str:
    """A name or a value of a header as text."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@lru_cache(256)
def _is_harmless(name: str | bytes) -> bool:
    return _NO_SECRET(text_of(name)) is not None


_PATTERNS = (
    (re.compile(r"(://)[^\s/'\"]+(?=@)"), rf"\1{REDACTED}"),
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{6,}", re.I), rf"\1 {REDACTED}"),
    (re.compile(r"\b(?:sk|pk|rk|gsk|hf|xai)[-_][\w-]{8,}"), REDACTED),
    (
        # An assignment, a field of a query, or a member of JSON, which may be in a text of JSON.
        re.compile(
            r"""((?:key|token|secret|password|passwd|signature|\bsig|credential)\\*["']?\s*"""
            r"""(?:=\s*\\*["']?|:\s*\\*["']))[^\s"'&,;()\[\]{}\\]{8,}""",
            re.I,
        ),
        rf"\1{REDACTED}",
    ),
)
"""What looks like a secret in the text of an error, whoever wrote it."""


class Secrets:
    """The secrets of the requests of one rollout, and of those inside it.

    Any thread may add and ask. Without a lock: another thread could hold it while this one forks.
    """

    def __init__(self) -> None:
        self._found: set[str] = set()
        self.names: set[str | bytes] = set()
        """Names of headers that may be secrets."""
        self._learned: dict[Header, None] = {}
        """The headers whose values may be secrets, and the addresses, which have no name."""
        self._sought = 0
        """How many of those have been searched: that takes time, and few runs have an error."""
        self._open: dict[object, tuple[Mapping[str, Any], str]] = {}
        """Headers and address of each call that is being made: an HTTP library may add to its
        headers, or replace them, as it sends."""

    def of_request(self, headers: Mapping[str, Any], url: str = "", call: object = None) -> None:
        """A call sends a request with these headers; what they were before is learned."""
        if call in self._open:
            self.close(call)
        self._open[call] = headers, url

    def close(self, call: object = None) -> Collection[Header]:
        """A call has ended: learn the values of its headers and address, and return the headers."""
        if (request := self._open.get(call)) is None:
            return ()
        headers = self.learn(*request)
        self._open.pop(call, None)  # only now: whoever asks meanwhile finds it here or learned
        return headers

    def learn(self, headers: Mapping[str, Any], url: str = "") -> Collection[Header]:
        """Add the values of headers and of an address; returns the headers."""
        every = headers_of(headers)
        for header in every:
            if not _is_harmless(header[0]):
                self._learned[header] = None
                self.names.add(header[0])
        if url:
            self._learned[_ADDRESS, url] = None
        return every

    def found(self) -> frozenset[str]:
        """All secrets."""
        for headers, url in self._open.copy().values():
            self.learn(headers, url)
        learned = list(self._learned)
        for name, value in learned[self._sought :]:
            text = text_of(value)
            for secret in secrets_of_url(text) if name == _ADDRESS else secrets_in({name: text}):
                self._found.update(secret_forms(secret))
        self._sought = max(self._sought, len(learned))  # only now: another thread may ask
        return frozenset(self._found)

    def scrub(self, text: str) -> str:
        """The text of an error without them, and without what looks like a secret."""
        return scrub(text, self.found())

    def scrub_reply(self, body: bytes) -> bytes:
        """A server's reply without them; one that a model made stays as it is."""
        reply = object_in(body)
        if reply is not None and _is_of_model(reply):
            return body
        text = body.decode("utf-8", "surrogateescape")
        scrubbed = _without(text, self.found())
        return body if scrubbed == text else scrubbed.encode("utf-8", "surrogateescape")


def _is_of_model(reply: Mapping[str, Any]) -> bool:
    sampled = not _OF_REPLIES.isdisjoint(reply) or isinstance(reply.get("message"), dict)
    return sampled and not reply.get("error")


def secret_forms(secret: str) -> set[str]:
    """The secret as it is in plain text, JSON, Python's `repr`, an address, and in base64."""
    plain = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    quoted = {quote(secret, errors="replace"), quote(secret, safe="", errors="replace")}
    quoted.add(quote_plus(secret, errors="replace"))
    quoted |= {_escape.sub(lambda match: match[0].lower(), each) for each in quoted}
    return plain | quoted | _escaped(secret) | _encoded(secret) | {repr(secret)[1:-1]}


def _escaped(secret: str) -> set[str]:
    """The secret as writers of JSON may escape it: each escapes other characters."""
    odd = sorted(set(_is_odd(secret)))[:_MOST_ODD]
    ways = [(c, f"\\u{ord(c):04x}", f"\\u{ord(c):04X}", *["\\/"][: c == "/"]) for c in odd]
    return {
        secret.translate(dict(zip(map(ord, odd), chosen, strict=True))) for chosen in product(*ways)
    }


def _encoded(secret: str) -> set[str]:
    """What each base64 of a text with the secret has in it, wherever in the text it begins."""
    found = set[str]()
    data = secret.encode("utf-8", "surrogateescape")
    for before in range(3):
        text = b64encode(bytes(before) + data).decode()
        inside = text[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        found |= {inside, inside.translate(_URL_SAFE)}
    return found


def secrets_in(headers: Mapping[Any, Any]) -> set[str]:
    """The values of headers, and their parts, but of those that are known to be harmless.

    A part is a word (the key after `Bearer `), a cookie, what follows its `=`, or the user and the
    password after `Basic `.
    """
    found = set[str]()
    for name, value in headers.items():
        if isinstance(value, str) and not _is_harmless(name):
            for part in (value, *re.split(r"[;,\s]+", value)):
                found |= {part, part.partition("=")[2]}
            if (basic := _is_basic(value)) is not None:
                found |= _parts_of_basic(basic[1])
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def _parts_of_basic(encoded: str) -> set[str]:
    """User and password of an `Authorization: Basic ...`."""
    try:
        user_info = b64decode(encoded).decode()
    except ValueError:
        return set()
    return {user_info, *user_info.split(":", 1)}


def secrets_of_url(url: str) -> set[str]:
    """User, password, values of the query, and what may be a key in the path of an address."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return set()
    user_info = parts.netloc.rpartition("@")[0]
    found = {user_info, *user_info.split(":", 1)}
    for field in parts.query.split("&"):
        name, separator, value = field.partition("=")
        if not separator:
            found.add(name)
        elif not _is_harmless(name):
            found |= {value, *(decoded for _, decoded in parse_qsl(field))}
    path = parts.path.rstrip("/")
    found |= set(path.removesuffix(api_path(path)).split("/")) - _PATH_WORDS
    found |= {unquote(secret) for secret in found}
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def api_path(path: str) -> str:
    """The part of a path that a model API is known to have: what is before it may be a key."""
    path = path.rstrip("/")
    end = endpoint_of(path) or ("/" + path.rpartition("/")[2] if asks_a_model(path) else "")
    before = _of_api(path.removesuffix(end))
    return (before.group() if before else "") + end


@lru_cache(64)
def public_address(address: str) -> str:
    """Scheme and host of an address, with the known part of its path."""
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return scheme + separator + host.rpartition("@")[2] + api_path(slash + path)


def without_token(address: str) -> str:
    """A path or an address without the token of a rollout."""
    return token_in_path.sub("", address) if "/r/" in address else address


def public_path(url: str) -> str:
    """The path of an address, without host and user info; of its query the names of the fields.

        https://me:password@host/v1/chat/completions?api-version=1&key=x
        /v1/chat/completions?api-version&key

    A field without a `=` is left out: it may be a key. An address without a scheme is a path, with
    or without the first `/`. The token of a gateway in it is left out.
    """
    if url.startswith("/") and url.replace("_", "").replace("/", "").isalnum():
        url = "/" + url.lstrip("/")  # as nearly always
        return without_token(url) if "/r/" in url else url
    address, _, query = url.partition("#")[0].partition("?")
    scheme, separator, rest = address.partition("//")
    if separator and not scheme.rstrip(":").strip(_SCHEME):
        address = api_path("/" + rest.partition("/")[2])
    names = [field.partition("=")[0] for field in query.split("&") if "=" in field]
    address = without_token(address)
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
