"""Receivers of OTLP over real HTTP and gRPC that have limits, are away, or hang."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from types import TracebackType
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExporter

from otel_rollout.otlp import read_protobuf
from otel_rollout.spans import SpanRecord


class Receiver:
    """What both have: the requests that came, and what they took."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.go = threading.Event()
        """Not set: requests are not answered."""
        self.go.set()
        self.sizes: list[int] = []
        """Bytes of each request with spans that was taken."""
        self.refused: list[int] = []
        """Bytes of each request that was refused, where this receiver is asked at all."""
        self.spans: list[SpanRecord] = []
        self._lock = threading.Lock()

    def take(self, body: bytes) -> bool:
        """Take a request; False if it is too large."""
        self.go.wait(60)
        with self._lock:
            if len(body) > self.max_bytes:
                self.refused.append(len(body))
                return False
            if body:
                self.sizes.append(len(body))
                self.spans += read_protobuf(body)
            return True

    def names(self) -> list[str]:
        return sorted(span.name for span in self.spans)


class HttpReceiver(Receiver):
    """OTLP/HTTP on a port of this host; 413 for what is too large."""

    def __init__(self, max_bytes: int = 20 << 20, port: int = 0) -> None:
        super().__init__(max_bytes)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200 if receiver.take(body) else 413)
                self.send_header("Content-Length", "0")
                self.end_headers()

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
        received = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            response_serializer=received.ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._server = grpc.server(
            ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", max_bytes)]
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"Export": handler})]
        )
        self._response = received.ExportTraceServiceResponse
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def _export(self, body: bytes, _: object) -> Any:
        self.take(body)
        return self._response()

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
