"""Trajectories as JSON, at a size that is linear in their content: each message is written once.

`messages` and `tokens` are trees: each row is [row of what is before it, or 0; content], rows count
from 1, and the exchanges name rows. A large message that follows several prefixes is written
once; its other rows are [row before, null, row that has it]. So it is with `params`: a row is
[params], or [params, {name: row that has it}] where long values are null in it, since earlier rows
have them; these rows count from 0.

Nothing that was exchanged is read to be written: requests and replies are put into the line as they
came, and a line that is read keeps them as they are in it until somebody asks. What a trajectory's
warnings say of its exchanges follows from these, and is not in the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import msgspec

from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import (
    EXACT_SOURCE,
    LARGE,
    Exchange,
    RequestMembers,
    Supplied,
    TokenPath,
    extend_tokens,
)
from otel_rollout.trajectory.record import FIELDS, Facts, RolloutRecord
from otel_rollout.trajectory.reward import Reward
from otel_rollout.trajectory.steps import Step
from otel_rollout.wire import (
    REPLY,
    Bounded,
    Cut,
    Json,
    JsonText,
    MessagePath,
    cut_value,
    dumps,
    dumps_strict,
    list_of,
    loads_leniently,
    read_strict,
)

SCHEMA_VERSION = 1
"""Version of what `Trajectory.to_dict` gives."""

_MARKS = (
    *("session", "refused", "policy_model", "last_policy_version", "side_call", "logprobs_mode"),
)
"""Fields of an exchange that few have: they are written where they are set."""
_OTHERWISE = (
    *("source", "lost", "prompt", "members", "body", "events", "prompts", "supplied"),
    *("_reply", "_is_read", "_contradictions", "tokens_first", "added", "form", "retried"),
    *("has_blobs", *_MARKS),
)
_EXCHANGE_FIELDS = [each.name for each in fields(Exchange) if each.name not in _OTHERWISE]
"""Fields of an exchange that are written as they are."""
_values, _marks = attrgetter(*_EXCHANGE_FIELDS), attrgetter(*_MARKS)
_FACTS = [name for name in FIELDS if name not in ("logs", "warnings")]
"""Fields of a trajectory that are written as they are."""
_PLAIN = frozenset((str, int, bool, NoneType))
_Node = TypeVar("_Node", MessagePath, TokenPath)


# --- written


def line_of(trajectory: RolloutRecord) -> str:
    """A trajectory as JSON on one line."""
    reward = trajectory.all_rewards.total
    facts = {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(trajectory, name) for name in _FACTS},
        "logs": trajectory.logs,
        "warnings": trajectory.recorded_warnings,
        "metrics": dict(trajectory.metrics),
        "metadata": dict(trajectory.metadata),
        "reward": None if reward is None else float(reward),
        "rewards": [each.to_dict() for each in trajectory.all_rewards.all()],
        "appended": [[*key, messages] for key, messages in list(trajectory.appended.items())],
    }
    if missing := trajectory.missing_calls:
        facts["missing_calls"] = missing
    if trajectory.built_by_hand:
        facts["steps"] = [step.to_dict() for step in trajectory.steps]
    for name, value in facts.items():
        if value and type(value) not in _PLAIN:  # it may have numbers and texts that JSON has not
            facts[name] = _uncut(value)
    return "".join([dumps_strict(facts)[:-1], *_exchanges(trajectory.exchanges), "}"])


def _exchanges(exchanges: Sequence[Exchange]) -> Iterator[str]:
    """The exchanges, with the messages, tokens and members that they name, in pieces of JSON."""
    paths: _Rows[MessagePath] = _Rows()
    tokens: _Rows[TokenPath] = _Rows()
    params = _Params()
    before = ',"exchanges":['
    for exchange in exchanges:
        yield before
        yield from _exchange(exchange, paths, tokens, params)
        before = ","
    first: dict[str, int] = {}
    messages: list[str] = []
    for number, (parent, path) in enumerate(paths, 1):
        text = path.json.text
        same = first.setdefault(text, number) if len(text) > LARGE else number
        messages.append(f"[{parent},{text}]" if same == number else f"[{parent},null,{same}]")
    yield '],"params":[' if exchanges else f'{before}],"params":['
    yield _on_one_line(",".join(params.rows))
    yield '],"messages":['
    yield _on_one_line(",".join(messages))
    yield '],"tokens":['
    texts = (path.text or dumps_strict([*path.ids])[1:-1] for _, path in tokens)
    rows = (f"[{row},[{text}]]" for (row, _), text in zip(tokens, texts, strict=True))
    yield ",".join(rows) + "]"


def _on_one_line(text: str) -> str:
    """The JSON without line breaks: they are white space, as texts have them escaped."""
    return text.replace("\n", " ").replace("\r", " ")


class _Rows(Generic[_Node]):
    """Paths as rows, each after the one that it continues; row numbers count from 1."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, _Node]] = []
        self._numbers: dict[int, int] = {}

    def number(self, path: _Node | None) -> int:
        missing: list[_Node] = []
        while path is not None and id(path) not in self._numbers:
            missing.append(path)
            path = path.parent
        row = 0 if path is None else self._numbers[id(path)]
        for node in reversed(missing):
            self._rows.append((row, node))
            row = self._numbers[id(node)] = len(self._rows)
        return row

    def __iter__(self) -> Iterator[tuple[int, _Node]]:
        return iter(self._rows)


