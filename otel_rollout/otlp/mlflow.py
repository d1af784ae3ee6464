"""Traces from MLflow's tracking server, as its own page gets them.

Its `traces/get` parses texts that are JSON and returns objects. What its page is made from has
every attribute as JSON, and texts that are JSON already as they came.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from otel_rollout import semconv as sc
from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp.http import get_json
from otel_rollout.otlp.json import UNREADABLE, in_camel_case, read_json
from otel_rollout.spans import SpanRecord, numbers_of

_address = re.compile(
    r"(https?://[^?#]+?)/(?:#|(?:ajax-)?api/)(?:.*\W)?tr-([0-9a-fA-F]{32})\b.*"
).fullmatch


def read_mlflow(
    url: str, trace_id: str, *, headers: Mapping[str, str] | None = None, timeout: float = 30.0
) -> list[SpanRecord]:
    """The spans of one trace from MLflow, such as at `http://127.0.0.1:5000`.

    trace_id: as OpenTelemetry has it, or MLflow's own, which begins with `tr-`.
    headers: sent along, such as `{"authorization": "Basic ..."}`.
    LookupError if MLflow does not have the trace (yet), SpanFormatError if the answer is not
    MLflow's, OSError if there is none. `timeout`: as for `read_jaeger`.
    """
    name = "tr-" + trace_id.removeprefix("tr-").lower()
    query = urllib.parse.urlencode({"request_id": name})
    address = f"{url.rstrip('/')}/ajax-api/3.0/mlflow/get-trace-artifact?{query}"
    answer = get_json("MLflow", url, address, api="MLflow's API", timeout=timeout, headers=headers)
    if answer is None:
        raise LookupError(f"MLflow at {url} has no trace {trace_id}")
    return list(read_answer(answer))


def read_address(address: str) -> Iterator[SpanRecord] | None:
    """The spans of the trace at an address of MLflow's page or API; None if it is none."""
    match = _address(address)
    return iter(read_mlflow(match[1], match[2])) if match else None


def read_answer(
    data: Any, *, on_error: Callable[[SpanFormatError], None] | None = None
) -> Iterator[SpanRecord]:
    """The spans of one answer of MLflow. SpanFormatError if it is none; `on_error`: as `read`."""
    if isinstance(data, Mapping) and isinstance(data.get("trace"), Mapping):
        rows = data["trace"].get("spans")  # of traces/get, whose attributes are OTLP's
        spans = [in_camel_case(row) for row in rows] if isinstance(rows, list) else rows
    else:
        rows = data.get("spans") if isinstance(data, Mapping) else None
        spans = [_span(row) for row in rows] if isinstance(rows, list) else rows
    if not isinstance(spans, list):
        raise SpanFormatError(f"expected the spans of a trace in MLflow, got {str(data)[:80]!r}")
    message = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    yield from read_json(message, on_error=on_error)


def _span(row: Any) -> Any:
    """The span as OTLP/JSON, all values as texts; as it is where it has another shape."""
    try:
        rest = {name: value for name, value in row.items() if name not in ("attributes", "events")}
        events = [
            {**in_camel_case(event), "attributes": _rows(event["attributes"])}
            for event in row.get("events") or ()
        ]
        attributes = _rows(_as_sent(row["attributes"]))
    except UNREADABLE:
        return row
    return {**in_camel_case(rest), "events": events, "attributes": attributes}


def _rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"stringValue": v if isinstance(v, str) else json.dumps(v)}}
        for name, v in values.items()
    ]


def _as_sent(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The texts that were sent. What was sent as the JSON of a text is found by its length."""
    found = {name: _decoded(value) for name, value in stored.items()}
    try:
        lengths = numbers_of(found.get(sc.LENGTHS))
    except ValueError:
        return found
    for name in lengths.keys() & found.keys():
        if len(found[name]) != lengths[name] == len(stored[name]):
            found[name] = stored[name]
    return found


def _decoded(value: str) -> str:
    """The text that this is the JSON of; itself for any other JSON."""
    text = json.loads(value)
    return text if isinstance(text, str) else value
