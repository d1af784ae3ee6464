"""Spans from and to where they are kept: files, the collector, Jaeger, ClickHouse.

`read` takes any of them. Every reader gives `SpanRecord`s, which `reconstruct` takes. They are
read as they come, so a file may be larger than the memory.
"""

from otel_rollout.otlp.clickhouse import read_clickhouse
from otel_rollout.otlp.formats import read_json, read_json_lines, read_protobuf
from otel_rollout.otlp.jaeger import find_jaeger, read_jaeger
from otel_rollout.otlp.source import joined, read
from otel_rollout.otlp.writing import JsonLinesSpanExporter, SplittingSpanExporter

__all__ = [
    "JsonLinesSpanExporter",
    "SplittingSpanExporter",
    "find_jaeger",
    "joined",
    "read",
    "read_clickhouse",
    "read_jaeger",
    "read_json",
    "read_json_lines",
    "read_protobuf",
]
