"""A trajectory on a line: what was exchanged is in it as it came, and damage is one error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from otel_rollout import SpanFormatError, Trajectory, reconstruct
from otel_rollout import semconv as sc
from otel_rollout.spans.record import SpanRecord
from otel_rollout.spans.seals import with_lengths
from otel_rollout.spans.writer import ExchangeWriter
from otel_rollout.wire import JsonText

TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 1200}}
LOGPROBS = {"content": [{"token": "b", "logprob": -2.0, "bytes": None, "top_logprobs": []}]}
CHOICE = {"index": 0, "token_ids": [5], "logprobs": LOGPROBS, "finish_reason": "stop"}
MESSAGE = {"role": "assistant", "content": "said"}
REPLY = {"id": "x", "prompt_token_ids": [1, 2], "choices": [{**CHOICE, "message": MESSAGE}]}
CHUNKS = [
    {"id": "y", "choices": [{**CHOICE, "finish_reason": None, "delta": {"content": "é"}}]},
    {"id": "y", "choices": [{**CHOICE, "delta": {"content": "t"}}], "usage": None},
]
STREAM = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*CHUNKS]) + "data: [DONE]\n\n"


def request(number: int, **more: Any) -> str:
    asked = [{"role": "user", "content": f"{n} " + "long " * 300} for n in range(number + 1)]
    return json.dumps({"model": "m", "messages": asked, "tools": [TOOL], **more})


def recorded(*calls: tuple[str, str]) -> Trajectory:
    """A trajectory of calls, each a request and a reply; a reply that begins as one is a stream."""
    writer, spans = ExchangeWriter(), list[SpanRecord]()

    def span(attributes: dict[str, Any]) -> None:
        number = f"{len(spans) + 1:016x}"
        sealed = with_lengths(attributes)
        spans.append(SpanRecord("x", "1" * 32, number, None, len(spans), 10**6, sealed))

    for number, (asked, reply) in enumerate(calls, 1):
        span(
            {
                sc.ROLLOUT_ID: "r",
                sc.EXCHANGE_VERSION: 1,
                sc.EXCHANGE_PROCESS: "p",
                sc.EXCHANGE_STARTED: number,
                sc.EXCHANGE_ENDED: number,
                sc.EXCHANGE_STATUS: "complete",
                sc.REQUEST_PATH: "/chat/completions",
                **writer.request(asked.encode("utf-8", "surrogatepass")),
                **writer.response(reply.encode(), events=reply.startswith("data:")),
            }
        )
    span(
        {
            sc.ROLLOUT_ID: "r",
            sc.ROLLOUT_SCHEMA_VERSION: 1,
            sc.ROLLOUT_STATUS: "complete",
            sc.ROLLOUT_PROCESS: "p",
            sc.ROLLOUT_EXCHANGE_COUNT: len(calls),
            sc.ROLLOUT_OPEN_COUNT: 0,
        }
    )
    (trajectory,) = reconstruct(spans)
    return trajectory


def strict(line: str) -> Any:
    """The JSON of a line, which programs of others read."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def asked_for(trajectory: Trajectory) -> Iterator[object]:
    """All that can be asked of what was exchanged."""
    yield json.dumps(trajectory.to_dict(), sort_keys=True)
    yield [trajectory.warnings, trajectory.missing_calls, trajectory.why_empty]
    yield [history.messages() for history in trajectory.histories]
    sequences = trajectory.token_sequences()
    yield [(s.token_ids, s.loss_mask, s.logprobs) for s in sequences]
    yield [(drop.reason, drop.cause) for drop in sequences.dropped]
    for c in trajectory.completions:
        yield [c.id, c.status, c.error, c.request, c.response, c.finish_reason, c.truncated]
        yield [c.model, c.usage, c.sampling, c.tools, c.sampled_count, c.side_call, c.media]
        yield [c.token_ids, c.prompt_token_ids, c.logprobs, c.context_key]


