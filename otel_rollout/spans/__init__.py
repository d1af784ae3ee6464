"""What is on a span: any span as plain data, and the exchange span, written and read. Pure."""

from otel_rollout.spans.exchange import (
    EXACT_SOURCE,
    LARGE,
    Exchange,
    TokenPath,
    context_key,
    digest_of,
    extend_tokens,
)
from otel_rollout.spans.reader import ExchangeReader
from otel_rollout.spans.record import (
    AttributeValue,
    SpanEvent,
    SpanRecord,
    as_record,
    carried,
    label,
    unchecked_record,
    united,
    with_lengths,
)
from otel_rollout.spans.writer import COPIES, ExchangeWriter

__all__ = [
    "COPIES",
    "EXACT_SOURCE",
    "LARGE",
    "AttributeValue",
    "Exchange",
    "ExchangeReader",
    "ExchangeWriter",
    "SpanEvent",
    "SpanRecord",
    "TokenPath",
    "as_record",
    "carried",
    "context_key",
    "digest_of",
    "extend_tokens",
    "label",
    "unchecked_record",
    "united",
    "with_lengths",
]
