"""The page over HTTP, to its owner only: on this machine, under a path that nobody can guess.

A request without the secret, for another name than this machine's, or for anything else
gets 404 and no reason. All is read-only. The files of the page are read at the start, so that no
path reaches a file.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from otel_rollout.errors import ConfigurationError, RolloutError
from otel_rollout.extras import to_install
from otel_rollout.hosts import LOOPBACK, is_ip, is_loopback, is_named, why_not_listening
from otel_rollout.trajectory import UNREADABLE
from otel_rollout.view.answers import Answers, Query
from otel_rollout.view.built_page import Page, as_json
from otel_rollout.wire import Json

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise ConfigurationError(
        f"the page of otel-rollout view needs the package {error.name}: "
        f"{to_install('otel-rollout[view]')}"
    ) from None

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
REACHABLE = "OTEL_ROLLOUT_VIEW_REACHABLE"
"""Environment variable that allows an address that other machines reach."""
_GRACE = 1
"""Seconds that answers have to end once the server is stopped."""

_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


class Server:
    """Serves the page on a free port, or the one that is given, until `stop`.

    host: an address of this machine. ConfigurationError for one that others reach, unless
    `reachable` is True.
    """

    def __init__(
        self,
        answers: Answers,
        page: Page,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        reachable: bool = False,
    ) -> None:
        if not reachable and not is_loopback(host):
            raise ConfigurationError(
                f"--host {host}: others could read the trajectories under this address; expected "
                f"127.0.0.1, ::1 or localhost ({REACHABLE}=1 in the environment takes any: the "
                f"page then is as safe as the network, and the secret in its address)"
            )
        self._socket = _listening(host, port)
        self._secret = secrets.token_urlsafe(24)
        port = self._socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/{self._secret}/"
        """The address of the page."""
        guarded = _Guarded(_application(answers, page), self._secret, _names(host))
        config = uvicorn.Config(
            guarded,
            interface="asgi3",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Answer until `stop`, or an interrupt, which ends it without an error."""
        with suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`; any thread may ask for it."""
        self._server.should_exit = True


class _Guarded:
    """An application behind a secret; every answer has the headers that keep a browser safe."""

    def __init__(self, application: Any, secret: str, names: frozenset[str] | None) -> None:
        self._application = application
        self._secret = secret.encode()
        self._names = names

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return

        async def safely(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower().encode() for name in _HEADERS}
                kept = [(k, v) for k, v in message["headers"] if k.lower() not in own]
                added = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        # The bytes as they came: what is decoded twice, or normalised, is another path.
        raw: bytes = scope["raw_path"]
        first, _, rest = raw.partition(b"?")[0].removeprefix(b"/").partition(b"/")
        knows = hmac.compare_digest(first, self._secret)
        # Another name than this machine's leads here only by a trick.
        if not knows or not is_named(scope["headers"], self._names):
            await Response("not found", 404)(scope, receive, safely)
        else:
            path = "/" + rest.decode("ascii", "replace")
            inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
            await self._application(inner, receive, safely)


def _application(answers: Answers, page: Page) -> Starlette:
    """The page and its answers, to be read only.

    Blocking work is done in threads, as Starlette does for `def`.
    """

    def file(body: bytes, kind: str) -> Callable[[Request], Response]:
        return lambda _: Response(body, media_type=kind)

    def answer(of: Callable[[Query], Json]) -> Callable[[Request], Response]:
        return lambda request: _answered(of, request.query_params)

    found = {f"/{name}": file(*each) for name, each in page.files.items()}
    found |= {f"/api/{name}": answer(of) for name, of in answers.named().items()}
    # HEAD comes with GET.
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in found.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused})


def _answered(of: Callable[[Query], Json], query: Mapping[str, str]) -> Response:
    status = 200
    try:
        body = as_json(of(query))
    except LookupError as error:
        status, body = 404, as_json({"error": str(error)})
    except RolloutError as error:
        status, body = 400, as_json({"error": str(error)})
    except (*UNREADABLE, sqlite3.Error) as error:
        why = f"a trajectory, or the index, is damaged ({error!r:.200})"
        status, body = 404, as_json({"error": why})
    return Response(body, status, media_type="application/json")


def _refused(_: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return Response("read only" if status == 405 else "not found", status)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port <= 65_535:
        raise ConfigurationError(f"--{why_not_listening(host, port)}")
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(why_not_listening(host, port, error)) from None


def _names(host: str) -> frozenset[str] | None:
    """The names that a request may be for. None: any address that is a number, no name."""
    if is_ip(host) and ipaddress.ip_address(host).is_unspecified:
        return None
    return LOOPBACK | {host.lower()}
