"""Token sequences: twelve worked cases, and what must hold for any conversation."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.trajectory.tokens import (
    TokenSequence,
    token_sequences,
    untrained_sequences,
)
from otel_rollout.wire import choices
from otel_rollout.wire.json import PartlyRead


@dataclass
class Server:
    """A rollout's calls to a server that returns token ids, as spans."""

    writer: ExchangeWriter = field(default_factory=ExchangeWriter)
    spans: list[SpanRecord] = field(default_factory=list)
    clock: int = 0

    def call(
        self,
        name: str,
        prompt: list[int] | None,
        *choices: list[int] | None,
        logprobs: list[float | None] | None = None,
        usage: int | None = None,
        status: str = "complete",
        finish: str = "stop",
        model: str = "m",
        at: tuple[int, int] | None = None,
        extra: dict[str, Any] | None = None,
        versions: bool = False,
        known: bool = False,
    ) -> None:
        """One call; `at` is when it began and ended, by default after all others.

        versions: True if the server names that of each token, which is the id's last bit.
        known: True if it sends the log-probability of each token, which is -id, and null for 0.
        """
        if at is None:
            self.clock += 1
            at = (self.clock, self.clock)
        # Texts are not what token sequences look at.
        messages = [{"role": "user", "content": f"{name}"}]
        several = {"n": len(choices)} if len(choices) > 1 else {}
        body = {"model": model, "messages": messages, **several, **(extra or {})}
        made: list[dict[str, Any]] = []
        for index, ids in enumerate(choices):
            values = [-float(each) or None for each in ids or ()] if known else logprobs
            entries = [{"token": "", "logprob": value} for value in values or ()]
            made.append(
                {
                    "index": index,
                    "finish_reason": finish,
                    "message": {"role": "assistant", "content": f"{name} {index}"},
                    "token_ids": ids,
                    "logprobs": {"content": entries} if values is not None else None,
                    **({"meta_info": versions_of(ids or ())} if versions else {}),
                }
            )
        reply: dict[str, Any] = {"id": name, "model": model, "choices": made}
        reply["prompt_token_ids"] = prompt
        if usage is not None:
            reply["usage"] = {"completion_tokens": usage}
        attributes = {
            sc.ROLLOUT_ID: "r",
            sc.EXCHANGE_VERSION: 1,
            sc.EXCHANGE_PROCESS: "p",
            sc.EXCHANGE_STARTED: at[0],
            sc.EXCHANGE_ENDED: at[1],
            sc.EXCHANGE_STATUS: status,
            sc.REQUEST_PATH: "/chat/completions",
            **self.writer.request(json.dumps(body).encode()),
            **self.writer.response(json.dumps(reply).encode()),
        }
        self._span(f"exchange {name}", at[0], attributes)

    def _span(self, name: str, start: int, attributes: dict[str, Any]) -> None:
        number = len(self.spans) + 1
        self.spans.append(
            SpanRecord(
                name, "1" * 32, f"{number:016x}", None, start, 10**6, with_lengths(attributes)
            )
        )

    def trajectory(self, seed: int | None = None, **own: Any) -> Trajectory:
        """The trajectory of the calls, whose spans come in any order."""
        attributes = {
            sc.ROLLOUT_ID: "r",
            sc.ROLLOUT_SCHEMA_VERSION: 1,
            sc.ROLLOUT_STATUS: "complete",
            sc.ROLLOUT_PROCESS: "p",
            sc.ROLLOUT_EXCHANGE_COUNT: len(self.spans),
            sc.ROLLOUT_OPEN_COUNT: 0,
            **own,
        }
        spans = list(self.spans)
        self._span("invoke_agent x", 0, attributes)
        spans, self.spans = self.spans, spans
        if seed is not None:
            random.Random(seed).shuffle(spans)
        (trajectory,) = reconstruct(spans)
        return trajectory


def versions_of(ids: Iterable[int]) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for version, same in groupby(ids, lambda token: token & 1):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(same))})
    return {"weight_versions": spans}


def brief(row: TokenSequence) -> tuple[list[int], str]:
    """A row as ids and mask, to compare with what was worked out by hand."""
    return row.token_ids, "".join(map(str, row.loss_mask))


def rows(server: Server, **options: Any) -> list[tuple[list[int], str]]:
    return [brief(row) for row in server.trajectory().token_sequences(**options)]


