"""One request that passes through the gateway: asked of the model server, recorded, handed on.

The reply goes to the client as it comes, and only as fast as the client takes it. What the client
has seen the end of is recorded already: the last bytes are handed on after the recorder has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from otel_rollout.gateway.http import Receive, Refusal, Send
from otel_rollout.gateway.supply import SupplyingUpstream
from otel_rollout.gateway.upstream import Upstream, response_headers
from otel_rollout.record import ExchangeRecorder, guarded

_NOT_RECORDED = "a call that passed through the gateway was not recorded completely"


class Cut(Exception):  # noqa: N818 - no error of ours
    """The model server ended a reply in its middle, so the client's is to end there too."""


class Exchange:
    """A request whose body has come, on its way to the model server and back.

    recorder: None: it is not recorded.
    """

    def __init__(self, recorder: ExchangeRecorder | None, send: Send) -> None:
        self._recorder = recorder
        self._send = send
        self._client_left = False
        self._response: Any = None

    async def pass_on(
        self,
        upstream: Upstream | SupplyingUpstream,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes,
        receive: Receive,
    ) -> None:
        """Ask the model server, and hand its reply on until it ends or the client has gone.

        Refusal if the model server gives no reply, Cut if it ends one in the middle.
        """
        asking = asyncio.current_task()
        assert asking is not None
        watch = asyncio.create_task(_left(receive))
        watch.add_done_callback(lambda done: self._leave(asking, done))
        try:
            self._response = await upstream.ask(method, target, headers, body or None)
            await self._reply()
        except asyncio.CancelledError:
            self._end(asyncio.CancelledError("the client went away"))
            if not self._client_left:
                raise
        except upstream.errors as error:
            self._end(error)
            if self._response is None:
                raise _unreachable(error) from None
            raise Cut from None
        finally:
            watch.cancel()
            if self._response is not None:
                self._response.close()  # a reply that came whole has given its connection back

    def _leave(self, asking: asyncio.Task[Any], done: asyncio.Task[None]) -> None:
        if not done.cancelled():
            self._client_left = True
            asking.cancel()

    async def _reply(self) -> None:
        response, recorder = self._response, self._recorder
        shown = False
        if recorder is not None:
            shown = bool(recorder.response(response.status, _mapping(response.raw_headers)))
        start = {"type": "http.response.start", "status": response.status}
        await self._send({**start, "headers": response_headers(response.raw_headers)})
        held = b""
        streams = recorder is None or recorder.framing is not None
        content = response.content
        while piece := await content.readany():
            if shown and recorder is not None:
                recorder.chunk(piece)
            if streams:
                await self._send_piece(piece)
                continue
            if held:
                await self._send_piece(held)
            held = piece
        self._end(None)
        await self._send({"type": "http.response.body", "body": held})

    async def _send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def _end(self, error: BaseException | None) -> None:
        if self._recorder is not None:
            with guarded(_NOT_RECORDED):
                self._recorder.end(error=error)


async def _left(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _mapping(headers: tuple[tuple[bytes, bytes], ...]) -> Mapping[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def _unreachable(error: Exception) -> Refusal:
    said = f"the model server gave no reply: {type(error).__name__}"
    return Refusal(502, said, "api_error")
