"""Read and write spans: files, the collector, Jaeger, ClickHouse.

`read` takes any of these sources. Every reader yields `SpanRecord`s, which `reconstruct` takes, one
at a time, so a file may be larger than the memory. The protobuf package, an HTTP client and the SDK
are loaded only by the functions and classes that need them.
"""

from typing import TYPE_CHECKING

from otel_rollout.first_use import load_on_first_use
from otel_rollout.otlp.clickhouse import read_clickhouse
from otel_rollout.otlp.json_lines import read_json, read_json_lines
from otel_rollout.otlp.source import joined, read

if TYPE_CHECKING:
    from otel_rollout.otlp.jaeger import find_jaeger, read_jaeger
    from otel_rollout.otlp.protobuf import read_protobuf
    from otel_rollout.otlp.writing import JsonLinesSpanExporter, SplittingSpanExporter, size_of
else:
    __getattr__ = load_on_first_use(
        __name__,
        {
            "jaeger": ("find_jaeger", "read_jaeger"),
            "protobuf": ("read_protobuf",),
            "writing": ("JsonLinesSpanExporter", "SplittingSpanExporter", "size_of"),
        },
    )

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
    "size_of",
]