def reasons(server: Server, **options: Any) -> dict[str, str]:
    dropped = server.trajectory().token_sequences(**options).dropped
    return {drop.completion.id: drop.reason for drop in dropped if drop.completion}


@pytest.fixture
def server() -> Server:
    """A server that has answered A: prompt 1 2, sampled 3 4."""
    server = Server()
    server.call("A", [1, 2], [3, 4], logprobs=[-1.0, -2.0])
    return server


# --- the twelve cases


def test_a_conversation_that_goes_on_is_one_row(server: Server):
    """1: what the prompt has behind the first reply is context, and log-probabilities are kept."""
    server.call("B", [1, 2, 3, 4, 5], [6], logprobs=[-3.0])
    (row,) = server.trajectory().token_sequences()
    assert brief(row) == ([1, 2, 3, 4, 5, 6], "001101")
    assert row.logprobs == [0, 0, -1, -2, 0, -3]
    assert row.prompt_length == 2
    assert row.spans == [("A", 2, 4), ("B", 5, 6)]
    assert row.completion_ids == ["A", "B"]
    assert row.sampled == row.loss_mask
    assert not row.truncated


def test_a_prompt_that_was_tokenised_differently_is_a_row_of_its_own(server: Server):
    """2: drift. The ids of the first reply came back as others: nothing is realigned."""
    server.call("B", [1, 2, 3, 9, 5], [7])
    assert rows(server) == [([1, 2, 3, 4], "0011"), ([1, 2, 3, 9, 5, 7], "000001")]


def test_reasoning_that_was_dropped_starts_a_row():
    """3: the model did not see its reasoning again, so the second call is a row of its own."""
    server = Server()
    server.call("A", [1, 2], [90, 91, 3])
    server.call("B", [1, 2, 3, 5], [6])
    assert rows(server) == [([1, 2, 90, 91, 3], "00111"), ([1, 2, 3, 5, 6], "00001")]


def test_interleaved_agents_are_a_row_each(server: Server):
    """4: each call goes on from the path that fits it, not from the call before it."""
    server.call("S1", [9, 9], [8])
    server.call("A2", [1, 2, 3, 4, 5], [6])
    server.call("S2", [9, 9, 8, 7], [6])
    assert rows(server) == [([1, 2, 3, 4, 5, 6], "001101"), ([9, 9, 8, 7, 6], "00101")]


def test_a_fork_trains_the_shared_reply_once(server: Server):
    """5: the first branch trains what both have, in the second it is sampled context."""
    server.call("F1", [1, 2, 3, 4, 5], [6])
    server.call("F2", [1, 2, 3, 4, 7], [8])
    first, second = server.trajectory().token_sequences()
    assert brief(first) == ([1, 2, 3, 4, 5, 6], "001101")
    assert brief(second) == ([1, 2, 3, 4, 7, 8], "000001")
    assert second.sampled == [0, 0, 1, 1, 0, 1]
    assert second.logprobs[:5] == [0, 0, -1, -2, 0]
    assert math.isnan(second.logprobs[5])


def test_a_call_that_failed_is_not_a_row():
    """6: a reply that the agent did not get does not train, the retry does."""
    server = Server()
    server.call("D", [1, 2], [3, 9], status="error")
    server.call("A", [1, 2], [3, 4])
    server.call("B", [1, 2, 3, 4, 5], [6])
    assert rows(server) == [([1, 2, 3, 4, 5, 6], "001101")]
    assert reasons(server) == {"D": "its call ended as 'error'"}


def test_samples_of_one_prompt_that_were_all_delivered_are_rows(server: Server):
    """6: an agent that samples twice got both replies; each trains once."""
    server.call("A2", [1, 2], [3, 5])
    server.call("B", [1, 2, 3, 4, 5], [6])
    assert rows(server) == [([1, 2, 3, 5], "0011"), ([1, 2, 3, 4, 5, 6], "001101")]


def test_a_reply_that_only_unresolved_retries_follow_trains():
    """Nobody knows which of two later samples the agent got; what came before them is known."""
    server = Server()
    server.call("a", [1, 2], [3])
    server.call("b", [1, 2, 3, 4], [5])
    server.call("c", [1, 2, 3, 4], [6])
    inexact = [
        replace(c, exchange=replace(c.exchange, source="a dialect"))
        for c in server.trajectory().completions
    ]
    rows = token_sequences(inexact)
    assert list(map(brief, rows)) == [([1, 2, 3], "001")]
    assert [str(dropped)[:32] for dropped in rows.dropped] == [
        "b: the same prompt was sampled a",
        "c: the same prompt was sampled a",
    ]


