"""Exporters of spans: one to a file, and those of OpenTelemetry, changed in three respects."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout.lines import append_at_once, append_lines, check_folder
from otel_rollout.otlp.encoding import encode_spans, json_lines

logger = logging.getLogger("otel_rollout")


class JsonLinesSpanExporter(SpanExporter):
    """Appends spans to a file, as lines of OTLP/JSON, as the collector's file exporter does.

        configure(span_exporters=[JsonLinesSpanExporter("spans.jsonl")])

    For runs without a collector; `read` reads the file. A line ends with the span after which it
    has 256 KiB. A batch that a full disk does not take whole is taken back and reported as a
    failure.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        """The file. It is created when the first spans are written."""
        self._lock = threading.Lock()
        self._appended = Path(os.path.abspath(path))
        """The file, also after the process has gone to another folder."""
        check_folder(path, type(self).__name__)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans. FAILURE, and an entry in the log, if they cannot all be written."""
        try:
            lines = list(json_lines(spans))
            with self._lock:
                append_lines(self._appended, *lines)
        except Exception:  # a span exporter does not raise
            logger.exception("%d spans were not written to %s", len(spans), self.path)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def export_at_once(self, span: ReadableSpan) -> None:
        """Append a span before this returns, without waiting for other writers of the file."""
        append_at_once(self._appended, b"".join(json_lines([span])))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered."""
        return True

    def shutdown(self) -> None:
        """Nothing is held."""


def use_encoder(exporter: SpanExporter) -> bool:
    """Let an OTLP exporter of OpenTelemetry, HTTP or gRPC, use our `encode_spans`.

    Its method that calls theirs is the same with another function of that name. False: none calls
    it, and the exporter stays as it is.
    """
    from opentelemetry.exporter.otlp.proto.common import trace_encoder

    methods = ("export", "_translate_data")
    for name in methods:
        if _globals(exporter, name).get("encode_spans") is trace_encoder.encode_spans:
            _with_global(exporter, name, "encode_spans", encode_spans)
    return any(_globals(exporter, name).get("encode_spans") is encode_spans for name in methods)


def try_once(exporter: SpanExporter) -> None:
    """Let an OTLP exporter of OpenTelemetry, HTTP or gRPC, send each request once.

    By itself it tries for ten seconds, and whoever waits for it cannot try anything else.
    """
    for owner in (exporter, getattr(exporter, "_client", None)):
        for name in ("export", "_export"):
            for retries in ("_MAX_RETRYS", "_MAX_RETRIES"):
                _with_global(owner, name, retries, 1)


def prepare_once(exporter: SpanExporter) -> None:
    """Let an OTLP exporter over HTTP prepare a request once; the next ones have another body.

    `requests` looks into the environment and the user's files for proxies, certificates and
    passwords, and joins and checks headers: three fifths of what a request costs. It does so again
    where headers have changed, and always where there are cookies or there is `auth`.
    """
    session = _session_of(exporter)
    is_known = type(session).__module__ == "requests.sessions"  # another may sign each request
    if session is None or not is_known or "prepare_request" in vars(session):
        return
    prepare, read = session.prepare_request, session.merge_environment_settings
    kept: list[tuple[Any, Any]] = []
    found = dict[tuple[str, str], Any]()

    def prepared(request: Any) -> Any:
        data, headers = request.data, {**request.headers}
        about = {**vars(request), "data": None, "headers": headers}, {**session.headers}
        if session.auth or session.cookies or not (data and isinstance(data, bytes)):
            return prepare(request)
        made = next((made for before, made in kept if before == about), None)
        if made is None:
            made = prepare(request)
            made.body = None
            kept[:] = [(about, made)]
        made = made.copy()
        made.body, made.headers["Content-Length"] = data, str(len(data))
        return made

    def read_once(url: str, *given: Any) -> Any:
        key = url, repr(given)
        if key not in found:
            found[key] = read(url, *given)
        return found[key]

    session.prepare_request, session.merge_environment_settings = prepared, read_once


