"""lm15, the HTTP client on sockets of its own that DSPy brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.model_post import ModelPost
from otel_rollout.record.transports.tee import Reading, shown, shown_async


class Lm15Post(ModelPost):
    """A POST as a request of a transport."""

    library = "lm15"

    def __init__(self, instance: Any, args: Any, kwargs: Any) -> None:
        super().__init__(instance, args, kwargs)
        self.headers = dict(self.request.headers)

    def replace(self, body: bytes) -> None:
        headers = [each for each in self.request.headers if each[0].lower() != "content-length"]
        self.send_instead(dataclasses.replace(self.request, body=body, headers=headers))

    def received(self, recorder: ExchangeRecorder, response: Any) -> None:
        headers = {name.lower(): value for name, value in response.headers}
        if not recorder.response(response.status, headers):
            return
        reading = Reading(recorder)
        reading.ends_with(response)
        is_async = hasattr(response._chunks, "__aiter__")
        response._chunks = (shown_async if is_async else shown)(response._chunks, reading)
        response._release = _releasing(response._release, reading)


def _releasing(release: Callable[[bool], Any], reading: Reading) -> Callable[[bool], Any]:
    """Release the connection, as asked; the response is read no further then."""

    def released(body_consumed: bool) -> Any:
        try:
            return release(body_consumed)
        finally:
            reading.dropped()

    return released
