"""The look lane: LLM spans for people to look at, and the queue of spans on their way out."""

from otel_rollout.look import instrumentors
from otel_rollout.look.environment import otlp_exporters, otlp_metric_exporters
from otel_rollout.look.span_queue import SpanQueue

__all__ = ["SpanQueue", "instrumentors", "otlp_exporters", "otlp_metric_exporters"]
