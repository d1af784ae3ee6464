"""Secrets of a request: which header values must not be recorded, should anybody repeat them.

A server's error may echo the key that a request was signed with, and so may an exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from otel_rollout.wire import loads

_SECRET_HEADER = re.compile(r"auth|key|token|cookie|secret|password|credential", re.I).search
_SHORTEST_SECRET = 8


def secrets_in(headers: Mapping[str, Any]) -> set[str]:
    """The values of headers whose names sound secret, and their parts.

    A part is a word (the key after `Bearer `), a cookie, or what follows its `=`.
    """
    found = set[str]()
    for name, value in headers.items():
        if isinstance(value, str) and _SECRET_HEADER(str(name)):
            for part in re.split(r"[;,\s]+", value):
                found |= {part, part.partition("=")[2]}
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def scrub(text: str, secrets: Iterable[str]) -> str:
    """The text with `[redacted]` in place of each secret.

    Lone surrogates are escaped: one would cost the whole batch that its span is exported in.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "[redacted]")
    return text.encode("utf-8", "backslashreplace").decode()


def scrub_reply(body: bytes, secrets: Iterable[str]) -> bytes:
    """A server's reply without secrets if it is an error; a sampled reply stays as it is."""
    secrets = set(secrets)
    if not any(secret.encode() in body for secret in secrets):
        return body
    try:
        reply = loads(body)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and not reply.get("error"):
        return body
    text = body.decode("utf-8", "surrogateescape")
    return scrub(text, secrets).encode("utf-8", "surrogateescape")
