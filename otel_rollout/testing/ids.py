"""Reproducible ids for traces."""

import itertools
import threading

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SequentialIdGenerator(IdGenerator):
    """Trace ids 1, 2, 3, ... and span ids 1, 2, 3, ... for reproducible traces. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trace_ids, self._span_ids = itertools.count(1), itertools.count(1)

    def generate_trace_id(self) -> int:
        with self._lock:
            return next(self._trace_ids)

    def generate_span_id(self) -> int:
        with self._lock:
            return next(self._span_ids)
