"""Hooks for botocore, which boto3 is on: on its HTTP session, below retries and signing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_rollout.record.encoding import decoded
from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.tee import without_count
from otel_rollout.record.transports.post import of_request, sending
from otel_rollout.record.transports.urllib3_body import show


class _Post:
    """A POST as botocore prepares it, anew for each attempt."""

    library = "botocore"

    def __init__(self, request: Any, path: str, args: Any, kwargs: Any) -> None:
        self.request, self.path, self.args, self.kwargs = request, path, args, kwargs
        self.url: str = request.url
        self.headers: Mapping[str, Any] = _texts(request.headers)

    @property
    def body(self) -> bytes | None:
        body = self.request.body
        if isinstance(body, str):
            return body.encode()
        return bytes(body) if isinstance(body, bytes | bytearray) else None

    def replace(self, body: bytes) -> None:
        self.request.body = body
        self.request.headers["Content-Length"] = str(len(body))

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        status, headers = response.status_code, response.headers
        content = response._content
        if content is not None:
            encoding = headers.get("content-encoding")  # botocore leaves it on
            recorder.response(status, headers, decoded(content, encoding))
            response._content = content if encoding else without_count(recorder, content)
        elif recorder.response(status, headers):
            show(response.raw, recorder)


def _texts(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a request; values that were signed are bytes."""
    return {
        name: value.decode("latin-1") if isinstance(value, bytes) else str(value)
        for name, value in headers.items()
    }


HOOKS = (Hook("URLLib3Session", "send", sending(of_request(_Post))),)
