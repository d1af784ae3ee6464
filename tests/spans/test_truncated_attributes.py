"""Every attribute of every span of ours, cut at any length or dropped: said, and nothing wrong."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import openai
import pytest

from otel_rollout import Completion, Trajectory, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.look.sums import Summary
from otel_rollout.record.attributes import place
from otel_rollout.spans.copies import united
from otel_rollout.spans.reader import ExchangeReader
from otel_rollout.spans.record import SpanRecord, as_record
from otel_rollout.spans.seals import with_lengths
from otel_rollout.testing import Raw, Reply
from otel_rollout.wire.json import dumps
from tests.kit.conversations import TOOLS, ask, said, user
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow


async def record(clients: Clients, recording: Recording) -> list[SpanRecord]:
    """The spans of a rollout, and of one inside it, that have every attribute there is."""
    two = Reply(choices=[Reply("one"), Reply("two", reasoning="hm")])
    busy = Raw(500, b'{"error": {"message": "busy"}}')
    script = [two, Reply("streamed, in several chunks"), "inner", busy, "last"]
    client = clients.asynchronous(clients.serve(script))
    options: dict[str, Any] = {"task_id": "task-1", "group_id": "group-1", "sample_index": 12}
    async with rollout("agent", policy_version=17, metadata={"a": 1}, **options) as live:
        first, _ = await ask(client, user("u"), n=2, tools=TOOLS)
        await ask(client, user("u"), first, user("u2"), stream=True, tools=TOOLS)
        live.reward = 12.5
        live.rewards["style"] = 10
        live.metrics["steps"] = 123
        live.log("a line")
        streamed = live.completions[-1]
        live.get_history(streamed.id).append(user("appended"))
        async with rollout("inner", trainable=False):
            await ask(client, user("v"))
        with pytest.raises(openai.InternalServerError):
            await ask(client, user("w"))
        await ask(client, user("u"), said("one"), user("u3"), tools=TOOLS)
    live.reward = 0.25
    live.rewards["late"] = 1
    live.reward = 0.75
    records = map(as_record, recording.spans)
    return [record for record in records if record.scope == sc.SCOPE]


def cuts(span: SpanRecord) -> Iterator[tuple[str, SpanRecord]]:
    """The span with one attribute dropped, or cut: short ones at every length, others at some."""
    for key, value in span.attributes.items():
        attributes = dict(span.attributes)
        del attributes[key]
        yield key, replace(span, attributes=attributes)
        if isinstance(value, float):
            continue  # no store cuts them, and none is read
        text = str(value)
        lengths = {*range(len(text) if len(text) < 12 else 3), 7, 31, len(text) // 2, len(text) - 1}
        for length in sorted(lengths):
            if 0 <= length < len(text):
                yield key, replace(span, attributes={**attributes, key: text[:length]})


READ = (
    "name",
    "task_id",
    "group_id",
    "parent_id",
    "sample_index",
    "policy_version",
    "output",
    "termination_reason",
    "reward",
)


def check(trajectory: Trajectory, truth: Trajectory, key: str = "") -> None:
    """Nothing that the trajectory gives differs from the truth; less may be there."""
    for name in READ:
        if name == "reward" and key == sc.ROLLOUT_ID:
            continue  # a late reward that is nobody's: that there was one is said
        assert getattr(trajectory, name) in (getattr(truth, name), None, ""), name
    assert trajectory.status in (truth.status, "unknown")
    assert trajectory.trainable in (truth.trainable, False)
    for mapping in ("rewards", "metrics", "metadata"):
        known = dict(getattr(truth, mapping))
        assert dict(getattr(trajectory, mapping)).items() <= known.items(), mapping
    assert trajectory.logs in (truth.logs, [])
    by_span = {(c.span_id, c.choice_index): c for c in truth.completions}
    for completion in trajectory.completions:
        true = by_span[completion.span_id, completion.choice_index]
        for name in ("message", "token_ids", "prompt_token_ids", "logprobs", "tools", "model"):
            assert getattr(completion, name) in (getattr(true, name), None), name
        if completion.message is not None:
            assert completion.id == true.id
            assert completion.reward in (true.reward, None)
        if completion.trainable:
            assert true.trainable
            assert completion.request == true.request
            assert completion.response == true.response
            assert completion.policy_version == true.policy_version
    for history in trajectory.histories:
        last = history.completions[-1]
        true_history = truth.get_history(last.id, last.choice_index)
        assert history.tools == true_history.tools
        messages = true_history.messages()
        assert history.messages() == messages[: len(history.items)]
        there = {
            name_of(c) for c in trajectory.completions if c.message and c.exchange.prompt_is_known
        }
        for item, true_item in zip(history.items, true_history.items, strict=False):
            assert name_of(item.completion) in (name_of(true_item.completion), None)
            if item.completion is None and true_item.completion is not None:
                lost = true_item.completion
                assert name_of(lost) not in there
    trained = [
        name_of(item.completion) for h in trajectory.histories for item in h.items if item.trainable
    ]
    assert sorted(map(str, trained)) == sorted(
        str(name_of(c)) for c in trajectory.completions if c.trainable
    )


def name_of(completion: Completion | None) -> tuple[str, int] | None:
    return (completion.span_id, completion.choice_index) if completion else None


async def test_each_attribute_cut_at_each_length(
    recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing on one span is a warning, and no value is another than it was."""
    spans = await record(clients, recording)
    whole = {t.id: t for t in reconstruct(spans)}
    assert sum(len(t.warnings) for t in whole.values()) == 0
    lines = [trajectory.to_json() for trajectory in whole.values()]
    seen: set[str] = set()
    for position, span in enumerate(spans):
        for key, cut in cuts(span):
            seen.add(key)
            caplog.clear()
            given = [*spans[:position], cut, *spans[position + 1 :]]
            trajectories = reconstruct(given)
            where = f"{span.name}: {key}: {cut.attributes.get(key)!r:.60}"
            for trajectory in trajectories:
                try:
                    check(trajectory, whole[trajectory.id], key)
                except AssertionError as error:
                    raise AssertionError(where) from error
            said_so = [w for t in trajectories for w in t.warnings] + caplog.messages
            beside = span.name.startswith("evaluate") and key in PLACE
            if key not in NOT_READ and not key.startswith(NOT_READ_BEGINNINGS) and not beside:
                assert said_so, where
            mended = [trajectory.to_json() for trajectory in reconstruct([cut, *given, span])]
            assert mended == lines, where
    assert len(seen) > 35


