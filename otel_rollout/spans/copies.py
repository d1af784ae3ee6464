"""Copies of one span, which may come several times and from several stores, as one record."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from otel_rollout import semconv as sc
from otel_rollout.spans.record import AttributeValue, SpanRecord
from otel_rollout.wire import dumps


def united(first: SpanRecord, second: SpanRecord) -> SpanRecord:
    """One record of two copies of a span: an attribute that was cut in one may be whole in both.

    An attribute in which whole copies differ has no value: one of them was forged, and nothing
    tells which; so it is if they differ in their times. Of a span of ours only what we wrote
    counts: a store may add its own. The result is the same for any number of copies in any order.
    """
    if first.end_time_ns is None or second.end_time_ns is None:
        return second if first.end_time_ns is None else first
    if first == second:
        return first
    base, other = sorted((first, second), key=_in_order)
    mine, theirs = base.attributes, other.attributes
    is_ours = sc.ROLLOUT_ID in mine or sc.ROLLOUT_ID in theirs
    counts = (sc.PREFIX, *_NAMES) if is_ours else ""
    differ = {
        name
        for name in mine.keys() & theirs.keys()
        if name.startswith(counts)
        and not name.startswith(sc.FOR_PEOPLE)
        and not _are_one(mine[name], theirs[name])
    }
    for name in ("start_time_ns", "end_time_ns"):
        if getattr(base, name) // _EXACT != getattr(other, name) // _EXACT:
            differ.add(name)
    differ |= {*base.disputed, *other.disputed}
    attributes = {**theirs, **mine, **dict.fromkeys(differ)}
    for name in (mine.keys() & theirs.keys()) - differ:
        if type(mine[name]) is not type(theirs[name]):  # else the order of copies would decide
            attributes[name] = min(mine[name], theirs[name], key=_of_type)
    cut = ((base.cut | other.cut) - attributes.keys()) | differ
    return replace(base, attributes=attributes, cut=frozenset(cut))


_NAMES = (sc.GEN_AI_AGENT_NAME, sc.GEN_AI_EVALUATION_NAME)
"""Attributes of the conventions that are read of a span of ours."""
_EXACT = 1_000_000
"""Nanoseconds to which every store keeps times: some cut them to microseconds."""


def _in_order(record: SpanRecord) -> tuple[object, ...]:
    """Sort key of the copies of a span: whose fields count where they differ."""
    return (
        record.start_time_ns,
        record.end_time_ns,
        record.name,
        record.parent_span_id or "",
        repr(sorted(record.attributes.items(), key=lambda item: item[0])),
    )


def _of_type(value: AttributeValue) -> tuple[bool, str, str]:
    """Sort key of values that are one, in several types; floats are read least."""
    return isinstance(value, float), type(value).__name__, repr(value)


def _are_one(mine: AttributeValue, theirs: AttributeValue) -> bool:
    """Whether two values are the same as every store keeps it; they write floats in other ways."""
    if isinstance(mine, bool) is not isinstance(theirs, bool):  # True is 1 to Python alone
        return _as_text(mine) == _as_text(theirs)
    if isinstance(mine, float) or isinstance(theirs, float):
        with suppress(TypeError, ValueError, OverflowError):
            first, second = _as_float(mine), _as_float(theirs)
            return first == second or (math.isnan(first) and math.isnan(second))
    return mine == theirs or _as_text(mine) == _as_text(theirs)


def _as_float(value: AttributeValue) -> float:
    if not isinstance(value, str | int | float):
        raise TypeError(f"expected a number, got {value!r:.80}")
    return float(value)


def _as_text(value: AttributeValue) -> str:
    if isinstance(value, list | tuple):  # the SDK has tuples, files have lists, some stores JSON
        with suppress(TypeError, RecursionError):
            return dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
