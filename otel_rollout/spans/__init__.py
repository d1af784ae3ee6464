"""What is on a span: any span as plain data, and the exchange span, written and read. Pure."""

from otel_rollout.spans.copies import united as united
from otel_rollout.spans.exchange import EXACT_SOURCE as EXACT_SOURCE
from otel_rollout.spans.exchange import LARGE as LARGE
from otel_rollout.spans.exchange import Exchange as Exchange
from otel_rollout.spans.exchange import Supplied as Supplied
from otel_rollout.spans.exchange import TokenPath as TokenPath
from otel_rollout.spans.exchange import digest_of as digest_of
from otel_rollout.spans.exchange import extend_tokens as extend_tokens
from otel_rollout.spans.exchange import unread as unread
from otel_rollout.spans.reader import DIFFERS as DIFFERS
from otel_rollout.spans.reader import WAS_CUT as WAS_CUT
from otel_rollout.spans.reader import ExchangeReader as ExchangeReader
from otel_rollout.spans.reader import absent as absent
from otel_rollout.spans.record import AttributeValue as AttributeValue
from otel_rollout.spans.record import SpanEvent as SpanEvent
from otel_rollout.spans.record import SpanKey as SpanKey
from otel_rollout.spans.record import SpanRecord as SpanRecord
from otel_rollout.spans.record import as_record as as_record
from otel_rollout.spans.record import as_records as as_records
from otel_rollout.spans.record import carried as carried
from otel_rollout.spans.record import label as label
from otel_rollout.spans.record import unchecked_record as unchecked_record
from otel_rollout.spans.seals import numbers_of as numbers_of
from otel_rollout.spans.seals import with_lengths as with_lengths
from otel_rollout.spans.writer import ExchangeWriter as ExchangeWriter
