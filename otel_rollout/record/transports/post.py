"""A POST that an HTTP library is asked to send: a model call to record, to count, or neither."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from otel_rollout.record.boundary import INCOMPLETE, guarded
from otel_rollout.record.calls import (
    UNRECORDED,
    ClientCall,
    Unrecorded,
    added_fields,
    asks_for_count,
    is_in_call,
    make,
    make_async,
    recording_rollout,
)
from otel_rollout.record.current import capture_is_off, current_rollout
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.running import ActiveRollout
from otel_rollout.record.to_gateway import is_for_gateway
from otel_rollout.record.uncaptured import note_outside, note_uncaptured
from otel_rollout.wire import Json, api_of, asks_a_model, endpoint_of, loads

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
_BINDING = frozenset(("signature", "digest", "content-digest", "content-md5"))
"""Headers, in lower case, that bind a request to its body."""


class ModelPost:
    """A POST to a model's path, as one HTTP library has it: by default a request, which is the
    first argument of the library's method that sends it.
    """

    library: str
    """Name of the library."""

    def __init__(self, request: Any, path: str, args: Any, kwargs: Any) -> None:
        self.request = request
        self.path: str = path
        """The path that it goes to, without its query."""
        self.url = str(request.url)
        """The address that it goes to."""
        self.headers: Mapping[str, Any] = request.headers or {}
        self.args: tuple[Any, ...] = args
        """Arguments by position of the library's method."""
        self.kwargs: dict[str, Any] = kwargs
        """Arguments by name of that method."""

    @property
    def body(self) -> bytes | None:
        """The body as it will be sent. None: not known before it is."""
        return as_bytes(self.request.body)

    def replace(self, body: bytes) -> None:
        """Have the library send another body."""
        raise NotImplementedError

    def send_instead(self, request: Any) -> None:
        """Have the library send another request."""
        self.request = request
        if self.args:
            self.args = (request, *self.args[1:])
        else:
            self.kwargs["request"] = request

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        """Show the recorder the response that the library's method returns."""
        raise NotImplementedError


def as_bytes(body: object) -> bytes | None:
    """A body that is a text or bytes; None for any other."""
    if isinstance(body, str):
        return body.encode()
    return bytes(body) if isinstance(body, bytes | bytearray) else None


PostOf: TypeAlias = Callable[
    [Any, tuple[Any, ...], dict[str, Any]], "Callable[[], ModelPost] | None"
]
"""What makes the POST of a method's call, given its object and arguments. None: it is no POST to
a model's path."""


def sending(post_of: PostOf) -> Callable[..., Any]:
    """A wrapper for the method of a library that sends every request."""

    def send(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        make_post = post_of(instance, args, kwargs)
        begun = None if make_post is None else begin(make_post)
        if begun is None:
            return wrapped(*args, **kwargs)
        call, post = begun
        return make(call, wrapped, post.args if post else args, post.kwargs if post else kwargs)

    return send


def sending_async(post_of: PostOf) -> Callable[..., Any]:
    """`sending`, for a method that is a coroutine."""

    async def send(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        make_post = post_of(instance, args, kwargs)
        begun = None if make_post is None else begin(make_post)
        if begun is None:
            return await wrapped(*args, **kwargs)
        call, post = begun
        return await make_async(
            call, wrapped, post.args if post else args, post.kwargs if post else kwargs
        )

    return send


def of_request(make_post: Callable[[Any, str, Any, Any], ModelPost]) -> PostOf:
    """`PostOf` for a library whose method takes a request that has its method and its address.

    make_post: what makes the POST of the request, its path, and the arguments.
    """

    def post_of(_: Any, args: Any, kwargs: Any) -> Callable[[], ModelPost] | None:
        request = args[0] if args else kwargs.get("request")
        if getattr(request, "method", None) not in ("POST", "post"):
            return None
        path = model_path(str(request.url))
        return None if path is None else partial(make_post, request, path, args, kwargs)

    return post_of


def model_path(url: str) -> str | None:
    """The path of an address, without its query, if a POST to it asks a model; else None."""
    address = url.partition("?")[0].partition("#")[0]
    if not asks_a_model(address):
        return None
    try:
        path = urlsplit(address).path
    except ValueError:  # the library raises it too
        return None
    return path if asks_a_model(path) else None


@guarded(INCOMPLETE)
def begin(
    make_post: Callable[[], ModelPost],
) -> tuple[ClientCall | Unrecorded, ModelPost | None] | None:
    """The call that a POST to a model's path is, and the POST, which may have got another body.

    `UNRECORDED` if it is only counted; None where it belongs to another call, or is not looked at.
    """
    if not _is_looked_at():
        return None
    post = make_post()
    active = UNRECORDED if is_for_gateway(post.url, post.headers) else _asking()
    if not isinstance(active, ActiveRollout):
        return active, None
    endpoint = endpoint_of(post.path)
    body = _json_of(post.body) if endpoint is not None else None
    if endpoint is None or not _is_asked(post.path, body):
        note_uncaptured(active, client_of(post.library), post.path)
        return UNRECORDED, None
    return _recorded(active, post, endpoint, body), post


@guarded(INCOMPLETE)
def watch(library: str, path: str) -> Unrecorded | None:
    """Count a POST to a model's path whose bytes are not captured; as `begin` otherwise."""
    if not _is_looked_at():
        return None
    active = UNRECORDED if is_for_gateway(path) else _asking()
    if not isinstance(active, ActiveRollout):
        return active
    note_uncaptured(active, client_of(library), path)
    return UNRECORDED


def _is_looked_at() -> bool:
    """False if a call sends the request that is known, or not looked at."""
    return not (is_in_call() or capture_is_off())


def _asking() -> ActiveRollout | Unrecorded:
    """The rollout that sends a request here.

    `UNRECORDED`: none that is recorded; that none does is counted.
    """
    active = recording_rollout()
    if active is not None:
        return active
    if current_rollout() is None:
        note_outside()
    return UNRECORDED


def _recorded(active: ActiveRollout, post: ModelPost, endpoint: str, body: Json) -> ClientCall:
    added = {} if is_signed(post.headers) else added_fields(endpoint, body)
    if added:
        post.replace(json.dumps({**body, **added}).encode())
    recorder = ExchangeRecorder(active, endpoint)
    recorder.hides_count = asks_for_count(added)
    recorder.request(post.body, post.headers, post.url)
    return ClientCall(recorder, lambda: None, post.received)


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


def is_signed(headers: Mapping[str, Any]) -> bool:
    """Whether the body is signed, so that it cannot be changed."""
    return any(
        name.lower() in _BINDING or str(value).startswith("AWS4-")
        for name, value in headers.items()
    )


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
