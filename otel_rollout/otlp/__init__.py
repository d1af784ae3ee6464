"""Read and write spans: files, the collector, Jaeger, ClickHouse, Phoenix, MLflow.

`read` takes any of these sources. Every reader yields `SpanRecord`s, which `reconstruct` takes, one
at a time, so a file may be larger than the memory. The protobuf package, an HTTP client and the SDK
are loaded only by the functions and classes that need them.
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
