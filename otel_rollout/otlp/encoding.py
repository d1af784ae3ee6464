"""Spans as OTLP, in protobuf and in JSON: one walk over a span, which copies no text.

The encoder of OpenTelemetry copies each text eleven times, since every message around it is made of
a copy. The nested dicts that are made here become a message, or JSON, in one call.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceState

from otel_rollout import semconv as sc
from otel_rollout.otlp.json import camel_case
from otel_rollout.wire import dumps

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

logger = logging.getLogger("otel_rollout")

PIECE = 1 << 18
"""Bytes after which a line ends, and characters that are encoded in one call, at most."""
_MOST_LEVELS = 89
"""Levels of messages around a list or mapping, at most: protobuf reads 100, those of a span too."""
_KNOWN_REMOTE, _REMOTE = 0x100, 0x200
"""`SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK` and `SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK`."""
_TWO_63 = 1 << 63
_encode = msgspec.json.Encoder().encode
_camel_case = cache(camel_case)


class EncodedSpan(ReadableSpan):
    """A span as the request that `encode_spans` has made of it alone."""

    def __init__(self, data: bytes) -> None:
        super().__init__("", resource=Resource.get_empty())
        self.data = data


def encode_spans(spans: Iterable[ReadableSpan]) -> ExportTraceServiceRequest:
    """The request with these spans, as OpenTelemetry's function of this name makes it.

    What is no value of OTLP is left out, and logged: text that is no UTF-8, an integer of more than
    64 bits, any other type.
    """
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2  # loaded when needed

    encoding, rows, encoded = _Protobuf(), list[tuple[ReadableSpan, Any]](), list[bytes]()
    for span in spans:
        if isinstance(span, EncodedSpan):
            encoded.append(span.data)
        else:
            rows.append((span, encoding.span(span)))
    request = trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=encoding.resource_spans(rows)
    )
    for data in encoded:
        request.MergeFromString(data)
    return request


def json_lines(spans: Iterable[ReadableSpan]) -> Iterator[bytes]:
    """The spans as OTLP/JSON objects, each on a line with its newline.

    A line ends with the span after which it has `PIECE` bytes. Left out is what `encode_spans`
    leaves out, but text that is no UTF-8, which is escaped.
    """
    encoding, rows, size = _Json(), list[tuple[ReadableSpan, list[bytes]]](), 0
    for span in spans:
        rows.append((span, encoding.span(span)))
        size += sum(map(len, rows[-1][1]))
        if size >= PIECE:
            yield encoding.line(rows)
            rows, size = [], 0
    if rows:
        yield encoding.line(rows)


def plain(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes as a plain dict: the SDK's mapping takes a lock at every access."""
    return attributes.copy() if hasattr(attributes, "copy") else attributes


