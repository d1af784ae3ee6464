"""A POST that an HTTP library is asked to send: a model call to record, to count, or neither."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Protocol

from otel_rollout.record.boundary import INCOMPLETE, guarded
from otel_rollout.record.calls import (
    UNRECORDED,
    Call,
    Unrecorded,
    added_fields,
    asks_for_count,
    is_in_call,
    recording_rollout,
)
from otel_rollout.record.current import capture_is_off
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.uncaptured import note_outside, note_uncaptured
from otel_rollout.wire import Json, api_of, endpoint_of, loads

_PLUMBING = frozenset(
    (
        *("otel_rollout", "opentelemetry", "wrapt"),
        *("httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "urllib3", "botocore"),
        *("http", "urllib", "asyncio", "anyio", "trio", "threading", "concurrent", "contextlib"),
        *("functools", "tenacity", "backoff", "contextvars"),
    )
)
"""Packages between a client library and the network."""
_NAMESPACES = frozenset(("google", "azure"))
"""Packages of several libraries, whose names have a second part."""


class Post(Protocol):
    """A POST as one HTTP library has it."""

    library: str
    """Name of the library."""
    url: str
    """The address that it goes to."""
    headers: Mapping[str, str]

    @property
    def body(self) -> bytes | None:
        """The body as it will be sent. None: not known before it is."""

    def replace(self, body: bytes) -> None:
        """Have the library send another body."""


@guarded(INCOMPLETE)
def begin(post: Post, path: str) -> Call | Unrecorded | None:
    """The call that a POST to a model's `path` (without its query) is.

    `UNRECORDED` if it is only counted; None where it belongs to another call, or nobody asks.
    """
    if is_in_call() or capture_is_off():
        return None
    active = recording_rollout()
    if active is None:
        note_outside()
        return None
    endpoint = endpoint_of(path)
    body = _json_of(post.body) if endpoint is not None else None
    if endpoint is None or not _is_asked(path, body):
        note_uncaptured(active, client_of(post.library), path)
        return UNRECORDED
    return _recorded(active, post, endpoint, body)


def _recorded(active: ActiveRollout, post: Post, endpoint: str, body: Json) -> Call:
    added = {} if _is_signed(post.headers) else added_fields(endpoint, body)
    if added:
        post.replace(json.dumps({**body, **added}).encode())
    recorder = ExchangeRecorder(active, endpoint)
    recorder.hides_count = asks_for_count(added)
    recorder.request(post.body, post.headers, post.url)
    return Call(recorder, lambda: None, gives_response=True)


def _json_of(body: bytes | None) -> Json:
    """The body as JSON. None: it is none, or not known."""
    try:
        return loads(body) if body else None
    except (ValueError, RecursionError):
        return None


def _is_asked(path: str, body: Json) -> bool:
    """Whether the body asks a model, as the API at this path is asked."""
    api = api_of(path.removesuffix("/"))
    members = ("input",) if api is None else (api.conversation, api.text)
    return isinstance(body, Mapping) and any(name in body for name in members)


def _is_signed(headers: Mapping[str, str]) -> bool:
    """Whether the body is signed, so that it cannot be changed."""
    return any(str(value).startswith("AWS4-") for value in headers.values())


def client_of(library: str) -> str:
    """What sends with an HTTP library, `ollama (httpx)`; that alone if the user's code does."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _PLUMBING:
        frame = frame.f_back
    is_installed = "-packages" in frame.f_code.co_filename
    return f"{_package(frame)} ({library})" if is_installed else library


def _package(frame: FrameType) -> str:
    package, _, rest = str(frame.f_globals.get("__name__")).partition(".")
    return f"{package}.{rest.partition('.')[0]}" if package in _NAMESPACES else package