def _session_of(exporter: SpanExporter) -> Any:
    """The session of `requests` that an OTLP exporter sends with; None: it has another way."""
    client = getattr(exporter, "_client", None)
    for owner in (exporter, getattr(client, "_transport", None)):
        session = getattr(owner, "_session", None)
        if isinstance(getattr(session, "hooks", None), dict):
            return session
    return None


Note = Callable[[float, int, str], None]
"""Takes what a receiver answers: the seconds after which it is to be asked again (0: it does not
say), how many spans of a request that it took it rejects for good, and why."""


def watch_answers(exporter: SpanExporter, note: Note) -> None:
    """Let an OTLP exporter of OpenTelemetry, HTTP or gRPC, note each answer that it gets.

    By itself it reads neither what was rejected nor, when it is not to try again, how long to wait.
    """

    def noted(response: Any, **_: Any) -> None:
        note(*_http_answer(response))

    if (session := _session_of(exporter)) is not None:
        given = session.hooks.get("response", [])
        session.hooks["response"] = [*([given] if callable(given) else given), noted]
    stub, channel = getattr(exporter, "_stub", None), getattr(exporter, "_channel", None)
    if stub is not None and channel is not None:
        watched: Any = exporter
        watched._stub = lambda channel: _WatchedStub(stub(channel), note)  # for a further channel
        watched._client = watched._stub(channel)


class _WatchedStub:
    """The stub of the service that takes spans over gRPC."""

    def __init__(self, stub: Any, note: Note) -> None:
        self._stub, self._note = stub, note

    def Export(self, **given: Any) -> Any:  # noqa: N802 - gRPC's name
        try:
            response = self._stub.Export(**given)
        except Exception as error:
            self._note(_retry_delay(error), 0, "")
            raise
        self._note(*_partial(response))
        return response


def _partial(response: Any) -> tuple[float, int, str]:
    partial = response.partial_success
    return 0.0, max(0, partial.rejected_spans), partial.error_message


def _http_answer(response: Any) -> tuple[float, int, str]:
    """The answer that a response of `requests` is."""
    if response.status_code in (429, 503):
        return _seconds(response.headers.get("retry-after", "")), 0, ""
    try:
        content = response.content if response.status_code == 200 else b""
        if not content:
            return 0.0, 0, ""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2  # loaded when needed

        return _partial(trace_service_pb2.ExportTraceServiceResponse.FromString(content))
    except Exception:  # protobuf's own; a receiver may answer anything
        return 0.0, 0, ""


def _seconds(text: str) -> float:
    """The seconds of a Retry-After header, which may be a date."""
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _retry_delay(error: Any) -> float:
    """The seconds that the details of an error of gRPC name (`RetryInfo`)."""
    try:
        from google.rpc import error_details_pb2, status_pb2  # the gRPC exporter needs them

        info = error_details_pb2.RetryInfo()
        found = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        for detail in status_pb2.Status.FromString(found).details:
            detail.Unpack(info)  # False, and nothing is done, for a detail of another type
    except Exception:  # protobuf's own; a receiver may answer anything
        return 0.0
    seconds: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return max(0.0, seconds)


def _globals(owner: object, name: str) -> dict[str, Any]:
    """The global names of a method. {}: there is no such method in Python."""
    method = getattr(owner, name, None)
    function = getattr(method, "__func__", None)
    return function.__globals__ if isinstance(function, FunctionType) else {}


def _with_global(owner: object, name: str, global_name: str, value: object) -> None:
    """Let a method of this object see another value of a global name, if it uses that."""
    names = _globals(owner, name)
    if global_name not in names:
        return
    was = getattr(owner, name).__func__
    if global_name not in was.__code__.co_names:
        return
    rest = name, was.__defaults__, was.__closure__
    function = FunctionType(was.__code__, {**names, global_name: value}, *rest)
    function.__kwdefaults__ = was.__kwdefaults__
    setattr(owner, name, MethodType(function, owner))
