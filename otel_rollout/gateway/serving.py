"""A gateway while it serves: its address, the environment of an agent that uses it, its server.

The server is uvicorn with httptools, in the event loop that it is started in. Beside what uvicorn
does, a connection has to send the head of a request in time, an offer of another protocol is
ignored, and HTTP/1.0 gets no chunks.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import socket
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from otel_rollout.errors import ConfigurationError, NoActiveRolloutError
from otel_rollout.extras import module_of
from otel_rollout.gateway.application import MAX_BODY_BYTES, Application, Settings
from otel_rollout.gateway.upstream import listening_socket
from otel_rollout.hosts import LOOPBACK, is_loopback
from otel_rollout.record import (
    ActiveRollout,
    current_rollout,
    fields_here,
    process_state,
    running_rollout,
)
from otel_rollout.trajectory import Trajectory


class Gateway:
    """A gateway that serves; `serve` makes it."""

    def __init__(self, application: Application, url: str) -> None:
        self.url = url
        """Its address, without a path."""
        self.made_secret = application.made_secret
        """The secret that opens its control routes, if it made one. None: it was given one."""
        self._application = application

    def token(self, rollout: Trajectory | str | None = None) -> str:
        """The token of a rollout that runs in this process.

        rollout: its trajectory, or its id. None: the current one. NoActiveRolloutError without one.
        """
        active = _active(rollout)
        self._application.fields[active] = fields_here()
        return self._application.tokens.own(active)

    def base_url(self, rollout: Trajectory | str | None = None) -> str:
        """The base URL for a client whose calls belong to this rollout.

        With `/v1` at its end, as OpenAI's clients want it; Anthropic's want it without.
        rollout: its trajectory, or its id. None: the current one. NoActiveRolloutError without one.
        """
        return f"{self.url}/r/{self.token(rollout)}/v1"

    def environment(self, rollout: Trajectory | str | None = None) -> dict[str, str]:
        """Environment variables for a program whose model calls belong to this rollout.

            subprocess.run(command, env={**os.environ, **gateway.environment()})

        rollout: its trajectory, or its id. None: the current one. NoActiveRolloutError without one.
        """
        return self.environment_of(_active(rollout))

    def environment_of(self, active: ActiveRollout) -> dict[str, str]:
        """The same of a rollout that runs; its calls ask for token ids if those made here would."""
        self._application.fields[active] = fields_here()
        return self._application.tokens.environment(active, self.url)


_Handle = TypeVar("_Handle")


class Served(ABC, Generic[_Handle]):
    """An ASGI application that is served in an `async with` block, or, with a plain `with`, in a
    thread of its own; the block gets the handle that `_begun` makes.

    host, port: where to listen; port 0 is any free one.
    listening: a socket that is bound there. None: one is made.
    header_seconds: how long a client may take for the head of a request.
    tls: the files of a certificate and of its key. None: plain HTTP.
    ConfigurationError without the extra `gateway`; OSError if the port is not free.
    """

    url = ""
    """Its address, without a path, once it is served."""

    def __init__(
        self,
        application: Any,
        host: str,
        port: int,
        header_seconds: float,
        listening: socket.socket | None = None,
        tls: tuple[str, str] | None = None,
    ) -> None:
        for name in ("uvicorn", "httptools"):
            module_of("gateway", name, "otel_rollout.gateway")
        self._application, self._header_seconds = application, header_seconds
        self._host, self._port, self._listening, self._tls = host, port, listening, tls

    @abstractmethod
    def _begun(self) -> _Handle:
        """It is served from now on; the handle of the block."""

    @abstractmethod
    async def _ended(self) -> None:
        """It is served no longer: release what it holds."""

    async def __aenter__(self) -> _Handle:
        self._sockets = [self._listening or listening_socket(self._host, self._port)]
        port = self._sockets[0].getsockname()[1]
        self._server = http_server(self._application, self._header_seconds, self._tls)
        starting = self._server.startup(sockets=self._sockets)
        # What is current here must not be so in the tasks of the requests.
        await contextvars.Context().run(asyncio.create_task, starting)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'http' if self._tls is None else 'https'}://{host}:{port}"
        return self._begun()

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._server.shutdown(sockets=self._sockets)
        finally:
            await self._ended()

    def __enter__(self) -> _Handle:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="otel-rollout-gateway", daemon=True
        )
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self.__aenter__(), self._loop).result()

    def __exit__(self, *exc_info: object) -> None:
        leaving = self.__aexit__(*exc_info)
        try:
            asyncio.run_coroutine_threadsafe(leaving, self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class serve(Served[Gateway]):  # noqa: N801 - used as `async with serve(...)`
    """Serve a gateway in front of a model server.

        async with serve("http://127.0.0.1:8000/v1") as gateway:
            with rollout("agent"):
                await run(command, env={**os.environ, **gateway.environment()})

    In the running event loop, or, with a plain `with`, in a thread of its own.

    upstream: address of the model server, with or without `/v1`.
    host: address to listen on. Any other than that of this machine needs a secret.
    port: 0 (default) is any free port.
    api_key: key of the model server, sent instead of the clients' keys. None: clients send theirs.
    secret: signs tokens, and opens the control routes. None: that of `configure`, or
        OTEL_ROLLOUT_SECRET; without one, a random one is made (`Gateway.made_secret`).
    max_body_bytes: a longer request is refused.
    listening: a socket that is bound to host and port, which processes may share. None: one is
        made.
    options: further fields of `Settings`, such as `idle_seconds`.

    ConfigurationError for a wrong option, and where the extra `gateway` is not installed; OSError
    if the port is not free.
    """

    def __init__(
        self,
        upstream: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        secret: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        listening: socket.socket | None = None,
        **options: Any,
    ) -> None:
        self._gateway = Application(Settings(upstream, api_key, secret, max_body_bytes, **options))
        super().__init__(
            self._gateway, host, port, self._gateway.header_seconds, listening=listening
        )
        if is_loopback(host):
            self._gateway.names = LOOPBACK | {host}
        elif self._gateway.made_secret is not None:
            raise ConfigurationError(
                f"gateway host: {host!r} can be reached by others, which needs a secret: set "
                f"OTEL_ROLLOUT_SECRET, or serve(secret=...)"
            )

    def _begun(self) -> Gateway:
        process_state.gateways.add(self.url)
        return Gateway(self._gateway, self.url)

    async def _ended(self) -> None:
        process_state.gateways.discard(self.url)
        await self._gateway.close()


def application(upstream: str, **options: Any) -> Application:
    """The gateway as an ASGI application, for a server of yours, or mounted below a path.

    options: those of `Settings`. ConfigurationError for a wrong option, or without the extra
    `gateway`.
    """
    return Application(Settings(upstream, **options))


def _active(rollout: Trajectory | str | None) -> ActiveRollout:
    """The rollout that is meant, which runs in this process. NoActiveRolloutError if none does."""
    if rollout is None:
        active = current_rollout()
    else:
        active = running_rollout(rollout if isinstance(rollout, str) else rollout.id)
    if active is None:
        problem = "no rollout is current" if rollout is None else f"{rollout!r} does not run here"
        raise NoActiveRolloutError(
            f"the gateway's address for a rollout: {problem}; ask for it inside the rollout"
        )
    return active


# --- the HTTP server


_GRACE = 1
"""Seconds that replies have to end once the server is stopped."""
_IDLE = 75
"""Seconds that a client's connection is kept between two requests."""
_quiet = logging.getLogger("otel_rollout.gateway.connections")
_quiet.setLevel(logging.CRITICAL)  # clients and model servers that break off are no errors of ours


