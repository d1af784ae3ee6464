"""Hooks for httpx, and for httpx2, which is made alike: on what every request goes through."""

from __future__ import annotations

from functools import partial
from typing import Any

from otel_rollout.record.calls import received
from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.post import ModelPost, sending, sending_async
from otel_rollout.wire import asks_a_model


class _HttpxPost(ModelPost):
    """A POST as a request of httpx."""

    def __init__(self, request: Any, path: str, args: Any, kwargs: Any) -> None:
        super().__init__(request, path, args, kwargs)
        self.library = type(request).__module__.partition(".")[0]

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
        self.send_instead(
            type(old)(old.method, old.url, headers=headers, content=body, extensions=old.extensions)
        )

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        received(recorder, response)


def _post(_: Any, args: Any, kwargs: Any) -> partial[_HttpxPost] | None:
    request = args[0] if args else kwargs.get("request")
    if getattr(request, "method", None) != "POST":
        return None
    path = request.url.raw_path.partition(b"?")[0].decode("ascii", "replace")
    return partial(_HttpxPost, request, path, args, kwargs) if asks_a_model(path) else None


HOOKS = (
    Hook("Client", "send", sending(_post)),
    Hook("AsyncClient", "send", sending_async(_post)),
)
