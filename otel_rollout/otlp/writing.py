"""A span exporter to a file, for runs without a collector."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout.lines import append_at_once, append_line, check_folder
from otel_rollout.otlp.encoding import json_lines

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
            lines = b"".join(json_lines(spans))
            with self._lock:
                append_line(self._appended, lines)
        except Exception:  # a span exporter does not raise
            logger.exception("%d spans were not written to %s", len(spans), self.path)
            return SpanExportResult.FAILURE
        self._failed = False
        return SpanExportResult.SUCCESS

    def export_at_once(self, span: ReadableSpan) -> None:
        """Append a span before this returns, without waiting for other writers of the file."""
        append_at_once(self._appended, b"".join(json_lines([span])))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered."""
        return True

    def shutdown(self) -> None:
        """Nothing is held."""
