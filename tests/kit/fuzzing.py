"""Spans, lines and files as a hostile or broken sender makes them: recorded ones, changed."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import warnings
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from otel_rollout import EmptyRowsWarning, Trajectory, to_token_rows
from otel_rollout import semconv as sc
from otel_rollout.spans import SpanRecord, with_lengths
from otel_rollout.view import Overview, format_trajectory
from otel_rollout.wire import dumps, loads

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**70), 10**400, 1.5, math.nan, math.inf, -math.inf),
    *("", "x", "1", "-5", "1" * 5000, "\ud800", "a\x1b[2Jb\u202e", "null", "[]", "{}", "é" * 33),
    *([], [1, 2], ["a"], [[1]], [None], {}, {"a": 1}, {"role": 1}, {"content": [1]}, b"\xff"),
    *("[" * 5000 + "]" * 5000, "[" * 600 + "]" * 600, '{"a":' * 300 + "1" + "}" * 300),
    *([{"role": "user", "content": "x"}], [{"tool_calls": ["x"]}], {"tool_calls": 1}),
    *({"~packed": 0}, {"~packed": -1}, {"~packed": 10**30}, {"value": 10**400}, {"value": "nan"}),
)
"""Values that are put in the place of others."""

FIELDS = (
    *("name", "trace_id", "span_id", "parent_span_id", "start_time_ns", "end_time_ns"),
    *("attributes", "scope", "events", "status_error", "dropped_attributes"),
)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """The JSON value with one place in it changed, dropped or repeated."""
    if isinstance(value, str) and value[:1] in ("{", "[") and draw.random() < 0.5:
        found = _mutated_text(value, draw)
        return None if isinstance(found, bytes) else found
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.1:
            return value[:place] + value[place + 1 :]
        if kind < 0.2:
            return [*value, value[place]]
        return [*value[:place], mutated_json(value[place], draw), *value[place + 1 :]]
    return draw.choice([junk for junk in JUNK if not isinstance(junk, bytes)])


def _mutated_text(text: str, draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.55:
        try:
            return dumps(mutated_json(loads(text), draw))
        except (ValueError, RecursionError):
            pass
    if kind < 0.75 and text:
        return text[: draw.randrange(len(text))]
    return draw.choice(JUNK)


def mutated_line(data: Any, draw: random.Random) -> bytes:
    """The JSON value as a line of a file, with up to three values changed, and some bytes."""
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        data = mutated_json(data, draw)
    try:
        line = json.dumps(data).encode()
    except (ValueError, RecursionError):  # an integer that has no text
        line = dumps(None).encode()
    return mutated_bytes(line, draw) if draw.random() < 0.3 else line


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """The bytes with one place of them cut, changed, repeated or zero, on one line."""
    start, length = draw.randrange(len(content)), draw.choice((0, 1, 2, 20, 400))
    end = start + length
    put = draw.choice((b"", b"\0" * length, content[start:end] * 2, b"\xff", b"{]", b'"', b"9" * 5))
    if draw.random() < 0.2:
        return content[:start]
    return (content[:start] + put + content[end:]).replace(b"\n", b" ")


def damage_bytes(path: Path, draw: random.Random) -> None:
    """Overwrite some places of a file with random bytes, or cut it off."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 5, 50))):
        start, length = draw.randrange(len(content)), draw.choice((1, 4, 100, 4096))
        length = min(length, len(content) - start)
        content[start : start + length] = draw.randbytes(length)
    path.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.1 else content)


def damage_cells(path: Path, draw: random.Random) -> None:
    """Overwrite one to three values in the tables of an SQLite file."""
    plain = [each for each in JUNK if isinstance(each, int | float | str | bytes | None)]
    with closing(sqlite3.connect(path)) as connection:
        names = "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%' AND name NOT LIKE ?"
        tables = [name for (name,) in connection.execute(names, ("words%",))]
        for _ in range(draw.choice((1, 1, 2, 3))):
            table = draw.choice(tables)
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            which = f"rowid = (SELECT rowid FROM {table} ORDER BY random() LIMIT 1)"
            change = f'UPDATE {table} SET "{draw.choice(columns)}" = ? WHERE {which}'
            with suppress(sqlite3.Error, OverflowError, UnicodeError):  # some columns take no junk
                connection.execute(change, (draw.choice(plain),))
        connection.commit()


def changed_attribute(span: SpanRecord, draw: random.Random, *, forged: bool = True) -> SpanRecord:
    """The span with one attribute changed. forged: it may have a seal that fits."""
    attributes: dict[str, Any] = dict(span.attributes)
    if not attributes:
        return span
    key = draw.choice(sorted(attributes))
    value = attributes[key]
    if draw.random() < 0.1:
        del attributes[key]
    elif isinstance(value, str):
        attributes[key] = _mutated_text(value, draw)
    else:
        attributes[key] = draw.choice(JUNK)
    # A hostile sender counts again; a store that cuts does not.
    if forged and draw.random() < 0.9 and sc.LENGTHS in attributes and key != sc.LENGTHS:
        attributes = sealed(attributes)
    return replace(span, attributes=attributes)


