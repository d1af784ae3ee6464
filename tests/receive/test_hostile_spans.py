"""Spans as anybody may send them: they end no receiver, and change no other rollout."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_rollout import semconv as sc
from otel_rollout.evidence import OpenRollouts
from otel_rollout.evidence.rollout import _READ
from otel_rollout.receive.heads import HeadFile
from otel_rollout.receive.intake import parsed
from otel_rollout.spans.seals import with_lengths
from tests.kit.sending import Receive, ids, post, request, spans_of, until

NAMES = [*sorted(_READ), sc.ROLLOUT_EPISODE, sc.RESPONSE_BODY]
TEXTS = st.text(max_size=4) | st.sampled_from(
    ["\ud800", "null", "[[]]", "9" * 30, "-1", "true", '{"trajectories": [{"id": "a"}]}', '["a"]']
)
VALUES = TEXTS | st.integers() | st.booleans() | st.floats() | st.none() | st.lists(TEXTS)
ATTRIBUTES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
KINDS = st.sampled_from(
    [sc.ROLLOUT_SCHEMA_VERSION, sc.EXCHANGE_VERSION, sc.REWARD, sc.ROLLOUT_PART]
)


def row(name: str, value: Any) -> Any:
    """An attribute as OTLP/JSON has it."""
    if isinstance(value, bool):
        return {"key": name, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": name, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": name, "value": {"doubleValue": value}}
    if isinstance(value, list):
        values = [{"stringValue": each} for each in value]
        return {"key": name, "value": {"arrayValue": {"values": values}}}
    return {"key": name, "value": None if value is None else {"stringValue": value}}


def made(
    number: int, attributes: dict[str, Any], kind: str, rollout: str, *, sealed: bool = True
) -> Any:
    """A span, with the seal of one of ours."""
    every = {**attributes, sc.ROLLOUT_ID: rollout, kind: attributes.get(kind, 1)}
    every = with_lengths(every) if sealed else every
    return {
        "traceId": "1" * 32,
        "spanId": f"{number:016x}",
        "endTimeUnixNano": number,
        "attributes": [row(name, value) for name, value in every.items()],
    }


SPANS = st.builds(
    made,
    st.integers(0, 3),
    ATTRIBUTES,
    KINDS,
    st.sampled_from(["a", "b" * 32, "\ud800"]),
    sealed=st.sampled_from([True, True, False]),
)


def message(spans: list[Any]) -> bytes:
    """An OTLP/JSON message."""
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


@given(st.lists(SPANS, min_size=1, max_size=5))
@example([made(1, {sc.REWARD: "{}"}, sc.ROLLOUT_SCHEMA_VERSION, "a")])
@example([made(1, {sc.REWARD: "{}"}, sc.REWARD, "a")])
@example([made(1, {}, sc.REWARD, "a")])  # damaged: it is no text
@settings(max_examples=60)
def test_any_spans_are_judged_and_kept(spans: list[Any]):
    """A head is kept of each rollout; where only rewards came, these are."""
    records, _ = parsed(message(spans), True)
    rollouts = OpenRollouts[int](rollout_seconds=1, group_seconds=1)
    for place, record in enumerate(records):
        rollouts.add(record, place, 0)
    units = [*rollouts.whole(), *rollouts.due(5)]
    with tempfile.TemporaryDirectory() as name:
        heads = HeadFile(Path(name))
        heads.begin([(unit, False) for unit in units], 0)
        span_ids = {h.rollout: [*rollouts.span_ids(h.rollout)] for u in units for h in u.heads}
        alone = [h.rollout for u in units if u.is_rewards for h in u.heads]
        rewards = [reward for each in alone for reward in rollouts.rewards_of(each)]
        heads.done(units, span_ids, rewards)
        kept = [h.rollout for u in units if not u.is_rewards for h in u.heads]
        assert [h.rollout for h in heads.heads()] == kept
        assert all(heads.has_rollout(each) for each in kept)
        assert {late.rollout for late in heads.late_spans()} == {*alone}
        assert {record.text(sc.ROLLOUT_ID) for record in records} - {None} <= {*kept, *alone}
        heads.close()
    for unit in units:
        rollouts.done(unit)
    assert (len(rollouts), rollouts.held) == (0, {})


def test_other_rollouts_go_on(receiver_of: Receive, tmp_path: Path):
    """Beside spans of which nothing can be made."""
    receiver = receiver_of(rollout_seconds=0.2, group_seconds=0.2)
    odd = {sc.ROLLOUT_GROUP_SIZE: "9" * 30, sc.ROLLOUT_GROUP_ID: "g"}
    span = made(5, odd, sc.ROLLOUT_SCHEMA_VERSION, "b" * 32)
    kind = {"Content-Type": "application/json"}
    assert post(receiver.url, message([span]), kind)[0] == 200
    assert post(receiver.url, request(spans_of("a" * 32)))[0] == 200
    until(lambda: "a" * 32 in ids(tmp_path / "out.jsonl"))
    until(lambda: receiver.counts()["open_rollouts"] == 0)
    assert receiver.is_running
