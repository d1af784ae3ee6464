"""The size of a span in a request, and the same span cut to a size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.trace import Status, StatusCode

from otel_rollout import semconv as sc
from otel_rollout.otlp import size_of
from otel_rollout.otlp.splitting import cut_to
from tests.otlp.any_span import spans


@settings(max_examples=40, deadline=None)
@given(st.lists(spans, min_size=1, max_size=2))
def test_the_size_is_never_below_what_is_sent(several: list[ReadableSpan]):
    """A request of spans has at most the sum of their sizes: with events, links, any value."""
    assert encode_spans(several).ByteSize() <= sum(map(size_of, several))


@pytest.mark.parametrize("value", [True, 1, 0.5, "é", ("a",) * 3, (1, 2), b"x"])
def test_many_small_attributes_are_counted(value: Any):
    """A thousand of them, where a fixed size for a span would be far too small, and not twice."""
    provider = TracerProvider(span_limits=SpanLimits(max_span_attributes=2000))
    span: Any = provider.get_tracer("x").start_span("x")
    span.set_attributes({f"k{number}": value for number in range(1000)})
    span.end()
    exact = encode_spans([span]).ByteSize()
    assert exact <= size_of(span) <= 5 * exact


def span_of(**rows: Any) -> ReadableSpan:
    span: Any = TracerProvider().get_tracer("x").start_span("x", attributes=rows)
    span.add_event("said", {"prompt": "p" * 30_000})
    span.add_event("small", {"prompt": "p"})
    span.end()
    found = span._readable_span()
    assert isinstance(found, ReadableSpan)
    return found


def test_the_largest_texts_are_cut_and_it_is_said():
    """Those that must be, no other; the note is on the span, and all else is as it was."""
    span = span_of(large="é" * 50_000, small="kept", number=7, ids=tuple(range(2000)))
    cut = cut_to(span, 120_000)
    assert encode_spans([cut]).ByteSize() <= size_of(cut) <= 120_000
    rows = dict(cut.attributes or {})
    (note,) = rows.pop(sc.CUT_ATTRIBUTES)  # type: ignore[misc]
    kept = str(rows["large"])
    assert kept == "é" * len(kept)
    assert 1000 < len(kept) < 50_000
    assert note == f"large: the first {len(kept)} of 50000 characters"
    assert {**(span.attributes or {}), "large": kept} == rows
    assert cut.context == span.context
    assert [dict(event.attributes or {}) for event in cut.events] == [
        dict(event.attributes or {}) for event in span.events
    ]
    assert cut_to(cut, 120_000) is cut


def test_everything_that_may_be_large_is_cut():
    """Texts of events, lists, bytes and the status too; a kilobyte of each text stays."""
    tracer = TracerProvider().get_tracer("x")
    span: Any = tracer.start_span(
        "x", attributes={"list": ("x" * 100,) * 500, "bytes": b"b" * 9999}
    )
    span.add_event("said", {"prompt": "p" * 30_000})
    span.set_status(Status(StatusCode.ERROR, "e" * 20_000))
    span.end()
    cut = cut_to(span._readable_span(), 8000)
    assert size_of(cut) <= 8000
    assert (cut.attributes or {})["list"] == ()
    assert len(str((cut.events[0].attributes or {})["prompt"])) >= 1024
    assert len(cut.status.description or "") >= 1024
    assert cut.status.status_code is StatusCode.ERROR
    notes = " ".join((cut.attributes or {})[sc.CUT_ATTRIBUTES])  # type: ignore[arg-type]
    assert "list: the first 0 of 500 items" in notes
    assert "prompt of event 0: the first" in notes
    assert "the status's description: the first" in notes
    assert "bytes: the first" in notes


def test_what_is_small_stays():
    """A span that fits is given back as it is, and one of many small texts is never cut."""
    small = span_of(a="x")
    assert cut_to(small, size_of(small)) is small
    many = span_of(**{f"k{number}": "x" * 900 for number in range(100)})
    cut = cut_to(many, 100)
    assert (
        dict(cut.attributes or {}).keys() - {sc.CUT_ATTRIBUTES}
        == dict(many.attributes or {}).keys()
    )
    assert (cut.attributes or {})["k7"] == "x" * 900


@settings(max_examples=25, deadline=None)
@given(spans, st.integers(1, 30_000))
def test_a_cut_span_is_a_span(span: ReadableSpan, max_bytes: int):
    """Whatever is cut can be sent, is no larger than before, and has the same names."""
    cut = cut_to(span, max_bytes)
    encode_spans([cut])
    assert size_of(cut) <= max(max_bytes, size_of(span))
    assert [event.name for event in cut.events] == [event.name for event in span.events]
    assert dict(cut.attributes or {}).keys() >= dict(span.attributes or {}).keys()