PLACE = place(Trajectory(task_id="t", group_id="g", sample_index=0, policy_version=1))
NOT_READ_BEGINNINGS = (*sc.FOR_PEOPLE, "gen_ai.evaluation.")  # the latter beside the reward itself
NOT_READ = {
    *(sc.ROLLOUT_REWARD, sc.GEN_AI_OPERATION_NAME, sc.ERROR_TYPE),
    *Summary().attributes(None),  # for people; losing them loses nothing
}


@pytest.mark.parametrize("limit", [0, 1, 10, 32, 64, 100, 300, 1000])
async def test_a_length_limit(recording: Recording, clients: Clients, limit: int) -> None:
    """A limit on the length of all attributes makes data that is missing, never wrong."""
    spans = await record(clients, recording)
    whole = {t.id: t for t in reconstruct(spans)}
    cut = [
        replace(
            span,
            attributes={
                key: value[:limit] if isinstance(value, str) else value
                for key, value in span.attributes.items()
            },
        )
        for span in spans
    ]
    for trajectory in reconstruct(cut):
        if limit >= 32:
            check(trajectory, whole[trajectory.id])
        assert trajectory.warnings or trajectory.name == "inner"
        assert not any(c.trainable for c in trajectory.completions if c.exchange.damage)


async def test_a_limit_on_the_number_of_attributes(recording: Recording, clients: Clients) -> None:
    """A limit that drops the attributes that were set first is noticed."""
    spans = await record(clients, recording)
    whole = {t.id: t for t in reconstruct(spans)}
    for count in range(1, 24):
        cut = [
            replace(span, attributes=dict(list(span.attributes.items())[-count:])) for span in spans
        ]
        if cut == spans:
            continue
        for trajectory in reconstruct(cut):
            check(trajectory, whole[trajectory.id])
            if any(
                c != s and c.attributes.get(sc.ROLLOUT_ID) == trajectory.id
                for c, s in zip(cut, spans, strict=True)
            ):
                assert trajectory.warnings