REPLIES = {
    "a reply": json.dumps(REPLY),
    "over several lines": json.dumps(REPLY, indent=1).replace("\n", "\r\n"),
    "a stream": STREAM,
    "a stream with NaN": STREAM.replace("-2.0", "NaN"),
    "a stream that ends in an event": STREAM[:-90],
    "events of no known shape": "data: [1]\n\ndata: [2]\n\n",
    "with NaN": json.dumps(REPLY).replace("-2.0", "NaN"),
    "out of range": json.dumps(REPLY).replace("-2.0", "-1e400"),
    "a lone surrogate": json.dumps(REPLY).replace("said", "\\ud800"),
    "a line break in a text": json.dumps(REPLY).replace("said", "sa\nid"),
    "null": " null ",
    "a text": '"only a text"',
    "half a reply": json.dumps(REPLY)[:-30],
    "no JSON": "<html>\n</html>",
    "nothing": "",
    "nested deep": json.dumps(REPLY).replace('"said"', "[" * 880 + "]" * 880),
    "nested": json.dumps(REPLY).replace('"said"', "[" * 700 + "]" * 700),
    "members twice": json.dumps(REPLY)[:-1] + ', "id": "again"}',
    "members nobody knows": json.dumps({**REPLY, "novel": [1.50, {"a": -0.0}]}),
}


@pytest.mark.parametrize("name", REPLIES)
def test_any_reply_comes_back(name: str) -> None:
    live = recorded((request(0), REPLIES[name]), (request(1), json.dumps(REPLY)))
    line = live.to_json()
    assert "\n" not in line
    assert "\r" not in line
    assert strict(line) == live.to_dict() or name == "out of range"
    for read in (
        Trajectory.from_json(line),
        Trajectory.from_json(line, reads_replies=True),
        Trajectory.from_json(line.encode(), reads_replies=True),
    ):
        assert [*map(repr, asked_for(read))] == [*map(repr, asked_for(live))]
        assert read.to_json() == line
    assert [*map(repr, asked_for(Trajectory.from_dict(live.to_dict())))] == [
        *map(repr, asked_for(live))
    ]


@pytest.mark.parametrize(
    "asked",
    [
        json.dumps(json.loads(request(2)), indent=2),
        request(0, odd=float("nan"), metadata={"k": float("inf")}),
        request(0).replace("long", "\\ud800"),
        request(0, seed=0).replace('"seed": 0', '"seed": ' + "5" * 5000),
        request(0).replace('"m"', '"m",\n "model":  "n"'),
        request(0, stop=["\u2028", "é" * 2000], seed=1 << 80),
        "no JSON\n",
    ],
)
def test_any_request_comes_back(asked: str) -> None:
    live = recorded((asked, json.dumps(REPLY)), (request(3), STREAM), (asked, STREAM))
    line = live.to_json()
    assert "\n" not in line
    read = Trajectory.from_json(line)
    assert [*map(repr, asked_for(read))] == [*map(repr, asked_for(live))]


def test_a_number_that_python_does_not_read() -> None:
    """It stays in the line as it came; `to_dict` has its digits."""
    reply = json.dumps({**REPLY, "novel": 0}).replace('"novel": 0', '"novel": ' + "5" * 5000)
    live = recorded((request(0), reply), (request(1), json.dumps(REPLY)))
    read = Trajectory.from_json(live.to_json())
    assert read.to_json() == live.to_json()
    assert [*map(repr, asked_for(read))] == [*map(repr, asked_for(live))]
    assert live.to_dict()["exchanges"][0]["response"]["novel"] == "5" * 5000
    assert [c.status for c in read.completions] == ["error", "complete"]
    assert read.completions[0].response == reply.replace("[1, 2]", "[1,2]")


def test_what_follows_from_exchanges_is_found_by_the_reader() -> None:
    """A line has no warnings that its reader would find twice."""
    live = recorded((request(0), json.dumps(REPLY)), (request(0), json.dumps(REPLY)))
    assert [*live.warnings]
    assert strict(live.to_json())["warnings"] == []
    assert Trajectory.from_json(live.to_json()).warnings == live.warnings


