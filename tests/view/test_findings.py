"""Findings: every warning and every completion that no row trains is one, and says what to do."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_rollout
from otel_rollout import Trajectory, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.spans import as_records
from otel_rollout.testing import Raw, Reply
from otel_rollout.trajectory import DROPS, Dropped, TokenSequences
from otel_rollout.trajectory import sentences as every
from otel_rollout.trajectory.sentences import UNKNOWN, Kind, Sentence, sentence_of
from otel_rollout.trajectory.tokens import Cause
from otel_rollout.view import Finding, Overview, findings_of
from tests.kit.conversations import TITLE, ask, said, user
from tests.kit.recording import Clients, Recording

PLAIN = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SENTENCES = {name: each for name, each in vars(every).items() if isinstance(each, Sentence)}


def names_in(sentence: Sentence) -> list[str]:
    """The values that a sentence has."""
    return [name for _, name, _, _ in Formatter().parse(sentence.words) if name]


def found_in(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Kind and text of each finding; each says what to do."""
    findings = findings_of(trajectory)
    for finding in findings:
        assert finding.advice.endswith("."), finding
        assert not finding.text.endswith("."), finding
    return [(finding.kind, finding.text) for finding in findings]


@given(st.data(), st.sampled_from(sorted(SENTENCES.keys() - {"UNKNOWN"})))
def test_a_warning_is_recognised_by_the_sentence_that_made_it(data: st.DataObject, name: str):
    """Whatever its values are, as long as they are no words of a sentence themselves."""
    sentence = SENTENCES[name]
    values = {
        value: data.draw(st.text("abc:'\n0123456789", min_size=1)) for value in names_in(sentence)
    }
    found, read = sentence_of(sentence(**values))
    assert found is sentence
    assert read == values


def test_a_value_may_have_the_words_of_its_sentence():
    """The end of a sentence is that of the warning."""
    key = "what cannot be read and"
    assert sentence_of(every.UNREADABLE(key=key)) == (every.UNREADABLE, {"key": key})
    assert sentence_of(every.UNREADABLE(key=key) + " well")[0] is UNKNOWN


@given(st.text())
def test_any_other_text_is_known_to_be_none(text: str):
    """It is uncertain, and its advice says to read it; what others wrote must not be lost."""
    assert sentence_of(text) == (UNKNOWN, {})
    (finding, _) = findings_of(Trajectory(id="a", warnings=[text]))
    assert (finding.kind, finding.text) == ("uncertain", text)
    assert finding.advice == UNKNOWN.advice


def test_a_long_text_is_matched_in_one_pass():
    """A megabyte of what sentences are made of does not take a power of its length."""
    text = "exchange " + ": its response has choices, but no model API is known at " * 20_000
    assert sentence_of(text)[0] is every.DAMAGED
    assert sentence_of(text[1:])[0] is UNKNOWN


def test_every_sentence_is_made_somewhere():
    """A sentence that nothing makes any more is kept only for files, with a reason here."""
    package = Path(otel_rollout.__file__).parent
    own = package / "trajectory" / "sentences.py"
    places = (package, package.parent / "exporters", package.parent / "formats")
    used = "".join(f.read_text() for place in places for f in place.rglob("*.py") if f != own)
    made_from_words = {"CUT", "COPIES_DIFFER", "UNKNOWN"}
    """Those that `spans.absent` makes, and the one for what nothing makes."""
    unused = {name for name in SENTENCES if not re.search(rf"sentences\.{name}\b", used)}
    assert unused == made_from_words


def test_every_cause_and_sentence_says_what_to_do():
    """With a kind that is known; advice is whole sentences."""
    assert set(DROPS) == set(get_args(Cause))
    advices = [*DROPS.values(), *((each.kind, each.advice) for each in SENTENCES.values())]
    for kind, advice in advices:
        assert kind in get_args(Kind)
        assert advice.endswith(".")
        assert advice[0].isupper() or advice[0] == "`"


async def test_a_clean_rollout_has_none(recording: Recording, clients: Clients):
    """With a reward, token ids and log-probabilities there is nothing to say."""
    client = clients.asynchronous(clients.serve(["a", "b"]))
    async with rollout("agent") as trajectory:
        await ask(client, user("hi"))
        await ask(client, user("hi"), said("a"), user("so?"))
        trajectory.reward = 1.0
    assert found_in(trajectory) == []
    assert Overview.of(trajectory).findings == ()


