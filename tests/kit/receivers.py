"""Receivers of OTLP over real HTTP and gRPC that have limits, refuse, are away, or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from types import TracebackType
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout.otlp import read_protobuf
from otel_rollout.spans import SpanRecord

TOO_LARGE, BUSY, AWAY, FULL = 413, 429, 503, 507
"""Refusals, by HTTP status; over gRPC RESOURCE_EXHAUSTED twice, and UNAVAILABLE."""
UNANSWERED = -1
"""The request is taken, and the connection closed without an answer."""


class Receiver:
    """What both have: the requests that came, and what they took."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.refuse: Callable[[int], int] = lambda size: TOO_LARGE if size > self.max_bytes else 0
        """Gives the answer to a request of so many bytes. 0: it is taken."""
        self.go = threading.Event()
        """Not set: requests are not answered."""
        self.go.set()
        self.sizes: list[int] = []
        """Bytes of each request with spans that was taken."""
        self.refused: list[int] = []
        """Bytes of each request that was refused, where this receiver is asked at all."""
        self.spans: list[SpanRecord] = []
        self.wait = 0
        """Seconds that a refusal asks to wait. 0: it does not."""
        self.rejected = 0
        """Spans that are rejected of each request that is taken."""
        self.keys = set[str | None]()
        """What requests had in the header `authorization`."""
        self._lock = threading.Lock()

    def take(self, body: bytes) -> int:
        """Take a request, or refuse it; its answer."""
        self.go.wait(60)
        with self._lock:
            answer = self.refuse(len(body))
            if answer > 0:
                self.refused.append(len(body))
            elif body:
                self.sizes.append(len(body))
                self.spans += read_protobuf(body)
            return answer

    def response(self) -> ExportTraceServiceResponse:
        """The answer to a request that is taken."""
        partial = ExportTracePartialSuccess(rejected_spans=self.rejected, error_message="why not")
        return ExportTraceServiceResponse(partial_success=partial if self.rejected else None)

    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)


class HttpReceiver(Receiver):
    """OTLP/HTTP on a port of this host."""

    def __init__(self, max_bytes: int = 20 << 20, port: int = 0) -> None:
        super().__init__(max_bytes)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.keys.add(self.headers["authorization"])
                answer = receiver.take(body)
                if answer == UNANSWERED:
                    self.close_connection = True
                    return
                content = b"" if answer else receiver.response().SerializeToString()
                self.send_response(answer or 200)
                if answer and receiver.wait:
                    self.send_header("Retry-After", str(receiver.wait))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HttpReceiver:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    def exporter(self, timeout: float = 10) -> SpanExporter:
        return OTLPSpanExporter(f"{self.url}/v1/traces", timeout=timeout)


class GrpcReceiver(Receiver):
    """OTLP/gRPC on a port of this host; gRPC itself refuses what is too large."""

    def __init__(self, max_bytes: int = 4 << 20, port: int = 0) -> None:
        super().__init__(max_bytes)
        grpc: Any = pytest.importorskip("grpc")
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._server = grpc.server(
            ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", max_bytes)]
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"Export": handler})]
        )
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def _export(self, body: bytes, context: Any) -> Any:
        self.keys.add(dict(context.invocation_metadata()).get("authorization"))
        if answer := self.take(body):
            codes = import_module("grpc").StatusCode
            exhausted = answer in (TOO_LARGE, BUSY)
            if self.wait:
                details, status = import_module("google.rpc.error_details_pb2"), Status(code=14)
                status.details.add().Pack(details.RetryInfo(retry_delay={"seconds": self.wait}))
                found = status.SerializeToString()
                context.set_trailing_metadata((("grpc-status-details-bin", found),))
            context.abort(codes.RESOURCE_EXHAUSTED if exhausted else codes.UNAVAILABLE, "no")
        return self.response()

    def __enter__(self) -> GrpcReceiver:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.go.set()
        self._server.stop(None).wait(5)

    def exporter(self, timeout: float = 10) -> SpanExporter:
        module = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        made: SpanExporter = module.OTLPSpanExporter(self.url, insecure=True, timeout=timeout)
        return made
