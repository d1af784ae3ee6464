"""The sums of a list of trajectories: histograms, endings, groups, versions, findings, curves."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from functools import cache

from otel_rollout.view.curves import By, Curve, SampleRow, interval_of
from otel_rollout.view.page_types import (
    Bin,
    Count,
    CurveView,
    GroupCount,
    GroupPage,
    Summary,
    VersionCount,
)
from otel_rollout.view.sums import Endings, Rewards, RewardsByValue, differ_by_rounding
from otel_rollout.view.table import Filter, Table
from otel_rollout.wire import Json, loads

_BINS = 20
_DIGITS = 2
"""Digits of an edge between bins beyond the first digit of their width."""
_MOST_GROUPS = 200
_MOST_VALUES = 100


def summary_of(table: Table, which: Filter) -> Summary:
    """The sums over the trajectories that a filter keeps."""
    endings = Endings()
    groups, by_version = RewardsByValue(Rewards), RewardsByValue(Rewards)
    versions: dict[str, list[Rewards]] = {}
    """The rewards of each version in a list of them, by its text: most lists are the same."""
    for reward, group, status, reason, text, *error in table.connection.execute(
        'SELECT "reward", "group_id", "status", "termination_reason", "versions", '
        '"error_type", "error" '
        f"FROM trajectories WHERE {which.sql}",
        which.parameters,
    ):
        endings.add_ending(reward, status, reason)
        endings.add_error(*error)
        if group is not None:
            groups.of(group).add(reward)
        if text not in versions:
            versions[text] = [by_version.of(version) for version in loads(text)]
        for each in versions[text]:
            each.add(reward)
    rewards = endings.rewards
    found = rewards.to_dict()
    return {
        "total": rewards.count,
        "rewards": {
            "count": rewards.scored,
            "missing": rewards.count - rewards.scored,
            "mean": found["mean"],
            "std": found["std"],
            "min": found["min"],
            "max": found["max"],
            "bins": _bins(table, which, "reward"),
        },
        "statuses": _counts(endings.statuses),
        "terminationReasons": _counts(endings.reasons),
        "errors": [
            {"value": name, "text": text, "count": count}
            for name, text, count in endings.errors()[:_MOST_VALUES]
        ],
        "groups": _named(table, groups.to_list(0, _MOST_GROUPS)),
        "groupsTotal": len(groups),
        "versions": sorted(by_version.to_list(0, _MOST_VALUES), key=_version),
        "findings": _findings(table, which),
        "seconds": {"bins": _bins(table, which, "seconds")},
        "turns": {"bins": _bins(table, which, "turns")},
        "sampledTokens": {"bins": _bins(table, which, "sampled_tokens")},
    }


def groups_of(table: Table, which: Filter, offset: int, limit: int) -> GroupPage:
    """The groups, the largest first, with the rewards of those of their trajectories."""
    groups = RewardsByValue(Rewards)
    for group, reward in table.connection.execute(
        'SELECT "group_id", "reward" FROM trajectories '
        f'WHERE "group_id" IS NOT NULL AND {which.sql}',
        which.parameters,
    ):
        groups.of(group).add(reward)
    rows = _named(table, groups.to_list(offset, offset + limit))
    return {"total": len(groups), "rows": rows}


def curve_of(table: Table, which: Filter, by: str, threshold: float) -> CurveView:
    """The rewards by `policy_version`, `task_id`, or `time` in intervals that fit."""
    where = f"FROM trajectories WHERE {which.sql}"
    if by == "time":
        first, last = table.connection.execute(
            f'SELECT MIN("start_time_ns"), MAX("start_time_ns") {where} AND "start_time_ns" > 0',
            which.parameters,
        ).fetchone()
        by = interval_of(first or 0, last or 0)
    curve = Curve(By.parse("by", by), threshold)
    versions = cache(loads)
    for reward, task, group, text, started in table.connection.execute(
        f'SELECT "reward", "task_id", "group_id", "versions", "start_time_ns" {where}',
        which.parameters,
    ):
        curve.add(SampleRow(reward, task, group, versions(text), started))
    return curve.answer()


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
    if not width or differ_by_rounding(low, high):
        return [{"from": low, "to": high, "count": count}]
    bins = math.ceil((high - low) / width) if is_whole else _BINS
    digits = 0 if is_whole else _DIGITS - math.floor(math.log10(width))
    inner = [round(low + n * width, digits) for n in range(1, bins)]
    values = table.connection.execute(f'SELECT "{column}" {where}', which.parameters)
    counts = Counter(bisect_right(inner, value) for (value,) in values)
    edges = [low, *inner, high]
    return [{"from": edges[n], "to": edges[n + 1], "count": counts[n]} for n in range(bins)]