class _Params:
    """Members of requests as rows, each once; row numbers count from 0."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._first: dict[tuple[str, str], int] = {}
        """The first row that has a long value, by its name and its text."""

    def number(self, members: RequestMembers) -> int:
        texts = tuple((name, member.text) for name, member in members.json.items())
        if texts not in self._numbers:
            number = self._numbers[texts] = len(self.rows)
            again: dict[str, int] = {}
            for name, text in texts:
                if len(text) > LARGE:
                    row = self._first.setdefault((name, text), number)
                    if row != number:
                        again[name] = row
            written = (f"{dumps_strict(k)}:{'null' if k in again else text}" for k, text in texts)
            row_text = f"{{{','.join(written)}}}"
            self.rows.append(f"[{row_text},{dumps(again)}]" if again else f"[{row_text}]")
        return self._numbers[texts]


def _exchange(
    exchange: Exchange, paths: _Rows[MessagePath], tokens: _Rows[TokenPath], params: _Params
) -> Iterator[str]:
    asked = exchange.supplied
    written = dict(zip(_EXCHANGE_FIELDS, _values(exchange), strict=True))
    if exchange.source != EXACT_SOURCE:
        written |= {"source": exchange.source, "lost": exchange.lost}
    marks = zip(_MARKS, _marks(exchange), strict=True)
    written |= {name: mark for name, mark in marks if mark is not None}
    written["prompt"] = paths.number(exchange.prompt)
    written["params"] = params.number(exchange.members)
    written["prompt_token_ids"] = [tokens.number(path) for path in exchange.prompts]
    if asked:
        written["supplied"] = [asked.held, tokens.number(asked.prompt)]
    text, is_json = exchange.text()
    if text is None:  # none came, or events that are no one reply, though each may be JSON
        written |= {"response_events": exchange.events} if exchange.events is not None else {}
    if text is None or not is_json or text.strip() == "null":
        yield dumps_strict({**written, "response": None, "response_text": text})
        return
    yield dumps_strict({**written, "response_text": None})[:-1]
    yield ',"response":'
    yield _on_one_line(text)
    yield "}"


def dict_of(line: str) -> dict[str, Json]:
    """What a line says. Numbers that Python has not are in texts: the reply, or the integer."""
    data: dict[str, Json] | None = read_strict(line)
    if data is None:
        data = dict(loads_leniently(line))
        for row in data["exchanges"]:
            text = dumps(row["response"])
            if cut_value(text) is None:
                row |= {"response": None, "response_text": text}
    return data


# --- read

_HINTS = get_type_hints(Exchange)
_FACT_HINTS = get_type_hints(Facts).items()
_ABSENT = dict.fromkeys(("group_size", "group_run", "main_call"), (None,))
"""Values of fields that a line may lack."""
_Row: Any = Annotated[int, msgspec.Meta(ge=0)]
"""The number of a row."""


def _struct(name: str, members: Sequence[tuple[Any, ...]], **options: Any) -> Any:
    return msgspec.defstruct(name, members, kw_only=not options, gc=False, **options)


_MessageRow: Any = _struct(
    "MessageRow", [("parent", _Row), ("message", Cut), ("same", _Row, 0)], array_like=True
)
_TokenRow: Any = _struct("TokenRow", [("parent", _Row), ("ids", list[int])], array_like=True)
_ParamsRow: Any = _struct(
    "ParamsRow", [("members", dict[str, Cut]), ("again", dict[str, _Row], {})], array_like=True
)


def _line(response: Any) -> Any:
    """The type of a line whose responses are of this type."""
    exchange: Any = [
        *((name, _HINTS[name]) for name in _EXCHANGE_FIELDS),
        *((name, _HINTS[name], None) for name in _MARKS),
        *(("source", str, EXACT_SOURCE), ("lost", list[str], [])),
        *(("prompt", _Row), ("params", _Row), ("prompt_token_ids", list[_Row])),
        ("supplied", tuple[int, _Row] | None, None),
        *(("response", response), ("response_text", str | None)),
        ("response_events", str | None, None),
    ]
    line = [
        ("schema_version", int),
        *((name, hint, *_ABSENT.get(name, ())) for name, hint in _FACT_HINTS if name in _FACTS),
        *(("logs", list[str]), ("warnings", list[str]), ("missing_calls", list[str], [])),
        *(("metrics", dict[str, bool | int | float]), ("metadata", dict[str, Any])),
        *(("rewards", list[dict[str, Any]]), ("steps", list[dict[str, Any]] | None, None)),
        ("appended", list[tuple[str, int, list[Any]]]),
        ("exchanges", list_of(_struct("ExchangeRow", exchange))),
        ("params", list_of(_ParamsRow)),
        *(("messages", list_of(_MessageRow)), ("tokens", list_of(_TokenRow))),
    ]
    return _struct("Line", line)


_Line: Any = _line(Cut)
_decode = msgspec.json.Decoder(_Line).decode
_with_replies: Bounded[Any] = Bounded(_line(REPLY | None), is_read=False)
_response: Any = _struct("Response", [("response", Cut)])
_responses = msgspec.json.Decoder(_struct("Responses", [("exchanges", list_of(_response))])).decode


def parameters_of_line(line: str | bytes, *, reads_replies: bool) -> dict[str, Any]:
    """The parameters of `Trajectory` that make the one this is a line of, but `sealed`.

    Whatever is wrong with it raises as it comes, and so does NaN. reads_replies: read the replies
    with it, in one pass, if all of them can be; else each is read when somebody asks.
    """
    read = _with_replies(line) if reads_replies else None
    found = _decode(line) if read is None else read
    _check_version(found.schema_version)
    parameters = _parameters(found)
    if read is not None:
        texts = cache(lambda: [bytes(row.response).decode() for row in _responses(line).exchanges])
        for place, row in enumerate(read.exchanges):
            if row.response is not None:
                text = JsonText(partial(_element, texts, place))
                parameters["exchanges"][place].take(row.response, text)
    return parameters


def _element(texts: Callable[[], list[str]], place: int) -> str:
    return texts()[place]


def parameters_of(data: Mapping[str, Json]) -> dict[str, Any]:
    """The same of what `to_dict` gave; SpanFormatError for another version."""
    _check_version(data.get("schema_version") if isinstance(data, Mapping) else None)
    rows = {
        "exchanges": [{**row, "response": _uncut(row["response"])} for row in data["exchanges"]],
        "params": [
            [{name: _uncut(value) for name, value in row[0].items()}, *row[1:]]
            for row in data["params"]
        ],
        "messages": [[row[0], _uncut(row[1]), *row[2:]] for row in data["messages"]],
    }
    return _parameters(msgspec.convert({**data, **rows}, _Line))


def wrong_in(data: Mapping[str, Json], error: Exception) -> str:
    """What is wrong with data of which `parameters_of` raised this error.

    If a field is of another type: which one, what it is, and what was expected.
    """
    try:
        _decode(dumps(data))
    except msgspec.ValidationError as found:
        return str(found)
    except (ValueError, TypeError, RecursionError):
        pass
    return repr(error)


def _uncut(value: Json) -> Cut:
    return Cut(dumps(value).encode())


def _check_version(version: Json) -> None:
    if type(version) is int and version > SCHEMA_VERSION:
        raise SpanFormatError(
            f"Trajectory.from_dict: expected schema_version {SCHEMA_VERSION}, got {version}: "
            f"a newer otel-rollout wrote it; update otel-rollout to read it"
        )
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise SpanFormatError(
            f"Trajectory.from_dict: expected an object with schema_version {SCHEMA_VERSION}, "
            f"got {version!r}: is it a line that JsonlTrajectoryExporter wrote?"
        )


def _parameters(line: Any) -> dict[str, Any]:
    try:
        exchanges = _exchanges_of(line)
    except IndexError:
        raise LookupError("a row is named that is not there, or not before") from None
    return {
        **{name: getattr(line, name) for name in (*FIELDS, "metrics", "metadata")},
        "exchanges": exchanges,
        "appended": {(id_, choice): messages for id_, choice, messages in line.appended},
        "rewards": {reward.key: reward for reward in map(Reward.from_dict, line.rewards)},
        "missing_calls": line.missing_calls,
        "steps": None if line.steps is None else [Step.from_dict(step) for step in line.steps],
    }


def _exchanges_of(line: Any) -> list[Exchange]:
    paths: list[MessagePath | None] = [None]
    same: dict[bytes, JsonText] = {}
    for row in line.messages:
        equal = paths[row.same] if row.same else None
        text = equal.json if equal else same.setdefault(bytes(row.message), _text_of(row.message))
        paths.append(MessagePath(paths[row.parent], text))
    tokens: list[TokenPath | None] = [None]
    for row in line.tokens:
        tokens.append(extend_tokens(tokens[row.parent], row.ids))
    members: list[RequestMembers] = []
    for row in line.params:
        found = {name: _text_of(cut) for name, cut in row.members.items()}
        for name, number in row.again.items():
            found[name] = members[number].json[name]
        members.append(RequestMembers(found))
    return [_exchange_of(row, paths, tokens, members) for row in line.exchanges]


def _text_of(cut: Cut) -> JsonText:
    return JsonText(bytes(cut).decode())


def _exchange_of(
    row: Any,
    paths: list[MessagePath | None],
    tokens: list[TokenPath | None],
    members: list[RequestMembers],
) -> Exchange:
    text, asked = row.response_text, row.supplied
    if isinstance(row.response, Cut) and (reply := bytes(row.response)) != b"null":
        text = reply.decode()
    return Exchange(
        **{name: getattr(row, name) for name in (*_EXCHANGE_FIELDS, "source", "lost", *_MARKS)},
        prompt=paths[row.prompt],
        members=members[row.params],
        body=text,
        events=row.response_events,
        prompts=[tokens[number] for number in row.prompt_token_ids],
        supplied=Supplied(asked[0], tokens[asked[1]]) if asked else None,
    )