class _Protobuf:
    """Messages as dicts of their fields, as protobuf's constructors take them."""

    STRING, BOOL, INT, DOUBLE = "string_value", "bool_value", "int_value", "double_value"
    BYTES, ARRAY, PAIRS = "bytes_value", "array_value", "kvlist_value"

    def message(self, **fields: Any) -> dict[str, Any]:
        """A message with these fields, of which empty ones are not there."""
        return fields

    def text(self, text: str) -> Any:
        """A text of the user's. UnicodeEncodeError for what cannot be sent."""
        if not text.isascii():
            text.encode()
        return text

    def name(self, text: str | None) -> Any:
        """A text that a message is not sent without."""
        return text and text.encode("utf-8", "replace").decode()

    def id(self, number: int, size: int) -> Any:
        return number.to_bytes(size, "big")

    def scalar(self, value: float | bytes) -> Any:
        """An integer, a float or bytes."""
        return value

    def resource_spans(self, rows: Iterable[tuple[ReadableSpan, Any]]) -> list[Any]:
        """`ResourceSpans` of spans, each with what it was encoded to.

        Spans of several groups of rollouts are not in one `ScopeSpans`: a load balancer that sends
        by an attribute looks at the first span of each.
        """
        groups: dict[int, tuple[Resource, dict[tuple[Any, str], list[Any]]]] = {}
        for span, encoded in rows:
            # By identity: the SDK makes JSON of a resource to hash it.
            _, scopes = groups.setdefault(id(span.resource), (span.resource, {}))
            there = plain(span.attributes or {})
            group = str(there.get(sc.ROLLOUT_OUTER_GROUP_ID) or there.get(sc.ROLLOUT_GROUP_ID))
            scopes.setdefault((span.instrumentation_scope or None, group), []).append(encoded)
        return [
            self.message(
                resource=self.message(attributes=self._attributes(resource.attributes)),
                scope_spans=[self._scope_spans(scope, each) for (scope, _), each in scopes.items()],
                schema_url=self.name(resource.schema_url),
            )
            for resource, scopes in groups.values()
        ]

    def _scope_spans(self, scope: InstrumentationScope | None, spans: list[Any]) -> Any:
        if scope is None:
            return self.message(scope={}, spans=spans)
        about = self.message(
            name=self.name(scope.name),
            version=self.name(scope.version),
            attributes=self._attributes(scope.attributes),
        )
        return self.message(scope=about, spans=spans, schema_url=self.name(scope.schema_url))

    def span(self, span: ReadableSpan) -> Any:
        """`Span`: fields of one span."""
        context, parent, state = span.context, span.parent, span.context.trace_state
        return self.message(
            trace_id=self.id(context.trace_id, 16),
            span_id=self.id(context.span_id, 8),
            trace_state=self.name(_of_state(state)) if state else None,
            parent_span_id=self.id(parent.span_id, 8) if parent else None,
            name=self.name(span.name),
            kind=span.kind.value + 1,
            start_time_unix_nano=span.start_time and self.scalar(span.start_time),
            end_time_unix_nano=span.end_time and self.scalar(span.end_time),
            attributes=self._attributes(span.attributes),
            **self._rest(span),
        )

    def _rest(self, span: ReadableSpan) -> dict[str, Any]:
        """The fields of a span after its attributes."""
        status = span.status
        return {
            "events": [
                self.message(
                    name=self.name(event.name),
                    time_unix_nano=event.timestamp and self.scalar(event.timestamp),
                    attributes=self._attributes(event.attributes),
                    dropped_attributes_count=event.dropped_attributes,
                )
                for event in span.events
            ],
            "links": [
                self.message(
                    trace_id=self.id(link.context.trace_id, 16),
                    span_id=self.id(link.context.span_id, 8),
                    attributes=self._attributes(link.attributes),
                    dropped_attributes_count=link.dropped_attributes,
                    flags=_flags(link.context),
                )
                for link in span.links
            ],
            "status": self.message(
                code=status.status_code.value, message=self.name(status.description)
            ),
            "dropped_attributes_count": span.dropped_attributes,
            "dropped_events_count": span.dropped_events,
            "dropped_links_count": span.dropped_links,
            "flags": _flags(span.parent),
        }

    def _attributes(self, attributes: Mapping[str, Any] | None) -> Any:
        rows = []
        for key, value in plain(attributes or {}).items():
            if type(value) is str and value.isascii() and key.isascii():
                rows.append({"key": key, "value": {self.STRING: value}})
                continue
            try:
                rows.append({"key": self.text(key), "value": self._value(value)})
            except (TypeError, ValueError, AttributeError) as error:
                logger.warning("the attribute %r is not exported: %.200s", key, error)
        return rows

    def _value(self, value: Any, levels: int = 0) -> dict[str, Any]:
        """`AnyValue`: in so many levels of messages. TypeError and ValueError if it is none."""
        if isinstance(value, str):
            return {self.STRING: self.text(value)}
        if isinstance(value, bool):
            return {self.BOOL: value}
        if isinstance(value, int):
            if not -_TWO_63 <= value < _TWO_63:
                raise ValueError("an integer of more than 64 bits")
            return {self.INT: self.scalar(value)}
        if isinstance(value, float):
            return {self.DOUBLE: self.scalar(value)}
        if value is None:
            return {}
        if isinstance(value, bytes):
            return {self.BYTES: self.scalar(value)}
        if levels > _MOST_LEVELS:
            raise ValueError("it is nested too deep")
        if isinstance(value, Sequence):
            values = [self._value(each, levels + 2) for each in value]
            return {self.ARRAY: self.message(values=values)}
        if isinstance(value, Mapping):
            pairs = [
                {"key": self.text(str(key)), "value": self._value(each, levels + 3)}
                for key, each in value.items()
            ]
            return {self.PAIRS: self.message(values=pairs)}
        raise TypeError(f"no value of OTLP: {type(value).__name__}")


