"""Replies as they were recorded, and with odd JSON put into them, are read as `json` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.wire import api_of, merge, wholly_read
from otel_rollout.wire.json import Json
from otel_rollout.wire.merging import Merging
from tests.kit.model_apis import TALKS

RECORDED = Path(__file__).parents[1] / "dialects" / "recorded"
_read = json.JSONDecoder(strict=False).decode


@pytest.fixture(autouse=True, scope="module")
def short_replies() -> Iterator[None]:
    """Short replies are read as long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otel_rollout.wire.api._LEAST", 0)
        yield


@cache
def bodies() -> list[tuple[str, str, bool]]:
    """`(path, body, is a stream)` of every reply that was recorded, each once."""
    found = set()
    for file in sorted(RECORDED.glob("*.wire.jsonl")):
        for line in file.read_text().splitlines():
            call = json.loads(line)
            if api_of(call["path"]) is not None:
                streamed = not call["response"].startswith("{")
                found.add((call["path"], call["response"], streamed))
    for talk in TALKS:
        found |= {(talk.path, json.dumps(reply), False) for reply in talk.replies}
    chosen = [{"token": "a", "tokenId": 7, "logProbability": -1.0}] * 2
    candidate = {"index": 0, "logprobsResult": {"chosenCandidates": chosen}}
    entries = [{"id": 7, "token": "a", "bytes": [97], "logprob": -1.0, "top_logprobs": []}] * 2
    pieces = [{"token_ids": [7, 8], "logprobs": [-1.0, -2.0], "text": "a"}] * 2
    part = {"type": "output_text", "text": "a", "logprobs": entries}
    own = {"index": 0, "content": "a", "tokens": [7, 8], "completion_probabilities": entries}
    for path, reply in (
        ("/models/m:generateContent", {"candidates": [candidate]}),
        ("/completion", own),
        ("/api/chat", {"model": "m", "done": True, "logprobs": entries}),
        ("/v2/chat", {"id": "x", "logprobs": pieces}),
        (
            "/responses",
            {"status": "completed", "output": [{"role": "assistant", "content": [part]}]},
        ),
    ):
        found.add((path, json.dumps(reply), False))
    return sorted(found)


def events_of(body: str) -> list[str]:
    datas = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
    return [data for data in datas if data != "[DONE]"]


def same(found: Json, expected: Json) -> bool:
    """Whether they are equal, types of numbers and NaN included."""
    if ValueError in (found, expected):
        return found is expected
    return json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


def read(path: str, body: str) -> Any:
    """What our reading gives; a ValueError as the text."""
    api = api_of(path)
    assert api is not None
    try:
        return wholly_read(api.read(body))
    except ValueError:
        return ValueError


def expected_of(body: str) -> Any:
    try:
        return _read(body)
    except (ValueError, RecursionError):
        return ValueError


def test_each_recorded_reply_is_read_as_json_reads_it() -> None:
    whole = [(path, body) for path, body, streamed in bodies() if not streamed]
    assert len(whole) > 100
    assert len({path for path, _ in whole}) >= 8
    for path, body in whole:
        assert same(read(path, body), expected_of(body)), body
        indented = json.dumps(_read(body), indent=2, ensure_ascii=False)
        assert same(read(path, indented), expected_of(body)), body


def test_each_recorded_stream_merges_as_if_json_had_read_its_chunks() -> None:
    streams = [(path, body) for path, body, streamed in bodies() if streamed]
    assert len(streams) > 20
    assert len({path for path, _ in streams}) >= 4
    for path, body in streams:
        api = api_of(path)
        assert api is not None
        chunks = [_read(event) for event in events_of(body)]
        if any("error" in chunk for chunk in chunks):
            continue
        found = merge(body, path=path).body
        assert same(wholly_read(found), api.merge(chunks, Merging())), body


_DEEP = "[" * 200 + "]" * 200
_ODD = st.sampled_from(
    [
        *("NaN", "Infinity", "-Infinity", "-0", "-0.0", "1e400", "-1e400", "1E-400", "0.1e1"),
        *(str(1 << 63), str(1 << 64), "-" + "9" * 30, "123456789.123456789123456789", "5e-324"),
        *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\ttab"', '"\x00"', '"\\/"', '"é\u2028"'),
        *("null", "true", "[]", "{}", '{"a":1,"a":2}', '{"index":-1}', '[{"index":null}]', _DEEP),
        *("01", "+1", ".5", "1.", "tru", '"\\x"', '"', "[1,]", "{,}", "nan", "'a'", ""),
    ]
)
_keys = st.sampled_from(["index", "text", "logprobs", "token_ids", "id", "novel", "usage", "error"])


def places(body: str) -> list[tuple[int, int]]:
    """Where the values of the members in a body begin and end."""
    found, scan = [], json.JSONDecoder(strict=False).raw_decode
    at = body.find(":")
    while at >= 0:
        start = at + 1
        while body.startswith(" ", start):
            start += 1
        try:
            found.append((start, scan(body, start)[1]))
        except ValueError:  # a colon in a text
            pass
        at = body.find(":", at + 1)
    return found


@given(st.data())
def test_odd_json_in_a_reply_is_read_or_refused_as_json_does(data: st.DataObject) -> None:
    whole = [(path, body) for path, body, streamed in bodies() if not streamed]
    path, body = data.draw(st.sampled_from(whole))
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = data.draw(st.sampled_from(places(body) or [(0, len(body))]))
        odd = data.draw(_ODD)
        kind = data.draw(st.sampled_from(["replace", "beside", "rename", "cut"]))
        if kind == "replace":
            body = body[:start] + odd + body[end:]
        elif kind == "beside":
            body = f'{body[:end]},"{data.draw(_keys)}":{odd}{body[end:]}'
        elif kind == "rename":
            names = st.sampled_from(["choices", "index", "message", "content", "id", "model"])
            body = body.replace(f'"{data.draw(names)}"', f'"{data.draw(_keys)}"')
        else:
            body = body[:end]
    assert same(read(path, body), expected_of(body))
