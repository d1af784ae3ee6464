"""Hooks for requests: on the method that sends a session's requests, redirects included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.tee import without_count
from otel_rollout.record.transports.post import of_request, sending
from otel_rollout.record.transports.urllib3_body import show


class _Post:
    """A POST as a prepared request."""

    library = "requests"

    def __init__(self, request: Any, path: str, args: Any, kwargs: Any) -> None:
        self.request, self.path, self.args, self.kwargs = request, path, args, kwargs
        self.url: str = request.url
        self.headers: Mapping[str, str] = request.headers or {}

    @property
    def body(self) -> bytes | None:
        body = self.request.body
        if isinstance(body, str):
            return body.encode()
        return bytes(body) if isinstance(body, bytes | bytearray) else None

    def replace(self, body: bytes) -> None:
        self.request = self.request.copy()  # the user may send the old one again
        self.request.body = body
        self.headers = self.request.headers
        self.request.headers["Content-Length"] = str(len(body))
        if self.args:
            self.args = (self.request, *self.args[1:])
        else:
            self.kwargs["request"] = self.request

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        status, headers = response.status_code, response.headers
        if isinstance(response._content, bytes):
            recorder.response(status, headers, response._content)
            response._content = without_count(recorder, response._content)
        elif recorder.response(status, headers):
            show(response.raw, recorder)


HOOKS = (Hook("Session", "send", sending(of_request(_Post))),)
