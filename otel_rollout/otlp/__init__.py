"""Read and write spans: files, the collector, Jaeger, ClickHouse, Phoenix, MLflow.

`read` takes any of these sources. Every reader yields `SpanRecord`s, which `reconstruct` takes, one
at a time, so a file may be larger than the memory. The protobuf package, an HTTP client and the SDK
are loaded only by the functions and classes that need them.
"""

from typing import TYPE_CHECKING

from otel_rollout.first_use import load_on_first_use
from otel_rollout.otlp.clickhouse import read_clickhouse
from otel_rollout.otlp.json_lines import read_json, read_json_lines
from otel_rollout.otlp.rotation import files_of, inode_of, parts_of, rotated_beside
from otel_rollout.otlp.source import read

if TYPE_CHECKING:
    from otel_rollout.otlp.jaeger import find_jaeger, read_jaeger
    from otel_rollout.otlp.mlflow import read_mlflow
    from otel_rollout.otlp.phoenix import read_phoenix
    from otel_rollout.otlp.protobuf import read_protobuf
    from otel_rollout.otlp.sizes import size_of
    from otel_rollout.otlp.splitting import SplittingSpanExporter
    from otel_rollout.otlp.writing import JsonLinesSpanExporter
else:
    __getattr__ = load_on_first_use(
        __name__,
        {
            "jaeger": ("find_jaeger", "read_jaeger"),
            "mlflow": ("read_mlflow",),
            "phoenix": ("read_phoenix",),
            "protobuf": ("read_protobuf",),
            "sizes": ("size_of",),
            "splitting": ("SplittingSpanExporter",),
            "writing": ("JsonLinesSpanExporter",),
        },
    )

__all__ = [
    "JsonLinesSpanExporter",
    "SplittingSpanExporter",
    "files_of",
    "find_jaeger",
    "inode_of",
    "parts_of",
    "read",
    "read_clickhouse",
    "read_jaeger",
    "read_json",
    "read_json_lines",
    "read_mlflow",
    "read_phoenix",
    "read_protobuf",
    "rotated_beside",
    "size_of",
]
