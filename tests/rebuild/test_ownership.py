"""Spans that somebody sends in a rollout's name: said, not trained, whatever their order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from otel_rollout import Trajectory, continue_rollout, propagate, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.record.state import process_state
from otel_rollout.spans import SpanRecord, as_record, with_lengths
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.not_replayed("spans of others are added")


@pytest.fixture
def spans(recording: Recording, clients: Clients) -> list[SpanRecord]:
    """A rollout of two calls, and of one that another process made."""
    client = clients.sync(clients.serve("hello"))

    def ask(text: str) -> None:
        messages: Any = [{"role": "user", "content": text}]
        client.chat.completions.create(model="m", messages=messages)

    with rollout("agent") as trajectory:
        ask("one")
        ask("two")
        carrier = propagate()
        del process_state.rollouts[trajectory.id]
        with continue_rollout(carrier) as part:
            ask("there")
    records = [as_record(span) for span in recording.spans if span.name != "chat m"]
    assert len(part.spans) == 2
    (whole,) = reconstruct(records)
    assert whole.warnings == []
    assert [c.trainable for c in whole.completions] == [True] * 3
    return records


def forged(span: SpanRecord, **changes: Any) -> SpanRecord:
    """The span as somebody would send it: with other attributes, and with their lengths."""
    fields = {k: changes.pop(k) for k in ("span_id", "trace_id", "start_time_ns") if k in changes}
    attributes = {k: v for k, v in span.attributes.items() if k not in (sc.LENGTHS, sc.CHECKSUMS)}
    attributes |= {getattr(sc, name): value for name, value in changes.items()}
    return replace(span, **fields, attributes=with_lengths(attributes))


def kind(spans: Sequence[SpanRecord], key: str) -> list[SpanRecord]:
    found = [span for span in spans if key in span.attributes]
    return sorted(found, key=lambda span: span.start_time_ns)


def rebuilt(spans: Sequence[SpanRecord]) -> Trajectory:
    """The one trajectory of the spans; the same in any order, and with duplicates."""
    (first,) = reconstruct(spans)
    for seed in range(6):
        shuffled = [*spans, *spans[seed % 2 :: 2]]
        random.Random(seed).shuffle(shuffled)
        (again,) = reconstruct(shuffled)
        assert again.to_dict() == first.to_dict()
        assert [c.trainable for c in again.completions] == [c.trainable for c in first.completions]
    return first


def trained(trajectory: Trajectory) -> list[str]:
    return [c.request_messages[-1]["content"] for c in trajectory.completions if c.trainable]


def test_a_span_id_alone_names_no_span(spans: list[SpanRecord]):
    """A span of another trace with a span id of ours is another span, and takes nothing away."""
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    other = forged(call, trace_id="e" * 32, EXCHANGE_PROCESS="stranger", RESPONSE_BODY="{}")
    found = rebuilt([*spans, other])
    assert trained(found) == ["one", "two", "there"]
    assert len(found.completions) == 4
    assert any("stranger" in warning for warning in found.warnings)


def test_a_call_may_lie_in_another_trace(spans: list[SpanRecord]):
    """Frameworks open roots of their own inside a rollout."""
    calls = kind(spans, sc.EXCHANGE_VERSION)
    moved = [replace(s, trace_id="d" * 32) if s is calls[1] else s for s in spans]
    found = rebuilt(moved)
    assert found.warnings == []
    assert trained(found) == ["one", "two", "there"]


def test_a_second_rollout_span(spans: list[SpanRecord]):
    """Which of both is true nothing tells: nothing trains."""
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    for start in (own.start_time_ns - 1, own.start_time_ns + 1):
        second = forged(own, span_id="f" * 16, start_time_ns=start, GEN_AI_AGENT_NAME="mine")
        found = rebuilt([*spans, second])
        assert not found.trainable
        assert trained(found) == []
        assert any("2 spans say that they are its own" in w for w in found.warnings)


def test_a_copy_of_a_span_that_differs(spans: list[SpanRecord]):
    """One of two whole copies was changed: neither is believed."""
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    body = str(call.attributes[sc.RESPONSE_BODY])
    found = rebuilt([*spans, forged(call, RESPONSE_BODY=body.replace("hello", "mine!"))])
    assert "mine!" not in str(found.to_dict())
    assert trained(found) == ["two", "there"]
    assert any(
        "copies of its span differ in rollout.exchange.response.body" in w for w in found.warnings
    )
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    found = rebuilt([*spans, forged(own, ROLLOUT_REWARDS='[{"value": 1.0}]')])
    assert not found.trainable or found.reward is None


def test_more_calls_than_were_counted(spans: list[SpanRecord]):
    """A call with a number that its process did not give, or gave to another call."""
    first, second = kind(spans, sc.EXCHANGE_VERSION)[:2]
    extra = forged(first, span_id="f" * 16, EXCHANGE_STARTED=3)
    found = rebuilt([*spans, extra])
    assert trained(found) == ["one", "two", "there"]
    assert any("is call 3 of its process, which made 2" in w for w in found.warnings)
    found = rebuilt([*spans, forged(second, span_id="f" * 16)])
    assert trained(found) == ["one", "there"]
    assert any("2 calls of its process are call 2" in w for w in found.warnings)
    # A call was lost, and a forged one takes its place in the count.
    found = rebuilt([s for s in spans if s is not second] + [forged(first, span_id="f" * 16)])
    assert trained(found) == ["there"]


def test_calls_of_a_process_that_nobody_announced(spans: list[SpanRecord]):
    """A part in the rollout's trace announces its process; one elsewhere does not."""
    (part,) = kind(spans, sc.ROLLOUT_PART)
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    stranger = forged(call, span_id="f" * 16, trace_id="e" * 32, EXCHANGE_PROCESS="stranger")
    found = rebuilt([*spans, stranger])
    assert trained(found) == ["one", "two", "there"]
    claim = forged(
        part,
        span_id="0" * 16,
        trace_id="e" * 32,
        ROLLOUT_PROCESS="stranger",
        ROLLOUT_METRICS='{"stolen": 1}',
    )
    found = rebuilt([*spans, stranger, claim])
    assert trained(found) == ["one", "two", "there"]
    assert dict(found.metrics) == {}
    assert any("1 parts of other processes are not in its trace" in w for w in found.warnings)
    found = rebuilt([*spans, stranger, replace(claim, trace_id=found.trace_id)])
    assert len(trained(found)) == 4