def test_a_reply_without_ids_is_context(server: Server):
    """7: the reply of a call without ids is in the next prompt, and is not trained."""
    server.call("B", [1, 2, 3, 4, 5], None)
    server.call("C", [1, 2, 3, 4, 5, 6, 7], [8])
    assert rows(server) == [([1, 2, 3, 4, 5, 6, 7, 8], "00110001")]
    assert "no token ids" in reasons(server)["B"]


def test_a_reply_with_too_few_logprobs_is_context():
    """7: lengths that disagree are not mended."""
    server = Server()
    server.call("A", [1, 2], [3, 4], logprobs=[-1.0])
    server.call("B", [1, 2, 3, 4, 5], [6])
    assert rows(server) == [([1, 2, 3, 4, 5, 6], "000001")]
    assert reasons(server) == {"A": "it has 2 token ids and 1 log-probabilities"}


def test_a_truncated_reply_keeps_its_tokens(server: Server):
    """8: no end-of-turn token is invented; an empty reply adds nothing and carries nothing on."""
    server.call("B", [1, 2, 3, 4, 5], [6, 6], finish="length")
    server.call("C", [1, 2, 3, 4, 5, 6, 6, 7], [])
    server.call("D", [1, 2, 3, 4, 5, 6, 6, 7], [8])
    (row,) = server.trajectory().token_sequences()
    assert brief(row) == ([1, 2, 3, 4, 5, 6, 6, 7, 8], "001101101")
    assert row.truncated
    assert "no token ids" in reasons(server)["C"]
    (masked,) = server.trajectory().token_sequences(mask_truncated=True)
    assert brief(masked) == ([1, 2, 3, 4, 5, 6, 6, 7, 8], "001100001")


def test_one_of_two_choices_is_continued():
    """9: choices share their prompt; each trains once, in its own row."""
    server = Server()
    server.call("A", [1, 2], [3], [4], usage=2)
    server.call("B", [1, 2, 4, 5], [6])
    assert rows(server) == [([1, 2, 3], "001"), ([1, 2, 4, 5, 6], "00101")]


def test_a_reply_that_is_continued_without_anything_between(server: Server):
    """10: an empty delta is legal."""
    server.call("B", [1, 2, 3, 4], [5])
    assert rows(server) == [([1, 2, 3, 4, 5], "00111")]


def test_ids_are_kept_whatever_their_text_is():
    """11: nothing is decoded: the largest ids and non-canonical ones come back as they were."""
    server = Server()
    server.call("A", [2**31 - 1, 0, 1], [151643, 2**31 - 1])
    assert rows(server) == [([2**31 - 1, 0, 1, 151643, 2**31 - 1], "00011")]


@pytest.mark.parametrize("wrong", [2**31, -1, 2**63, 10**30, -(2**40), True, 1.5, 7.0, "7", None])
@pytest.mark.parametrize("place", range(4))
def test_what_can_be_no_id_is_in_no_row(wrong: Any, place: int):
    """The reason has the first one, its place and its list; what came is kept, and others train."""
    server = Server()
    ids: list[Any] = [1, 2, 3, 4]
    ids[place] = wrong
    server.call("A", ids[:2], ids[2:])
    server.call("B", [1, 2], [3])
    trajectory = server.trajectory()
    found = trajectory.token_sequences()
    assert [row.token_ids for row in found] == [[1, 2, 3]]
    (drop,) = found.dropped
    whose = "reply" if place > 1 else "prompt"
    expected = f"the token ids of its {whose} have {wrong!r} at place {place % 2}, which can"
    assert drop.reason.startswith(expected)
    assert (drop.cause, drop.lacks_only_ids) == ("impossible_id", True)
    reply: Any = trajectory.completions[0].response
    assert [reply["prompt_token_ids"], reply["choices"][0]["token_ids"]] == [ids[:2], ids[2:]]
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    again = Trajectory.from_json(trajectory.to_json(), reads_replies=True)
    assert again.token_sequences().dropped[0].reason == drop.reason
    assert all(wrong not in row.token_ids for row in untrained_sequences(found))


