"""Traces read from Jaeger's API."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from otel_rollout import SpanFormatError, reconstruct
from otel_rollout.otlp import find_jaeger, read, read_jaeger
from tests.kit.recording import Recording
from tests.kit.transports import to_json_line


class Jaeger:
    """A query service that knows some traces: by id, and by the time at which they began."""

    def __init__(self, traces: Mapping[str, tuple[int, Any]], most: int = 100) -> None:
        self.queries: list[dict[str, str]] = []
        self.largest = 0

        jaeger = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                query = {name: values[-1] for name, values in parse_qs(address.query).items()}
                jaeger.queries.append(query)
                found = jaeger.find(address.path, query, traces)
                jaeger.largest = max(jaeger.largest, len(found))
                body = json.dumps({"result": {"resourceSpans": list(itertools.chain(*found))}})
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def find(self, path: str, query: Any, traces: Any) -> list[Any]:
        *_, last = path.split("/")
        if last != "traces":
            assert path == f"/api/v3/traces/{last}"
            assert query["rawTraces"] == query["raw_traces"] == "true"
            return [traces[last][1]] if last in traces else []
        assert query["query.serviceName"] == query["query.service_name"] == "agents"
        assert query["query.rawTraces"] == query["query.raw_traces"] == "true"
        assert query["query.searchDepth"] == query["query.num_traces"]
        low, high = (
            nanoseconds(query["query.startTimeMin"]),
            nanoseconds(query["query.startTimeMax"]),
        )
        found = [(time, trace) for time, trace in traces.values() if low <= time <= high]
        newest = sorted(found, key=lambda row: row[0])[-int(query["query.searchDepth"]) :]
        return [trace for _, trace in newest]

    def __enter__(self) -> Jaeger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def nanoseconds(text: str) -> int:
    whole, fraction = text.removesuffix("Z").split(".")
    assert len(fraction) == 9
    seconds = datetime.fromisoformat(whole + "+00:00").timestamp()
    return int(seconds) * 1_000_000_000 + int(fraction)


def stored(spans: Any) -> dict[str, tuple[int, Any]]:
    """What a Jaeger that was sent these spans has, by trace id."""
    traces: dict[str, tuple[int, Any]] = {}
    for span in spans:
        trace_id = f"{span.context.trace_id:032x}"
        time, before = traces.get(trace_id, (span.start_time, []))
        rows_of_span = json.loads(to_json_line([span]))["resourceSpans"]
        traces[trace_id] = min(time, span.start_time), [*before, *rows_of_span]
    return traces


def test_a_trace_by_its_address(recorded: Any, recording: Recording):
    """The address of the browser, of the API, and the id are the same trace."""
    with Jaeger(stored(recorded)) as jaeger:
        first = recording.trajectories[0]
        for path in ("trace", "api/v3/traces", "api/traces"):
            for end in ("", "/", "?uiFind=x", "?rawTraces=true"):
                assert reconstruct(read(f"{jaeger.url}/{path}/{first.trace_id}{end}")) == [first]
        assert reconstruct(read_jaeger(jaeger.url + "/", first.trace_id)) == [first]
        with pytest.raises(LookupError, match="has no trace"):
            read_jaeger(jaeger.url, "ab")
        for address in (jaeger.url, f"{jaeger.url}/search?service=x"):
            with pytest.raises(SpanFormatError, match="address of a trace"):
                list(read(address))
    with pytest.raises(OSError):
        read_jaeger(jaeger.url, first.trace_id)


@pytest.mark.parametrize("limit", [2, 3, 7, 100])
def test_traces_by_service(spans: Any, limit: int):
    """All traces of a span of time come, each once, however few an answer holds."""
    lines = json.loads(to_json_line(spans))["resourceSpans"]
    traces: dict[str, tuple[int, Any]] = {}
    begin = 1_700_000_000_000_000_000
    for number in range(40):
        trace_id = f"{number + 1:032x}"
        text = json.dumps(lines).replace(f"{spans[0].context.trace_id:032x}", trace_id)
        traces[trace_id] = begin + 10 * number**5, json.loads(text)
    with Jaeger(traces) as jaeger:
        found = list(find_jaeger(jaeger.url, "agents", begin, begin + 10 * 40**5, limit=limit))
        assert len(found) == 2 * 40
        assert {record.trace_id for record in found} == traces.keys()
        assert jaeger.largest <= limit
        assert list(find_jaeger(jaeger.url, "agents", 0, 1, limit=limit)) == []


def test_too_many_traces_at_one_moment(spans: Any):
    """What no span of time can separate is said, not left out."""
    lines = json.loads(to_json_line(spans))["resourceSpans"]
    traces: dict[str, tuple[int, Any]] = {}
    for number in range(4):
        trace_id = f"{number + 1:032x}"
        text = json.dumps(lines).replace(f"{spans[0].context.trace_id:032x}", trace_id)
        traces[trace_id] = 5_000_000, json.loads(text)
    with Jaeger(traces) as jaeger:
        with pytest.raises(SpanFormatError, match="use a larger limit"):
            list(find_jaeger(jaeger.url, "agents", 0, 10_000_000, limit=3))
        assert len(list(find_jaeger(jaeger.url, "agents", 0, 10_000_000, limit=5))) == 8
