"""Hooks for requests: on the method that sends a session's requests, redirects included."""

from __future__ import annotations

from typing import Any

from otel_rollout.record.hooks import Hook
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.tee import without_count
from otel_rollout.record.transports.post import ModelPost, of_request, sending
from otel_rollout.record.transports.urllib3_body import show


class _RequestsPost(ModelPost):
    """A POST as a prepared request."""

    library = "requests"

    def replace(self, body: bytes) -> None:
        request = self.request.copy()  # the user may send the old one again
        request.body = body
        request.headers["Content-Length"] = str(len(body))
        self.send_instead(request)

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        status, headers = response.status_code, response.headers
        if isinstance(response._content, bytes):
            recorder.response(status, headers, response._content)
            response._content = without_count(recorder, response._content)
        elif recorder.response(status, headers):
            show(response.raw, recorder)


HOOKS = (Hook("Session", "send", sending(of_request(_RequestsPost))),)
