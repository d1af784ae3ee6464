"""Servers with the APIs of Phoenix and MLflow, which answer as these do (read from real ones)."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.kit.transports import to_json_line

Json = dict[str, Any]
KINDS = ("array_value", "bool_value", "bytes_value", "double_value", "int_value", "kvlist_value")
Answer = Callable[[str, dict[str, str]], Any]


class Api:
    """Serves what `answer(path, query)` gives as JSON; None is 404."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.headers: list[Mapping[str, str]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                query = {name: values[-1] for name, values in parse_qs(address.query).items()}
                api.asked.append((address.path, query))
                api.headers.append(dict(self.headers))
                found = answer(unquote(address.path), query)
                self.send_response(404 if found is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Api:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def sent(spans: Iterable[Any]) -> list[Json]:
    """The spans as OTLP/JSON."""
    return [
        span
        for resource in json.loads(to_json_line(list(spans)))["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def value_of(value: Json) -> Any:
    """The plain value of an OTLP/JSON one."""
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [value_of(item) for item in content.get("values", ())]
    return int(content) if kind == "intValue" else content


def plain(rows: Iterable[Json]) -> Json:
    return {row["key"]: value_of(row["value"]) for row in rows}


# --- Phoenix


def phoenix_value(value: Any) -> Json:
    kind = {bool: "bool", int: "int", float: "double", str: "string", list: "array"}[type(value)]
    content = {"values": [phoenix_value(item) for item in value]} if kind == "array" else value
    return {**dict.fromkeys((*KINDS, "string_value")), f"{kind}_value": content}


def phoenix_rows(attributes: Json) -> list[Json]:
    """Phoenix parses what is named metadata, and names its leaves one by one; nulls are lost."""
    rows: list[Json] = []
    for key, value in attributes.items():
        if key.endswith("metadata"):
            rows += phoenix_rows({f"{key}.{n}": v for n, v in json.loads(value).items()})
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = {f"{key}.{n}": v for n, v in enumerate(value) if isinstance(v, dict)}
            rows += phoenix_rows(items)
        elif isinstance(value, dict):
            rows += phoenix_rows({f"{key}.{n}": v for n, v in value.items()})
        elif value is not None:
            rows.append({"key": key, "value": phoenix_value(value)})
    return rows


def phoenix_time(nanoseconds: str) -> int:
    return int(round(int(nanoseconds) / 1e9, 6) * 1_000_000_000)


def phoenix_span(span: Json) -> Json:
    events = [
        {
            "name": event["name"],
            "time_unix_nano": phoenix_time(event["timeUnixNano"]),
            "attributes": phoenix_rows(plain(event.get("attributes", ()))),
            "dropped_attributes_count": None,
        }
        for event in span.get("events", ())
    ]
    status = span.get("status", {})
    return {
        "trace_id": span["traceId"],
        "span_id": span["spanId"],
        "parent_span_id": span.get("parentSpanId"),
        "trace_state": None,
        "flags": None,
        "name": span["name"],
        "kind": "SPAN_KIND_INTERNAL",
        "start_time_unix_nano": phoenix_time(span["startTimeUnixNano"]),
        "end_time_unix_nano": phoenix_time(span["endTimeUnixNano"]),
        "attributes": phoenix_rows(plain(span["attributes"])),
        "events": events or None,
        "links": None,
        "status": {"code": status.get("code", 0), "message": status.get("message")},
        "dropped_attributes_count": None,
    }


def phoenix(spans: Iterable[Any], project: str = "default") -> Api:
    """A Phoenix with one project, which has these spans."""
    rows = [phoenix_span(span) for span in reversed(sent(spans))]

    def answer(path: str, query: dict[str, str]) -> Any:
        if path != f"/v1/projects/{project}/spans/otlpv1":
            return None
        found = [row for row in rows if query.get("trace_id") in (None, row["trace_id"])]
        first, limit = int(query.get("cursor", 0)), int(query["limit"])
        more = str(first + limit) if first + limit < len(found) else None
        return {"data": found[first : first + limit], "next_cursor": more}

    return Api(answer)


# --- MLflow


def mlflow_attributes(attributes: Json) -> Json:
    """JSON of each value, but of a text that is JSON of a text, a list or an object the text."""
    stored = {}
    for key, value in attributes.items():
        stored[key] = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            try:
                if isinstance(json.loads(value), str | list | dict):
                    stored[key] = value
            except ValueError:
                pass
    return stored


def in_base64(name: str) -> str:
    return base64.b64encode(bytes.fromhex(name)).decode()


def mlflow_span(span: Json) -> Json:
    codes = ("STATUS_CODE_UNSET", "STATUS_CODE_OK", "STATUS_CODE_ERROR")
    status, parent = span.get("status", {}), span.get("parentSpanId")
    return {
        "trace_id": in_base64(span["traceId"]),
        "span_id": in_base64(span["spanId"]),
        "parent_span_id": in_base64(parent) if parent else None,
        "name": span["name"],
        "start_time_unix_nano": int(span["startTimeUnixNano"]),
        "end_time_unix_nano": int(span["endTimeUnixNano"]),
        "events": [
            {
                "name": event["name"],
                "time_unix_nano": int(event["timeUnixNano"]),
                "attributes": plain(event.get("attributes", ())),
            }
            for event in span.get("events", ())
        ],
        "status": {"code": codes[status.get("code", 0)], "message": status.get("message", "")},
        "attributes": mlflow_attributes(plain(span["attributes"])),
        "links": [],
    }


def mlflow(spans: Iterable[Any]) -> Api:
    """An MLflow that has these spans."""
    rows = sent(spans)

    def answer(path: str, query: dict[str, str]) -> Any:
        if path != "/ajax-api/3.0/mlflow/get-trace-artifact":
            return None
        found = [mlflow_span(row) for row in rows if f"tr-{row['traceId']}" == query["request_id"]]
        return {"spans": found} if found else None

    return Api(answer)