def test_without_the_rollouts_span_nothing_is_announced(spans: list[SpanRecord]):
    """A lost span is said; what was sampled still trains."""
    found = rebuilt([s for s in spans if sc.ROLLOUT_SCHEMA_VERSION not in s.attributes])
    assert trained(found) == ["one", "two", "there"]
    assert any("own span did not come" in w for w in found.warnings)


def test_calls_that_are_claimed_from_another_trace(spans: list[SpanRecord]):
    """A rollout elsewhere cannot take calls of this one into its own, under its own reward."""
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    thief = forged(
        own,
        trace_id="e" * 32,
        ROLLOUT_ID="9" * 32,
        ROLLOUT_PARENT_ID=own.attributes[sc.ROLLOUT_ID],
        ROLLOUT_CLAIMS=f'["{call.span_id}"]',
        ROLLOUT_EXCHANGE_COUNT=0,
    )
    for given in ([*spans, thief], [thief, *spans]):
        found = {t.id: t for t in reconstruct(given)}
        assert trained(found.pop("9" * 32)) == []
        assert trained(next(iter(found.values()))) == ["one", "two", "there"]


def test_a_span_without_an_id_is_nobodys(spans: list[SpanRecord], caplog: pytest.LogCaptureFixture):
    """A span whose rollout id is empty makes no rollout of its own, and is named in the log."""
    (own,) = (span for span in spans if sc.ROLLOUT_SCHEMA_VERSION in span.attributes)
    found = reconstruct([*spans, forged(own, span_id="f" * 16, ROLLOUT_ID="")])
    assert [t.id for t in found] == [own.attributes[sc.ROLLOUT_ID]]
    assert "1 spans of its trace were passed over" in caplog.text


@pytest.mark.parametrize("key", [sc.EXCHANGE_PROCESS, sc.EXCHANGE_STARTED])
def test_a_call_that_names_no_process_or_number(key: str, spans: list[SpanRecord]):
    """Nothing accounts for a call that does not say which one it is, though its seal fits."""
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    bare = replace(call, attributes={k: v for k, v in call.attributes.items() if k != key})
    found = rebuilt([*spans, forged(bare, span_id="7" * 16)])
    assert trained(found) == ["one", "two", "there"]
    assert any("which call of which process" in warning for warning in found.warnings)