class _Json(_Protobuf):
    """Messages as OTLP/JSON has them: without what is empty, ids in hex, integers as text.

    A span is a list of pieces of JSON, since its texts are long: they are copied once, into a line.
    """

    STRING, BOOL, INT, DOUBLE = "stringValue", "boolValue", "intValue", "doubleValue"
    BYTES, ARRAY, PAIRS = "bytesValue", "arrayValue", "kvlistValue"

    def line(self, rows: Sequence[tuple[ReadableSpan, list[bytes]]]) -> bytes:
        """The line of spans."""
        marks = [(span, msgspec.Raw(b"\0%d\0" % number)) for number, (span, _) in enumerate(rows)]
        around = _encode({"resourceSpans": self.resource_spans(marks)}).split(b"\0")
        pieces = [around[0]]
        for number, after in zip(around[1::2], around[2::2], strict=True):
            pieces += rows[int(number)][1]
            pieces.append(after)
        return b"".join([*pieces, b"\n"])

    def span(self, span: ReadableSpan) -> list[bytes]:
        context, parent, state = span.context, span.parent, span.context.trace_state
        head = b'{"traceId":"%032x","spanId":"%016x"' % (context.trace_id, context.span_id)
        if state:
            head += b',"traceState":%b' % _quoted(_of_state(state))
        if parent:
            head += b',"parentSpanId":"%016x"' % parent.span_id
        if span.name:
            head += b',"name":%b' % _quoted(span.name)
        head += b',"kind":%d' % (span.kind.value + 1)
        if span.start_time:
            head += b',"startTimeUnixNano":"%d"' % span.start_time
        if span.end_time:
            head += b',"endTimeUnixNano":"%d"' % span.end_time
        if pairs := self._pairs(span.attributes):
            pairs = [b',"attributes":[', pairs[0][1:], *pairs[1:], b"]"]
        return [head, *pairs, self._after(span)]

    def _after(self, span: ReadableSpan) -> bytes:
        """The end of a span, after its attributes."""
        dropped = span.dropped_attributes or span.dropped_events or span.dropped_links
        if dropped or span.events or span.links or not span.status.is_unset:
            return b"," + _encode(self.message(**self._rest(span)))[1:]
        return b',"status":{},"flags":%d}' % _flags(span.parent)

    def _attributes(self, attributes: Mapping[str, Any] | None) -> Any:
        pairs = b"".join(self._pairs(attributes))
        return msgspec.Raw(b"[%b]" % pairs[1:]) if pairs else []

    def _pairs(self, attributes: Mapping[str, Any] | None) -> list[bytes]:
        """Pieces of attributes, each of which begins with a comma."""
        found = list[bytes]()
        for key, value in plain(attributes or {}).items():
            try:
                if type(value) is str and len(value) <= PIECE and value.isascii():
                    found += (_head(key), _encode(value), b"}}")
                elif isinstance(value, str):
                    found += (_head(key), *_text(value), b"}}")
                elif type(value) is int and -_TWO_63 <= value < _TWO_63:
                    found.append(b'%b"%d"}}' % (_head(key, b'{"intValue":'), value))
                else:
                    found += (_head(key, b""), _encode(self._value(value)), b"}")
            except (TypeError, ValueError, AttributeError) as error:
                logger.warning("the attribute %r is not exported: %.200s", key, error)
        return found

    def message(self, **fields: Any) -> dict[str, Any]:
        return {_camel_case(k): v for k, v in fields.items() if v or isinstance(v, dict)}

    def text(self, text: str) -> Any:
        is_plain = type(text) is str and len(text) <= PIECE and text.isascii()
        return text if is_plain else msgspec.Raw(b"".join(_text(text)))

    def name(self, text: str | None) -> Any:
        return text and self.text(text)

    def id(self, number: int, size: int) -> Any:
        return number.to_bytes(size, "big").hex()

    def scalar(self, value: float | bytes) -> Any:
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        if isinstance(value, int):
            return int.__repr__(value)
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@lru_cache(1024)
def _head(key: str, after: bytes = b'{"stringValue":') -> bytes:
    """The JSON of an attribute before its text, or before another value."""
    return b',{"key":%b,"value":%b' % (b"".join(_text(key)), after)


def _text(text: str) -> list[bytes]:
    """The JSON of a text, piece by piece, since the interpreter waits for each."""
    pieces = [_quoted(text[at : at + PIECE])[1:-1] for at in range(0, len(text), PIECE)]
    return [b'"', *pieces, b'"']


def _quoted(text: str) -> bytes:
    """The JSON of a text; lone surrogates are escaped."""
    try:
        return _encode(text)
    except UnicodeEncodeError:
        return dumps(text).encode()


def _of_state(state: TraceState) -> str:
    return ",".join(f"{key}={value}" for key, value in state.items())


def _flags(context: SpanContext | None) -> int:
    """The flags of a span with this parent, or of a link to it."""
    return _KNOWN_REMOTE | (_REMOTE if context and context.is_remote else 0)
