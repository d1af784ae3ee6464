"""Replies without what was asked for training: the bytes that the server would have sent."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import Hiding, HidingReader, hidden_reply, hiding_of

TRAINING = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.sampled_from(["token_ids", "a", "é", "choices"]), values, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.fixed_dictionaries({"content": st.text(), "extra": VALUES})
INDENTS = st.sampled_from([None, 0, 1, 3])
IDS = st.lists(st.integers(0, 9), max_size=3)


def hiding(**fields: Any) -> Hiding:
    found = hiding_of(fields or TRAINING, b'{"prompt_logprobs": 1}')
    assert found is not None
    return found


def written(value: Any, indent: int | None, compact: bool) -> str:
    """JSON as some server writes it."""
    separators = (",", ":") if compact else None
    return json.dumps(value, indent=indent, separators=separators, ensure_ascii=False)


def placed(members: dict[str, Any], more: dict[str, Any], place: int) -> dict[str, Any]:
    """An object with further members at some place."""
    items = list(members.items())
    place %= len(items) + 1
    return dict([*items[:place], *more.items(), *items[place:]])


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, str]:
    """A reply with what is hidden, and as the server would have sent it."""
    choices, plain = [], []
    for index in range(draw(st.integers(0, 3))):
        choice = {"index": index, "message": draw(MESSAGES), "logprobs": None}
        plain.append(choice)
        shown = {**choice, "logprobs": draw(st.none() | st.just({"content": []}))}
        choices.append(placed(shown, {"token_ids": draw(IDS)}, draw(st.integers(0, 5))))
    head = {"id": draw(st.text()), "model": "m", "other": draw(VALUES)}
    place = draw(st.integers(0, 5))
    whole = placed({**head, "choices": choices}, {"prompt_token_ids": draw(IDS)}, place)
    indent, compact = draw(INDENTS), draw(st.booleans())
    return (
        written(whole, indent, compact),
        written({**head, "choices": plain}, indent, compact),
    )


@given(replies())
def test_a_reply_is_the_one_without_the_fields(reply: tuple[str, str]):
    """Byte for byte, however the server writes JSON, and wherever the members stand."""
    asked, plain = reply
    assert hidden_reply(asked.encode(), hiding()) == plain.encode()
    assert hidden_reply(plain.encode(), hiding()) == plain.encode()


@given(st.binary(max_size=60), st.booleans())
def test_what_is_no_reply_stays(body: bytes, named: bool):
    """Bytes of any kind, also where they name what is hidden."""
    body += b'"token_ids"' if named else b""
    try:
        json.loads(body)
    except ValueError:
        assert hidden_reply(body, hiding()) == body


def chunk(**members: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "model": "m", **members}).encode() + b"\n\n"


def choice(delta: Any, reason: str | None = None, ids: Any = None, **more: Any) -> dict[str, Any]:
    found = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
    return found if ids is None else {**found, "token_ids": ids}


STREAM: list[tuple[bytes, bytes]] = [
    (
        chunk(choices=[choice({"role": "assistant"}, ids=[])], prompt_token_ids=[1], usage=None),
        chunk(choices=[choice({"role": "assistant"})]),
    ),
    (chunk(choices=[choice({"content": "a"}, ids=[1])]), chunk(choices=[choice({"content": "a"})])),
    (b": still here\n\n", b": still here\n\n"),
    (chunk(choices=[choice({}, ids=[2])]), b""),
    (chunk(choices=[choice({}, "stop", ids=[3])]), chunk(choices=[choice({}, "stop")])),
    (chunk(choices=[], usage={"prompt_tokens": 1}), b""),
    (b"data: [DONE]\n\n", b"data: [DONE]\n\n"),
]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_a_stream_is_the_one_without_the_fields(sizes: list[int]):
    """However the network cuts it: events that only say what is hidden are left out."""
    reader, shown = HidingReader(hiding()), b""
    rest = b"".join(event for event, _ in STREAM)
    for size in sizes:
        shown += reader.shown(rest[:size])
        rest = rest[size:]
    shown += reader.shown(rest) + reader.rest()
    assert shown == b"".join(plain for _, plain in STREAM)


def test_an_event_is_shown_when_it_has_come():
    """No event waits for the next one."""
    reader = HidingReader(hiding())
    for event, plain in STREAM:
        assert reader.shown(event) == plain


def test_a_chunk_that_the_server_would_have_sent_stays():
    """An empty one without token ids, and one in an extension, by what asked for it."""
    empty = chunk(choices=[choice({})])
    assert HidingReader(hiding()).shown(empty) == empty
    extension = chunk(choices=[], sglext={"output_ids": [[1]]})
    assert HidingReader(hiding()).shown(extension) == extension
    assert HidingReader(hiding(return_output_ids_in_sglext=True)).shown(extension) == b""


@pytest.mark.parametrize(
    ("field", "member", "left"),
    [
        ("return_token_ids", "token_ids", False),
        ("return_meta_info", "meta_info", False),
        ("n_probs", "completion_probabilities", False),
        ("logprobs", "logprobs", True),
    ],
)
def test_only_what_was_added_is_hidden(field: str, member: str, left: bool):
    """What other fields ask for was the client's to ask."""
    reply = {"choices": [{"index": 0, "token_ids": [1], "logprobs": {}, "meta_info": {}}]}
    reply["choices"][0] |= {"completion_probabilities": [1], "prompt_logprobs": [1]}
    expected = copy.deepcopy(reply)
    if left:
        expected["choices"][0][member] = None
    else:
        del expected["choices"][0][member]
    shown = hidden_reply(json.dumps(reply).encode(), hiding(**{field: 1}))
    assert json.loads(shown) == expected


def test_nothing_is_hidden_where_nothing_was_added():
    """Also where only a field was added that nothing in a reply is known of."""
    assert hiding_of({}, b"{}") is None
    assert hiding_of({"return_something": True}, b"{}") is None
    assert hiding_of({"stream_options": {"include_usage": False}}, b"{}") is None


@pytest.mark.parametrize("asks", [False, True])
def test_log_probabilities_of_a_prompt_that_is_echoed(asks: bool):
    """A server (vLLM) sends them where `logprobs` and `echo` meet; they stay where asked for."""
    request = b'{"prompt": "a", "echo": true%b}' % (b', "prompt_logprobs": 1' if asks else b"")
    found = hiding_of({"logprobs": 0}, request)
    assert found is not None
    reply = b'{"choices": [{"text": "a", "logprobs": {"tokens": []}, "prompt_logprobs": [null]}]}'
    shown = json.loads(hidden_reply(reply, found))["choices"][0]
    assert shown == {"text": "a", "logprobs": None, "prompt_logprobs": [None] if asks else None}
