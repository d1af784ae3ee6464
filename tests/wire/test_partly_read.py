"""Replies of chats keep their log-probabilities unread: whoever asks gets what was sent."""

from __future__ import annotations

import copy
import json
import pickle
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_rollout.wire import (
    Json,
    alternatives,
    api_of,
    merge,
    sampled_ids,
    sampled_logprobs,
    sampled_texts,
    wholly_read,
)
from otel_rollout.wire import json as json_module
from otel_rollout.wire.choices import merge_choices
from otel_rollout.wire.conversation import extend_with, path_messages
from otel_rollout.wire.json import PartlyRead
from otel_rollout.wire.merging import Merging

CHAT = "/chat/completions"
_numbers = st.floats(-1e3, 0) | st.sampled_from([-9999.0, 0, -1, None, -1e39, True])
_entries = st.lists(
    st.fixed_dictionaries(
        {
            "token": st.sampled_from(["a", "é", "token_id:7", "\ufffd", '"]', ""]),
            "logprob": _numbers,
        },
        optional={
            "bytes": st.none() | st.just([97]),
            "id": st.integers(0, 9),
            "top_logprobs": st.just([{"token": "b", "logprob": -2.0}]),
        },
    ),
    max_size=4,
)
_logprobs = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "content": st.none() | _entries,
        "refusal": st.none() | _entries,
        "tokens": st.just(["a"]),
        "token_logprobs": st.just([-1.0]),
    },
)
_ids = st.none() | st.lists(
    st.integers(0, 1 << 40) | st.sampled_from([1 << 70, 1.5, True, None]), max_size=4
)
_others = st.sampled_from([None, True, 1, 1.0, 0, "x", "", [1], [], [True], {}, {"a": 1}])
_more = {"novel": st.just({"x": [1]}), "stop_reason": st.none() | st.just("</s>")}


