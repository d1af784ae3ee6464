"""Traces from Jaeger's API v3, whose answers are OTLP/JSON.

Every request sets `rawTraces`: without it Jaeger adjusts the spans of a trace.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp.http import get_json
from otel_rollout.otlp.json import read_json
from otel_rollout.spans import SpanRecord

_trace_address = re.compile(
    r"(https?://.+?)/(?:api/v3/traces|api/traces|trace)/([0-9a-fA-F]{1,32})/?(?:[?#].*)?"
).fullmatch


def read_jaeger(url: str, trace_id: str, *, timeout: float = 30.0) -> list[SpanRecord]:
    """The spans of one trace from a Jaeger query service, such as `http://127.0.0.1:16686`.

    LookupError if Jaeger does not have the trace (yet), SpanFormatError if the answer is not from
    Jaeger's API v3, OSError if there is no answer. `timeout`: seconds to wait for the next bytes;
    a whole answer may take ten times as long, and have 1 GiB.
    """
    # Jaeger before 2.20 knows only the first spelling, later ones prefer the second.
    query = {"raw_traces": "true", "rawTraces": "true"}
    data = _get(url, f"traces/{urllib.parse.quote(trace_id)}", query, timeout)
    if data is None:
        raise LookupError(f"Jaeger at {url} has no trace {trace_id}")
    return list(read_json(data))


def find_jaeger(
    url: str,
    service: str,
    start_time_ns: int,
    end_time_ns: int,
    *,
    limit: int = 20,
    timeout: float = 30.0,
) -> Iterator[SpanRecord]:
    """The spans of all traces of a service that began between these times (Unix nanoseconds).

    Jaeger has no paging. If an answer has `limit` traces, each half of the period is requested
    again, so no more than `limit` traces are held at once. SpanFormatError if `limit` or more
    traces began in the same nanosecond, or as for `read_jaeger`.
    """
    seen: set[str] = set()
    windows = [(start_time_ns, end_time_ns)]
    while windows:
        start, end = windows.pop()
        names = {"serviceName": service, "searchDepth": limit, "rawTraces": "true"}
        names |= {"startTimeMin": _rfc3339(start), "startTimeMax": _rfc3339(end)}
        query = {f"query.{name}": value for name, value in names.items()}
        names |= {"numTraces": limit}  # Jaeger before 2.20, which knows only the other spelling
        query |= {f"query.{_snake(name)}": value for name, value in names.items()}
        records = list(read_json(_get(url, "traces", query, timeout) or {"resourceSpans": []}))
        found = {record.trace_id for record in records}
        yield from (record for record in records if record.trace_id not in seen)
        seen |= found
        if len(found) < limit:
            continue
        if end - start <= 1:
            raise SpanFormatError(
                f"Jaeger at {url}: {limit} or more traces of {service!r} began at "
                f"{_rfc3339(start)}; use a larger limit"
            )
        middle = (start + end) // 2
        windows += [(middle, end), (start, middle)]


def read_address(address: str) -> Iterator[SpanRecord] | None:
    """The spans of the trace at an address of Jaeger's page or API; None if it is none."""
    match = _trace_address(address)
    return iter(read_jaeger(match[1], match[2])) if match else None


def _get(url: str, path: str, query: Mapping[str, Any], timeout: float) -> Any:
    """The answer's OTLP/JSON; None for 404."""
    address = f"{url.rstrip('/')}/api/v3/{path}?{urllib.parse.urlencode(query)}"
    data = get_json("Jaeger", url, address, api="Jaeger's API v3", timeout=timeout)
    return data["result"] if isinstance(data, dict) and "result" in data else data


def _rfc3339(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda match: "_" + match[0].lower(), name)
