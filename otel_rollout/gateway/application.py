"""The gateway as a bare ASGI application: requests get their rollout, are recorded and passed on.

    application = otel_rollout.gateway.application("http://127.0.0.1:8000/v1", secret="...")

Any ASGI server runs it, and it can be mounted below a path of another application. The context
that is current where it runs does not decide whose call a request is.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import BinaryIO, TypeAlias
from weakref import WeakKeyDictionary

from otel_rollout.errors import ConfigurationError
from otel_rollout.gateway.control import Control, ControlReply
from otel_rollout.gateway.exchange import Cut, Exchange, Request
from otel_rollout.gateway.http import (
    ClientGone,
    HeldBodies,
    Receive,
    Refusal,
    Scope,
    Send,
    answer,
    is_foreign,
    plain_body,
    read_body,
    refuse,
)
from otel_rollout.gateway.paths import Asked, asked_of, is_open, name_of, plain_path, raw_path
from otel_rollout.gateway.renderers import Renderer, next_prompt_by
from otel_rollout.gateway.replies import KeyRemover
from otel_rollout.gateway.rollout_parts import HeldRollouts
from otel_rollout.gateway.supply import Supply, SupplyingUpstream
from otel_rollout.gateway.tokens import TokenError, Tokens
from otel_rollout.gateway.upstream import Upstream
from otel_rollout.hosts import is_named
from otel_rollout.record import (
    NOTHING,
    OUTSIDE,
    ActiveRollout,
    Added,
    Carried,
    ExchangeRecorder,
    attached,
    came_back,
    guarded,
    note_uncaptured,
    record_call,
    rollout_secret,
    running_rollout,
    with_fields,
)
from otel_rollout.wire import Json, asks_a_model, endpoint_of, hiding_of

logger = logging.getLogger("otel_rollout")
_CARRIER = (b"traceparent", b"tracestate", b"baggage")
_CONTROL = (b"authorization", b"content-type")
"""Headers that the control routes read."""
_ROOT = b"otel-rollout-root"
"""The address that a client reached another process of the gateway at."""


MAX_BODY_BYTES = 128 << 20
"""Bytes of a request: more than any conversation with its images has."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a gateway."""

    upstream: str
    """Address of the model server, with or without `/v1`."""
    api_key: str | None = None
    """Key of the model server, sent instead of the clients' keys. None: clients send their own."""
    secret: str | None = None
    """Signs tokens, and opens the control routes. None: that of `configure` or of the environment
    (OTEL_ROLLOUT_SECRET); without one, a random one is made."""
    max_body_bytes: int = MAX_BODY_BYTES
    """A longer request is refused with 413, and not held."""
    body_seconds: float = 60.0
    """How long a client may take for the next piece of a request's body."""
    request_seconds: float = 600.0
    """How long a client may take for the whole body of a request."""
    max_held_bytes: int = 1 << 30
    """Bytes of all requests that are under way; a request with which they are more gets 503."""
    max_held_bytes_of_rollout: int = 256 << 20
    """The same for the requests of one rollout."""
    header_seconds: float = 30.0
    """How long a client may take for the head of a request, where `serve` serves."""
    connect_seconds: float = 30.0
    """How long connecting to the model server may take. A reply may take as long as it does."""
    token_seconds: float = 24 * 3600.0
    """How long the token of a rollout is good for, at most: it ends with its rollout."""
    idle_seconds: float = 600.0
    """How long the part of a rollout of another process is kept open without a call."""
    rollout_seconds: float = 3600.0
    """How long a rollout that was begun by `POST /rollouts` may be without a call, and how long a
    token is good for in another process than its rollout's."""
    most_parts: int = 4096
    """How many parts of rollouts of other processes are open at a time."""
    most_rollouts: int = 10_000
    """How many rollouts that were begun by `POST /rollouts` are open at a time; a further one is
    refused with 429."""
    allow_paths: Sequence[str] = ()
    """Further paths of the model server that the token of a rollout opens, each with all below it;
    `("/",)` is every path."""
    holder: str | None = None
    """Address of the gateway that holds what `POST /rollouts` begins; such requests are passed on
    to it. None: this one does."""
    versions: BinaryIO | None = None
    """A file of what several processes know of policy versions: written by the one that holds what
    `POST /rollouts` begins, read by the others. None: there is one process."""
    renderer: str | Renderer | None = None
    """Sends the token ids that a conversation has instead of its messages: "server", the name of a
    tokenizer, or an object with `bridge_to_next_turn`. None: requests pass as they are."""

    def __post_init__(self) -> None:
        for name in ("api_key", "secret"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                kind = "an empty text" if value == "" else type(value).__name__
                raise ConfigurationError(f"gateway {name}: expected a text, or None, got {kind}")
        for name in LIMITS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigurationError(f"gateway {name}: expected more than 0, got {value!r}")
        for path in self.allow_paths:
            if not path.startswith("/") or plain_path(path.encode()) != path:
                raise ConfigurationError(
                    f"gateway allow_paths: expected paths such as /v1/files, got {path!r}"
                )


LIMITS: dict[str, type[int | float]] = {
    each.name: int if each.type == "int" else float
    for each in fields(Settings)
    if each.type in ("int", "float")
}
"""The options that are numbers above 0, with their types."""


_Recorded: TypeAlias = tuple[ExchangeRecorder | None, bytes, Added]


class Application:
    """The gateway as an ASGI application; `close` ends what it holds."""

    def __init__(self, settings: Settings) -> None:
        self.header_seconds = settings.header_seconds
        self._api_key = settings.api_key
        given = settings.secret.encode() if settings.secret is not None else rollout_secret()
        self.made_secret = None if given else secrets.token_urlsafe(32)
        """The secret that was made. None: one was given."""
        self.names: frozenset[str] | None = None
        """The names in `Host` by which the control routes are asked. None: any."""
        self._secret = given or str(self.made_secret).encode()
        self._remover = None if settings.api_key is None else KeyRemover(settings.api_key)
        self._allow_paths = settings.allow_paths
        if self._allow_paths:
            logger.warning(
                "gateway allow_paths: agents may send any request to %s%s",
                ", ".join(self._allow_paths),
                ", with the model server's key" if self._api_key else "",
            )
        elsewhere = settings.rollout_seconds if settings.holder is None else None
        self.tokens = Tokens(self._secret, settings.token_seconds, elsewhere)
        self.held = HeldRollouts(
            most=settings.most_parts, idle_seconds=settings.idle_seconds, versions=settings.versions
        )
        self._upstream = Upstream(
            settings.upstream, api_key=settings.api_key, connect_seconds=settings.connect_seconds
        )
        self._holder = settings.holder and Upstream(
            settings.holder, api_key=None, connect_seconds=settings.connect_seconds
        )
        renderer = settings.renderer
        self._supply = None if renderer is None else Supply(next_prompt_by(renderer))
        self.fields: WeakKeyDictionary[ActiveRollout, Json] = WeakKeyDictionary()
        """The fields of `request_token_ids` where the address of a rollout was asked for."""
        self._control = Control(
            *(self.held, self.tokens, self._secret),
            *(settings.rollout_seconds, settings.most_rollouts),
        )
        self._most = settings.max_body_bytes
        self._bodies = HeldBodies(settings.max_held_bytes, settings.max_held_bytes_of_rollout)
        self._read_body = partial(
            read_body,
            most=settings.max_body_bytes,
            seconds=settings.body_seconds,
            all_seconds=settings.request_seconds,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        with attached(OUTSIDE), guarded("a request to the gateway was not answered"):
            await self._answer(scope, receive, send)

    async def close(self) -> None:
        """End every rollout that it holds, and the connections to the model server."""
        self.held.close()
        await self._upstream.close()
        if self._holder:
            await self._holder.close()

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                if message["type"] == "lifespan.startup":
                    await send({"type": "lifespan.startup.complete"})
                else:
                    await self.close()
                    await send({"type": "lifespan.shutdown.complete"})
                    return
        await send({"type": "websocket.close", "code": 1003})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = raw_path(scope)
        asked = asked_of(path, scope["headers"])
        try:
            if is_foreign(scope):
                raise Refusal(403, "web pages of other sites get no answer", "permission_error")
            if self._control.is_at(asked.path) and asked.token is None:
                if self.names is not None and not is_named(scope["headers"], self.names):
                    raise Refusal(403, "expected a Host of this machine", "permission_error")
                self._control.check(scope, asked.path)
                with self._bodies.body("") as hold:
                    body = await self._read_body(scope, receive, hold)
                    reply = await self._controlled(scope, asked.path, body)
                await answer(send, *reply)
                return
            carried = self._rollout_of(asked, scope)
            self._check_path(carried, asked, scope)
            with self._bodies.body(carried.rollout_id) as hold:
                body = await self._read_body(scope, receive, hold)
                plain = plain_body(scope, body, hold, self._most)
                with self.held.call(carried) as active:
                    recorded = self._recorded(active, asked, scope, body, *plain)
                    if recorded[2].fields and plain[0] is not None:
                        body = plain[0]  # what fields are added to is sent on decoded
                    await self._pass_on(active, asked, scope, body, recorded, receive, send)
        except Refusal as refusal:
            await refuse(send, refusal, asked.path)
        except (ClientGone, Cut):
            return  # uvicorn closes a connection whose reply is not complete

    async def _controlled(self, scope: Scope, path: str, body: bytes) -> ControlReply:
        """The reply of the control routes, from the gateway that holds the rollouts."""
        if not self._holder:
            return self._control.answer(scope, path, body, _root_of(scope))
        headers = [(k.decode(), v.decode("latin-1")) for k, v in scope["headers"] if k in _CONTROL]
        headers.append((_ROOT.decode(), _root_of(scope)))
        try:
            async with await self._holder.ask(scope["method"], path, headers, body) as reply:
                return reply.status, await reply.read(), reply.content_type
        except self._holder.errors as error:
            raise Refusal(503, f"what holds the rollouts is away: {error!r:.200}") from None

    def _rollout_of(self, asked: Asked, scope: Scope) -> Carried:
        """The rollout that a request belongs to. Refusal for one that proves none."""
        if asked.token is not None:
            try:
                token = self.tokens.read(asked.token)
            except TokenError as error:
                raise Refusal(401, str(error), "authentication_error") from None
            if token.is_own and running_rollout(token.carried.rollout_id) is None:
                raise Refusal(401, "the rollout of this token has ended", "authentication_error")
            return token.carried
        carried = self._in_headers(scope)
        if carried is None:
            raise Refusal(401, _NAMES_NONE, "authentication_error")
        return carried

    def _check_path(self, carried: Carried, asked: Asked, scope: Scope) -> None:
        """Refusal for a path that a token does not open."""
        method, path = scope["method"], asked.path[:_LONGEST_PATH]
        if asked.is_plain and is_open(method, asked.path, self._allow_paths):
            return
        if asked.is_plain and any(
            name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]
        ):  # clients then ask by HTTP
            raise Refusal(404, "the gateway has no websockets", "not_found_error")
        with self.held.call(carried) as active:
            self._count_unknown(active, scope, asked.path, _REFUSED)
        if not asked.is_plain:
            raise Refusal(400, f"{path}: expected a path without .., //, ; or encoded slashes")
        raise Refusal(403, _NOT_OPEN.format(method=method, path=path), "permission_error")

    def _count_unknown(self, active: ActiveRollout, scope: Scope, path: str, by: str) -> None:
        """Count a request that may be a model call, at a path where none is known."""
        content_type = dict(scope["headers"]).get(b"content-type", b"")
        if scope["method"] == "POST" and (asks_a_model(path) or b"json" in content_type):
            note_uncaptured(active, by, path)

    def _in_headers(self, scope: Scope) -> Carried | None:
        """The rollout that `traceparent` and `baggage` name, and prove with the secret."""
        found = {name.decode(): value for name, value in scope["headers"] if name in _CARRIER}
        if "baggage" not in found:
            return None
        carried = Carried.by({k: v.decode("latin-1") for k, v in found.items()}, self._secret)
        if carried is not None:
            came_back(carried)
        return carried

    async def _pass_on(
        self,
        active: ActiveRollout,
        asked: Asked,
        scope: Scope,
        body: bytes,
        recorded: _Recorded,
        receive: Receive,
        send: Send,
    ) -> None:
        recorder, sent, added = recorded
        hiding = hiding_of(added.fields, body)
        without = {b"content-encoding"} if added.fields else set[bytes]()
        if hiding is not None or self._remover:
            without.add(b"accept-encoding")
        request = request_to(self._upstream, asked, scope, body, sent, added, without)
        upstream = self._upstream_of(active, recorder, asked.path)
        exchange = Exchange(upstream, recorder, hiding, self._remover, send)
        await exchange.pass_on(request, receive)

    def _upstream_of(
        self, active: ActiveRollout, recorder: ExchangeRecorder | None, path: str
    ) -> Upstream | SupplyingUpstream:
        """The model server as a request asks it."""
        name = endpoint_of(path)
        if self._supply is None or recorder is None or name is None:
            return self._upstream
        return SupplyingUpstream(self._upstream, self._supply, active, recorder, name)

    def _recorded(
        self,
        active: ActiveRollout,
        asked: Asked,
        scope: Scope,
        body: bytes,
        plain: bytes | None,
        encoding: str,
    ) -> _Recorded:
        """The recorder of a request, its body as the model server gets it, and what was added.

        An encoded body is sent on as it came, unless something is added to it.
        """
        with guarded("a call that passes through the gateway is not recorded"):
            name = name_of(scope["method"], asked.path)
            if name is None:
                if not is_open(scope["method"], asked.path):
                    self._count_unknown(active, scope, asked.path, _PASSED)
                return None, body, NOTHING
            if plain is None or (encoding and not plain.lstrip().startswith(b"{")):
                note_uncaptured(active, _ENCODED.format(encoding=encoding[:_LONGEST_NAME]), name)
                return None, body, NOTHING
            headers = self._secrets(asked, scope)
            fields = self.fields.get(active)
            sent, added = with_fields(name, plain, headers, fields, self._upstream.root)
            recorder = record_call(active, name)
            recorder.asks_for(added)
            recorder.request(sent, headers)
            return recorder, sent if added.fields else body, added
        return None, body, NOTHING

    def _secrets(self, asked: Asked, scope: Scope) -> Mapping[str, str]:
        """The headers of a request, and the secrets that an error might repeat."""
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        headers["gateway-token"] = asked.token or ""
        headers["gateway-key"] = self._api_key or ""
        return headers


_NAMES_NONE = (
    "this request names no rollout: use a base URL with /r/TOKEN/v1, the API key or-TOKEN, or the "
    "headers traceparent and baggage of a rollout, with its proof"
)

_NOT_OPEN = (
    "{method} {path} is not open to a rollout: its token opens model calls, counting their tokens, "
    "and GET of /v1/models, /health, /version and /ping. The gateway's option --allow-path PREFIX "
    "opens more"
)
_REFUSED = "the gateway, which refuses what is no model API,"
_PASSED = "the gateway, which knows no model API there,"
_ENCODED = "the gateway, which cannot decode its Content-Encoding {encoding!r},"
_LONGEST_NAME = 40
"""Characters of an encoding in a warning."""
_LONGEST_PATH = 200
"""Characters of a path in an error."""


def request_to(
    upstream: Upstream,
    asked: Asked,
    scope: Scope,
    body: bytes,
    sent: bytes,
    added: Added,
    without: Collection[bytes],
) -> Request:
    """A request as the model server gets it: with this body, and without some of its headers."""
    headers = upstream.request_headers(
        scope["headers"],
        key_is_token=asked.key_is_token,
        key_name="x-api-key" if "/v1/messages" in asked.path else "authorization",
        without=without,
    )
    query = scope["query_string"].decode("latin-1")
    target = f"{asked.path}?{query}" if query else asked.path
    return Request(scope["method"], target, headers, sent or None, added, body)


def _root_of(scope: Scope) -> str:
    """The address that the client reached the application at."""
    headers: dict[bytes, str] = {k: v.decode("latin-1") for k, v in scope["headers"]}
    if _ROOT in headers:
        return headers[_ROOT]
    host = headers.get(b"host", "")
    return f"{scope.get('scheme', 'http')}://{host}{scope.get('root_path', '')}"