def http_server(application: Any, header_seconds: float, tls: tuple[str, str] | None = None) -> Any:
    """A `uvicorn.Server` for an ASGI application; its arguments are those of `Served`."""
    uvicorn = module_of("gateway", "uvicorn", "otel_rollout.gateway")
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
        **({} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}),
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


class _Connection:
    """One connection of uvicorn's, with what httptools and uvicorn leave out."""

    def __init__(self: Any, *args: Any, header_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _quiet
        self._header_seconds = header_seconds
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_offer = False
        """True from the head of a request that offers another protocol until it is read anew."""
        self._data = b""
        """What is read next."""

    def connection_made(self: Any, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._expect_head()

    def data_received(self: Any, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        self._data = data
        while data:
            super().data_received(data)  # type: ignore[misc]
            if not self._is_offer:
                break
            data, self._is_offer = self._data, False

    def _unsupported_upgrade_warning(self: Any) -> None:
        """Read the request anew without its offer; httptools takes its body for the protocol's.

        uvicorn calls it while it handles the error that says where the head ends.
        """
        if not self._is_offer:
            return
        offer = sys.exc_info()[1]
        assert offer is not None
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._data = b"\r\n".join([*lines, b"", self._data[offer.args[0] :]])
        self.parser = type(self.parser)(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def on_headers_complete(self: Any) -> None:
        self._forget_head()
        # A server may ignore an offer (RFC 9110, 7.8). Websockets are refused later.
        offers = {value.lower() for name, value in self.headers if name == b"upgrade"}
        if self.parser.should_upgrade() and offers and b"websocket" not in offers:
            self._is_offer = True
            return
        super().on_headers_complete()  # type: ignore[misc]
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _until_closed(self.cycle)

    def on_message_complete(self: Any) -> None:
        if not self._is_offer:
            super().on_message_complete()  # type: ignore[misc]

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


def _until_closed(cycle: Any) -> Any:
    """The `send` for HTTP/1.0, which knows no chunks: a reply without a length ends by closing."""
    send, has_length = cycle.send, False

    async def send_on(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_on


@functools.cache
def _protocol_class() -> Any:
    base: Any = module_of(
        "gateway", "uvicorn.protocols.http.httptools_impl", "otel_rollout.gateway"
    ).HttpToolsProtocol

    class Protocol(_Connection, base):  # type: ignore[misc]
        pass

    return Protocol