def sealed(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes with a seal that fits them, as whoever forges them would write it."""
    plain = {k: v for k, v in attributes.items() if k not in (sc.LENGTHS, sc.CHECKSUMS)}
    try:
        return with_lengths(plain)
    except ValueError:  # an integer that has no text
        return attributes


def changed_field(span: SpanRecord, draw: random.Random) -> SpanRecord:
    name = draw.choice(FIELDS)
    value = getattr(span, name)
    if isinstance(value, str) and draw.random() < 0.4:
        value = value[: draw.randrange(len(value) + 1)]
    else:
        value = draw.choice(JUNK)
    fields: dict[str, Any] = {name: value}
    return replace(span, **fields)


@dataclass(frozen=True)
class Change:
    """Spans of which one was changed."""

    spans: list[SpanRecord]
    touched: set[str]
    """Ids of the rollouts and traces that the change is about."""
    forged: bool
    """True if nothing may tell the changed span from one that we wrote."""
    what: str


def changed(spans: Sequence[SpanRecord], draw: random.Random) -> Change:
    """The spans with one of them changed in one to three places, or its changed copy beside it."""
    place = draw.randrange(len(spans))
    before = after = spans[place]
    forged = draw.random() < 0.8
    for _ in range(draw.choice((1, 1, 1, 2, 3)) if forged else 1):
        if not isinstance(after.attributes, dict):
            break
        if forged and draw.random() < 0.2:
            after = changed_field(after, draw)
        else:
            after = changed_attribute(after, draw, forged=forged)
    touched = {str(before.attributes.get(sc.ROLLOUT_ID)), before.trace_id, str(after.trace_id)}
    if isinstance(after.attributes, dict):
        touched |= {str(after.attributes.get(k)) for k in (sc.ROLLOUT_ID, sc.ROLLOUT_PARENT_ID)}
        forged = forged or _keeps_lengths(before, after)
    given = list(spans)
    if draw.random() < 0.7:
        given[place] = after
    else:
        given.insert(draw.randrange(len(given)), after)
    return Change(given, touched, forged, f"{before.name}: {differences(before, after)}")


def _keeps_lengths(before: SpanRecord, after: SpanRecord) -> bool:
    """True if a value without a checksum was changed to one as long: what cuts does not do that.

    An object is as long as the text that a store may have made it of.
    """
    checked = str(before.attributes.get(sc.CHECKSUMS, ""))
    return any(
        len(str(value)) in (len(str(other)), isinstance(other, list | dict) and len(dumps(other)))
        and f"{key.removeprefix(sc.PREFIX)}:" not in checked
        for key, value in before.attributes.items()
        if (other := after.attributes.get(key)) != value
    )


def differences(before: SpanRecord, after: SpanRecord) -> str:
    """What was changed, in a few words."""
    fields = [
        f"{name}={getattr(after, name)!r:.80}"
        for name in ("name", "trace_id", "span_id", "start_time_ns", "end_time_ns", "events")
        if getattr(after, name) != getattr(before, name)
    ]
    if isinstance(after.attributes, dict):
        fields += [
            f"{key}={after.attributes.get(key)!r:.200}"
            for key in before.attributes
            if repr(after.attributes.get(key)) != repr(before.attributes[key])
        ]
    return ", ".join(fields)


PROPERTIES = (
    *("message", "request_messages", "tools", "model", "request_model", "sampling", "media"),
    *("finish_reason", "truncated", "stop_reason", "usage", "token_ids", "sampled_in_response"),
    *("prompt_token_ids", "logprobs", "logprobs_mode", "reward", "policy_version", "request"),
    *("policy_version_spans", "response", "exact", "lost", "stream", "api"),
)


def read_all(trajectory: Trajectory) -> dict[str, Any]:
    """Ask a trajectory for everything that it has; its JSON."""
    for completion in trajectory.completions:
        for name in PROPERTIES:
            getattr(completion, name)
    for history in trajectory.histories:
        history.messages()
        history.to_list()
    trajectory.steps
    trajectory.reward
    trajectory.token_sequences(on_failure="keep", mask_truncated=True, max_length=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyRowsWarning)  # it says why nothing trains
        to_token_rows([trajectory])
    Overview.of(trajectory).to_dict()
    format_trajectory(trajectory)
    format_trajectory(trajectory, width=None)
    text = dumps(trajectory.to_dict())
    text.encode()
    back = Trajectory.from_dict(loads(text))
    assert dumps(back.to_dict()) == text
    return back.to_dict()


def changed_others(
    before: Iterable[Trajectory], after: Iterable[Trajectory], touched: set[str]
) -> list[str]:
    """The ids of rollouts that differ although nothing of theirs was changed."""
    found = {trajectory.id: trajectory for trajectory in after}
    return [
        trajectory.id
        for trajectory in before
        if not {trajectory.id, trajectory.trace_id, trajectory.parent_id} & touched
        and found.get(trajectory.id) != trajectory
    ]
