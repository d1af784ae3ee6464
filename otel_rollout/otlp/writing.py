"""Span exporters: to a file without a collector, and in batches small enough for receivers."""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
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
        self._appended = Path(os.path.abspath(path))
        """The file, also after the process has gone to another folder."""
        check_folder(path, type(self).__name__)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans. FAILURE, and an entry in the log, if they cannot all be written."""
        try:
            line = to_json_line(spans).encode()
            with self._lock:
                append_line(self._appended, line)
        except Exception:  # a span exporter does not raise
            logger.exception("%d spans were not written to %s", len(spans), self.path)
            return SpanExportResult.FAILURE
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


class SplittingSpanExporter(SpanExporter):
    """Passes spans on to `exporter` in batches of at most `max_bytes` (estimated).

    Batch processors count spans, but receivers limit bytes (4 MiB over gRPC, 20 MiB over HTTP by
    default), and all spans of a refused batch are lost. A single larger span is sent alone.
    """

    def __init__(self, exporter: SpanExporter, max_bytes: int = 3 << 20) -> None:
        self._exporter = exporter
        self._max_bytes = max_bytes

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send every batch. FAILURE if any of them failed."""
        results = [self._exporter.export(batch) for batch in self._batches(spans)]
        failed = SpanExportResult.FAILURE in results
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def _batches(self, spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
        batch: list[ReadableSpan] = []
        total = 0
        for span in spans:
            size = size_of(span)
            if batch and total + size > self._max_bytes:
                yield batch
                batch, total = [], 0
            batch.append(span)
            total += size
        if batch:
            yield batch

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the wrapped exporter."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Shut the wrapped exporter down."""
        self._exporter.shutdown()


def size_of(span: ReadableSpan) -> int:
    """Approximate size of a span in bytes; only texts are ever large."""
    size = 512
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        for key, value in (attributes or {}).items():
            size += len(key) + 16
            if isinstance(value, str):
                size += len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
            elif isinstance(value, Sequence):
                size += 16 * len(value) + sum(len(v) for v in value if isinstance(v, str))
    return size
