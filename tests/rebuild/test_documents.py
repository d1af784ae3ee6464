"""Documents of other programs as trajectories that say what they lack; each comes once."""

from __future__ import annotations

import copy
import json
import operator
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_rollout import SpanFormatError, Trajectory
from otel_rollout.rebuild.documents import (
    CaptureState,
    Documents,
    documents_in,
    may_be_document,
)
from tests.kit.documents import ATIF, ENTRY, HISTORY, MINI


def read(*documents: Any) -> list[Trajectory]:
    """The trajectories of documents; each is equal to what its line of JSON gives."""
    known = Documents()
    found = [trajectory for document in documents for trajectory in known.read(document)]
    errors = list[SpanFormatError]()
    found += known.rollouts(errors.append)
    if errors:
        raise errors[0]
    assert [Trajectory.from_json(trajectory.to_json()) for trajectory in found] == found
    return found


def changed(document: dict[str, Any], step: int, **members: Any) -> dict[str, Any]:
    """The document with other members of a step."""
    made = copy.deepcopy(document)
    made["steps"][step] |= members
    return made


def test_steps_are_a_conversation():
    """Messages, reasoning, calls of tools, their results, and what was observed otherwise."""
    (trajectory,) = read(ATIF)
    (history,) = trajectory.histories
    assert history.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "list"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a b"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "are you sure?"},
    ]
    first, second = trajectory.completions
    assert (first.model, second.model) == ("m", "n")
    assert first.usage == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert first.start_time_ns == 1_767_225_605_500_000_000
    assert (trajectory.name, trajectory.status, trajectory.reward) == (
        "terminus-2",
        "unknown",
        None,
    )
    assert trajectory.id.startswith("s-")
    assert trajectory.metrics == {"total_cost_usd": 0.5}
    assert trajectory.metadata["agent_extra"] == {"parser": "x"}


def test_it_trains_as_far_as_it_goes():
    """By token ids where they are given, by messages elsewhere, and it says what is lost."""
    (trajectory,) = read(changed(ATIF, 3, model_name=None))
    (row,) = trajectory.token_sequences()
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.loss_mask == [0, 0, 0, 1, 1, 0, 1]
    assert row.logprobs == [0.0, 0.0, 0.0, -0.5, -1.0, 0.0, -0.25]
    assert not row.truncated
    (completion, _) = trajectory.completions
    assert completion.trainable
    assert not completion.exact
    assert "token ids" not in completion.lost
    assert "tool definitions" in completion.lost
    assert "document of the format 'atif'" in trajectory.warnings[0]
    (without,) = read(changed(ATIF, 2, metrics=None))
    assert "token ids" in without.completions[0].lost
    assert len(without.token_sequences().dropped) == 1
    assert without.completions[0].trainable


def test_what_no_model_call_is():
    """Copied context, and what the agent did itself, are in requests only."""
    (copied,) = read(changed(ATIF, 2, is_copied_context=True))
    (made,) = read(changed(ATIF, 2, llm_call_count=0))
    for trajectory in (copied, made):
        (completion,) = trajectory.completions
        assert len(completion.request_messages) == 4
    (several,) = read(changed(ATIF, 2, llm_call_count=2))
    assert [each.trainable for each in several.completions] == [False, True]
    assert "its step stands for 2 model calls" in several.warnings[1]


def test_a_compaction_begins_a_conversation():
    """What is before it was replaced."""
    replaced = {"context_management": {"type": "compaction", "boundary": "replace"}}
    (trajectory,) = read(changed(ATIF, 3, extra=replaced))
    assert [len(each.request_messages) for each in trajectory.completions] == [2, 0]
    assert len(trajectory.histories) == 2


def test_media_are_addresses():
    """Parts of text, images and sound."""
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"media_type": "image/png", "path": "images/1.png"}},
    ]
    (trajectory,) = read(changed(ATIF, 1, message=parts))
    assert trajectory.completions[0].media == ["image_url"]
    assert trajectory.messages()[1]["content"][1]["image_url"] == {"url": "images/1.png"}


def test_documents_inside_a_document_come_once():
    """Also where they stand alone; the id of a document is final."""
    inner = {**ATIF, "trajectory_id": "inner"}
    outer = {**ATIF, "trajectory_id": "outer", "subagent_trajectories": [inner]}
    parent, child = read(outer, copy.deepcopy(outer))
    assert (parent.id, child.id, child.parent_id) == ("outer", "inner", "outer")
    assert [each.id for each in read({**inner}, {**inner, "session_id": "t"})] == ["inner"] * 2


