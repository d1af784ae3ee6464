"""Spans as OTLP: as OpenTelemetry's own encoder writes them, and in pieces."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as theirs
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from otel_rollout import semconv as sc
from otel_rollout.otlp import encoding, read_json, read_protobuf, use_encoder, writing
from otel_rollout.otlp.encoding import PIECE, encode_spans, json_lines
from tests.kit.receivers import GrpcReceiver, HttpReceiver
from tests.otlp.any_span import spans


def in_hex(value: Any) -> Any:
    """Protobuf's JSON with the ids of OTLP/JSON."""
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            key: base64.b64decode(inner).hex() if key in ids else in_hex(inner)
            for key, inner in value.items()
        }
    return [in_hex(each) for each in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(spans)
def test_a_span_is_encoded_as_by_opentelemetry(span: ReadableSpan):
    """Field by field, in protobuf and in JSON; compared as text, since NaN is no NaN."""
    expected = theirs([span])
    assert str(encode_spans([span])) == str(expected)
    as_json = in_hex(MessageToDict(expected, use_integers_for_enums=True))
    (line,) = json_lines([span])
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    written = json.loads(line)
    assert json.dumps(written, sort_keys=True) == json.dumps(as_json, sort_keys=True)


def ended(name: str = "x", provider: Any = None, **rows: Any) -> ReadableSpan:
    span: Any = (provider or TracerProvider()).get_tracer("x").start_span(name, attributes=rows)
    span.end()
    found = span._readable_span()
    assert isinstance(found, ReadableSpan)
    return found


def test_spans_are_grouped_by_resource_and_scope():
    """As OpenTelemetry groups them, in one request and on one line."""
    providers = [TracerProvider(resource=Resource({"number": number})) for number in range(2)]
    several = [
        ended(str(number), providers[number % 2] if number < 5 else providers[0])
        for number in range(7)
    ]
    assert str(encode_spans(several)) == str(theirs(several))
    (line,) = json_lines(several)
    assert [span.name for span in read_json(json.loads(line))] == list("0245613")
    assert encode_spans([]).SerializeToString() == b""
    assert list(json_lines([])) == []


class Text(str):
    """A text of another type, which JSON takes as a text all the same."""


def nested(levels: int) -> Any:
    return (nested(levels - 1),) if levels else ()


LEFT_OUT: Mapping[str, Any] = {"big": 1 << 63, "small": -(1 << 63) - 1, "deep": nested(60)}
KEPT: Mapping[str, Any] = {
    "text": 'é\u2028\0\x1f"\\</script>💾',
    "of a type": Text("é"),
    "largest": (1 << 63) - 1,
    "smallest": -(1 << 63),
    "infinite": -math.inf,
    "tiny": 5e-324,
    "zero": -0.0,
    "bytes": b"\xff\x00",
    "list": (True, 1, 0.1, "x", None),
}


@pytest.mark.parametrize("lone", ["\ud83d", "é\udc00 x", "\udfff" * 3])
def test_what_is_no_value_of_otlp_is_left_out_alone(lone: str, caplog: pytest.LogCaptureFixture):
    """It is named in the log; a lone surrogate is written to a file, and not sent."""
    span = ended("named", **KEPT, **LEFT_OUT, lone=lone, **{f"key {lone}": 1})
    kept = {**KEPT, "list": [*KEPT["list"]]}
    (sent,) = read_protobuf(encode_spans([span]).SerializeToString())
    assert repr(sent.attributes) == repr({**kept, "of a type": "é"})
    for name in (*LEFT_OUT, "lone"):
        assert f"the attribute {name!r} is not exported" in caplog.text
    (line,) = json_lines([span])
    (written,) = read_json(json.loads(line))
    assert written.attributes == {**kept, "lone": lone, f"key {lone}": 1}
    assert repr(written.attributes["zero"]) == "-0.0"


def test_a_name_that_is_no_utf_8_is_sent_in_part():
    """The span is not lost: what cannot be sent of its name is a question mark."""
    (sent,) = read_protobuf(encode_spans([ended("a\ud800b")]).SerializeToString())
    assert sent.name == "a?b"
    (line,) = json_lines([ended("a\ud800b")])
    assert next(read_json(json.loads(line))).name == "a\ud800b"


def test_no_long_text_is_encoded_at_once(monkeypatch: pytest.MonkeyPatch):
    """Whoever waits for the interpreter waits for a piece, also while a line is put together."""
    encoded = list[int]()
    encode = encoding._encode

    def counted(value: Any) -> bytes:
        encoded.append(len(value) if isinstance(value, str) else len(encode(value)))
        return encode(value)

    monkeypatch.setattr(encoding, "_encode", counted)
    texts = {"mixed": 'a"é\ud800' * PIECE, "ascii": 'ab\0"' * PIECE}
    (line,) = json_lines([ended("long", **texts, left_out=["x" * PIECE * 2, 1 << 63], after="0")])
    written = next(read_json(json.loads(line)))
    assert (written.name, written.attributes) == ("long", {**texts, "after": "0"})
    assert sorted(encoded)[-10:] == [PIECE] * 10
    assert sorted(encoded)[-11] < 2000  # what is around these texts


def test_lines_are_short():
    """One ends with the span after which it has 256 KiB; all spans are there, in their order."""
    short = [ended(str(number), text="x" * (PIECE // 10)) for number in range(50)]
    several = [*short, ended("long", text="x" * 2 * PIECE), *short]
    lines = list(json_lines(several))
    names = [[span.name for span in read_json(json.loads(line))] for line in lines]
    assert [name for line in names for name in line] == [span.name for span in several]
    assert [len(line) for line in names] == [10] * 5 + [1] + [10] * 5
    assert max(len(line) for line in lines if b'"long"' not in line) < PIECE * 1.1


def test_spans_of_two_groups_are_apart():
    """A load balancer looks at the first span of each resource, scope and trace only."""
    own, outer, provider = sc.ROLLOUT_GROUP_ID, sc.ROLLOUT_OUTER_GROUP_ID, TracerProvider()
    groups: list[dict[str, str]] = [{own: "g"}, {own: "h"}, {}, {own: "g"}, {outer: "h"}]
    groups.append({own: "h", outer: "g"})
    several = [ended(f"{number}", provider, **group) for number, group in enumerate(groups)]
    (resource,) = encode_spans(several).resource_spans
    names = [[span.name for span in scope.spans] for scope in resource.scope_spans]
    assert names == [["0", "3", "5"], ["1", "4"], ["2"]]


def test_a_text_is_copied_once(monkeypatch: pytest.MonkeyPatch):
    """OTLP exporters encode with our function, those of others with their own."""
    requests = list[int]()

    def counted(several: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        requests.append(len(several))
        return encode_spans(several)

    monkeypatch.setattr(writing, "encode_spans", counted)
    for kind in (HttpReceiver, GrpcReceiver):
        with kind() as receiver:
            exporter = receiver.exporter()
            assert exporter.export([ended("plain")]) is SpanExportResult.SUCCESS
            assert requests == []
            assert use_encoder(exporter)
            assert exporter.export([ended("a"), ended("b")]) is SpanExportResult.SUCCESS
            assert requests == [2]
            requests.clear()
            exporter.shutdown()
        assert receiver.names() == ["a", "b", "plain"]

    class Own(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    own = Own()
    assert not use_encoder(own)
    assert "export" not in vars(own)
