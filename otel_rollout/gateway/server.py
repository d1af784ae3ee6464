"""The HTTP server of a gateway: uvicorn with httptools, in the event loop that it is started in.

Beside what uvicorn does, a connection has to send the head of a request in time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from typing import Any

from otel_rollout.gateway.extra import library

_GRACE = 1
"""Seconds that replies have to end once the server is stopped."""
_IDLE = 75
"""Seconds that a client's connection is kept between two requests."""
_quiet = logging.getLogger("otel_rollout.gateway.connections")
_quiet.setLevel(logging.CRITICAL)  # clients and model servers that break off are no errors of ours


class GatewayServer:
    """Serves an ASGI application on a socket that is bound."""

    def __init__(self, application: Any, listening: socket.socket, header_seconds: float) -> None:
        uvicorn = library("uvicorn")
        config = uvicorn.Config(
            application,
            http=functools.partial(_protocol_class(), header_seconds=header_seconds),
            interface="asgi3",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_GRACE,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._socket = listening

    async def start(self) -> None:
        """Take connections from now on."""
        await self._server.startup(sockets=[self._socket])

    async def stop(self) -> None:
        """Take no more; replies under way have a moment to end."""
        await self._server.shutdown(sockets=[self._socket])


class _Timed:
    """Closes a connection that does not send the head of a request in time."""

    def __init__(self: Any, *args: Any, header_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _quiet
        self._header_seconds = header_seconds
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self: Any, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._expect_head()

    def data_received(self: Any, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        super().data_received(data)  # type: ignore[misc]

    def on_headers_complete(self: Any) -> None:
        self._forget_head()
        super().on_headers_complete()  # type: ignore[misc]

    def connection_lost(self: Any, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)  # type: ignore[misc]

    def _expect_head(self: Any) -> None:
        close = self.timeout_keep_alive_handler
        self._header_timer = self.loop.call_later(self._header_seconds, close)

    def _forget_head(self: Any) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


@functools.cache
def _protocol_class() -> Any:
    base: Any = library("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol

    class Protocol(_Timed, base):  # type: ignore[misc]
        pass

    return Protocol