async def test_a_rollout_without_a_reward_is_unscored(recording: Recording, clients: Clients):
    """Named rewards without a weight are no reward, and the advice says so."""
    client = clients.asynchronous(clients.serve())
    async with rollout("agent") as trajectory:
        await ask(client, user("hi"))
    assert found_in(trajectory) == [("unscored", "it has no reward")]
    trajectory.rewards["style"] = 1.0
    (finding,) = findings_of(trajectory)
    assert finding.text == "it has no reward, though it has 'style'"
    assert "weight" in finding.advice


async def test_what_no_row_trains_is_one_finding_each(recording: Recording, clients: Clients):
    """A failed call, a side call, one without ids: each with its kind and its completion."""
    client = clients.asynchronous(clients.serve([Reply("title"), Raw(500, b"{}"), "yes"]))
    bare = clients.asynchronous(clients.serve(Reply("x", id="other"), token_ids=False))
    async with rollout("agent") as trajectory:
        await ask(client, *TITLE)
        with pytest.raises(openai.InternalServerError):
            await ask(client, user("hi"), tools=PLAIN)
        await ask(client, user("hi"), tools=PLAIN)
        await ask(bare, user("hello"), tools=PLAIN)
        trajectory.reward = 1.0
    findings = findings_of(trajectory)
    assert [finding.kind for finding in findings] == ["side_call", "failed", "inexact"]
    dropped = trajectory.token_sequences().dropped
    assert [finding.completion_id for finding in findings] == [
        drop.completion.id for drop in dropped if drop.completion
    ]
    assert [finding.text for finding in findings] == [drop.reason for drop in dropped]
    assert [drop.cause for drop in dropped] == ["side_call", "call_failed", "no_token_ids"]
    assert Overview.of(trajectory).findings == ("failed", "inexact", "side_call")


@pytest.mark.parametrize(
    ("status", "reward", "cause"),
    [("error", None, "rollout_failed"), ("cancelled", 1.0, "rollout_cancelled")],
)
async def test_a_rollout_that_ended_badly(
    status: str, reward: float | None, cause: str, recording: Recording, clients: Clients
):
    """Each of its completions is dropped for that, and is a finding of the kind `failed`."""
    client = clients.asynchronous(clients.serve())
    error = ValueError("no") if status == "error" else asyncio.CancelledError()

    @rollout
    async def agent() -> None:
        await ask(client, user("hi"))
        trajectory = otel_rollout.get_current_trajectory()
        trajectory.reward = reward
        raise error

    with pytest.raises(type(error)):
        await agent()
    trajectory = recording.trajectory
    kinds = [kind for kind, _ in found_in(trajectory)]
    assert kinds == (["failed"] if reward else ["failed", "unscored"])
    assert [drop.cause for drop in trajectory.token_sequences().dropped] == [cause]


async def test_a_rollout_that_failed_before_its_first_call(recording: Recording):
    """The call that is missing, the failure, and no reward."""
    with pytest.raises(ValueError):
        async with rollout("agent") as trajectory:
            raise ValueError("no")
    found = found_in(trajectory)
    assert [kind for kind, _ in found] == ["incomplete", "failed", "unscored"]
    assert found[1][1] == "its rollout ended as 'error' without a model call: ValueError: no"


async def test_forks_by_tokens_are_one_finding_a_class(recording: Recording, clients: Clients):
    """With how many calls and tokens; a rollout that only appends is not asked."""
    replies = [Reply("a", reasoning="hm"), Reply("b", reasoning="hm"), "c"]
    client = clients.asynchronous(clients.serve(replies))
    async with rollout("agent") as trajectory:
        messages = [user("hi")]
        for text in "abc":
            await ask(client, *messages)
            messages += [said(text), user("so?")]
        trajectory.reward = 1.0
    (finding,) = findings_of(trajectory)
    assert finding.kind == "drift"
    assert finding.text.startswith("2 of 2 calls that continue a conversation do not continue")
    assert "(reasoning dropped)" in finding.text
    assert finding.completion_id == trajectory.drift().forks[0].after_id


