"""A span exporter to a file, for runs without a collector."""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout.lines import append_line, check_folder

logger = logging.getLogger("otel_rollout")


class JsonLinesSpanExporter(SpanExporter):
    """Appends spans to a file, one line for each batch, as the collector's file exporter does.

        configure(span_exporters=[JsonLinesSpanExporter("spans.jsonl")])

    For runs without a collector; `read` reads the file. What a full disk does not take whole is
    taken back and reported as a failure.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        """The file. It is created when the first spans are written."""
        self._lock = threading.Lock()
        self._failed = False
        """True if the last spans could not be written."""
        self._appended = Path(os.path.abspath(path))
        """The file, also after the process has gone to another folder."""
        check_folder(path, type(self).__name__)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans. FAILURE, and an entry in the log, if they cannot all be written.

        No spans: nothing is written, and the result is that of the call before.
        """
        if not spans:
            return SpanExportResult.FAILURE if self._failed else SpanExportResult.SUCCESS
        self._failed = True
        try:
            line = to_json_line(spans).encode()
            with self._lock:
                append_line(self._appended, line)
        except Exception:  # a span exporter does not raise
            logger.exception("%d spans were not written to %s", len(spans), self.path)
            return SpanExportResult.FAILURE
        self._failed = False
        return SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered."""
        return True

    def shutdown(self) -> None:
        """Nothing is held."""


def to_json_line(spans: Sequence[ReadableSpan]) -> str:
    """The spans as one OTLP/JSON object, on one line with a newline."""
    data = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in data.get("resourceSpans", ()):
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for link in (span, *span.get("links", ())):
                    _ids_to_hex(link)
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


def _ids_to_hex(row: dict[str, Any]) -> None:
    """Convert ids from base64 (protobuf's own JSON) to hex (OTLP/JSON)."""
    for key in ("traceId", "spanId", "parentSpanId"):
        if key in row:
            row[key] = base64.b64decode(row[key]).hex()