def test_ids_beyond_the_vocabulary_do_not_train():
    """`max_token_id` is asked of prompts and replies, whatever was asked before."""
    server = Server()
    server.call("A", [1, 2], [3])
    server.call("B", [1, 2, 3, 90], [5])
    trajectory = server.trajectory()
    assert len(trajectory.token_sequences()[0]) == 5
    for limit, expected in ((90, [5]), (89, [3]), (5, [3]), (3, [3]), (2, [])):
        found = trajectory.token_sequences(max_token_id=limit)
        assert [len(row) for row in found] == expected
        assert len(trajectory.with_max_token_id(limit).token_sequences()) == len(expected)
    assert "the token ids of its prompt have 90 at place 3" in str(
        trajectory.token_sequences(max_token_id=89).dropped[0]
    )
    assert len(trajectory.token_sequences()[0]) == 5


def test_tool_arguments_with_different_keys_stay_as_they_were():
    """12: rows of different tool calls do not get each other's keys."""
    server = Server()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    server.call("A", [1], [2], extra={"tools": tools})
    server.call("B", [1, 2, 3], [4])
    assert rows(server) == [([1, 2, 3, 4], "0101")]  # ids decide, not what they were made of


# --- what is admitted


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"status": "abandoned"}, "its call ended as 'abandoned'"),
        ({"status": "cancelled"}, "its call ended as 'cancelled'"),
        ({"usage": 3}, "the server says that it sampled 3 tokens and sent 2 token ids"),
        ({"logprobs": [-1.0, -2.0, -3.0]}, "it has 2 token ids and 3 log-probabilities"),
        ({"logprobs": [-1.0]}, "it has 2 token ids and 1 log-probabilities"),
        ({"logprobs": []}, "it has 2 token ids and 0 log-probabilities"),
    ],
)
def test_what_is_not_admitted_says_why(call: dict[str, Any], reason: str):
    """Lengths that disagree and calls that did not end well are listed, never trained."""
    server = Server()
    server.call("A", [1, 2], [3, 4], **call)
    assert rows(server) == []
    assert reasons(server) == {"A": reason}


@pytest.mark.parametrize("prompt", [None, []])
def test_without_prompt_ids_nothing_is_admitted(prompt: list[int] | None):
    """Sampled ids alone do not say what the model saw."""
    server = Server()
    server.call("A", prompt, [3, 4])
    assert reasons(server) == {"A": "the server sent no token ids of the prompt"}


def test_unknown_logprobs_are_not_zero():
    """Where the server gave none they are NaN, on the sampled tokens only."""
    server = Server()
    server.call("A", [1], [2, 3], logprobs=[-0.5, None])
    server.call("B", [1, 2, 3], [4])
    (row,) = server.trajectory().token_sequences()
    assert row.logprobs[:2] == [0.0, -0.5]
    assert [math.isnan(value) for value in row.logprobs] == [False, False, True, True]


def test_models_are_not_mixed(server: Server):
    """Another model's call is a row of its own, whatever its ids are."""
    server.call("B", [1, 2, 3, 4, 5], [6], model="judge")
    assert rows(server) == [([1, 2, 3, 4], "0011"), ([1, 2, 3, 4, 5, 6], "000001")]


def test_only_what_had_ended_can_be_continued():
    """A call that was under way when another began cannot have been what that one went on from."""
    server = Server()
    server.call("A", [1], [2], at=(1, 3))
    server.call("B", [1, 2, 3], [4], at=(2, 3))
    assert rows(server) == [([1, 2], "01"), ([1, 2, 3, 4], "0001")]


def test_of_identical_samples_the_last_is_continued():
    """Both train once; which one went on is taken as histories take it."""
    server = Server()
    server.call("A", [1], [2])
    server.call("B", [1], [2])
    server.call("C", [1, 2, 3], [4])
    sequences = server.trajectory().token_sequences()
    assert [row.completion_ids for row in sequences] == [["A"], ["B", "C"]]


def test_a_failed_rollout_trains_only_if_it_was_scored(server: Server):
    """An error without a reward is no data; with one, or if asked for, it is."""
    assert server.trajectory(None, **{sc.ROLLOUT_STATUS: "error"}).token_sequences() == []
    kept = server.trajectory(None, **{sc.ROLLOUT_STATUS: "error"})
    assert len(kept.token_sequences(on_failure="keep")) == 1
    scored = server.trajectory(None, **{sc.ROLLOUT_STATUS: "error"})
    scored.reward = -1.0
    assert len(scored.token_sequences()) == 1
    (drop,) = server.trajectory(None, **{sc.ROLLOUT_STATUS: "error"}).token_sequences().dropped
    assert "has no reward" in drop.reason


