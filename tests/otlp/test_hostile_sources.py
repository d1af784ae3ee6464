"""Files and answers that somebody made to break their reader: a sentence, and the rest is read."""

from __future__ import annotations

import gzip
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import compressed, lines
from otel_rollout.errors import SpanFormatError
from otel_rollout.otlp import http, jaeger, read, read_json, read_json_lines


def span(number: int) -> dict[str, Any]:
    ids = {"traceId": "a" * 32, "spanId": f"{number:016x}"}
    return {**ids, "name": "s", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}


def message(*spans: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


BROKEN: tuple[Any, ...] = (
    *(1, None, "x", [], {}, {**span(1), "spanId": "abc"}, {**span(1), "traceId": None}),
    *({**span(1), "endTimeUnixNano": float("inf")}, {**span(1), "attributes": [1]}),
    *({**span(1), "attributes": [{"key": "k", "value": {"doubleValue": 10**400}}]},),
    *({**span(1), "events": {"a": 1}}, {**span(1), "events": [[]]}, {**span(1), "status": [1]}),
)


@pytest.mark.parametrize("broken", BROKEN, ids=repr)
def test_one_bad_span_of_a_line_costs_no_other(broken: Any):
    """It is reported, with its line; those before and after it are read."""
    line = json.dumps(message(span(1), broken, span(2))).encode()
    errors: list[SpanFormatError] = []
    found = [r.span_id for r in read(io.BytesIO(line + b"\n" + line), on_error=errors.append)]
    assert found[::2] == found[1::2] or found == [f"{n:016x}" for n in (1, 2, 1, 2)]
    assert len(found) == 4
    assert ["line 1" in str(error) for error in errors] == [True, False]
    with pytest.raises(SpanFormatError):
        list(read_json(message(broken)))


@pytest.mark.parametrize(
    "data",
    [
        *({"resourceSpans": [1, None, {"scopeSpans": 1}, {"scopeSpans": [1, {"spans": 1}]}]},),
        *({"meta": [1], "data": [1]}, {"meta": [{"name": "a"}], "data": 1}),
        *({"meta": [{"name": "a"}], "data": [[1, 2], 1, {}]}, {"TraceId": 1}, {"result": 1}),
    ],
    ids=repr,
)
def test_any_json_is_read_or_said(data: Any):
    errors: list[SpanFormatError] = []
    text = json.dumps(data).encode() + b"\n" + json.dumps(message(span(1))).encode()
    (found,) = read(io.BytesIO(text), on_error=errors.append)
    assert found.span_id == f"{1:016x}"
    assert errors


ODD = (
    *("NaN", "-Infinity", "1e400", "-0", "-0.0", str(1 << 70), "1" * 5000, "0.1e1", "01", "1."),
    *(
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '"a\tb"',
        '"\0"',
        '"\\x"',
        '"\u00e9\u2028"',
        '{"a":1,"a":2}',
    ),
    *("[1,]", "tru", "null", "[" * 500 + "]" * 500),
)
"""Values that readers of JSON differ about, and some that are none."""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_a_line_says_what_the_standard_library_reads(odd: str, encoding: str):
    """Whichever library reads it: the same values, and the same lines are no JSON."""
    text = json.dumps(message({**span(1), "name": ["ODD"]})).replace('["ODD"]', odd)
    line = text.encode(encoding, "replace")
    errors: list[SpanFormatError] = []
    try:
        (expected,) = read_json(json.loads(line))
    except ValueError:
        found = list(read(io.BytesIO(line + b"\n" + line + b"\n{}"), on_error=errors.append))
        assert not found
        assert errors
    else:
        (record,) = read(io.BytesIO(line), on_error=errors.append)
        assert (repr(record), errors) == (repr(expected), [])


def test_what_is_compressed_twice_is_not_unpacked_twice():
    """A bomb in a bomb: one layer is opened, and the rest is said."""
    inner = gzip.compress(json.dumps(message(span(1))).encode())
    assert len(list(read(io.BytesIO(inner)))) == 1
    with pytest.raises(SpanFormatError, match="compressed twice"):
        list(read(io.BytesIO(gzip.compress(inner))))


def test_a_compressed_file_has_a_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compressed, "UNPACKED", 100_000)
    line = json.dumps(message(span(1))).encode() + b"\n"
    assert len(list(read(io.BytesIO(gzip.compress(line * 100))))) == 100
    with pytest.raises(SpanFormatError, match="longer than 100000 bytes"):
        list(read(io.BytesIO(gzip.compress(line + b"\n" * 1_000_000))))


def test_a_line_has_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A longer one is passed over without being held."""
    monkeypatch.setattr(lines, "LONGEST", 10_000)
    line = json.dumps(message(span(1))).encode() + b"\n"
    long = json.dumps(message({**span(2), "name": "n" * 20_000})).encode() + b"\n"
    errors: list[SpanFormatError] = []
    found = list(read(io.BytesIO(line + long + line), on_error=errors.append))
    assert len(found) == 2
    assert [str(error).partition(": ")[2][:24] for error in errors] == ["it is longer than 0.0095"]
    assert "line 2" in str(errors[0])
    path = tmp_path / "spans"
    path.write_bytes(line + long + line)
    with pytest.raises(SpanFormatError, match="line 2: it is longer"):
        list(read_json_lines(path))
    pretty = json.dumps(message({**span(2), "name": "n" * 20_000}), indent=1).encode()
    with pytest.raises(SpanFormatError, match="its object is longer"):
        list(read(io.BytesIO(pretty)))
    for head in (b"\x00\x01\x00\x00\n", b"\n"):
        with pytest.raises(SpanFormatError, match=r"is longer than 0\.0095"):
            list(read(io.BytesIO(head + b"\x00" * 20_000)))


class Endless(BaseHTTPRequestHandler):
    """Sends spaces, a few at a time, until the client has had enough."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 1000)
                time.sleep(0.01)
        except OSError:
            pass

    def log_message(self, *args: Any) -> None:
        pass


def test_an_answer_of_jaeger_ends(monkeypatch: pytest.MonkeyPatch):
    """One that trickles for ever, and one that is endless, are given up."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(TimeoutError, match="took too long"):
            jaeger.read_jaeger(url, "a" * 32, timeout=0.05)
        monkeypatch.setattr(http, "LONGEST", 5000)
        with pytest.raises(SpanFormatError, match="more than 5000 bytes"):
            jaeger.read_jaeger(url, "a" * 32)
        server.shutdown()
