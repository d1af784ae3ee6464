"""OTLP over gRPC and HTTP: bytes in, and an answer when they are safe; nothing is parsed here.

"retry" is UNAVAILABLE with RetryInfo, or 503 with Retry-After; never RESOURCE_EXHAUSTED, which
exporters do not repeat. What is refused for good is INVALID_ARGUMENT, or 400 or 413: collectors
repeat the rest.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from otel_rollout.extras import module_of
from otel_rollout.gateway import (
    ClientGone,
    HeldBodies,
    Receive,
    Refusal,
    Scope,
    Send,
    answer,
    is_foreign,
    read_body,
)
from otel_rollout.hosts import is_named, why_not_listening
from otel_rollout.receive.intake import Answer, Intake, Limits
from otel_rollout.wire import Json, dumps

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PATH = "/v1/traces"
_RETRY_SECONDS = 1
_SLOW_SECONDS = 60.0
"""Time between two pieces of a body."""
_WHOLE_SECONDS = 600.0
_TYPES = ("application/x-protobuf", "application/json")
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 3, 415: 3, 503: 14}
"""Codes of gRPC for statuses of HTTP."""


def is_allowed(token: str | None, given: str) -> bool:
    """True if an Authorization header has the token. None: there is none."""
    scheme, _, found = given.partition(" ")
    if token is None:
        return True
    return scheme.lower() == "bearer" and hmac.compare_digest(
        found.strip().encode(), token.encode()
    )


def _response(found: Answer) -> ExportTraceServiceResponse:
    if not found.rejected:
        return ExportTraceServiceResponse()
    partial = ExportTracePartialSuccess(rejected_spans=found.rejected, error_message=found.why)
    return ExportTraceServiceResponse(partial_success=partial)


def _status(code: int, message: str) -> Any:
    """A `google.rpc.Status`, as OTLP wants it."""
    rpc = module_of("receive", "google.rpc.status_pb2", "otel-rollout receive")
    return rpc.Status(code=code, message=message)


def _retry_details(why: str) -> tuple[tuple[str, bytes]]:
    """The metadata by which gRPC says when to try again."""
    details = module_of("receive", "google.rpc.error_details_pb2", "otel-rollout receive")
    status = _status(_CODES[503], why)
    status.details.add().Pack(details.RetryInfo(retry_delay={"seconds": _RETRY_SECONDS}))
    return (("grpc-status-details-bin", status.SerializeToString()),)


class GrpcEndpoint:
    """The gRPC server, in the running event loop, from `start` to `stop`."""

    def __init__(
        self, intake: Intake, limits: Limits, token: str | None, tls: tuple[bytes, bytes] | None
    ) -> None:
        self._grpc = module_of("receive", "grpc", "otel-rollout receive")
        self._aio = module_of("receive", "grpc.aio", "otel-rollout receive")
        self._intake, self._limits, self._token, self._tls = intake, limits, token, tls
        self._server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port. OSError if it is not free."""
        options = (
            # More than is taken: gRPC itself refuses what is longer still (RESOURCE_EXHAUSTED).
            ("grpc.max_receive_message_length", 2 * self._limits.body_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 64),
        )
        self._server = self._aio.server(options=options)
        handler = self._grpc.method_handlers_generic_handler(
            _METHOD[1:].partition("/")[0],
            {"Export": self._grpc.unary_unary_rpc_method_handler(self._export)},
        )
        self._server.add_generic_rpc_handlers((handler,))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                found = self._server.add_insecure_port(address)
            else:
                credentials = self._grpc.ssl_server_credentials([self._tls])
                found = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(why_not_listening(host, port, OSError(str(error)))) from None
        if not found:
            raise OSError(why_not_listening(host, port, OSError("it is in use")))
        await self._server.start()
        return int(found)

    async def stop(self) -> None:
        """Take no more; calls under way have a moment to end."""
        if self._server is not None:
            await self._server.stop(1)

    async def _export(self, body: bytes, context: Any) -> bytes:
        code = self._grpc.StatusCode
        if self._token is not None:
            metadata = dict(context.invocation_metadata() or ())
            if not is_allowed(self._token, str(metadata.get("authorization", ""))):
                await context.abort(code.UNAUTHENTICATED, "expected the token of this receiver")
        found = await asyncio.wrap_future(self._intake.submit(body, "", is_json=False))
        if found.kind == "retry":
            await context.abort(code.UNAVAILABLE, found.why, _retry_details(found.why))
        if found.kind == "refused":
            await context.abort(code.INVALID_ARGUMENT, found.why)
        return _response(found).SerializeToString()