def test_a_cancelled_rollout_trains_where_it_was_scored(server: Server):
    """And only where that is asked for."""
    cancelled = server.trajectory(None, **{sc.ROLLOUT_STATUS: "cancelled"})
    assert cancelled.token_sequences(on_failure="keep") == []
    cancelled.reward = 1.0
    assert len(cancelled.token_sequences(on_failure="keep")) == 1
    assert "cancelled" in cancelled.token_sequences().dropped[0].reason


def test_a_rollout_that_is_not_trainable_has_no_rows(server: Server):
    """`@rollout(trainable=False)` is said to be the reason."""
    judge = server.trajectory(None, **{sc.ROLLOUT_TRAINABLE: False})
    assert judge.token_sequences() == []
    assert judge.token_sequences().dropped[0].reason == "its rollout is not trainable"


def test_a_row_is_cut_at_its_end(server: Server):
    """`max_length` cuts all lists alike and flags the row; what is not reached is listed."""
    server.call("B", [1, 2, 3, 4, 5], [6, 7])
    server.call("C", [1, 2, 3, 4, 5, 6, 7, 8], [9])
    (row,) = server.trajectory().token_sequences(max_length=6)
    assert brief(row) == ([1, 2, 3, 4, 5, 6], "001101")
    assert len(row.logprobs) == len(row.sampled) == 6
    assert row.truncated
    assert row.spans == [("A", 2, 4), ("B", 5, 6)]
    assert reasons(server, max_length=6) == {"C": "beyond 6 tokens of its row"}


@pytest.mark.parametrize(
    ("finish", "extra", "truncated"),
    [
        ("stop", {}, False),
        ("stop", {"max_tokens": 2}, False),
        ("length", {}, True),
        ("tool_calls", {"max_tokens": 2}, True),
        ("tool_calls", {"max_completion_tokens": 3}, False),
    ],
)
def test_what_counts_as_truncated(finish: str, extra: dict[str, Any], truncated: bool):
    """The server's word; for calls of tools also as many tokens as were allowed: some hide it."""
    server = Server()
    server.call("A", [1], [2, 3], finish=finish, extra=extra)
    (row,) = server.trajectory().token_sequences()
    assert row.truncated is truncated


@pytest.mark.parametrize(
    "options", [{"on_failure": "ignore"}, {"max_length": 0}, {"max_length": "8"}]
)
def test_wrong_options_are_named(server: Server, options: dict[str, Any]):
    """What was expected and what was got is said."""
    with pytest.raises(ValueError, match=f"token_sequences\\({next(iter(options))}=.*expected"):
        server.trajectory().token_sequences(**options)


# --- any conversation


@st.composite
def plays(draw: st.DrawFn) -> Server:
    """Calls that go on from earlier ones, fork, drift, fail, overlap, and repeat."""
    server = Server()
    fulls: list[list[int]] = []
    token = st.integers(0, 5)  # few ids: beginnings are shared by accident too
    clock = 0
    for number in range(draw(st.integers(1, 9))):
        goes_on = draw(st.booleans())
        base = list(draw(st.sampled_from(fulls))) if fulls and goes_on else []
        if base and draw(st.integers(0, 5)) == 0:
            base[draw(st.integers(0, len(base) - 1))] = draw(token)
        prompt = base + draw(st.lists(token, min_size=0 if base else 1, max_size=3))
        n = draw(st.integers(1, 2))
        choices = [draw(st.lists(token, max_size=3)) for _ in range(n)]
        if draw(st.integers(0, 5)) == 0:
            clock = max(0, clock - 1)
        clock += 1
        server.call(
            f"c{number}",
            None if draw(st.integers(0, 9)) == 0 else prompt,
            *choices,
            status=draw(st.sampled_from(["complete"] * 5 + ["error"])),
            model=draw(st.sampled_from(["m", "m", "m", "judge"])),
            at=(clock, clock + draw(st.integers(0, 1))),
            versions=draw(st.booleans()),
            known=draw(st.booleans()),
        )
        fulls += [prompt + choice for choice in choices]
    return server


