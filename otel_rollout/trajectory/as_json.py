"""Trajectories as JSON, at a size that is linear in their content: each message is written once.

`messages` and `tokens` are trees: each row is [row of what is before it, or 0; content], rows count
from 1, and the exchanges name rows. A message that stands after several prefixes is written once;
its other rows are [row before, null, row that has it]. So it is with `params`: a row in which long
values are null, since earlier rows have them, is [params, {name: row that has it}], from row 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import (
    EXACT_SOURCE,
    LARGE,
    Exchange,
    Supplied,
    TokenPath,
    digest_of,
    extend_tokens,
)
from otel_rollout.trajectory.record import FIELDS, RolloutRecord
from otel_rollout.trajectory.reward import Reward
from otel_rollout.trajectory.steps import Step
from otel_rollout.wire import Json, MessagePath, Params, context_key, copy_json, dumps, extend

SCHEMA_VERSION = 1
"""Version of what `Trajectory.to_dict` gives."""

_MARKS = ("session", "policy_model", "side_call")
"""Fields of an exchange that few have: they are written where they are set."""
_OTHERWISE = (
    *("source", "lost", "prompt", "params", "body", "events", "prompts", "supplied"),
    *("context_key", "_reply", "_is_read", *_MARKS),
)
_EXCHANGE_FIELDS = [each.name for each in fields(Exchange) if each.name not in _OTHERWISE]
"""Fields of an exchange that are written as they are."""
_Node = TypeVar("_Node", MessagePath, TokenPath)


def as_json(trajectory: RolloutRecord) -> dict[str, Json]:
    """A trajectory as plain JSON."""
    exchanges, reward = exchanges_to_dict(trajectory.exchanges), trajectory.all_rewards.total
    data = {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(trajectory, name) for name in FIELDS},
        "metrics": dict(trajectory.metrics),
        "metadata": dict(trajectory.metadata),
        "reward": None if reward is None else float(reward),
        "rewards": [each.to_dict() for each in trajectory.all_rewards.all()],
        "appended": [[*key, messages] for key, messages in list(trajectory.appended.items())],
        **exchanges,
    }
    if missing := trajectory.missing_calls:
        data["missing_calls"] = missing
    if trajectory.built_by_hand:
        data["steps"] = [step.to_dict() for step in trajectory.steps]
    return {key: copy_json(value) for key, value in data.items()}


def parameters_of(data: Mapping[str, Json]) -> dict[str, Any]:
    """The parameters of `Trajectory` that make the one this is the JSON of, but `sealed`.

    SpanFormatError for another version; whatever else may be wrong with it raises as it comes.
    """
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if version != SCHEMA_VERSION:
        raise SpanFormatError(
            f"Trajectory.from_dict: expected an object with schema_version {SCHEMA_VERSION}, "
            f"got {version!r}: is it a line that JsonlTrajectoryExporter wrote?"
        )
    steps = data.get("steps")
    return {
        **{name: data[name] for name in (*FIELDS, "metrics", "metadata")},
        "exchanges": exchanges_from_dict(data),
        "appended": {(id_, choice): messages for id_, choice, messages in data["appended"]},
        "rewards": {reward.key: reward for reward in map(Reward.from_dict, data["rewards"])},
        "missing_calls": data.get("missing_calls", ()),
        "steps": None if steps is None else [Step.from_dict(step) for step in steps],
    }


def exchanges_to_dict(exchanges: Sequence[Exchange]) -> dict[str, Json]:
    """The exchanges, with the messages, tokens and parameters that they name."""
    paths: _Rows[MessagePath] = _Rows()
    tokens: _Rows[TokenPath] = _Rows()
    params = _Params()
    rows = [_exchange_to_dict(exchange, paths, tokens, params) for exchange in exchanges]
    return {
        "exchanges": rows,
        "params": params.rows,
        "messages": _message_rows(paths),
        "tokens": [[parent, path.ids.tolist()] for parent, path in tokens],
    }


def exchanges_from_dict(data: Mapping[str, Json]) -> list[Exchange]:
    """The exchanges that `exchanges_to_dict` described."""
    paths: list[MessagePath | None] = [None]
    messages: list[Json] = [None]
    for parent, message, *same in data["messages"]:
        messages.append(messages[same[0]] if same else message)
        paths.append(extend(paths[parent], messages[-1]))
    tokens: list[TokenPath | None] = [None]
    for parent, ids in data["tokens"]:
        tokens.append(extend_tokens(tokens[parent], ids))
    params: list[tuple[Json, bytes]] = []
    for row in data["params"]:
        row, again = row if isinstance(row, list) else (row, {})
        row = {**row, **{key: params[number][0][key] for key, number in again.items()}}
        params.append((row, context_key(row)))
    return [
        _exchange_from_dict(row, paths, tokens, *params[row["params"]]) for row in data["exchanges"]
    ]


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
    """Parameters of requests as rows, each once; row numbers count from 0."""

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._numbers: dict[str, int] = {}
        self._first: dict[tuple[str, str], int] = {}
        """The first row that has a long value, by its name and its digest."""
        self._digests: dict[int, str] = {}
        """Digests of values by their identity: calls of one rollout share the long ones."""

    def number(self, params: Params) -> int:
        long = {key: digest for key, value in params.items() if (digest := self._digest(value))}
        text = dumps([{**params, **dict.fromkeys(long)}, long])
        if text not in self._numbers:
            number = self._numbers[text] = len(self.rows)
            first = {name: self._first.setdefault((name, long[name]), number) for name in long}
            again = {name: row for name, row in first.items() if row != number}
            row = copy_json({**params, **dict.fromkeys(again)})
            self.rows.append([row, again] if again else row)
        return self._numbers[text]

    def _digest(self, value: Json) -> str:
        """The digest of a long value; "" for a short one."""
        if not isinstance(value, str | list | dict):
            return ""
        if id(value) not in self._digests:
            text = dumps(value)
            is_long = len(text) > LARGE
            self._digests[id(value)] = digest_of(text.encode()).hex() if is_long else ""
        return self._digests[id(value)]


def _message_rows(paths: _Rows[MessagePath]) -> list[list[Json]]:
    first: dict[int, int] = {}
    rows: list[list[Json]] = []
    for number, (parent, path) in enumerate(paths, 1):
        same = first.setdefault(id(path.message), number)
        rows.append([parent, path.message] if same == number else [parent, None, same])
    return rows


def _exchange_to_dict(
    exchange: Exchange,
    paths: _Rows[MessagePath],
    tokens: _Rows[TokenPath],
    params: _Params,
) -> dict[str, Json]:
    asked = exchange.supplied
    return {
        **{name: getattr(exchange, name) for name in _EXCHANGE_FIELDS},
        **(
            {"source": exchange.source, "lost": exchange.lost}
            if exchange.source != EXACT_SOURCE
            else {}
        ),
        **{name: mark for name in _MARKS if (mark := getattr(exchange, name)) is not None},
        "prompt": paths.number(exchange.prompt),
        "params": params.number(exchange.params),
        **_response_to_dict(exchange),
        "prompt_token_ids": [tokens.number(path) for path in exchange.prompts],
        **({"supplied": [asked.held, tokens.number(asked.prompt)]} if asked else {}),
    }


def _response_to_dict(exchange: Exchange) -> dict[str, Json]:
    reply, events = exchange.reply, exchange.events
    if reply is None and events is not None:  # of an unknown shape, though each may be JSON
        return {"response": None, "response_text": None, "response_events": events}
    text = exchange.response() if reply is None else None
    if text is None and any(word in (exchange.body or events or "") for word in _NO_JSON):
        text = dumps(reply)  # a file of JSON lines has to be JSON, whatever the server says
    return {"response": reply if text is None else None, "response_text": text}


_NO_JSON = ("NaN", "Infinity")


def _exchange_from_dict(
    row: Mapping[str, Json],
    paths: list[MessagePath | None],
    tokens: list[TokenPath | None],
    params: dict[str, Json],
    context: bytes,
) -> Exchange:
    reply, text, asked = row["response"], row["response_text"], row.get("supplied")
    return Exchange(
        **{name: row[name] for name in _EXCHANGE_FIELDS},
        **{name: row[name] for name in ("source", "lost", *_MARKS) if name in row},
        prompt=paths[row["prompt"]],
        params=params,
        body=text,
        events=row.get("response_events"),
        prompts=[tokens[number] for number in row["prompt_token_ids"]],
        supplied=Supplied(asked[0], tokens[asked[1]]) if asked else None,
        context_key=context,
        _reply=reply,
        _is_read=reply is not None,
    )