def test_values_of_stores_that_keep_only_text() -> None:
    """Integers and booleans that came back as text are whole."""
    attributes: dict[str, Any] = with_lengths(
        {sc.ROLLOUT_SCHEMA_VERSION: 1, sc.ROLLOUT_ID: "r", sc.ROLLOUT_TRAINABLE: False}
        | {sc.ROLLOUT_EXCHANGE_COUNT: 0, sc.ROLLOUT_OPEN_COUNT: 0, sc.ROLLOUT_REWARD: 1.0}
    )
    texts = {key: dumps(value).strip('"') for key, value in attributes.items()}
    texts[sc.LENGTHS] = attributes[sc.LENGTHS]
    texts[sc.ROLLOUT_REWARD] = "1"
    spans = [
        SpanRecord("invoke_agent x", "1" * 32, "1" * 16, None, 1, 2, values)
        for values in (attributes, texts)
    ]
    first, second = (reconstruct([span])[0] for span in spans)
    assert first == second
    assert first.warnings == []
    assert not first.trainable


def test_two_copies_make_one_whole_span() -> None:
    """What two ways cut differently is put together again, in either order."""
    attributes = with_lengths(
        {sc.EXCHANGE_VERSION: 1, sc.ROLLOUT_ID: "r" * 32, sc.REQUEST_PATH: "/x/y"}
    )
    span = SpanRecord("exchange", "1" * 32, "1" * 16, None, 1, 2, attributes)
    copies = [
        as_record(replace(span, attributes={**attributes, key: "cut"}))
        for key in (sc.ROLLOUT_ID, sc.REQUEST_PATH, sc.EXCHANGE_VERSION)
    ]
    for first in copies:
        for second in copies:
            reader = ExchangeReader()
            reader.add(first)
            reader.add(second)
            damage = reader.read(united(first, second)).damage
            assert bool(damage) == (first is second)


async def test_what_was_cut_is_logged_where_no_trajectory_can_say_it(
    recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """A span whose rollout is not known any more belongs to none."""
    spans = await record(clients, recording)
    cut = [replace(span, attributes={**span.attributes, sc.ROLLOUT_ID: "abc"}) for span in spans]
    with caplog.at_level(logging.WARNING, "otel_rollout"):
        assert reconstruct(cut) == []
    assert f"{len(spans)} spans of its trace were passed over" in caplog.text


@pytest.mark.parametrize("values", [(False, 0, 1), (True, 1), (1, 1.0, "1"), (0, "0", False)])
def test_the_order_of_copies_decides_nothing(values: tuple[Any, ...]) -> None:
    """Values that Python takes for equal are of several types: each order gives one record."""
    span, name = SpanRecord("s", "t", "i", None, 1, 2, {}, scope=sc.SCOPE), sc.ROLLOUT_NESTED_COUNT
    copies = [
        replace(span, attributes={sc.ROLLOUT_ID: "r", name: value, "rollout.z": number})
        for number, value in enumerate(values)
    ]
    found = [reduce(united, [*order, *order[::2]]) for order in itertools.permutations(copies)]
    kept = {repr(each.attributes[name]) for each in found}
    assert len(kept) == 1
    assert len({each.cut for each in found}) == 1