class HttpEndpoint:
    """The ASGI application of the HTTP server.

    names: those by which it is reached, see `is_named`. metrics: gives the text of `/metrics`.
    """

    def __init__(
        self,
        intake: Intake,
        limits: Limits,
        token: str | None,
        names: frozenset[str] | None,
        metrics: Callable[[], str],
    ) -> None:
        self._intake, self._limits, self._token = intake, limits, token
        self._names, self._metrics = names, metrics
        self._held = HeldBodies(limits.waiting_bytes, limits.waiting_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        is_json = kind == _TYPES[1]
        try:
            self._check(scope, headers)
            if scope["path"] == "/metrics":
                await answer(send, 200, self._metrics().encode(), "text/plain; version=0.0.4")
                return
            if scope["path"] != _PATH:
                raise Refusal(404, f"expected {_PATH}, or /metrics")
            if scope["method"] != "POST":
                raise Refusal(405, "expected POST")
            if kind not in _TYPES:
                raise Refusal(415, f"expected Content-Type {' or '.join(_TYPES)}")
            found = await self._taken(scope, receive, headers, is_json=is_json)
            if found.kind == "retry":
                raise Refusal(503, found.why)
            if found.kind == "refused":
                raise Refusal(400, found.why)
            await answer(send, 200, _body(found, is_json=is_json), _TYPES[is_json])
        except ClientGone:
            return
        except Refusal as refusal:
            await _refuse(send, refusal, is_json=is_json)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        """Refusal unless the request may be made."""
        if not is_allowed(self._token, headers.get(b"authorization", "")):
            raise Refusal(401, "expected the token of this receiver: Authorization: Bearer TOKEN")
        if self._token is None and not is_named(scope["headers"], self._names):
            raise Refusal(403, "the request is for another host")
        if is_foreign(scope):
            raise Refusal(403, "a web page of another site sends this request")

    async def _taken(
        self, scope: Scope, receive: Receive, headers: dict[bytes, str], *, is_json: bool
    ) -> Answer:
        with self._held.body("") as hold:
            body = await read_body(
                scope,
                receive,
                hold,
                most=self._limits.body_bytes,
                seconds=_SLOW_SECONDS,
                all_seconds=_WHOLE_SECONDS,
            )
            encoding = headers.get(b"content-encoding", "").strip().lower()
            return await asyncio.wrap_future(self._intake.submit(body, encoding, is_json=is_json))


def _body(found: Answer, *, is_json: bool) -> bytes:
    if not is_json:
        return _response(found).SerializeToString()
    partial = {"rejectedSpans": str(found.rejected), "errorMessage": found.why}
    return dumps({"partialSuccess": partial} if found.rejected else {}).encode()


async def _refuse(send: Send, refusal: Refusal, *, is_json: bool) -> None:
    """Answer that a request is not taken."""
    code, message = _CODES.get(refusal.status, 2), refusal.message
    more: tuple[tuple[bytes, bytes], ...] = ()
    if refusal.status == 503:
        more += ((b"retry-after", b"%d" % _RETRY_SECONDS),)
    if refusal.status in (400, 408, 413, 503):
        more += ((b"connection", b"close"),)  # the rest of the body is not read
    if is_json:
        status: Json = {"code": code, "message": message}
        body = dumps(status).encode()
    else:
        body = _status(code, message).SerializeToString()
    await answer(send, refusal.status, body, _TYPES[is_json], more)
