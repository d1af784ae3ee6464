"""Hooks for httpx, and for httpx2, which is made alike: on what every request goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from otel_rollout.record.calls import Call, Unrecorded, make, make_async
from otel_rollout.record.hooks import Hook
from otel_rollout.record.transports.post import begin
from otel_rollout.wire import asks_a_model


class _Post:
    """A POST as a request of httpx."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.library: str = type(request).__module__.partition(".")[0]
        self.url = str(request.url)
        self.headers: Mapping[str, str] = request.headers

    @property
    def body(self) -> bytes | None:
        try:
            content: bytes = self.request.content
        except RuntimeError:  # made while it is sent
            return None
        return content

    def replace(self, body: bytes) -> None:
        old = self.request
        headers = old.headers.copy()
        headers.pop("content-length", None)
        self.request = type(old)(
            old.method, old.url, headers=headers, content=body, extensions=old.extensions
        )
        self.headers = self.request.headers


def _begin(args: Any, kwargs: Any) -> tuple[Call | Unrecorded | None, Any]:
    """The call that a client's `send` makes, and the arguments to make it with."""
    request = args[0] if args else kwargs.get("request")
    if request is None or request.method != "POST":
        return None, args
    path = request.url.raw_path.partition(b"?")[0].decode("ascii", "replace")
    if not asks_a_model(path):
        return None, args
    post = _Post(request)
    call = begin(post, path)
    if post.request is not request:
        if args:
            args = (post.request, *args[1:])
        else:
            kwargs["request"] = post.request
    return call, args


def _send(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    call, args = _begin(args, kwargs)
    return wrapped(*args, **kwargs) if call is None else make(call, wrapped, args, kwargs)


async def _async_send(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    call, args = _begin(args, kwargs)
    if call is None:
        return await wrapped(*args, **kwargs)
    return await make_async(call, wrapped, args, kwargs)


HOOKS = (
    Hook("Client", "send", _send),
    Hook("AsyncClient", "send", _async_send),
)
