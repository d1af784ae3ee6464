"""httpx, and httpx2, which is made alike."""

from __future__ import annotations

import sys
from typing import Any

from otel_rollout.record.calls import received
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.transports.encoding import decoded
from otel_rollout.record.transports.model_post import ModelPost
from otel_rollout.wire import asks_a_model


class HttpxPost(ModelPost):
    """A POST as a request of httpx."""

    def __init__(self, instance: Any, args: Any, kwargs: Any) -> None:
        super().__init__(instance, args, kwargs)
        self.library = type(self.request).__module__.partition(".")[0]

    @classmethod
    def path(cls, _: Any, args: Any, kwargs: Any) -> str | None:
        """The path; its address is not made a text for that, which is costly."""
        request = cls.request_in(args, kwargs)
        if getattr(request, "method", None) != "POST":
            return None
        path: str = request.url.raw_path.partition(b"?")[0].decode("ascii", "replace")
        return path if asks_a_model(path) else None

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

    def refusal(self, response: Any) -> Any:
        if hasattr(response, "_content"):
            return response.text
        bound = response.stream
        assert bound._stream is not None  # before it is read: it takes its place again
        if hasattr(bound, "__aiter__"):
            return self._read(response)
        return self._put_back(response, b"".join(response.iter_raw()))

    async def _read(self, response: Any) -> str:
        return self._put_back(response, b"".join([part async for part in response.aiter_raw()]))

    def _put_back(self, response: Any, body: bytes) -> str:
        """Have the body, which was read, read again."""
        response.stream._stream = sys.modules[self.library].ByteStream(body)
        response.is_stream_consumed = response.is_closed = False
        return decoded(body, response.headers.get("content-encoding")).decode("utf-8", "replace")
