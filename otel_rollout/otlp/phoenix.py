"""Spans from Phoenix's REST API, whose answers are OTLP with the names of protobuf.

Phoenix keeps attributes, events, parents and status as they were; times only to the microsecond,
and no kinds, links and scopes. What is named metadata it parses and takes apart, and drops nulls.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp.http import get_json
from otel_rollout.otlp.json import UNREADABLE, in_camel_case, read_json
from otel_rollout.spans import SpanRecord, nanoseconds_of

_address = re.compile(
    r"(https?://[^?#]+?)/(?:v1/)?projects/([^/?#]+)"
    r"(?:/(?:traces/([0-9a-fA-F]{32})|traces|spans|sessions)(?:/[^?#]*)?)?/?"
    r"(?:\?([^#]*))?(?:#.*)?"
).fullmatch
_PAGING = ("cursor", "limit")
_METADATA = f"{sc.ROLLOUT_METADATA}."


def read_phoenix(
    url: str,
    project: str = "default",
    trace_id: str | None = None,
    *,
    limit: int = 100,
    headers: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Iterator[SpanRecord]:
    """The spans of a project in Phoenix, such as at `http://127.0.0.1:6006`, the last ones first.

    project: its name or id. trace_id: of this trace alone. limit: spans in one answer, up to 1,000;
    all answers are read. headers: sent along, such as `{"authorization": "Bearer ..."}`.
    LookupError if Phoenix has no such project, or not the trace (yet), SpanFormatError if the
    answer is not Phoenix's, OSError if there is none. `timeout`: as for `read_jaeger`.
    """
    query = {"limit": str(limit)} | ({} if trace_id is None else {"trace_id": trace_id.lower()})
    came = False
    for record in _pages(url, project, query, headers, timeout):
        came = True
        yield record
    if not came and trace_id is not None:
        raise LookupError(f"Phoenix at {url} has no trace {trace_id} in project {project!r}")


def _pages(
    url: str,
    project: str,
    query: Mapping[str, str],
    headers: Mapping[str, str] | None,
    timeout: float,
) -> Iterator[SpanRecord]:
    path = f"{url.rstrip('/')}/v1/projects/{urllib.parse.quote(project, safe='')}/spans/otlpv1"
    cursor: dict[str, str] = {}
    while True:
        address = f"{path}?{urllib.parse.urlencode({**query, **cursor})}"
        answer = get_json(
            "Phoenix", url, address, api="Phoenix's API", timeout=timeout, headers=headers
        )
        if answer is None:
            raise LookupError(f"Phoenix at {url} has no project {project!r}")
        yield from read_answer(answer)
        following = {"cursor": str(answer["next_cursor"])} if answer.get("next_cursor") else {}
        if not following:
            return
        if following == cursor:
            raise SpanFormatError(f"Phoenix at {url} gives the page {cursor} after itself")
        cursor = following


def read_address(address: str) -> Iterator[SpanRecord] | None:
    """The spans at an address: of a project or a trace in Phoenix's page, or of its API.

    None if it is no address of Phoenix.
    """
    match = _address(address)
    if match is None:
        return None
    url, project, trace_id, text = match.groups()
    query = dict(urllib.parse.parse_qsl(text or "")) if "/v1/projects/" in address else {}
    project = urllib.parse.unquote(project)
    if trace_id is None and query.keys() - {*_PAGING}:
        kept = {name: value for name, value in query.items() if name != "cursor"}
        return _pages(url, project, kept, None, 30.0)
    return read_phoenix(url, project, trace_id)


def read_answer(
    data: Any, *, on_error: Callable[[SpanFormatError], None] | None = None
) -> Iterator[SpanRecord]:
    """The spans of one answer of Phoenix. SpanFormatError if it is none; `on_error`: as `read`."""
    is_row = isinstance(data, Mapping) and "span_kind" in data
    rows = [data] if is_row else data.get("data") if isinstance(data, Mapping) else None
    if not isinstance(rows, list) or not all(is_span(row) for row in rows):
        raise SpanFormatError(
            "expected an answer of Phoenix's /v1/projects/<project>/spans or spans/otlpv1, or a "
            f"row of its dataframe of spans, got {str(data)[:80]!r}"
        )
    made = [_span(row) if "span_kind" in row else in_camel_case(row) for row in rows]
    message = {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}
    yield from map(_as_sent, read_json(message, on_error=on_error))


def is_span(row: object) -> bool:
    """True for a span in an answer of Phoenix."""
    return isinstance(row, Mapping) and (
        {"trace_id", "span_id", "attributes"} <= row.keys() or "span_kind" in row
    )


_COLUMN = "attributes."


def _span(row: Mapping[str, Any]) -> Any:
    """A span of `/spans`, or a row of the dataframe, as OTLP/JSON; as it is in another shape.

    A dataframe has the attributes as columns, and lists of messages in one.
    """
    try:
        context = row.get("context") or {}
        ids = {name: context.get(name) or row.get(f"context.{name}") for name in _IDS}
        held = row.get("attributes") or {}
        held = held | {k.removeprefix(_COLUMN): v for k, v in row.items() if k.startswith(_COLUMN)}
        attributes = {sc.OPENINFERENCE_KIND: row["span_kind"], **_flat(held)}
        made = {
            "name": row.get("name") or "",
            "traceId": ids["trace_id"],
            "spanId": ids["span_id"],
            "parentSpanId": row.get("parent_id") or "",
            "attributes": [{"key": k, "value": _value(v)} for k, v in attributes.items()],
        }
        for name, key in (("start_time", "startTimeUnixNano"), ("end_time", "endTimeUnixNano")):
            made[key] = _time(row.get(name))
        if row.get("status_code") == "ERROR":
            made["status"] = {"code": 2, "message": row.get("status_message") or ""}
    except UNREADABLE:
        return row
    return made


_IDS = ("trace_id", "span_id")


def _time(value: Any) -> int:
    """Nanoseconds of a time: a text, or milliseconds as pandas writes them."""
    return nanoseconds_of(value) if isinstance(value, str) else int(value or 0) * 1_000_000


def _flat(held: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes by their dotted names; those that are null, or a list with nulls, are left out."""
    found: dict[str, Any] = {}
    for name, value in held.items():
        inner: Any = value
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            inner = {str(number): item for number, item in enumerate(value)}
        if isinstance(inner, Mapping):
            found |= {f"{name}.{key}": item for key, item in _flat(inner).items()}
        elif value is not None:
            found[name] = value
    return found


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a dataframe makes floats of a column with gaps
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue"}
    return {kinds.get(type(value), "stringValue"): value}


def _as_sent(record: SpanRecord) -> SpanRecord:
    """The span as it was sent, as far as Phoenix keeps it."""
    end = record.end_time_ns
    return replace(
        record,
        start_time_ns=_microseconds(record.start_time_ns),
        end_time_ns=None if end is None else _microseconds(end),
        events=[replace(event, time_ns=_microseconds(event.time_ns)) for event in record.events],
        attributes=_put_together(record.attributes),
    )


def _microseconds(time_ns: int) -> int:
    """The time without the error of the float that Phoenix makes it from."""
    return round(time_ns, -3)


def _put_together(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes with the metadata as one; its length shows whether anything of it is lost."""
    pieces = {name: value for name, value in attributes.items() if name.startswith(_METADATA)}
    whole: dict[str, Any] = {}
    for name, value in pieces.items():
        *around, last = name.removeprefix(_METADATA).split(".")
        holder = whole
        for each in around:
            holder = holder.setdefault(each, {})
            if not isinstance(holder, dict):  # two names that are one here
                return attributes
        holder[last] = value
    if not whole:
        return attributes
    rest = {name: value for name, value in attributes.items() if name not in pieces}
    return {**rest, sc.ROLLOUT_METADATA: whole}
