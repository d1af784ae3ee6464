"""Any span that the SDK may hold: what hypothesis draws."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

texts = st.text(max_size=40) | st.sampled_from(["", "é" * 300, "💾" * 200, "x" * 5000, '"\n' * 99])
keys = st.text(min_size=1, max_size=12) | st.sampled_from(["k" * 300, "ключ"])
numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.booleans()
values: Any = st.recursive(
    texts | numbers | st.binary(max_size=200) | st.none(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
attributes = st.dictionaries(keys, values, max_size=5)
states = st.dictionaries(
    st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.from_regex(r"[a-z]{1,90}", fullmatch=True)
).map(lambda rows: TraceState(list(rows.items())))
contexts = st.builds(
    SpanContext,
    trace_id=st.integers(1, (1 << 128) - 1),
    span_id=st.integers(1, (1 << 64) - 1),
    is_remote=st.booleans(),
    trace_flags=st.just(TraceFlags(1)),
    trace_state=states,
)
times = st.integers(0, (1 << 64) - 1)
statuses = st.builds(Status, st.just(StatusCode.ERROR), texts) | st.just(Status())
resources = st.builds(Resource, attributes, texts)
scopes = st.builds(InstrumentationScope, texts, texts, texts, attributes)
spans = st.builds(
    ReadableSpan,
    name=texts,
    context=contexts,
    parent=contexts | st.none(),
    resource=resources,
    attributes=attributes,
    events=st.lists(st.builds(Event, texts, attributes, times), max_size=2),
    links=st.lists(st.builds(Link, contexts, attributes), max_size=2),
    kind=st.sampled_from(SpanKind),
    status=statuses,
    start_time=times,
    end_time=times,
    instrumentation_scope=scopes | st.none(),
)