@given(plays(), st.integers(0, 99))
def test_invariants(server: Server, seed: int):
    """Every admitted completion trains once; prompts and replies are exact beginnings of rows."""
    trajectory = server.trajectory()
    sequences = trajectory.token_sequences()
    dropped = {
        (d.completion.id, d.completion.choice_index) for d in sequences.dropped if d.completion
    }
    admitted = {
        (c.id, c.choice_index): c
        for c in trajectory.completions
        if (c.id, c.choice_index) not in dropped
    }
    for completion in trajectory.completions:
        whole = completion.trainable and completion.token_ids and completion.prompt_token_ids
        assert bool(whole) == ((completion.id, completion.choice_index) in admitted)
    trained: dict[tuple[str, int], int] = dict.fromkeys(admitted, 0)
    total = 0
    for row in sequences:
        assert len(row) == len(row.loss_mask) == len(row.logprobs) == len(row.sampled)
        assert row.prompt_length == row.sampled.index(1)
        assert [row.spans[i][0] for i in range(len(row.spans))] == row.completion_ids
        covered, values = [0] * len(row), [0.0] * len(row)
        models = set()
        for completion, (name, start, end) in zip(row.completions, row.spans, strict=True):
            assert name == completion.id
            ids, prompt = completion.token_ids or [], completion.prompt_token_ids or []
            assert row.token_ids[:start] == prompt
            assert row.token_ids[start:end] == ids
            covered[start:end] = [1] * (end - start)
            known = completion.logprobs or [None] * (end - start)
            values[start:end] = [math.nan if value is None else value for value in known]
            if any(row.loss_mask[start:end]):
                assert all(row.loss_mask[start:end])
                trained[completion.id, completion.choice_index] += 1
            models.add(completion.model)
        assert covered == row.sampled
        assert row.token_ids == (
            (row.completions[-1].prompt_token_ids or []) + (row.completions[-1].token_ids or [])
        )
        assert len(models) == 1
        assert all(m <= s for m, s in zip(row.loss_mask, row.sampled, strict=True))
        assert any(row.loss_mask)
        total += sum(row.loss_mask)
        assert repr(row.logprobs) == repr(values)
    assert set(trained.values()) <= {1}
    assert total == sum(len(c.token_ids or []) for c in admitted.values())
    again = server.trajectory(seed).token_sequences()
    assert [brief(row) for row in again] == [brief(row) for row in sequences]
    assert [row.spans for row in again] == [row.spans for row in sequences]


@given(plays(), st.sampled_from([None, 1, 4, 7]))
def test_spans_of_versions_are_of_the_sampled_tokens(server: Server, max_length: int | None):
    """Each sampled token of a row is in one, in order; its version is None where none was named."""
    for row in server.trajectory().token_sequences(max_length=max_length):
        known = {
            at: row.token_ids[at] & 1 if completion.policy_version_spans else None
            for completion, (_, start, end) in zip(row.completions, row.spans, strict=True)
            for at in range(start, end)
        }
        spans = row.policy_version_spans
        if spans is None:
            assert set(known.values()) <= {None}
            continue
        assert [at for _, start, end in spans for at in range(start, end)] == [*known]
        assert {at: v for v, start, end in spans for at in range(start, end)} == known
        assert [at for at, is_sampled in enumerate(row.sampled) if is_sampled] == [*known]
        assert {version for version, _, _ in spans} <= {*row.policy_versions, None}


@given(plays())
def test_the_tokens_that_do_not_train_are_rows_too(server: Server):
    """Each reply with ids that no row holds is in such a row, with all its ids; nothing trains."""
    trajectory = server.trajectory()
    trajectory.status = "error"
    for sequences in (trajectory.token_sequences(), trajectory.token_sequences(on_failure="keep")):
        untrained = untrained_sequences(sequences)
        there = [c for row in [*sequences, *untrained] for c in row.completions]
        assert set(there) == {c for c in trajectory.completions if c.token_ids}
        for row in untrained:
            assert not any(row.loss_mask)
            assert not any(row.trains)
            row.token_id_array[:] = array(row.token_id_array.typecode, [7] * len(row))
            assert len(row) == len(row.loss_mask) == len(row.logprobs) == len(row.sampled)
            for completion, (_, start, end) in zip(row.completions, row.spans, strict=True):
                assert row.token_ids[start:end] == completion.token_ids
                assert row.token_ids[:start] == (completion.prompt_token_ids or [])
                assert all(row.sampled[start:end])