async def test_what_trains_and_is_doubtful(recording: Recording, clients: Clients):
    """Replies without log-probabilities, of constrained decoding, and truncated ones."""
    client = clients.asynchronous(clients.serve(Reply("a", finish_reason="length"), logprobs=False))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    async with rollout("agent") as trajectory:
        await ask(client, user("hi"))
        await ask(client, user("you"), response_format=schema)
        trajectory.reward = 1.0
    texts = dict(found_in(trajectory))
    assert texts["truncated"] == (
        "2 of 2 replies that train were truncated (finish reason 'length')"
    )
    assert "2 of 2 replies that train have no log-probabilities" in [
        text for _, text in found_in(trajectory)
    ]


async def test_ids_that_several_responses_have_are_duplicates(
    recording: Recording, clients: Clients
):
    """As a cache of replies gives them."""
    client = clients.asynchronous(clients.serve(Reply("a", id="one")))
    async with rollout("agent") as trajectory:
        await ask(client, user("hi"))
        await ask(client, user("you"))
        trajectory.reward = 1.0
    assert [kind for kind, _ in found_in(trajectory)] == ["duplicate"]


async def test_a_damaged_call_is_one_finding(recording: Recording, clients: Clients):
    """Its warning and its drop are one, with the completion; what is missing is incomplete."""
    client = clients.asynchronous(clients.serve())
    async with rollout("agent") as live:
        await ask(client, user("hi"))
        await ask(client, user("you"))
        live.reward = 1.0
    first, second, *others = as_records(recording.spans)
    cut = replace(first, attributes={**first.attributes, sc.RESPONSE_BODY: '{"id":'})
    (damaged,) = reconstruct([cut, second, *others])
    (finding,) = findings_of(damaged)
    assert finding.kind == "damaged"
    assert [finding.completion_id] == [
        drop.completion.id for drop in damaged.token_sequences().dropped if drop.completion
    ]
    (without,) = reconstruct([second, *others])
    assert found_in(without) == [
        ("incomplete", "1 of 2 model calls are missing: their spans did not come")
    ]
    assert found_in(Trajectory.from_dict(without.to_dict())) == found_in(without)


def test_a_warning_of_a_missing_call_is_incomplete_whatever_its_words():
    """`missing_calls` tells, for sentences of other versions too."""
    trajectory = Trajectory(
        id="a", reward=1.0, warnings=["some went by"], missing_calls=["some went by", "and more"]
    )
    assert found_in(trajectory) == [("incomplete", "some went by"), ("incomplete", "and more")]


@pytest.mark.parametrize(
    ("kind", "text", "plain", "replies"),
    [
        ("truncated", "3 of 5 replies that train were truncated", "replies that train were", 3),
        ("incomplete", "2 of 7 model calls are missing: their", "model calls are missing:", 0),
        ("incomplete", "at least 2 model calls are missing", "model calls are missing", 0),
        ("inexact", "no token ids of 2 of the 7 tokens", "no token ids of some of the tokens", 0),
        ("duplicate", "2 responses have the id 'r'", "responses of several calls have one id", 0),
        ("uncertain", "4 replies, 3 histories: the client", "replies, histories: the client", 0),
        ("failed", "its call ended as 'error': asked 40112 tokens", "asked 40112 tokens", 0),
        ("dropped", "beyond 4096 tokens of its row", "beyond … tokens of its row", 0),
    ],
)
def test_the_sentence_for_a_sum_has_no_counts(kind: Any, text: str, plain: str, replies: int):
    """What is counted is left out; what an error says keeps its numbers."""
    finding = Finding(kind, text, "Do.")
    assert plain in finding.plain
    assert " … of " not in finding.plain
    assert finding.replies == replies


def test_a_drop_of_an_exporter_is_a_finding_too():
    """Its reason is what the exporter says, and an older pickle has no cause."""
    trajectory = Trajectory(id="a", reward=1.0)
    assert findings_of(trajectory, rows=TokenSequences((), [Dropped(None, "x")])) == []
    assert Dropped(None, "x").cause == "other"
    assert Finding("dropped", "x", "y.").to_dict() == {
        "kind": "dropped",
        "text": "x",
        "advice": "y.",
        "completion_id": None,
        "choice_index": 0,
    }
