"""What is on a span: any span as plain data, and the exchange span, written and read. Pure."""

from otel_rollout.spans.as_line import from_line, to_line
from otel_rollout.spans.copies import united
from otel_rollout.spans.exchange import (
    EXACT_SOURCE,
    LARGE,
    Exchange,
    Supplied,
    TokenPath,
    context_key,
    digest_of,
    extend_tokens,
    unread,
)
from otel_rollout.spans.reader import DIFFERS, WAS_CUT, ExchangeReader, absent
from otel_rollout.spans.record import (
    AttributeValue,
    SpanEvent,
    SpanKey,
    SpanRecord,
    as_record,
    as_records,
    carried,
    label,
    unchecked_record,
)
from otel_rollout.spans.seals import numbers_of, with_lengths
from otel_rollout.spans.writer import COPIES, CutReply, ExchangeWriter

__all__ = [
    "COPIES",
    "DIFFERS",
    "EXACT_SOURCE",
    "LARGE",
    "WAS_CUT",
    "AttributeValue",
    "CutReply",
    "Exchange",
    "ExchangeReader",
    "ExchangeWriter",
    "SpanEvent",
    "SpanKey",
    "SpanRecord",
    "Supplied",
    "TokenPath",
    "absent",
    "as_record",
    "as_records",
    "carried",
    "context_key",
    "digest_of",
    "extend_tokens",
    "from_line",
    "label",
    "numbers_of",
    "to_line",
    "unchecked_record",
    "united",
    "unread",
    "with_lengths",
]
