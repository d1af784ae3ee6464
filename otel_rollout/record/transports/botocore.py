"""Hooks for botocore, which boto3 is on: on its HTTP session, below retries and signing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_rollout.record.encoding import decoded
from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.tee import without_count
from otel_rollout.record.transports.post import ModelPost, of_request, sending
from otel_rollout.record.transports.urllib3_body import show


class _BotocorePost(ModelPost):
    """A POST as botocore prepares it, anew for each attempt."""

    library = "botocore"

    def __init__(self, request: Any, path: str, args: Any, kwargs: Any) -> None:
        super().__init__(request, path, args, kwargs)
        self.headers = _texts(request.headers)

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


HOOKS = (Hook("URLLib3Session", "send", sending(of_request(_BotocorePost))),)