def all_trained(spans: Sequence[SpanRecord]) -> list[str]:
    return sorted(text for trajectory in reconstruct(spans) for text in trained(trajectory))


def claiming(own: SpanRecord, call: SpanRecord, number: int) -> SpanRecord:
    return forged(
        own,
        span_id=f"{number:016x}",
        ROLLOUT_ID=f"{number:032x}",
        ROLLOUT_PARENT_ID=own.attributes[sc.ROLLOUT_ID],
        ROLLOUT_CLAIMS=f'["{call.span_id}"]',
        ROLLOUT_EXCHANGE_COUNT=0,
    )


def test_a_call_that_two_trajectories_claim_trains_in_neither(spans: list[SpanRecord]):
    """What was sampled once trains at most once."""
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    one, two = (claiming(own, call, number) for number in (1, 2))
    assert all_trained([*spans, one]) == ["one", "there", "two"]
    for given in ([*spans, one, two], [two, one, *spans]):
        found = {t.id: t for t in reconstruct(given)}
        assert all_trained(given) == ["there", "two"]
        for number in (1, 2):
            (warning,) = found[f"{number:032x}"].warnings
            assert "2 trajectories claim it" in warning


def test_a_rollout_that_claims_calls_of_itself_keeps_all(spans: list[SpanRecord]):
    """A rollout is not inside itself: no call of it is lost."""
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    itself = forged(
        own,
        ROLLOUT_PARENT_ID=own.attributes[sc.ROLLOUT_ID],
        ROLLOUT_CLAIMS=f'["{call.span_id}"]',
    )
    found = rebuilt([itself if span is own else span for span in spans])
    assert trained(found) == ["one", "two", "there"]
    assert any("calls of itself" in warning for warning in found.warnings)


@pytest.mark.parametrize("change", [{"start_time_ns": 5}, {"GEN_AI_AGENT_NAME": "evil1"}])
def test_copies_of_the_rollouts_span_that_differ(change: dict[str, Any], spans: list[SpanRecord]):
    """Also in its name or its times: nothing tells which is true."""
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    found = rebuilt([*spans, forged(own, **change)])
    assert trained(found) == []
    assert any("copies of its span differ" in warning for warning in found.warnings)


def test_copies_of_a_call_that_differ_in_time(spans: list[SpanRecord]):
    """Times decide what continues what; a store that rounds them changes nothing."""
    call = kind(spans, sc.EXCHANGE_VERSION)[1]
    found = rebuilt([*spans, forged(call, start_time_ns=5)])
    assert trained(found) == ["one", "there"]
    rounded = replace(call, start_time_ns=call.start_time_ns // 1000 * 1000)
    assert rebuilt([*spans, rounded]).warnings == []


@pytest.mark.parametrize("changes", [{"ROLLOUT_PART": True}, {"EXCHANGE_VERSION": 1}])
def test_a_copy_of_the_rollouts_span_as_another_kind(
    changes: dict[str, Any], spans: list[SpanRecord]
):
    """It stays the rollout's own, of which copies differ."""
    (own,) = kind(spans, sc.ROLLOUT_SCHEMA_VERSION)
    found = rebuilt([*spans, forged(own, **changes)])
    assert trained(found) == []
    assert found.name == "agent"


def test_a_mark_of_redaction_of_another_type_is_damage(spans: list[SpanRecord]):
    """Whether the call was redacted is not known then."""
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    changed = forged(call, EXCHANGE_REDACTED="yes")
    found = rebuilt([changed if span is call else span for span in spans])
    assert trained(found) == ["two", "there"]


@pytest.mark.parametrize("field", ["span_id", "trace_id"])
def test_an_empty_id_names_no_span(
    field: str, spans: list[SpanRecord], caplog: pytest.LogCaptureFixture
):
    """Spans without an id are not copies of each other: they are passed over, with a warning."""
    call = kind(spans, sc.EXCHANGE_VERSION)[0]
    found = rebuilt([*spans, forged(call, **{field: ""})])
    assert (trained(found), found.warnings) == (["one", "two", "there"], [])
    assert "it is passed over" in caplog.text