@given(plays(), st.none() | st.integers(1, 12))
def test_arrays_have_what_the_lists_have(server: Server, most: int | None):
    """And what trains is counted without either, however the rows are truncated."""
    for row in server.trajectory().token_sequences(max_length=most):
        assert row.trained_tokens == sum(row.loss_mask) > 0
        arrays = row.token_id_array, row.loss_mask_array, row.logprob_array, row.sampled_array
        assert [each.typecode for each in arrays] == ["i", "b", "d", "b"]
        lists = row.token_ids, row.loss_mask, row.logprobs, row.sampled
        assert repr([each.tolist() for each in arrays]) == repr([*lists])
        assert {len(row.token_ids), len(row.loss_mask), len(row.logprobs)} == {len(row)}
        start = row.prompt_length
        assert row.sampled[: start + 1] == [0] * start + [1]
        assert row.trains == [bool(row.loss_mask[start]) for _, start, _ in row.spans]
        for each in arrays:
            each[:] = array(each.typecode, [7] * len(each))
        again = row.token_id_array, row.loss_mask_array, row.logprob_array, row.sampled_array
        assert repr([each.tolist() for each in again]) == repr([*lists])
        for completion, (_, start, end) in zip(row.completions, row.spans, strict=True):
            assert row.token_ids[start:end] == (completion.token_ids or [])[: end - start]


@pytest.mark.parametrize("least", [0, 1 << 20])
def test_an_array_of_a_completion_is_the_callers_own(least: int, monkeypatch: pytest.MonkeyPatch):
    """What is written into it changes no row, and no completion, however the reply was read."""
    monkeypatch.setattr("otel_rollout.wire.api._LEAST", least)
    server = Server()
    server.call("A", [1], [2, 3], logprobs=[-1.0, -2.0])
    trajectory = server.trajectory()
    (completion,) = trajectory.completions
    for values in (completion.logprob_array, completion.logprob_array):
        assert values is not None
        assert values.tolist() == [-1.0, -2.0]
        values[0] = 0.0
    assert completion.logprobs == [-1.0, -2.0]
    assert trajectory.token_sequences()[0].logprobs == [0.0, -1.0, -2.0]


def test_who_asks_for_messages_first_leaves_the_tokens_unread():
    """Rows are read in one pass with the reply, messages without its tokens."""
    server = Server()
    server.call("A", [1], [*range(2, 999)], known=True)
    first, later = server.trajectory(), server.trajectory()
    (row,) = first.token_sequences()
    (history,) = later.histories
    assert isinstance(read := first.completions[0].choice, PartlyRead)
    assert isinstance(unread := later.completions[0].choice, PartlyRead)
    members = "logprobs", "token_ids"
    assert [name for name in members if read.cut(name) is not None] == []
    assert [name for name in members if unread.cut(name) is not None] == [*members]
    assert not unread.known
    assert history.messages() == first.histories[0].messages()
    assert later.token_sequences() == [row]
    assert dict(unread) == dict(read)


@given(plays())
def test_no_row_could_have_gone_on_further(server: Server):
    """A row begins anew only where no earlier path of its model fits."""
    sequences = server.trajectory().token_sequences()
    paths = [
        (row.token_ids[:end], completion)
        for row in sequences
        for completion, (_, _, end) in zip(row.completions, row.spans, strict=True)
    ]
    for row in sequences:
        first = row.completions[0]
        prompt = row.token_ids[: row.prompt_length]
        for path, completion in paths:
            earlier = completion.exchange.ended < first.exchange.started
            same = completion.model == first.model and completion is not first
            assert not (earlier and same and prompt[: len(path)] == path)


def test_replies_are_read_when_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch):
    """A line is written and read without reading a reply; rows read each one once."""
    live, read_replies, partly = server.trajectory(), list[str](), choices.ChoicesApi.usual

    def reading(text: str) -> Any:
        read_replies.append(text)
        return partly(text)

    monkeypatch.setattr(choices.ChoicesApi, "usual", staticmethod(reading))
    monkeypatch.setattr("otel_rollout.wire.api._LEAST", 0)
    read = Trajectory.from_json(live.to_json())
    assert read.status == "complete"
    assert [each.path for each in read.exchanges] == ["/chat/completions"] * len(live.exchanges)
    assert read.to_json() == live.to_json()
    assert read_replies == []
    assert brief(read.token_sequences()[0]) == ([1, 2, 3, 4], "0011")
    assert (read.warnings, read.messages()[-1]["role"]) == ([], "assistant")
    assert len(read_replies) == len(read.exchanges)
    assert read.completions[0].response == live.completions[0].response
