"""Versions of the policy in replies: spans over their tokens, in every place and by every chunk."""

from __future__ import annotations

import json
from itertools import accumulate, groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import Trajectory, rollout
from otel_rollout.testing import Raw, Reply
from otel_rollout.wire import is_partition, version_spans
from otel_rollout.wire.apis import merge
from tests.kit.calling import STREAMED
from tests.kit.comparing import replayed
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording

Spans = list[tuple[str, int, int]]

versions = st.lists(st.sampled_from("789"), min_size=1, max_size=12)
"""The version of each token of a reply."""


def spans_of(tokens: list[str]) -> Spans:
    spans: Spans = []
    for version, same in groupby(tokens):
        start = spans[-1][2] if spans else 0
        spans.append((version, start, start + len(list(same))))
    return spans


def listed(spans: Spans) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def merged(choices: list[dict[str, Any]], **of_reply: Any) -> dict[str, Any]:
    """The reply of chunks with one choice each; `of_reply` is on each of them."""
    chunks = [{"id": "c", "choices": [choice], **of_reply} for choice in choices]
    reply = merge("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)).body
    assert isinstance(reply, dict)
    return reply


def read(reply: dict[str, Any], index: int = 0) -> list[tuple[Any, ...]]:
    return list(map(tuple, version_spans(reply["choices"][index], reply)))


@given(versions, st.sampled_from(["meta_info", "choice", "art", "sglext", "metadata"]))
def test_a_list_of_spans_is_read_in_every_place(tokens: list[str], place: str) -> None:
    """SGLang's four places and ART's; other members of a span, and those of no token, are none."""
    spans = spans_of(tokens)
    said: dict[str, Any] = {"weight_versions": [*listed(spans), *listed([("0", 0, 0)])]}
    choice: dict[str, Any] = {"index": 0}
    reply = {"choices": [choice]}
    if place == "art":
        named = [{"policy_version": v, "start_token": a, "end_token": b} for v, a, b in spans]
        choice["policy_token_spans"] = [{**each, "lora_slot": "m"} for each in named]
    elif place == "choice":
        choice |= said
    elif place == "meta_info":
        choice["meta_info"] = {**said, "weight_version": tokens[-1]}
    else:
        reply[place] = {**said, "weight_version": tokens[-1]}  # type: ignore[assignment]
    assert read(reply) == spans
    assert is_partition(version_spans(choice, reply), len(tokens))


@pytest.mark.parametrize("place", ["sglext", "metadata"])
def test_spans_on_a_reply_of_several_choices_are_of_none(place: str) -> None:
    """They are of the first, and nothing says so; the version of the last token is said of all."""
    said = {"weight_version": "8", "weight_versions": listed([("7", 0, 1), ("8", 1, 2)])}
    reply = {"choices": [{"index": 0}, {"index": 1}], place: said}
    assert read(reply, 0) == read(reply, 1) == [("8", None, None)]


@given(versions, st.data())
def test_versions_of_chunks_are_spans_of_their_tokens(tokens: list[str], data: Any) -> None:
    """However the chunks are cut: each names its own, or lists all so far; n choices take turns."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)))) | {len(tokens)})
    place = data.draw(st.sampled_from(["meta_info", "metadata", "so far", "some so far"]))
    of_chunk = [tokens[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    whole = [version for chunk in of_chunk for version in [chunk[-1]] * len(chunk)]
    chunks: list[dict[str, Any]] = []
    for end, own in zip(accumulate(map(len, of_chunk)), of_chunk, strict=True):
        for index in (0, 1):
            choice: dict[str, Any] = {"index": index, "delta": {"content": "x"}}
            choice["token_ids"] = [1] * len(own)
            said: dict[str, Any] = {"weight_version": own[-1]}
            if place == "so far" or (place == "some so far" and end == len(tokens)):
                said["weight_versions"] = listed(spans_of(tokens[:end]))
            of_reply = place == "metadata"
            chunks.append(
                {"choices": [choice], "metadata": said}
                if of_reply
                else {"choices": [{**choice, "meta_info": said}]}
            )
    last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = "".join(f"data: {json.dumps(each)}\n\n" for each in [*chunks, last])
    reply = merge(events).body
    assert isinstance(reply, dict)
    for index in (0, 1):
        assert read(reply, index) == spans_of(tokens if "so far" in place else whole)
        assert reply["choices"][index]["token_ids"] == [1] * len(tokens)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        (["7", "7"], [("7", None, None)]),
        (["7", "8", "8"], [("7", None, None), ("8", None, None)]),
        (["7", None, "8", None, "8"], [("7", None, None), ("8", None, None)]),
    ],
    ids=["one", "two", "some"],
)
def test_tokens_that_are_not_counted_have_no_numbers(choices: list[Any], expected: Any) -> None:
    """The versions are there in order; which token is of which is not made up."""
    pieces: list[dict[str, Any]] = [
        {"delta": {"content": "x"}, **({"meta_info": {"weight_version": v}} if v else {})}
        for v in choices
    ]
    assert read(merged(pieces)) == expected


def test_a_chunk_that_names_no_version_leaves_no_numbers() -> None:
    """A version of some tokens is not that of all."""
    pieces: list[dict[str, Any]] = [
        {"delta": {"content": "x"}, "token_ids": [1]},
        {"delta": {"content": "y"}, "token_ids": [2], "meta_info": {"weight_version": "7"}},
    ]
    assert read(merged(pieces)) == [("7", None, None)]


@pytest.mark.parametrize(
    "spans",
    [
        [("7", 0, 3)],
        [("7", 0, 2), ("8", 3, 4)],
        [("7", 0, 3), ("8", 2, 4)],
        [("7", 1, 4)],
        [("8", 2, 4), ("7", 0, 2)],
        [("7", 0, 5)],
        [("7", 0, "x")],
        [("7", 0, True)],
        [(None, 0, 2), ("7", 2, 4)],
    ],
)
def test_spans_that_are_not_of_all_tokens_once(spans: Any, recording: Recording, clients: Clients):
    """Their versions are known, and no token's is."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "token_ids": [1] * 4}
    reply = {"id": "c", "choices": [{**choice, "weight_versions": listed(spans)}]}
    with rollout("x"):
        ask(clients, Raw(body=json.dumps(reply).encode()))
    (completion,) = recording.trajectory.completions
    assert completion.policy_version_spans is None
    assert completion.policy_versions == tuple(v for v, _, _ in spans if v is not None)


def ask(clients: Clients, server: Reply | Raw, **options: Any) -> None:
    messages: Any = [user("hi")]
    reply = clients.sync(clients.serve(server)).chat.completions.create(
        model="m", messages=messages, **options
    )
    if options.get("stream"):
        list(reply)


@STREAMED
def test_a_reply_through_which_the_weights_changed(
    recording: Recording, clients: Clients, stream: bool
):
    """The call, its rows, what its spans rebuild and what JSON gives back: all have the spans."""
    server = Reply("twelve tokens", weight_versions=[("7", 8), ("8", 99)])
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    options["extra_body"] = {"return_token_ids": True, "logprobs": True}
    with rollout("x"):
        ask(clients, server, stream=stream, **options)
    count = len("twelve tokens") + 1
    live = recording.trajectory
    for each in (live, replayed(recording), Trajectory.from_json(live.to_json())):
        (completion,) = each.completions
        assert completion.policy_versions == ("7", "8")
        assert completion.policy_version_spans == [("7", 0, 8), ("8", 8, count)]
        (row,) = each.token_sequences()
        start = row.prompt_length
        assert row.policy_version_spans == [("7", start, start + 8), ("8", start + 8, len(row))]
        assert each.policy_versions == ["7", "8"]


def test_the_rollouts_version_counts_before_the_servers(recording: Recording, clients: Clients):
    """`policy_version=` is in the trainer's words; the spans stay in the server's."""
    with rollout("x", policy_version=3):
        ask(clients, Reply("ab", weight_versions=[("default", 9)]))
    (completion,) = recording.trajectory.completions
    assert (completion.policy_version, completion.policy_versions) == (3, (3,))
    assert completion.policy_version_spans == [("default", 0, 3)]


@pytest.mark.parametrize("named", [True, False])
def test_a_version_that_is_known_only_at_the_end(
    recording: Recording, clients: Clients, named: bool
):
    """The server's for all tokens count alone; where it names none, the beginning is not known."""
    versions = iter([None, None])
    server = Reply("ab", weight_versions=[("7", 9)] if named else [])
    extra: Any = {"return_token_ids": True}
    with rollout("x", policy_version=lambda: next(versions, 8)) as trajectory:
        ask(clients, server, stream=True, extra_body=extra)
    assert trajectory.policy_version is None
    for each in (trajectory, replayed(recording), Trajectory.from_json(trajectory.to_json())):
        (completion,) = each.completions
        assert completion.policy_versions == (("7",) if named else (None, 8))
        assert each.policy_versions == (["7"] if named else [8])
