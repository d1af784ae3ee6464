"""The sums of a list of trajectories: histograms, endings, facets, groups, findings, curves."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from otel_rollout.view.curves import By, Curve, Endings, SampleRow, ScoresByValue, token_numbers
from otel_rollout.view.page_types import (
    Bin,
    Count,
    CurveView,
    GroupCount,
    GroupPage,
    Summary,
    VersionCount,
)
from otel_rollout.view.table import Filter, Table
from otel_rollout.wire import Json, dumps, loads

_BINS = 20
_DIGITS = 2
"""Digits of an edge between bins beyond the first digit of their width."""
_MOST_GROUPS = 200
_MOST_VALUES = 100
_MOST_KEYS = 20
_LONGEST_VALUE = 100


def summary_of(table: Table, which: Filter) -> Summary:
    """The sums over the trajectories that a filter keeps."""
    endings = Endings()
    groups, by_version = ScoresByValue(), ScoresByValue()
    names, metadata = Counter[str](), dict[str, Counter[str]]()
    for sample, reason, error_type, error, name, about in _samples(
        table, which, "termination_reason", "error_type", "error", "name", "metadata"
    ):
        endings.add(sample, reason)
        endings.add_error(error_type, error)
        if sample.group_id is not None:
            groups.of(sample.group_id).add(sample)
        for version in sample.versions:
            by_version.of(version).add(sample)
        names[name] += 1
        _count_values(metadata, about)
    scores = endings.scores
    return {
        "total": scores.count,
        "rewards": {
            "count": scores.scored,
            "missing": scores.count - scores.scored,
            "mean": scores.to_dict()["mean"],
            "bins": _bins(table, which, "reward"),
        },
        "statuses": _counts(endings.statuses),
        "terminationReasons": _counts(endings.reasons),
        "errors": [
            {"value": name, "text": text, "count": count}
            for name, text, count in endings.errors()[:_MOST_VALUES]
        ],
        "names": _counts(names),
        "metadata": [
            {"key": key, "values": _counts(values)}
            for key, values in metadata.items()
            if len(values) < _MOST_VALUES
        ],
        "groups": _named(table, groups.to_list(0, _MOST_GROUPS)),
        "groupsTotal": len(groups),
        "versions": sorted(by_version.to_list(0, _MOST_VALUES), key=_version),
        "findings": _findings(table, which),
        "seconds": {"bins": _bins(table, which, "seconds")},
        "turns": {"bins": _bins(table, which, "turns")},
        "tokens": token_numbers(prompt_tokens=scores.prompt, sampled_tokens=scores.sampled),
        "promptTokens": {"bins": _bins(table, which, "prompt_tokens")},
        "sampledTokens": {"bins": _bins(table, which, "sampled_tokens")},
    }


def _count_values(found: dict[str, Counter[str]], metadata: str) -> None:
    """Count the values of `metadata` that a filter can ask for, as it writes them."""
    for key, value in loads(metadata).items() if metadata != "{}" else ():
        is_single = isinstance(value, str | int | float) and len(str(value)) <= _LONGEST_VALUE
        if is_single and (key in found or len(found) < _MOST_KEYS):
            values = found.setdefault(key, Counter())
            if len(values) < _MOST_VALUES:
                values[dumps(value)] += 1


def groups_of(table: Table, which: Filter, offset: int, limit: int) -> GroupPage:
    """The groups, the largest first, with the rewards of those of their trajectories."""
    groups = ScoresByValue()
    for (sample,) in _samples(table, which):
        if sample.group_id is not None:
            groups.of(sample.group_id).add(sample)
    rows = _named(table, groups.to_list(offset, offset + limit))
    return {"total": len(groups), "rows": rows}


def curve_of(
    table: Table, which: Filter, by: str, threshold: float, *, scored_only: bool
) -> CurveView:
    """The rates by `policy_version` or `task_id`."""
    curve = Curve(By.parse("by", by), threshold, scored_only)
    for (sample,) in _samples(table, which):
        curve.add(sample)
    return curve.answer()


def _samples(table: Table, which: Filter, *others: str) -> Iterator[tuple[Any, ...]]:
    """Each trajectory that a filter keeps, with further columns of it."""
    names = ", ".join(f'"{name}"' for name in (*SampleRow._fields, *others))
    versions = cache(lambda text: tuple(loads(text)))
    at, size = SampleRow._fields.index("versions"), len(SampleRow._fields)
    for row in table.connection.execute(
        f"SELECT {names} FROM trajectories WHERE {which.sql}", which.parameters
    ):
        sample = *row[:at], versions(row[at]), *row[at + 1 : size]
        yield SampleRow._make(sample), *row[size:]


def _named(table: Table, groups: list[Json]) -> list[GroupCount]:
    """The groups with the task of each: the id that its members share, else the text."""
    for group in groups:
        task, question = table.task_of(str(group["value"]))
        group["task"] = task or question
    return groups


def _version(counted: VersionCount) -> tuple[bool, Json]:
    """Versions are in their order, the newest last, as far as they have one."""
    return isinstance(counted["value"], str), counted["value"]


def _counts(found: Counter[str]) -> list[Count]:
    counts = sorted(found.items(), key=lambda each: (-each[1], each[0]))[:_MOST_VALUES]
    return [{"value": value, "count": count} for value, count in counts]


def _findings(table: Table, which: Filter) -> list[Json]:
    found = table.connection.execute(
        "SELECT kind, text, advice, COUNT(*), SUM(replies) "
        "FROM found JOIN sentences USING (sentence) "
        f"WHERE number IN (SELECT number FROM trajectories WHERE {which.sql}) "
        "GROUP BY sentence ORDER BY 4 DESC, kind, text LIMIT ?",
        (*which.parameters, _MOST_VALUES),
    )
    names = ("kind", "text", "advice", "count", "replies")
    return [dict(zip(names, row, strict=True)) for row in found]


def _bins(table: Table, which: Filter, column: str) -> list[Bin]:
    """A histogram of a column; whole numbers have bins of whole numbers."""
    # Text, which a file may hold there, and infinity are in no bin.
    known = f"typeof(\"{column}\") IN ('integer', 'real') AND abs(\"{column}\") < 1e300"
    where = f"FROM trajectories WHERE {known} AND {which.sql}"
    low, high, count, is_whole = table.connection.execute(
        f'SELECT MIN("{column}"), MAX("{column}"), COUNT(*), '
        f"COALESCE(MIN(typeof(\"{column}\") = 'integer'), 0) {where}",
        which.parameters,
    ).fetchone()
    if not count:
        return []
    width = max(1, math.ceil((high - low) / _BINS)) if is_whole else (high - low) / _BINS
    if not width or math.isclose(low, high, rel_tol=1e-12, abs_tol=1e-15):
        return [{"from": low, "to": high, "count": count}]
    bins = math.ceil((high - low) / width) if is_whole else _BINS
    digits = 0 if is_whole else _DIGITS - math.floor(math.log10(width))
    inner = [round(low + n * width, digits) for n in range(1, bins)]
    values = table.connection.execute(f'SELECT "{column}" {where}', which.parameters)
    counts = Counter(bisect_right(inner, value) for (value,) in values)
    edges = [low, *inner, high]
    return [{"from": edges[n], "to": edges[n + 1], "count": counts[n]} for n in range(bins)]
