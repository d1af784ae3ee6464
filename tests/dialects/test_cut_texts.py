"""Texts that a length limit cut: damage where something tells, named as lost where nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory, reconstruct
from otel_rollout.rebuild.dialects.call import Fact, ForeignCall, check_not_cut
from otel_rollout.spans.record import SpanRecord
from tests.dialects.compare import ALL, NAMES, spans_of, trajectories_of

pytestmark = pytest.mark.slow
LONG = ("long_text", "long_reply")


def of_scenario(name: str, scenario: str) -> list[SpanRecord]:
    trace_id = trajectories_of(name)[scenario].trace_id
    return [span for span in spans_of(name) if span.trace_id == trace_id]


def cut(span: SpanRecord, length: int) -> SpanRecord:
    """The span as a limit on the length of values leaves it."""
    values = {k: v[:length] if isinstance(v, str) else v for k, v in span.attributes.items()}
    return replace(span, attributes=values)


def only(spans: list[SpanRecord]) -> Trajectory:
    (trajectory,) = reconstruct(spans, infer_rollouts=True)
    return trajectory


def check(name: str, scenario: str, length: int) -> list[bool]:
    """For each call whose texts a limit cut, whether it is damaged; else it has to be named."""
    spans = of_scenario(name, scenario)
    whole = {c.span_id: c for c in only(spans).completions}
    damaged: list[bool] = []
    for read in only([cut(span, length) for span in spans]).completions:
        before = whole[read.span_id]
        if (read.request_messages, read.items) != (before.request_messages, before.items):
            damaged.append(bool(read.exchange.damage))
            assert read.exchange.damage or Fact.TEXT_END.value in read.lost
            assert not (read.exchange.damage and read.trainable)
    return damaged


@settings(max_examples=25)
@given(name=st.sampled_from(NAMES), scenario=st.sampled_from(LONG), length=st.integers(64, 9500))
@example(name="openllmetry-flat", scenario="long_text", length=5003)
def test_a_text_cut_at_any_length_is_damage_or_named(name: str, scenario: str, length: int):
    """No cut text passes for a whole one, wherever the limit is."""
    check(name, scenario, length)


@pytest.mark.parametrize("length", [64, 127, 1000, 1023, 4000, 4095, 4096, 8191])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_cut_at_a_usual_limit_is_damage(name: str, length: int):
    """Limits that are round, or a power of two, or one less, are recognised by the length."""
    for scenario in LONG:
        assert all(check(name, scenario, length))
        assert check(name, scenario, length)


@pytest.mark.parametrize("length", [999, 3777, 5003])
def test_a_reply_that_is_short_of_its_tokens_is_damage(length: int):
    """Our server's tokens are bytes: a reply with fewer bytes than tokens was cut."""
    damaged = check("openllmetry-flat", "long_reply", length)
    assert damaged
    assert all(damaged)


def test_whole_texts_are_not_damage():
    """Of the recorded calls only those are in question that hold the longest text of the trace."""
    for scenario in LONG:
        *rest, last = only(of_scenario("openllmetry-flat", scenario)).completions
        assert [c.exchange.damage for c in rest] == [[]] * len(rest)
        assert not any(Fact.TEXT_END.value in c.lost for c in rest)
        assert last.exchange.damage  # its 9,000 characters may be a limit


def test_a_limit_of_bytes_is_recognised_too():
    """Backends count bytes: a text of fewer characters may be as long as it may be."""
    text = "ü" * 2048
    call = ForeignCall("/chat/completions", {})
    check_not_cut({"a": text[:-1] + "xy"}, call, [_span(text[:-1] + "xy")])
    assert "4096 bytes" in call.damage[0]
    call = ForeignCall("/chat/completions", {})
    check_not_cut({"a": "ü" * 2050 + "x"}, call, [_span("ü" * 2050 + "x")])
    assert call.damage == []
    assert call.also_loses == {Fact.TEXT_END}


def _span(text: str) -> SpanRecord:
    return replace(spans_of(ALL[0])[0], attributes={"a": text})


@pytest.mark.parametrize("name", ALL)
def test_cut_at_any_character_reading_never_fails(name: str):
    """Whatever a limit leaves of any attribute, calls are read, and nothing is raised."""
    for length in (0, 1, 7, 40, 200):
        spans: list[Any] = [cut(span, length) for span in spans_of(name)]
        for trajectory in reconstruct(spans, infer_rollouts=True):
            assert not any(c.exact for c in trajectory.completions)
