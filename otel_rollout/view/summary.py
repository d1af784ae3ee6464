"""What a list of trajectories is like: histograms, endings, groups, versions, findings; by SQL."""

from __future__ import annotations

import math
from typing import Literal

from otel_rollout.view.table import Filter, Table
from otel_rollout.wire import Json

_BINS = 20
_MOST_GROUPS = 200
_MOST_VALUES = 100


def summary_of(table: Table, which: Filter) -> dict[str, Json]:
    """All of it, of the trajectories that are asked for."""
    groups = groups_of(table, which, 0, _MOST_GROUPS)
    return {
        "total": table.count(which),
        "rewards": _rewards(table, which),
        "statuses": _values(table, which, "status"),
        "terminationReasons": _values(table, which, "termination_reason"),
        "groups": [
            {name: group[name] for name in ("value", "count", "scored", "mean", "std")}
            for group in groups["rows"]
        ],
        "groupsTotal": groups["total"],
        "versions": _versions(table, which),
        "findings": _findings(table, which),
        "seconds": {"bins": _bins(table, which, "seconds")},
        "turns": {"bins": _bins(table, which, "turns")},
        "sampledTokens": {"bins": _bins(table, which, "sampled_tokens")},
    }


def groups_of(table: Table, which: Filter, offset: int, limit: int) -> dict[str, Json]:
    """The groups, the largest first, with the rewards of those of their trajectories."""
    sql = f'SELECT "group_id" AS value, "reward" AS reward FROM trajectories WHERE {which.sql}'
    found = _by_value(table, f"SELECT * FROM ({sql}) WHERE value IS NOT NULL", which, limit, offset)
    (total,) = table.connection.execute(
        f'SELECT COUNT(DISTINCT "group_id") FROM trajectories WHERE {which.sql}', which.parameters
    ).fetchone()
    return {"total": total, "rows": found}


def _versions(table: Table, which: Filter) -> list[dict[str, Json]]:
    """Policy versions, the newest last as far as they have an order."""
    sql = (
        'SELECT json_each.value AS value, "reward" AS reward FROM trajectories, '
        f'json_each(trajectories."versions") WHERE number IN '
        f"(SELECT number FROM trajectories WHERE {which.sql})"
    )
    found = _by_value(table, sql, which, _MOST_VALUES, 0)
    kept = [{k: row[k] for k in ("value", "count", "scored", "mean", "std")} for row in found]
    return sorted(kept, key=lambda row: (isinstance(row["value"], str), row["value"]))


def _by_value(
    table: Table, pairs: str, which: Filter, limit: int, offset: int
) -> list[dict[str, Json]]:
    """Count and rewards of each value, of SQL that gives columns `value` and `reward`."""
    # The deviation in a second pass: sums of squares lose it where rewards are large.
    sql = f"""
        WITH pairs AS ({pairs}),
        means AS (SELECT value, COUNT(*) AS n, COUNT(reward) AS scored, AVG(reward) AS mean,
                  MIN(reward) AS low, MAX(reward) AS high FROM pairs GROUP BY value),
        some AS (SELECT * FROM means ORDER BY n DESC, value LIMIT ? OFFSET ?)
        SELECT some.value, n, scored, mean, low, high,
               AVG((reward - mean) * (reward - mean))
        FROM some JOIN pairs ON pairs.value = some.value GROUP BY some.value
        ORDER BY n DESC, some.value"""
    return [
        {
            "value": value,
            "count": count,
            "scored": scored,
            "mean": mean,
            "std": None if variance is None else math.sqrt(variance),
            "min": low,
            "max": high,
        }
        for value, count, scored, mean, low, high, variance in table.connection.execute(
            sql, (*which.parameters, limit, offset)
        )
    ]


def _rewards(table: Table, which: Filter) -> dict[str, Json]:
    where = f"FROM trajectories WHERE {which.sql}"
    total, count, mean, low, high = table.connection.execute(
        f'SELECT COUNT(*), COUNT("reward"), AVG("reward"), MIN("reward"), MAX("reward") {where}',
        which.parameters,
    ).fetchone()
    (variance,) = table.connection.execute(
        f'SELECT AVG(("reward" - ?) * ("reward" - ?)) {where}', (mean, mean, *which.parameters)
    ).fetchone()
    return {
        "count": count,
        "missing": total - count,
        "mean": mean,
        "std": None if variance is None else math.sqrt(variance),
        "min": low,
        "max": high,
        "bins": _bins(table, which, "reward"),
    }


def _values(
    table: Table, which: Filter, column: Literal["status", "termination_reason"]
) -> list[dict[str, Json]]:
    found = table.connection.execute(
        f'SELECT "{column}", COUNT(*) FROM trajectories WHERE {which.sql} '
        "GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT ?",
        (*which.parameters, _MOST_VALUES),
    )
    return [{"value": value, "count": count} for value, count in found if value is not None]


def _findings(table: Table, which: Filter) -> list[dict[str, Json]]:
    found = table.connection.execute(
        "SELECT kind, text, advice, SUM(count) FROM found JOIN sentences USING (sentence) "
        f"WHERE number IN (SELECT number FROM trajectories WHERE {which.sql}) "
        "GROUP BY sentence ORDER BY 4 DESC, kind, text LIMIT ?",
        (*which.parameters, _MOST_VALUES),
    )
    return [dict(zip(("kind", "text", "advice", "count"), row, strict=True)) for row in found]


def _bins(table: Table, which: Filter, column: str) -> list[dict[str, Json]]:
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
    if low == high:
        return [{"from": low, "to": high, "count": count}]
    width = max(1, math.ceil((high - low) / _BINS)) if is_whole else (high - low) / _BINS
    bins = math.ceil((high - low) / width) if is_whole else _BINS
    counts = dict(
        table.connection.execute(
            f'SELECT MIN(CAST(("{column}" - ?) / ? AS INTEGER), ?), COUNT(*) {where} GROUP BY 1',
            (low, width, bins - 1, *which.parameters),
        ).fetchall()
    )
    edges = [low + n * width for n in range(bins)] + [high]
    return [{"from": edges[n], "to": edges[n + 1], "count": counts.get(n, 0)} for n in range(bins)]
