"""Rows of the table `otel_traces` that the collector's ClickHouse exporter fills.

The table stores every attribute as text; readers of a span convert the text of a number back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from otel_rollout.errors import SpanFormatError
from otel_rollout.spans import AttributeValue, SpanEvent, SpanRecord, nanoseconds_of

_ERRORS = ("Error", "STATUS_CODE_ERROR")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def read_clickhouse(rows: Iterable[Mapping[str, Any]]) -> Iterator[SpanRecord]:
    """The spans of rows of `otel_traces`, as dicts by column name from any client.

    Times are exact as numbers (`SELECT * REPLACE (toUnixTimestamp64Nano(Timestamp) AS Timestamp)`)
    or as text in UTC, the server's default; a `datetime` has only microseconds. SpanFormatError for
    a row without the columns of a span.
    """
    for number, row in enumerate(rows, 1):
        try:
            yield _span(row)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            missing = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise SpanFormatError(
                f"row {number}: expected a row of otel_traces as the ClickHouse exporter "
                f"writes it, got {str(row)[:80]!r}: {missing}"
            ) from error


def _span(row: Mapping[str, Any]) -> SpanRecord:
    start = _nanoseconds(row["Timestamp"])
    return SpanRecord(
        name=str(row["SpanName"]),
        trace_id=row["TraceId"].lower(),
        span_id=row["SpanId"].lower(),
        parent_span_id=(row.get("ParentSpanId") or "").lower() or None,
        start_time_ns=start,
        end_time_ns=start + int(row["Duration"]),
        attributes=_attributes(row["SpanAttributes"]),
        scope=row.get("ScopeName") or "",
        events=list(_events(row)),
        status_error=(row.get("StatusMessage") or "") if row.get("StatusCode") in _ERRORS else None,
    )


def _events(row: Mapping[str, Any]) -> Iterator[SpanEvent]:
    """The events of a row: a `Nested` column comes as three lists, or as one list of rows."""
    rows: Sequence[Any] = row.get("Events") or ()
    if not rows:
        columns = ("Events.Timestamp", "Events.Name", "Events.Attributes")
        rows = list(zip(*(row.get(column) or () for column in columns), strict=True))
    for event in rows:
        time, name, attributes = (
            (event["Timestamp"], event["Name"], event["Attributes"])
            if isinstance(event, Mapping)
            else event
        )
        yield SpanEvent(name, _nanoseconds(time), _attributes(attributes))


def _attributes(found: Any) -> dict[str, AttributeValue]:
    """Attributes from a map. With the exporter's `json: true` it is nested at the dots of names."""
    attributes: dict[str, AttributeValue] = {}
    pairs = found.items() if isinstance(found, Mapping) else (tuple(pair) for pair in found)
    for key, value in pairs:
        if isinstance(value, Mapping):
            attributes |= {f"{key}.{name}": inner for name, inner in _attributes(value).items()}
        else:
            attributes[key] = value
    return attributes


def _nanoseconds(time: Any) -> int:
    if isinstance(time, int):
        return time
    if isinstance(time, datetime):
        if hasattr(time, "nanosecond"):  # a pandas Timestamp
            return int(getattr(time, "value"))  # noqa: B009 - not of every datetime
        aware = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
        return (aware - _EPOCH) // timedelta(microseconds=1) * 1000
    if hasattr(time, "astype"):  # a numpy datetime64
        return int(time.astype("datetime64[ns]").astype("int64"))
    if isinstance(time, str):
        if time.isdecimal():
            return int(time)
        return nanoseconds_of(time)
    raise ValueError(f"expected a time in UTC, got {time!r}")