@pytest.fixture(autouse=True, scope="module")
def short_replies() -> Iterator[None]:
    """Short replies are read as long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otel_rollout.wire.api._LEAST", 0)
        yield


def choices(inner: str, said: st.SearchStrategy[Json]) -> st.SearchStrategy[list[Json]]:
    return st.lists(
        st.fixed_dictionaries(
            {"index": st.integers(0, 1), inner: said},
            optional={
                "logprobs": _logprobs,
                "token_ids": _ids,
                "finish_reason": st.none(),
                **_more,
            },
        ),
        max_size=3,
    )


_replies = st.fixed_dictionaries(
    {"id": st.text(max_size=2)},
    optional={
        "choices": choices("message", st.just({"role": "assistant", "content": "hi"})),
        "usage": st.just({"completion_tokens": 2}),
        "novel": st.just(1),
    },
)
_chunks = st.lists(
    st.fixed_dictionaries(
        {"id": st.just("x"), "choices": choices("delta", st.just({"content": "é"}))},
        optional={"usage": st.none(), "system_fingerprint": st.just("f"), "novel": st.just(1)},
    ),
    min_size=1,
    max_size=5,
)


_NAMES = ("finish_reason", "stop_reason", "logprobs", "novel")


def asked(choice: Any, reply: Json) -> list[Any]:
    ids = sampled_ids(choice, reply)
    return [
        ids and list(ids),
        sampled_logprobs(choice, len(ids) if ids else None),
        sampled_logprobs(choice, None),
        sampled_texts(choice),
        alternatives(choice),
        json.dumps([choice.get(name) for name in _NAMES], sort_keys=True),
    ]


@given(_replies, st.sampled_from([None, 1]), st.booleans())
def test_a_reply_gives_what_was_sent(sent: Json, indent: int | None, tokens: bool) -> None:
    """Whether or not tokens are read with it."""
    api = api_of(CHAT)
    assert api is not None
    found = api.read(json.dumps(sent, indent=indent), tokens=tokens)
    assert wholly_read(found) == sent
    for choice, plain in zip(found.get("choices", ()), sent.get("choices", ()), strict=True):
        for _ in range(2):
            assert repr(asked(choice, found)) == repr(asked(plain, sent))
        assert (dict(choice), len(choice), list(choice)) == (plain, len(plain), [*dict(choice)])


_lists = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "tokens": st.none() | st.lists(st.sampled_from(["a", "token_id:7", '",', ""]), max_size=3),
        "token_logprobs": st.none() | st.lists(_numbers, max_size=3),
        "top_logprobs": st.none() | st.lists(st.none() | st.just({"b": -2.0}), max_size=3),
        "text_offset": st.just([0, 1]),
        "content": st.none() | _entries,
    },
)
_texts = st.fixed_dictionaries(
    {"id": st.text(max_size=2)},
    optional={
        "choices": st.lists(
            st.fixed_dictionaries(
                {"index": st.integers(0, 1), "text": st.sampled_from(["a", "", None])},
                optional={"logprobs": _lists, "token_ids": _ids, "finish_reason": st.none()},
            ),
            max_size=3,
        ),
        "usage": st.just({"completion_tokens": 2}),
    },
)


@given(_texts, st.booleans(), st.booleans())
def test_a_text_completion_gives_what_was_sent(sent: Json, is_echo: bool, tokens: bool) -> None:
    api = api_of("/completions")
    assert api is not None
    params = {"prompt": "a", "echo": is_echo}
    found, plain = api.read(json.dumps(sent), tokens=tokens), json.loads(json.dumps(sent))
    assert wholly_read(found) == plain
    pairs = zip(api.sampled(params, None, found), api.sampled(params, None, plain), strict=True)
    for ours, expected in pairs:
        assert (ours.index, ours.items) == (expected.index, expected.items)
        assert repr(asked(ours.choice, found)) == repr(asked(expected.choice, plain))


RESPONSES = "/responses"
GEMINI = "/v1beta/models/m:generateContent"
_tokens = st.fixed_dictionaries(
    {"token": st.just("a"), "tokenId": st.integers(0, 9), "logProbability": st.just(-1.5)}
)
_chosen = st.lists(_tokens, max_size=3) | st.lists(
    st.fixed_dictionaries(
        {"token": st.sampled_from(["a", "é", ""])},
        optional={
            "logProbability": _numbers,
            "tokenId": st.integers(0, 1 << 40) | st.sampled_from([None, 1 << 70, 1.5]),
        },
    ),
    max_size=3,
)
_results = st.fixed_dictionaries(
    {},
    optional={
        "chosenCandidates": _chosen,
        "topCandidates": st.lists(st.fixed_dictionaries({"candidates": _chosen}), max_size=3),
        "logProbabilitySum": st.just(-1.0),
    },
)
_contents = st.fixed_dictionaries(
    {"candidates": st.none()},
    optional={"usageMetadata": st.just({"promptTokenCount": 2}), "novel": st.just(1)},
) | st.fixed_dictionaries(
    {
        "candidates": st.lists(
            st.fixed_dictionaries(
                {"content": st.just({"role": "model", "parts": [{"text": "hi"}]})},
                optional={
                    "index": st.integers(0, 1),
                    "finishReason": st.just("STOP"),
                    "logprobsResult": _results | st.none(),
                    "novel": st.just([{"token": "a", "logprob": -1.0}]),
                },
            ),
            max_size=2,
        )
    }
)


def check_reading(path: str, sent: Json) -> None:
    """What is read of a reply is what `json.loads` gives, asked once or again."""
    api = api_of(path)
    assert api is not None
    for tokens in (False, True):
        found, plain = api.read(json.dumps(sent), tokens=tokens), json.loads(json.dumps(sent))
        assert wholly_read(found) == plain
        pairs = zip(api.sampled({}, None, found), api.sampled({}, None, plain), strict=True)
        for ours, expected in pairs:
            assert (ours.index, ours.items) == (expected.index, expected.items)
            for _ in range(2):
                assert repr(asked(ours.choice, found)) == repr(asked(expected.choice, plain))


@given(_contents)
def test_a_candidate_gives_what_was_sent(sent: Json) -> None:
    check_reading(GEMINI, sent)


def test_a_usual_candidate_is_partly_read() -> None:
    chosen = [{"token": "a", "tokenId": 7, "logProbability": -1.0}]
    tops = [{"candidates": [{"token": "b", "logProbability": -2.0}]}]
    content = {"role": "model", "parts": [{"text": "a"}]}
    result = {"chosenCandidates": chosen, "topCandidates": tops}
    sent = {"candidates": [{"content": content, "logprobsResult": result}]}
    api = api_of(GEMINI)
    assert api is not None
    found = api.read(json.dumps(sent))
    (read,) = found["candidates"]
    assert isinstance(read, PartlyRead)
    assert read.known["logprobsResult"] == (array("d", [-1.0]), array("i", [7]))
    assert (sampled_ids(read, found), sampled_texts(read)) == (array("i", [7]), [b"a"])
    assert [each[0].text for each in alternatives(read)] == [b"b"]


_numbered = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(0, 9), "token": st.just("a"), "logprob": st.just(-1.5)}
    ),
    max_size=3,
)
_pieces = st.lists(
    st.fixed_dictionaries(
        {"token_ids": st.lists(st.integers(0, 1 << 40) | st.just(1 << 70), max_size=2)},
        optional={"logprobs": st.none() | st.lists(_numbers, max_size=2), "text": st.just("a")},
    )
    | st.just({"token_ids": [1, 2], "logprobs": [-1.0, -2.5]}),
    max_size=3,
)
_said: dict[str, Any] = {
    "message": {"role": "assistant", "content": "hi"},
    "content": "hi",
    "model": "m",
}
_at_each_path: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/completion": {
        "content": st.just("hi"),
        "tokens": _ids | st.just([1.5]),
        "completion_probabilities": st.none() | _numbered | _entries,
        "tokens_predicted": st.integers(0, 3),
        "choices": st.just([]) | choices("message", st.just(_said["message"])),
    },
    "/api/chat": {
        "message": st.just(_said["message"]),
        "done": st.just(True),
        "logprobs": st.none() | _numbered | _entries | _pieces,
    },
    "/v2/chat": {
        "message": st.just(_said["message"]),
        "finish_reason": st.none() | st.just("COMPLETE"),
        "logprobs": st.none() | _pieces | _entries,
    },
}


@pytest.mark.parametrize("path", _at_each_path)
@given(st.data())
def test_a_reply_that_is_the_choice_gives_what_was_sent(path: str, data: st.DataObject) -> None:
    members = {**_at_each_path[path], "novel": st.just({"x": [1]})}
    sent = data.draw(st.fixed_dictionaries({"model": st.just("m")}, optional=members))
    check_reading(path, sent)


@pytest.mark.parametrize(
    ("path", "place", "sent"),
    [
        (
            "/completion",
            "completion_probabilities",
            {
                "content": "a",
                "tokens": [7],
                "completion_probabilities": [{"id": 7, "token": "a", "logprob": -1.0}],
            },
        ),
        ("/api/chat", "logprobs", {"logprobs": [{"id": 7, "token": "a", "logprob": -1.0}]}),
        ("/v2/chat", "logprobs", {"logprobs": [{"token_ids": [7], "logprobs": [-1.0]}]}),
    ],
)
def test_a_usual_reply_that_is_the_choice_is_partly_read(path: str, place: str, sent: Json) -> None:
    api = api_of(path)
    assert api is not None
    found = api.read(json.dumps(sent))
    assert isinstance(found, PartlyRead)
    assert found.known[place] == (array("d", [-1.0]), array("i", [7]))
    assert sampled_ids(found, found) == array("i", [7])


_said_parts = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["output_text", "a_call", "refusal"]),
        "logprobs": _numbered | _entries | st.just([{"token": "a", "logprob": -1.0}]) | st.none(),
        "text": st.sampled_from(["a", "", None]),
    },
    optional={"novel": _others},
)
_items = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["message", "reasoning", "novel_call"]),
        "content": st.lists(_said_parts, min_size=1, max_size=2) | st.sampled_from([None, ["a"]]),
    },
    optional={
        "id": st.just("m1"),
        "role": st.sampled_from(["assistant", "user", None]),
        "arguments": _others,
    },
)
_responses = st.fixed_dictionaries(
    {
        "status": st.just("completed"),
        "output": st.lists(_items, min_size=1, max_size=3) | st.sampled_from([None, ["a"], []]),
    },
    optional={
        "tools": st.just([{"type": "function", "name": "f"}]),
        "novel": st.just(1),
    },
)


@given(_responses)
def test_a_response_gives_what_was_sent(sent: Json) -> None:
    """Its items, in the order of their members, and their keys, too."""
    api = api_of(RESPONSES)
    assert api is not None
    found, plain = api.read(json.dumps(sent)), json.loads(json.dumps(sent))
    pairs = [*zip(api.sampled({}, None, found), api.sampled({}, None, plain), strict=True)]
    for ours, expected in pairs:
        paths = [extend_with(None, each.items) for each in (ours, expected)]
        assert len({path and path.key for path in paths}) == 1
        assert len(ours.items) == len(expected.items)
        for _ in range(2):
            assert repr(asked(ours.choice, found)) == repr(asked(expected.choice, plain))
        assert json.dumps([*ours.items]) == json.dumps(expected.items)
        assert [id(item) for item in ours.items] == [id(item) for item in ours.items]
        assert [path_messages(path) for path in paths] == [list(expected.items)] * 2
    assert wholly_read(found) == plain


def test_of_a_usual_response_nothing_is_read_for_its_key_and_its_numbers() -> None:
    part = {"type": "output_text", "text": "a", "logprobs": [{"token": "a", "logprob": -1.0}]}
    said = {"type": "message", "id": "m", "content": [part, part], "role": "assistant"}
    sent = {"status": "completed", "output": [{"type": "reasoning", "summary": []}, said]}
    api = api_of(RESPONSES)
    assert api is not None
    found = api.read(json.dumps(sent))
    (one,) = api.sampled({}, None, found)
    assert isinstance(one.choice, PartlyRead)
    path = extend_with(None, one.items)
    assert path is not None
    assert path.key == extend_with(None, sent["output"]).key  # type: ignore[union-attr]
    assert (sampled_ids(one.choice, found), api.finish_reason(one.choice)) == (None, "completed")
    assert sampled_logprobs(one.choice, None) == array("d", [-1.0, -1.0])
    assert one.choice._reply._value is json_module._UNREAD  # type: ignore[union-attr]
    assert path.json._value is json_module._UNREAD
    assert (one.items[1], path.message) == (said, said)
    assert json.loads(path.json.text) == said


def test_of_a_chat_without_ids_they_are_not_looked_for_in_its_text() -> None:
    entries = [{"token": "a", "logprob": -1.0}]
    api = api_of(CHAT)
    assert api is not None
    sent = {"choices": [{"index": 0, "logprobs": {"content": entries}}]}
    found = api.read(json.dumps(sent), tokens=True)
    (choice,) = found["choices"]
    whole = choice._reply
    assert (sampled_ids(choice, found), sampled_logprobs(choice, None)) == (None, array("d", [-1]))
    assert whole._value is json_module._UNREAD
    assert choice["logprobs"] == {"content": entries}
    assert whole._value is not json_module._UNREAD


@pytest.mark.parametrize("path", [CHAT, "/api/chat"])
@pytest.mark.parametrize("name", ["token_id:", r"\u0074oken_id:", r"token\u005Fid:"])
def test_texts_that_are_ids_are_found_however_they_are_written(path: str, name: str) -> None:
    entries = f'[{{"token": "{name}7", "logprob": -1.0}}]'
    text = f'{{"choices": [{{"index": 0, "logprobs": {{"content": {entries}}}}}]}}'
    chunk = text.replace('"logprobs"', '"delta": {"content": "a"}, "logprobs"')
    api = api_of(path)
    assert api is not None
    if path == CHAT:
        bodies = [api.read(text, tokens=tokens) for tokens in (False, True)]
        bodies.append(merge(f"data: {chunk}\n\n", path=CHAT).body)
        pairs = [(body["choices"][0], body) for body in bodies]
    else:
        pairs = [(body, body) for body in [api.read(f'{{"logprobs": {entries}}}')]]
    for choice, body in pairs:
        assert isinstance(choice, PartlyRead)
        assert sampled_ids(choice, body) == [7]


def test_a_copy_of_a_choice_has_what_was_passed_over() -> None:
    sent = {"model": "m", "logprobs": [{"token": "a", "logprob": -1.0}]}
    api = api_of("/api/chat")
    assert api is not None
    found = api.read(json.dumps(sent))
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert dict(copied) == sent
    assert "logprobs" in found
    assert "novel" not in found


@pytest.mark.parametrize("path", [CHAT, GEMINI, RESPONSES, "/completion", "/api/chat", "/v2/chat"])
def test_a_number_that_python_does_not_read_is_found_at_once(path: str) -> None:
    """Also where it would be passed over."""
    number = "9" * 5000
    entry = f'{{"token": "a", "logprob": -1.0, "bytes": [{number}]}}'
    chosen = f'{{"tokenId": 1, "logProbability": -1.0, "token": {number}}}'
    piece = f'{{"token_ids": [1], "logprobs": [-1.0], "text": {number}}}'
    text = {
        CHAT: f'{{"choices": [{{"logprobs": {{"content": [{entry}]}}}}]}}',
        GEMINI: f'{{"candidates": [{{"logprobsResult": {{"chosenCandidates": [{chosen}]}}}}]}}',
        RESPONSES: f'{{"output": [{{"content": [{{"logprobs": [{entry}]}}]}}]}}',
        "/completion": f'{{"content": "a", "completion_probabilities": [{entry}]}}',
        "/api/chat": f'{{"logprobs": [{entry}]}}',
        "/v2/chat": f'{{"logprobs": [{piece}]}}',
    }[path]
    api = api_of(path)
    assert api is not None
    for tokens in (False, True):
        with pytest.raises(ValueError, match="limit"):
            api.read(text, tokens=tokens)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "-Infinity", "1e999", "9" * 40, '"a\tb"'])
@pytest.mark.parametrize("name", ["token", "logprob", "id", "novel"])
def test_what_only_json_reads_is_read_as_it_does(name: str, value: str, tokens: bool) -> None:
    entry = f'{{"token": "a", "logprob": -1.0, "{name}": {value}}}'
    text = f'{{"choices": [{{"logprobs": {{"content": [{entry}]}}, "token_ids": [{value}]}}]}}'
    api, plain = api_of(CHAT), json.loads(text, strict=False)
    assert api is not None
    found = api.read(text, tokens=tokens)
    assert repr(wholly_read(found)) == repr(plain)
    assert repr(asked(found["choices"][0], found)) == repr(asked(plain["choices"][0], plain))


@given(_chunks, st.sampled_from(["\n", "\r\n"]))
def test_a_stream_is_merged_as_if_it_were_read(sent: list[Json], end: str) -> None:
    events = "".join(f"data: {json.dumps(chunk)}{end * 2}" for chunk in sent)
    merged = merge(events + f"data: [DONE]{end * 2}", path=CHAT)
    expected = merge_choices(json.loads(json.dumps(sent)), Merging())
    assert wholly_read(merged.body) == expected
    for choice, plain in zip(merged.body["choices"], expected["choices"], strict=True):
        assert repr(asked(choice, merged.body)) == repr(asked(plain, expected))


_PIECE = {
    "index": 0,
    "delta": {"content": "é"},
    "finish_reason": None,
    "token_ids": [1],
    "logprobs": {"content": [{"token": "a", "logprob": -1.0}]},
}
_CHUNK = {"id": "x", "created": 1, "usage": None, "choices": [_PIECE]}
_changes = st.one_of(
    st.tuples(st.sampled_from(["id", "created", "usage", "prompt_token_ids", "novel"]), _others),
    st.tuples(st.sampled_from(sorted(_PIECE)), _others | st.just({"content": None})),
    st.tuples(
        st.just("delta"),
        st.fixed_dictionaries(
            {"content": st.sampled_from(["b", None])},
            optional={"role": st.sampled_from(["assistant", "a", None]), "refusal": st.none()},
        ),
    ),
    st.tuples(st.just("logprobs"), _logprobs),
    st.tuples(st.sampled_from(["stop_reason", "native_finish_reason"]), _others),
)


_CALL = {"content": "a", "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}


@given(st.lists(st.none() | _changes, min_size=3, max_size=6))
@example([("delta", _CALL)] * 3)
def test_chunks_that_only_add_are_joined_and_no_others(changes: list[tuple[str, Json] | None]):
    """Whatever one of them has in another way, the reply is that of each chunk by itself."""
    sent: list[Json] = []
    for change in changes:
        name, value = change or ("id", "x")
        is_inner = name not in (*_CHUNK, "prompt_token_ids", "novel")
        piece = {**_PIECE, name: value} if is_inner else _PIECE
        sent.append({**_CHUNK, "choices": [piece], **({} if is_inner else {name: value})})
    read = _read_as_it_was_sent(sent)
    if not any(changes):
        assert len(read) == 1


def test_lists_with_white_space_are_joined():
    """An empty one adds nothing to the others."""
    lists = [_PIECE["logprobs"], {"content": []}, _PIECE["logprobs"]]
    sent = [{**_CHUNK, "choices": [{**_PIECE, "logprobs": each}]} for each in lists]
    _read_as_it_was_sent(sent, lambda text: text.replace("[", "[ ").replace("]", " ]"))


@pytest.mark.parametrize("end", [{}, {"id": "y"}, {"novel": 1}])
def test_a_long_stream_is_read_as_a_short_one(end: dict[str, Json]):
    """Its chunks are read in several calls: also one whose last chunk has another shape."""
    delta = {**_PIECE, "delta": {"content": "word " * 1000}}
    sent: list[Json] = [{**_CHUNK, "choices": [delta]}] * 200
    read = _read_as_it_was_sent([*sent, {**_CHUNK, "choices": [delta], **end}])
    assert len(read) == (201 if "novel" in end else 1 + bool(end))


def _read_as_it_was_sent(
    sent: list[Json], written: Callable[[str], str] = lambda text: text
) -> list[Json]:
    """The chunks of a stream, which merge to the reply that they are.

    written: changes how the JSON of each is written.
    """
    api = api_of(CHAT)
    assert api is not None
    read = api.read_chunks([written(json.dumps(each)) for each in sent])
    assert read is not None
    assert outcome(lambda: wholly_read(merge_choices(read, Merging()))) == outcome(
        lambda: merge_choices(json.loads(json.dumps(sent)), Merging())
    )
    return read


def outcome(made: Callable[[], Json]) -> str:
    try:
        return json.dumps(made(), sort_keys=True)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return type(error).__name__


def test_usual_replies_and_streams_are_partly_read() -> None:
    """What is gained: no object for each token."""
    logprobs = {"content": [{"token": "a", "logprob": -1.0, "bytes": [97]}], "refusal": None}
    choice = {"index": 0, "logprobs": logprobs, "token_ids": [1], "finish_reason": "stop"}
    reply = {"id": "x", "choices": [{**choice, "message": {"role": "assistant", "content": "a"}}]}
    chunk = {"id": "x", "choices": [{**choice, "delta": {"content": "a"}}]}
    api = api_of(CHAT)
    assert api is not None
    for found, is_cut in (
        (api.read(json.dumps(reply)), True),
        (api.read(json.dumps(reply), tokens=True), False),
        (merge(f"data: {json.dumps(chunk)}\n\n", path=CHAT).body, True),
    ):
        (read,) = found["choices"]
        assert isinstance(read, PartlyRead)
        assert (read.cut("logprobs") is not None) is is_cut
        assert is_cut or read.known["logprobs"] == (array("d", [-1.0]), None)
        assert is_cut or read["logprobs"] is read["logprobs"]  # the text is read again once
        assert (read["logprobs"], sampled_logprobs(read, 1)) == (logprobs, array("d", [-1.0]))


@pytest.mark.parametrize("value", [-9999.0, -10000.5, -1e39, 1e39, None, True, 0, -1])
def test_what_stands_for_an_unknown_log_probability_is_found(value: Json) -> None:
    """Where only the numbers are read, too."""
    entries = [{"token": "a", "logprob": each} for each in (-1.0, value, -0.5)]
    reply = {"choices": [{"index": 0, "logprobs": {"content": entries}}]}
    api = api_of(CHAT)
    assert api is not None
    for tokens in (False, True):
        found = api.read(json.dumps(reply), tokens=tokens)
        (read,), (plain,) = (made["choices"] for made in (found, reply))
        assert isinstance(read, PartlyRead) or value is None or value is True
        assert repr(sampled_logprobs(read, 3)) == repr(sampled_logprobs(plain, 3))


@pytest.mark.parametrize("damaged", ['{"choices": [{"logprobs": [}]}', '{"choices": [}', "x", ""])
def test_what_is_no_json_is_refused(damaged: str) -> None:
    api = api_of(CHAT)
    assert api is not None
    for tokens in (False, True):
        with pytest.raises(ValueError, match=r"Expecting|char|Extra"):
            api.read(damaged, tokens=tokens)