ODD = [None, True, 0, -1, 1 << 70, 1.5, "", "1", [], [1], {}, {"a": 1}, [[0]], {"~packed": 99}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in inside:
        yield (*path, name)
        if isinstance(part, dict | list):
            yield from places(part, (*path, name))


def changed(data: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The same with something odd in one place, or without it."""
    data = copy.deepcopy(data)
    *path, last = chance.choice([*places(data)])
    parent: Any = data
    for name in path:
        parent = parent[name]
    if chance.random() < 0.2:
        del parent[last]
    else:
        parent[last] = chance.choice(ODD)
    return data


@pytest.mark.parametrize("seed", range(6))
def test_damage_is_one_error(seed: int) -> None:
    """A line is refused with an error that is ours, or all that is asked of it has an answer."""
    live = recorded((request(0), json.dumps(REPLY)), (request(2), STREAM), (request(1), ""))
    data, chance, read = live.to_dict(), random.Random(seed), 0
    for _ in range(150):
        line = json.dumps(changed(data, chance))
        if chance.random() < 0.3:
            at = chance.randrange(len(line))
            line = line[:at] + chance.choice('{}[]",:0n \\') + line[at + chance.randint(0, 2) :]
        first, second = (outcome(line, reads_replies=reads) for reads in (False, True))
        assert first == second
        read += isinstance(first, list)
    assert 20 < read < 140


def outcome(line: str | bytes, *, reads_replies: bool) -> str | list[str]:
    """All that is asked of a line, or why it is refused."""
    try:
        return [*map(repr, asked_for(Trajectory.from_json(line, reads_replies=reads_replies)))]
    except SpanFormatError as error:
        return str(error)


@pytest.mark.parametrize(
    "path",
    [
        *("/chat/completions", "/responses", "/completions", "/completion", "/novel"),
        *("/models/m:generateContent", "/api/chat", "/v2/chat", "/v1/messages"),
    ],
)
def test_a_reply_is_read_as_its_api_has_it(path: str) -> None:
    """Also where it looks as one of a chat, or is one in part."""
    data = recorded(
        (request(0), json.dumps(REPLY)), (request(1), json.dumps({"id": "z"}))
    ).to_dict()
    for row in data["exchanges"]:
        row["path"] = path
    line = json.dumps(data)
    first, second = (outcome(line, reads_replies=reads) for reads in (False, True))
    assert first == second


def test_a_number_that_python_does_not_read_is_found_with_the_line() -> None:
    """Also where it would be passed over."""
    line = recorded((request(0), json.dumps(REPLY))).to_json()
    odd = line.replace('"token":"b"', f'"token":{"9" * 5000}')
    odd = odd.replace('"token": "b"', f'"token":{"9" * 5000}')
    assert odd != line
    first, second = (outcome(odd, reads_replies=reads) for reads in (False, True))
    assert first == second


def test_bytes_that_are_no_text_are_found_in_replies() -> None:
    """Those that only log-probabilities have are not read, and damage the line all the same."""
    line = recorded((request(0), json.dumps(REPLY))).to_json().encode()
    damaged = line.replace(b'"token":"b"', b'"token":"\xff"')
    damaged = damaged.replace(b'"token": "b"', b'"token": "\xff"')
    assert damaged != line
    first, second = (outcome(damaged, reads_replies=reads) for reads in (False, True))
    assert isinstance(first, str)
    assert first == second


def test_replies_that_are_read_with_their_line_need_no_second_look() -> None:
    """The text of a reply is cut out of the line when somebody asks for it, and not before."""
    line = recorded((request(0), json.dumps(REPLY)), (request(1), STREAM)).to_json()
    for reads in (True, False):
        trajectory = Trajectory.from_json(line, reads_replies=reads)
        assert [len(row.token_ids) for row in trajectory.token_sequences()] == [3]
        assert [c.logprobs for c in trajectory.completions] == [[-2.0], [-2.0, -2.0]]
        bodies = [e.body for e in trajectory.exchanges]
        assert [isinstance(body, str) for body in bodies] == [not reads, not reads]
        texts = [body._text for body in bodies if isinstance(body, JsonText)]
        assert not any(isinstance(text, str) for text in texts)
        assert trajectory.to_json() == line


def test_an_error_names_the_place() -> None:
    data = recorded((request(0), json.dumps(REPLY))).to_dict()
    data["exchanges"][0]["started"] = "soon"
    with pytest.raises(SpanFormatError, match=r"'r' is damaged.*exchanges\[0\]\.started"):
        Trajectory.from_json(json.dumps(data))
    with pytest.raises(SpanFormatError, match=r"exchanges\[0\]\.started"):
        Trajectory.from_dict(data)