def test_what_a_document_lacks_is_an_error():
    """It names the member; so does a version that is not known."""
    for wrong, why in (
        ({"schema_version": "ATIF-v1.0"}, "'agent' is missing"),
        ({**ATIF, "schema_version": "ATIF-v2.0"}, "expected ATIF 1, got"),
        ({**ATIF, "steps": 1}, "not as atif has it"),
        ({"a": 1}, "expected a trajectory of ATIF.*; got 'a'"),
        (1, "got int"),
    ):
        with pytest.raises(SpanFormatError, match=why):
            read(wrong)
    inside: Any = ATIF
    for number in range(60):
        inside = {**ATIF, "trajectory_id": str(number), "subagent_trajectories": [inside]}
    with pytest.raises(SpanFormatError, match="inside each other"):
        read(inside)


def test_times_are_those_that_are_known():
    """In any precision; a step without one is after the one before it."""
    (trajectory,) = read(changed(ATIF, 2, timestamp=None))
    assert (trajectory.start_time_ns, trajectory.end_time_ns) == (0, None)
    for text, nanoseconds in (
        ("2026-01-01T00:00:05.5Z", 0),
        ("2026-01-01T00:00:05.500000123", 123),
        ("2026-01-01 00:00:05.50", 0),
    ):
        (trajectory,) = read(changed(ATIF, 2, timestamp=text))
        assert trajectory.start_time_ns == 1_767_225_605_500_000_000 + nanoseconds
        assert trajectory.end_time_ns == trajectory.start_time_ns + 1
    (trajectory,) = read(changed(changed(ATIF, 2, timestamp=None), 3, timestamp="2026-01-01"))
    assert trajectory.start_time_ns == trajectory.end_time_ns == 1_767_225_600_000_000_000


def test_mini_swe_agent():
    """Replies as they were sent, also one that the agent could not read; how it ended."""
    (trajectory,) = read(MINI)
    assert [each.id for each in trajectory.completions[:2]] == ["r1", "r2"]
    assert [len(each.request_messages) for each in trajectory.completions] == [2, 3, 5]
    assert trajectory.completions[1].finish_reason == "tool_calls"
    assert trajectory.completions[1].start_time_ns == 1_706_000_000_500_000_000
    assert (trajectory.status, trajectory.output) == ("complete", "diff")
    assert trajectory.metrics == {"instance_cost": 0.05, "api_calls": 3}
    assert [len(history.messages()) for history in trajectory.histories] == [3, 6]
    (failed,) = read({**MINI, "info": {**MINI["info"], "exit_status": "ValueError"}})
    assert (failed.status, failed.error and failed.error["type"]) == ("error", "ValueError")


def test_a_list_of_chat_messages():
    """As mini-swe-agent wrote before it had a format, and as anybody may; each reply is a call."""
    messages = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "mend"},
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "out"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "diff"},
    ]
    (trajectory,) = read(*documents_in(messages))
    (history,) = trajectory.histories
    assert history.messages() == messages
    assert [c.trainable for c in trajectory.completions] == [True, True]
    assert trajectory.name == "chat"
    assert documents_in([*messages, {"content": "no role"}])[0] == messages[0]


def test_mini_swe_agent_with_responses():
    """Replies of the Responses API are their items."""
    reply = {
        "id": "resp_1",
        "object": "response",
        "model": "x",
        "output": [{"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"}],
        "extra": {"actions": []},
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "a", "extra": {}}
    end = {**reply, "id": "resp_2", "output": [{"type": "message", "role": "assistant",
        "content": [{"type": "output_text", "text": "bye"}]}]}  # fmt: skip
    (trajectory,) = read({**MINI, "messages": [*MINI["messages"][:2], reply, result, end]})
    (history,) = trajectory.histories
    assert history.completion_ids == ["resp_1", "resp_2"]
    assert len(history.messages()) == 5


