"""Hooks on HTTP libraries: a POST is a model call to record, to count, or neither."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from otel_rollout.record.added_fields import NOTHING, added_fields
from otel_rollout.record.boundary import INCOMPLETE, guarded
from otel_rollout.record.calls import (
    UNRECORDED,
    ClientCall,
    Unrecorded,
    is_in_call,
    make,
    make_async,
    recording_rollout,
)
from otel_rollout.record.current import capture_is_off, current_rollout
from otel_rollout.record.privacy.secrets import api_path
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.transports.hooks import Hook
from otel_rollout.record.transports.model_post import ModelPost, is_signed
from otel_rollout.record.transports.to_gateway import is_for_gateway, note_for_gateway
from otel_rollout.record.transports.uncaptured import note_outside, note_uncaptured
from otel_rollout.wire import Json, api_of, endpoint_of, object_in

_LIBRARIES = {
    name: name
    for name in ("httpx", "httpx2", "aiohttp", "requests", "botocore", "urllib3", "urllib")
} | {"http": "http.client"}
"""HTTP libraries by their package, as they are named."""
_PLUMBING = frozenset(
    (
        *("otel_rollout", "opentelemetry", "wrapt", "httpcore", "httpcore2", *_LIBRARIES),
        *("asyncio", "anyio", "trio", "threading", "concurrent", "contextlib", "contextvars"),
        *("functools", "tenacity", "backoff", "google.auth", "requests_toolbelt", "httpx_aiohttp"),
    )
)
"""Packages between a client library and the network."""
_NAMESPACES = frozenset(("google", "azure"))
"""Packages of several libraries, whose names have a second part."""


def hook(owner: str, method: str, kind: type[ModelPost]) -> Hook:
    """A hook on the method of a library that sends every request."""

    def send(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        path = None if is_in_call() else kind.path(instance, args, kwargs)
        begun = None if path is None else _begin(kind, path, instance, args, kwargs)
        return wrapped(*args, **kwargs) if begun is None else make(begun[0], wrapped, *begun[1:])

    return Hook(owner, method, send)


def async_hook(owner: str, method: str, kind: type[ModelPost]) -> Hook:
    """`hook`, for a method that is a coroutine."""

    async def send(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        path = None if is_in_call() else kind.path(instance, args, kwargs)
        begun = None if path is None else _begin(kind, path, instance, args, kwargs)
        if begun is None:
            return await wrapped(*args, **kwargs)
        return await make_async(begun[0], wrapped, *begun[1:])

    return Hook(owner, method, send)


@guarded(INCOMPLETE)
def _begin(
    kind: type[ModelPost], path: str, instance: Any, args: Any, kwargs: Any
) -> tuple[ClientCall | Unrecorded, Any, Any] | None:
    """The call that a POST to a model's path is, and the arguments that it is to be sent with.

    `UNRECORDED` if it is only counted; None where it is not looked at.
    """
    if capture_is_off():
        return None
    post = kind(instance, args, kwargs)
    if is_for_gateway(post.url, post.headers):
        note_for_gateway()
        return UNRECORDED, args, kwargs
    active = _asking()
    if active is None:
        return UNRECORDED, args, kwargs
    endpoint = endpoint_of(path)
    sent = post.body if endpoint is not None else None
    body = object_in(sent) if sent else None
    if endpoint is None or body is None or not _is_asked(path, body):
        note_uncaptured(active, client_of(post.library), api_path(path))
        active.secrets.learn(post.headers, post.url)
        return UNRECORDED, args, kwargs
    added = NOTHING
    if not is_signed(post.headers):
        added = added_fields(endpoint, body, post.url, counts=post.hides_count)
    if added.fields:
        post.replace(json.dumps({**body, **added.fields}).encode())
    recorder = ExchangeRecorder(active, endpoint)
    recorder.asks_for(added)
    recorder.request(post.body, post.headers, post.url)

    def plain() -> tuple[Any, Any]:
        post.replace(sent or b"")
        recorder.request(sent, post.headers, post.url)
        return post.args, post.kwargs

    call = ClientCall(recorder, lambda: None, added, plain, post.received, post.refusal)
    return call, post.args, post.kwargs


def _asking() -> ActiveRollout | None:
    """The rollout that sends a request here. None: none that is recorded; no rollout is counted."""
    active = recording_rollout()
    if active is None and current_rollout() is None:
        note_outside()
    return active


def _is_asked(path: str, body: Mapping[str, Json]) -> bool:
    """Whether the body asks a model, as the API at this path is asked."""
    api = api_of(path.removesuffix("/"))
    members = ("input",) if api is None else (api.conversation, api.text)
    return any(name in body for name in members)


def client_of(library: str) -> str:
    """The sender of a request, `ollama (httpx)`; the library alone if the user's code sends it.

    The library is the outermost one on the way there: requests, not the urllib3 that it is on.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (package := _package(frame)) in _PLUMBING:
        library = _LIBRARIES.get(package, library)
        frame = frame.f_back
    client = _package(frame)
    is_installed = "-packages" in frame.f_code.co_filename
    return f"{client} ({library})" if is_installed and client != library else library


def _package(frame: FrameType) -> str:
    package, _, rest = str(frame.f_globals.get("__name__")).partition(".")
    return f"{package}.{rest.partition('.')[0]}" if package in _NAMESPACES else package
