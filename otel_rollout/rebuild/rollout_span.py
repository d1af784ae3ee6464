"""A rollout's own span, and that of another process's part of it, as a trajectory.

Each attribute is what it should be, or it is None and a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import convert

from otel_rollout import semconv as sc
from otel_rollout.spans import SpanKey, SpanRecord, absent
from otel_rollout.trajectory import (
    UNREADABLE,
    AllRewards,
    Reward,
    Source,
    Step,
    Trajectory,
    sentences,
)
from otel_rollout.wire import Json, check_depth, loads

T = TypeVar("T")
NOT_KNOWN = "not known: the rules of its rollout were its own, and what they said did not come"
"""Why a call is a side call whose rollout's own rules judged it, where their reasons are lost."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The attributes of a span that are JSON texts."""

    record: SpanRecord
    warnings: list[str]
    """A sentence for each attribute that cannot be read is added here."""

    def read(self, key: str, of: Callable[[Json], T]) -> T | None:
        """What `of` makes of an attribute; None where it is not there or cannot be read."""
        text = self.record.text(key)
        if text is None:
            return None
        try:
            check_depth(text)
            return of(loads(text))
        except UNREADABLE:
            self.warnings.append(sentences.UNREADABLE(key=key))
            return None


def read_rollout(record: SpanRecord, rewards: AllRewards, source: Source | None) -> Trajectory:
    """The trajectory of a rollout's span; its rewards are added to `rewards`."""
    warnings = absent(record)
    fields = Fields(record, warnings)
    for reward in fields.read(sc.ROLLOUT_REWARDS, _rewards) or ():
        if reward.key not in rewards:
            rewards.put(reward)
    if (record.integer(sc.ROLLOUT_SCHEMA_VERSION) or 0) > sc.SCHEMA_VERSION:
        warnings.append(sentences.NEWER())
    return Trajectory(
        id=record.text(sc.ROLLOUT_ID) or "",
        name=record.text(sc.GEN_AI_AGENT_NAME) or "",
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_id=record.text(sc.ROLLOUT_PARENT_ID),
        task_id=record.text(sc.ROLLOUT_TASK_ID),
        group_id=record.text(sc.ROLLOUT_GROUP_ID),
        group_run=record.text(sc.ROLLOUT_GROUP_RUN),
        sample_index=record.integer(sc.ROLLOUT_SAMPLE_INDEX),
        group_size=record.integer(sc.ROLLOUT_GROUP_SIZE),
        policy_version=record.label(sc.ROLLOUT_POLICY_VERSION),
        source=source,
        trainable=record.boolean(sc.ROLLOUT_TRAINABLE) is not False
        and sc.ROLLOUT_TRAINABLE not in record.cut,
        appended=fields.read(sc.ROLLOUT_APPENDED, _appended) or {},
        rewards=rewards,
        metrics=fields.read(sc.ROLLOUT_METRICS, _metrics) or {},
        metadata=fields.read(sc.ROLLOUT_METADATA, _object) or {},
        logs=fields.read(sc.ROLLOUT_LOGS, texts) or (),
        status=record.text(sc.ROLLOUT_STATUS) or "unknown",
        termination_reason=record.text(sc.ROLLOUT_TERMINATION_REASON),
        error=fields.read(sc.ROLLOUT_ERROR, _error),
        output=fields.read(sc.ROLLOUT_OUTPUT, lambda value: value),
        main_call=fields.read(sc.ROLLOUT_MAIN, _call),
        start_time_ns=record.start_time_ns,
        end_time_ns=record.end_time_ns,
        steps=fields.read(sc.ROLLOUT_STEPS, lambda rows: [Step.from_dict(row) for row in rows]),
        warnings=warnings,
        sealed=True,
    )


def side_calls_of(
    calls: Mapping[SpanKey, SpanRecord], rollout: SpanRecord | None, parts: Iterable[SpanRecord]
) -> dict[SpanKey, str]:
    """Why calls are side calls, "" where one is none; only of those that the user's rules judged.

    Rules are code, and spans are read elsewhere: so the span of a rollout, or of a part of it,
    names the side calls of its process. parts: the trusted ones.
    """
    judged = {key: call for key, call in calls.items() if call.boolean(sc.EXCHANGE_JUDGED)}
    if not judged:
        return {}
    reasons_of = {
        record.text(sc.ROLLOUT_PROCESS): _side_calls(record)
        for record in (rollout, *parts)
        if record is not None
    }
    found: dict[SpanKey, str] = {}
    for key, call in judged.items():
        reasons = reasons_of.get(call.text(sc.EXCHANGE_PROCESS))
        found[key] = NOT_KNOWN if reasons is None else reasons.get(call.span_id, "")
    return found


def _side_calls(record: SpanRecord) -> dict[str, str] | None:
    """The reasons on the span of a rollout or a part, by span id; None where they are not there."""
    if sc.ROLLOUT_SIDE_CALLS in record.cut:
        return None
    return Fields(record, []).read(sc.ROLLOUT_SIDE_CALLS, _reasons)


def _of(kind: type[T]) -> Callable[[Json], T]:
    """Gives a value if it is of this type; ValueError for any other."""
    return partial(convert, type=kind)


texts = _of(list[str])
_object = _of(dict[str, Any])
_reasons = _of(dict[str, str])
_call = _of(tuple[str, int])


def _rewards(rows: Json) -> list[Reward]:
    return [Reward.from_dict(row) for row in rows]


def _appended(rows: Json) -> dict[tuple[str, int], list[Json]]:
    found = convert(rows, list[tuple[str, int, list[Any]]])
    return {(completion_id, choice): messages for completion_id, choice, messages in found}


def _metrics(value: Json) -> dict[str, float]:
    numbers = convert(value, dict[str, bool | int | float])
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("a metric is a finite number")
    return numbers


def _error(value: Json) -> dict[str, str]:
    error = _reasons(value)
    _ = error["type"], error["message"]
    return error


def missed_calls(fields: Fields, *, outside: bool = True) -> list[str]:
    """What the span of a rollout, or of a part of one, says of calls that were not captured.

    outside: also of those that were made outside any rollout.
    """
    return [
        *map(_uncaptured, fields.read(sc.ROLLOUT_UNCAPTURED, _counted_pairs) or ()),
        *map(_outside, (fields.read(sc.ROLLOUT_OUTSIDE, _counted_names) or ()) if outside else ()),
    ]


def programs_of(fields: Fields, *, is_given: bool) -> dict[str, Any]:
    """What a warning says of programs that a rollout started; {} where there are none.

    is_given: those that were given a model server. False: the others.
    """
    rows = fields.read(sc.ROLLOUT_PROGRAMS, _counted_pairs) or ()
    counts = {name: count for name, given, count in rows if (given == sc.GIVEN) is is_given}
    if not counts:
        return {}
    count = sum(counts.values())
    programs, were = ("programs", "were") if count > 1 else ("program", "was")
    return {"count": count, "programs": programs, "were": were, "names": ", ".join(counts)}


_counted_pairs = _of(list[tuple[str, str, int]])
_counted_names = _of(list[tuple[str, int]])


def _uncaptured(row: tuple[str, str, int]) -> str:
    library, path, count = row
    requests, were = ("requests", "were") if count > 1 else ("request", "was")
    return sentences.UNCAPTURED(
        count=count, requests=requests, path=path, library=library, were=were
    )


def _outside(row: tuple[str, int]) -> str:
    place, count = row
    calls, were = ("model calls", "were") if count > 1 else ("model call", "was")
    return sentences.OUTSIDE(count=count, calls=calls, were=were, place=place)