def test_a_history_of_pydantic_ai():
    """Each reply with all that was said before; instructions come after the system prompts."""
    (trajectory,) = read(*documents_in(HISTORY))
    (history,) = trajectory.histories
    assert trajectory.id == "run-1"
    asked, answer = trajectory.completions
    system = [{"role": "system", "content": text} for text in ("You add.", "Be short.")]
    assert asked.request_messages == [*system, {"role": "user", "content": "1 + 2?"}]
    assert [m["role"] for m in history.messages()[3:]] == ["assistant", "tool", "assistant"]
    assert history.messages()[3] == {
        "role": "assistant",
        "content": "Adding.",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            }
        ],
    }
    assert history.messages()[4] == {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert [(c.id, c.finish_reason) for c in (asked, answer)] == [
        ("r1", "tool_calls"),
        ("r2", "stop"),
    ]
    assert (answer.usage or {})["prompt_tokens"] == 102
    assert asked.exchange.start_time_ns == 1_795_680_720_170_325_000
    assert asked.trainable
    assert answer.trainable
    assert "log-probabilities" in answer.lost


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"part_kind": "retry-prompt", "content": "no", "tool_name": "add"}, "'retry-prompt'"),
        ({"part_kind": "retry-prompt", "content": [{"loc": ["a"]}]}, "'retry-prompt'"),
        ({"part_kind": "user-prompt", "content": [{"kind": "audio-url", "url": "u"}]}, "audio-url"),
    ],
)
def test_what_a_history_does_not_keep(part: dict[str, Any], sentence: str):
    """A reply to it does not train, those before do."""
    messages = copy.deepcopy(HISTORY)
    messages[2]["parts"] = [{"tool_call_id": "c1", **part}]
    (trajectory,) = read(*documents_in(messages))
    first, second = trajectory.completions
    assert first.trainable
    assert not second.trainable
    assert any(sentence in text for text in trajectory.warnings)
    image = {"kind": "binary", "media_type": "image/png", "data": "aGk="}
    link = {"kind": "image-url", "url": "https://a.b/c.png"}
    messages[2]["parts"] = [{"part_kind": "user-prompt", "content": ["see", image, link]}]
    (trajectory,) = read(*documents_in(messages))
    assert trajectory.completions[1].trainable
    assert trajectory.completions[1].request_messages[-1]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}},
    ]


def test_token_entries():
    """Those of a rollout are one trajectory, in any order; a newer version is refused."""
    second = {**ENTRY, "model_call_id": "call-2", "prompt_token_ids": [1, 2, 3, 4, 5]}
    other = {**ENTRY, "rollout_id": "other"}
    trajectory, alone = read(second, other, ENTRY)
    assert (trajectory.id, alone.id) == ("r.1-a_B", "other")
    (row,) = trajectory.token_sequences()
    assert (row.token_ids, row.loss_mask) == ([1, 2, 3, 4, 5, 3, 4], [0, 0, 1, 1, 0, 1, 1])
    assert [each.id for each in trajectory.completions] == ["call-1", "call-2"]
    state = CaptureState("r.1-a_B", True, frozenset())
    (marked,) = Documents().rollouts(print, state)
    assert marked.missing_calls == [marked.warnings[1]]
    for wrong, why in (
        ({"schema_version": 2}, "schema_version 2, and up to 1 is read"),
        ({"model_call_id": ""}, "model_call_id is ''"),
        ({"generation_token_ids": [1.5, 2]}, "generation_token_ids is no list"),
        ({"generation_log_probs": [1.0]}, "2 ids and 1 log_probs"),
    ):
        with pytest.raises(SpanFormatError, match=why):
            read({**ENTRY, **wrong})


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([ATIF, MINI, ENTRY, *documents_in(HISTORY), *documents_in(MINI["messages"])]),
    st.integers(0, 2**32),
)
def test_any_change_is_a_trajectory_or_an_error(document: dict[str, Any], seed: int):
    """Whatever stands in a place of it."""
    rng, made = random.Random(seed), copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        place: Any = made
        key: Any = rng.choice(list(made))
        while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.9:
            place = place[key]
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if rng.random() < 0.3:
            operator.delitem(place, key)
            break
        place[key] = rng.choice([None, 1, -(2**70), 1.5, "x", [], {}, [1], {"type": 1}, True, [[]]])
    try:
        for trajectory in read(made):
            assert trajectory.token_sequences() is not None
            assert trajectory.histories is not None
    except SpanFormatError:
        pass


@pytest.mark.parametrize("document", [ATIF, MINI, ENTRY, HISTORY[0], MINI["messages"][0]])
def test_the_first_bytes_show_a_document(document: dict[str, Any]):
    """In every layout and order of members; our own lines and spans are none."""
    for text in (
        json.dumps(document),
        json.dumps(document, indent=4),
        json.dumps([document], indent=1),
        json.dumps(document, sort_keys=True),
    ):
        assert may_be_document(text.encode()[:64])
    for other in ('{"schema_version":1,"id":"x"', '{"resourceSpans":[', '[{"TraceId":"', "[", ""):
        assert not may_be_document(other.encode())
