"""Whether a rollout is whole, from attributes alone: the same as what its trajectory reports."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.evidence import Evidence, rollout_of
from otel_rollout.spans import KINDS, SpanRecord, as_record
from otel_rollout.spans.seals import with_lengths
from otel_rollout.trajectory import sentences
from otel_rollout.trajectory.sentences import sentence_of
from tests.kit.random_agents import Rollout, all_spans, plays


def evidence_of(spans: list[SpanRecord]) -> dict[str, Evidence]:
    """That of each rollout of these spans."""
    found: dict[str, Evidence] = {}
    for span in spans:
        if (rollout_id := rollout_of(record := as_record(span))) is not None:
            found.setdefault(rollout_id, Evidence(rollout_id)).add(record)
    return found


def lost(trajectory: Trajectory) -> list[str]:
    """The warnings that something did not come, or came damaged."""
    return [each for each in trajectory.warnings if sentence_of(each)[0] in sentences.LOST]


def cut(span: SpanRecord, data: st.DataObject) -> SpanRecord:
    """The span with one of its texts truncated, or an attribute dropped."""
    attributes = dict(span.attributes)
    name = data.draw(st.sampled_from(sorted(attributes.keys() - {sc.ROLLOUT_ID})))
    value = attributes.pop(name)
    if isinstance(value, str) and value and data.draw(st.booleans()):
        attributes[name] = value[: data.draw(st.integers(0, len(value) - 1))]
    return replace(span, attributes=attributes)


@given(plays(), st.randoms(use_true_random=False), st.data())
@settings(max_examples=40)
def test_it_is_whole_if_nothing_is_lost(
    rollouts: list[Rollout], order: random.Random, data: st.DataObject
):
    """Of any subset of the spans, some twice, some damaged, in any order."""
    spans = all_spans(rollouts)
    if data.draw(st.booleans()):
        spans = data.draw(st.lists(st.sampled_from(spans), unique_by=lambda s: s.span_id))
    if spans:
        spans += data.draw(st.lists(st.sampled_from(spans), max_size=3))
        damaged = data.draw(st.lists(st.integers(0, len(spans) - 1), max_size=1))
        for number in damaged:
            spans[number] = cut(spans[number], data)
    order.shuffle(spans)
    evidence = evidence_of(spans)
    for trajectory in reconstruct(spans):
        found = evidence.pop(trajectory.id)
        missing = lost(trajectory)
        assert bool(found.missing()) == bool(missing), (found.missing(), missing)
        assert found.has_ended or missing
    assert all(each.missing() for each in evidence.values())


def span(number: int = 1, **attributes: object) -> SpanRecord:
    """An exchange span of the rollout `r`."""
    named = {getattr(sc, name): value for name, value in attributes.items()}
    every = {
        sc.EXCHANGE_VERSION: 1,
        sc.ROLLOUT_ID: "r" * 32,
        sc.EXCHANGE_PROCESS: "p",
        sc.EXCHANGE_STARTED: number,
        **named,
    }
    return SpanRecord("s", "1" * 32, f"{number:016x}", None, 5, 6, with_lengths(every))


def own(count: int = 1, **attributes: object) -> SpanRecord:
    """The span of the rollout `r`."""
    named = {getattr(sc, name): value for name, value in attributes.items()}
    every = {
        sc.ROLLOUT_SCHEMA_VERSION: 1,
        sc.ROLLOUT_ID: "r" * 32,
        sc.ROLLOUT_PROCESS: "p",
        sc.ROLLOUT_STATUS: "complete",
        sc.ROLLOUT_EXCHANGE_COUNT: count,
        sc.ROLLOUT_OPEN_COUNT: 0,
        **named,
    }
    return SpanRecord("s", "1" * 32, "f" * 16, None, 5, 6, with_lengths(every))


def test_copies():
    """A copy is a copy; a damaged one is not used; a whole one takes its place; others differ."""
    evidence = Evidence("r" * 32)
    whole = span(RESPONSE_BODY='{"a": 1}')
    bent = as_record(replace(whole, attributes={**whole.attributes, sc.RESPONSE_BODY: '{"a": 2}'}))
    other = span(RESPONSE_BODY='{"a": 2}')
    assert bent.cut
    assert evidence.add(as_record(own())) == "new"
    assert evidence.add(bent) == "new"
    assert evidence.missing()
    assert evidence.add(as_record(whole)) == "new"
    assert evidence.missing() == ()
    assert evidence.add(as_record(whole)) == "copy"
    assert evidence.add(bent) == "damaged"
    assert evidence.missing() == ()
    assert evidence.add(as_record(other)) == "differs"
    assert evidence.missing() == ("copies of its span 0000000000000001 differ",)
    assert not evidence.head(evidence.missing()).is_whole


@given(st.permutations([*KINDS]), st.integers(1, len(KINDS)))
def test_a_span_of_several_kinds_is_the_first_of_them(attributes: list[str], count: int):
    """Anybody may send one: a rollout's own span with a reward's attribute is no reward."""
    record = span_of_kinds(attributes[:count])
    order = ["rollout", "exchange", "reward", "part", "start"]
    kind = min((KINDS[attribute] for attribute in attributes[:count]), key=order.index)
    assert record.kind == kind
    evidence = Evidence("r" * 32)
    evidence.add(record)
    came = {"reward": "rewards", "start": "start"}.get(kind, "contents")
    assert (evidence.came, evidence.has_ended) == (came, kind == "rollout")
    assert len(evidence.rewards) == (kind == "reward")
    assert len(evidence.head(()).rewards) == (kind == "reward")


def span_of_kinds(attributes: list[str]) -> SpanRecord:
    every = {sc.ROLLOUT_ID: "r" * 32} | {
        name: {sc.REWARD: "{}", sc.ROLLOUT_STARTED: "r" * 32, sc.ROLLOUT_PART: True}.get(name, 1)
        for name in attributes
    }
    return as_record(SpanRecord("s", "1" * 32, "a" * 16, None, 5, 6, with_lengths(every)))


def test_content_is_not_kept():
    """Of a large reply nothing stays in memory."""
    evidence = Evidence("r" * 32)
    evidence.add(as_record(span(RESPONSE_BODY="x" * 100_000)))
    [(_, kept)] = evidence._spans.values()
    assert sum(len(str(value)) for value in kept.attributes.values()) < 200


def test_the_call_of_another_process_waits_for_its_part():
    """Only the part counts the calls of its process."""
    part = SpanRecord(
        "s",
        "1" * 32,
        "e" * 16,
        None,
        5,
        6,
        with_lengths(
            {
                sc.ROLLOUT_PART: True,
                sc.ROLLOUT_ID: "r" * 32,
                sc.ROLLOUT_PROCESS: "q",
                sc.ROLLOUT_EXCHANGE_COUNT: 2,
                sc.ROLLOUT_OPEN_COUNT: 0,
            }
        ),
    )
    evidence = Evidence("r" * 32)
    evidence.add(as_record(own(0, ROLLOUT_PROPAGATED=True)))
    assert "handed on" in evidence.missing()[0]
    evidence.add(as_record(span(1, EXCHANGE_PROCESS="q")))
    assert "of its process 'q'" in evidence.missing()[0]
    evidence.add(as_record(part))
    assert "1 of 2 model calls" in evidence.missing()[0]
    evidence.add(as_record(span(2, EXCHANGE_PROCESS="q")))
    assert evidence.missing() == ()


def test_what_is_open_at_the_end_is_not_waited_for():
    """A call that had not ended when its rollout did is no part of it."""
    evidence = Evidence("r" * 32)
    evidence.add(as_record(own(1, ROLLOUT_OPEN_COUNT=1)))
    assert evidence.missing() == ()
