"""Spans that are not as they were written: whatever they hold, reading them never fails."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import Trajectory, reconstruct
from otel_rollout.otlp import read_json, read_protobuf
from otel_rollout.spans.record import SpanRecord, as_record
from tests.dialects.compare import ALL, spans_of
from tests.kit.fuzzing import changed, read_all

pytestmark = pytest.mark.slow

every_dialect = pytest.mark.parametrize("name", ALL)
JUNK = [
    *(
        "",
        "null",
        "0",
        "[]",
        "{}",
        "[1]",
        '["a"]',
        "[null]",
        '[{"role": 1}]',
        '{"a": 1}',
        "x" * 128,
    ),
    *('[{"role": "user", "parts": "x"}]', '[{"role": "user", "parts": [1]}]', '{"messages": 1}'),
    *('[{"type": "text"}]', '[[{"role": "user"}]]', '{"messages": [1], "tools": 2}', "[" * 9999),
    *('{"choices": 1}', '{"choices": [1]}', '{"choices": [{"message": 1}]}', '{"output": 1}'),
    *('{"choices": [{"index": "a", "message": {"tool_calls": [1]}}]}', '{"usage": 1}'),
    *('{"message": 1}', '{"choices": [{"token_ids": 5, "logprobs": 1}], "usage": 3}'),
    *('{"choices": [{"token_ids": [1], "logprobs": {"content": 7}}], "prompt_token_ids": 1}'),
    *(None, True, 0, -1, 1.5, [1, 2], ["a"], b"\xff"),
]


def damaged(span: SpanRecord, draw: random.Random) -> Iterator[SpanRecord]:
    """The span with some attributes replaced, cut or gone."""
    attributes: dict[str, Any] = dict(span.attributes)
    for key in draw.sample(sorted(attributes), min(len(attributes), draw.randint(0, 4))):
        value = attributes[key]
        damage = draw.choice(("gone", "cut", "junk", "junk"))
        if damage == "gone":
            del attributes[key]
        elif damage == "cut" and isinstance(value, str):
            attributes[key] = value[: draw.randrange(len(value) + 1)]
        else:
            attributes[key] = draw.choice(JUNK)
    if draw.random() < 0.9:
        yield replace(span, attributes=attributes, dropped_attributes=draw.choice((0, 0, 3)))


@every_dialect
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_no_damage_makes_reading_fail(name: str, seed: int):
    """Attributes that are gone, cut or of any other shape give calls, and no exception."""
    draw = random.Random(seed)
    spans = [record for span in spans_of(name) for record in damaged(span, draw)]
    for trajectory in reconstruct(spans, infer_rollouts=True):
        data = trajectory.to_dict()
        assert Trajectory.from_dict(json.loads(json.dumps(data))).to_dict() == data
        assert trajectory.warnings[0].startswith("inferred:")
        for completion in trajectory.completions:
            assert not completion.exact
            assert not (completion.trainable and completion.message is None)
            read = (completion.token_ids, completion.logprobs, completion.tools, completion.usage)
            assert all(value is None or isinstance(value, list | dict) for value in read)
            assert isinstance(completion.request_messages, list)
        for history in trajectory.histories:
            assert history.messages()


def test_how_many_attributes_were_dropped_is_read_from_every_source():
    """The count of attributes that the SDK dropped comes with spans, OTLP/JSON and protobuf."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(span_limits=SpanLimits(max_span_attributes=2))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("tests").start_as_current_span("call") as span:
        for number in range(5):
            span.set_attribute(f"key.{number}", number)
    (ended,) = exporter.get_finished_spans()
    message = encode_spans([ended])
    assert as_record(ended).dropped_attributes == 3
    (record,) = read_protobuf(message.SerializeToString())
    assert record.dropped_attributes == 3
    data = MessageToDict(message)
    for span_data in data["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        span_data |= {"traceId": record.trace_id, "spanId": record.span_id}
    assert [r.dropped_attributes for r in read_json(data)] == [3]


@every_dialect
def test_no_change_of_a_span_makes_reading_fail(name: str):
    """Nor do fields of wrong types, and JSON that was changed in one place."""
    draw = random.Random(name)
    spans = spans_of(name)
    for number in range(20):
        change = changed(spans, draw)
        try:
            for trajectory in reconstruct(change.spans, infer_rollouts=True):
                if trajectory.trace_id in change.touched:
                    read_all(trajectory)
        except Exception as error:
            raise AssertionError(f"change {number}: {change.what}") from error
