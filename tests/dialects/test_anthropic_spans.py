"""Spans that Anthropic's client writes itself, held against what our server saw and sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from otel_rollout import Completion, reconstruct
from otel_rollout.rebuild.dialects.call import Fact
from tests.dialects.compare import spans_of, trajectories_of, wire_of

NAME = "anthropic"


def completions(scenario: str) -> list[Completion]:
    return trajectories_of(NAME)[scenario].completions


def changed(scenario: str, **attributes: Any) -> list[Completion]:
    """The completions of a scenario whose calls have these attributes, too."""
    root = next(s for s in spans_of(NAME) if s.name == scenario and s.parent_span_id is None)
    spans = [span for span in spans_of(NAME) if span.trace_id == root.trace_id]
    spans = [
        span if span is root else replace(span, attributes={**span.attributes, **attributes})
        for span in spans
    ]
    (trajectory,) = reconstruct(spans, infer_rollouts=True)
    return trajectory.completions


@pytest.mark.parametrize(
    "scenario", ["chat", "stream", "thinking", "stream_thinking", "tools", "stream_tools", "cached"]
)
def test_a_conversation_is_one_history_that_trains(scenario: str):
    """Two turns join, thinking and tools among them, and both replies train."""
    first, second = completions(scenario)
    assert {first.exchange.source, first.exchange.path} == {NAME, "/v1/messages"}
    assert first.exchange.damage == second.exchange.damage == []
    (history,) = trajectories_of(NAME)[scenario].histories
    assert [item.trainable for item in history.items].count(True) == 2
    assert history.completions == [first, second]


def test_usage_of_the_cache_is_that_of_the_api():
    """Input tokens leave out those of the cache, which the conventions' count has in it."""
    for completion in completions("cached"):
        assert completion.usage == {
            "input_tokens": 5,
            "cache_creation_input_tokens": 7,
            "cache_read_input_tokens": 16,
            "output_tokens": 4,
        }


def test_the_system_prompt_and_the_way_it_ended_are_kept():
    """The system prompt stands beside the messages; stop reasons are the server's."""
    (first, _) = completions("chat")
    assert first.request["system"] == [{"type": "text", "text": "Be terse.\n“ü”"}]
    assert first.request["stop_sequences"] == ["\n\n"]
    endings = completions("endings")
    assert [c.finish_reason for c in endings] == ["max_tokens", "stop_sequence", "refusal"]
    assert [c.truncated for c in endings] == [True, False, True]  # a refusal cuts the reply


@pytest.mark.parametrize("scenario", ["image", "tool_image", "odd_blocks", "truncated"])
def test_content_that_was_left_out_is_damage(scenario: str):
    """A call whose messages have blocks without their content does not train."""
    last = completions(scenario)[-1]
    assert last.exchange.damage
    assert not last.trainable
    assert trajectories_of(NAME)[scenario].warnings


@pytest.mark.parametrize(
    "flag", ["anthropic.content.truncated", "vendor.truncated", "gen_ai.input.messages_truncated"]
)
@pytest.mark.parametrize("value", [True, "true", 1, "12 messages"])
def test_any_flag_that_says_truncated_is_damage(flag: str, value: Any):
    """Whoever wrote the flag, and as whatever: the call does not train, and says why."""
    for completion in changed("chat", **{flag: value}):
        assert not completion.trainable
        assert any(flag in sentence for sentence in completion.exchange.damage)


@pytest.mark.parametrize("value", [False, "false", 0, "0", ""])
def test_a_flag_that_says_not_truncated_is_none(value: Any):
    """A flag that is off changes nothing."""
    for completion in changed("chat", **{"anthropic.content.truncated": value}):
        assert completion.trainable
        assert completion.exchange.damage == []


def test_a_stream_without_the_helper_has_no_reply():
    """The client writes no content of a stream that is read event by event."""
    (completion,) = completions("raw_stream")
    assert (completion.message, completion.trainable) == (None, False)
    assert any("no reply" in sentence for sentence in completion.exchange.damage)


@pytest.mark.parametrize("scenario", ["cut", "abandoned"])
def test_a_reply_that_broke_off_is_not_trained_on(scenario: str):
    """What had come of the reply is there, and not taken for all of it."""
    (completion,) = completions(scenario)
    assert completion.status in ("error", "abandoned")
    assert not completion.trainable
    assert completion.message is not None


def test_content_that_was_not_recorded_is_not_an_empty_conversation():
    """The client's default is to record no content: then nothing trains, and that is said."""
    for completion in completions("no_content"):
        assert not completion.trainable
        assert len(completion.exchange.damage) == 2


def test_counting_tokens_is_no_completion():
    """Of the calls of the client only those that generate are read."""
    assert len([wire for wire in wire_of(NAME) if wire.scenario == "count"]) == 2
    assert len(trajectories_of(NAME)["count"].exchanges) == 1


def test_what_the_client_never_writes_is_named():
    """Tools and temperature are on no span; each completion says so."""
    for trajectory in trajectories_of(NAME).values():
        for completion in trajectory.completions:
            assert {Fact.TOOLS.value, Fact.PARAMETERS.value} <= set(completion.lost)
            assert not completion.exact
