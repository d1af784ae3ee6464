"""Every source of spans gives the same spans, and says what of it cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import SpanFormatError, reconstruct, rollout
from otel_rollout.otlp import read, read_clickhouse, read_json, read_json_lines, read_protobuf
from otel_rollout.spans.record import SpanRecord, as_record, label, transportable
from tests.kit.recording import Clients, Recording
from tests.kit.transports import TRANSPORTS, rows, to_json_line
from tests.otlp.written import SCALARS


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- what is kept


@pytest.mark.parametrize("transport", TRANSPORTS[1:3])
def test_spans_come_back_as_they_were(transport: Callable[..., Any], spans: Any):
    """JSON and protobuf keep every value, event, error, id, time and scope."""
    assert [as_record(span) for span in transport(spans)] == [
        record_of_lists(span) for span in spans
    ]


def record_of_lists(span: ReadableSpan) -> SpanRecord:
    """The SDK has sequences as tuples, what is read has lists; both are values of an attribute."""
    record = as_record(span)
    attributes = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in record.attributes.items()
    }
    return replace(record, attributes=attributes)


def test_rows_keep_all_but_types(spans: Any):
    """A row gives the same span with texts for values, times exact to the nanosecond."""
    for record, span in zip(read_clickhouse(rows(spans)), spans, strict=True):
        original = as_record(span)
        for field in ("name", "trace_id", "span_id", "parent_span_id", "scope", "status_error"):
            assert getattr(record, field) == getattr(original, field)
        assert record.start_time_ns == original.start_time_ns
        assert record.end_time_ns == original.end_time_ns
        assert record.attributes.keys() == original.attributes.keys()
        assert [e.name for e in record.events] == [e.name for e in original.events]
        assert [e.time_ns for e in record.events] == [e.time_ns for e in original.events]
        if span.name == "outer":
            assert record.integer("large") == 2**63 - 1
            assert (record.boolean("true"), record.boolean("false")) == (True, False)
            assert record.text("text") == SCALARS["text"]
            assert record.boolean("text") is None
            assert record.integer("text") is None


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("version", ["7", 7, "", "007", "true", -1, 2**80, "step-1", None])
def test_a_policy_version_keeps_its_type(
    recording: Recording, clients: Clients, transport: Callable[..., Any], version: Any
):
    """A text that reads like a number stays a text, on the rollout and on its calls."""
    client = clients.sync(clients.serve())
    with rollout("r", policy_version=version, sample_index=3, trainable=False) as live:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    (found,) = reconstruct(transport(recording.spans))
    assert found == live
    assert found.policy_version == version
    assert type(found.policy_version) is type(version)
    assert found.completions[0].policy_version == version
    assert type(found.completions[0].policy_version) is type(version)
    assert (found.sample_index, found.trainable) == (3, False)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_integer_of_any_size_is_carried(recording: Recording, transport: Callable[..., Any]):
    """One that no transport could carry costs neither itself nor its batch."""
    with rollout("r", sample_index=-(2**90)) as live:
        pass
    assert [t.sample_index for t in reconstruct(transport(recording.spans))] == [-(2**90)]
    assert live.sample_index == -(2**90)


def test_labels_of_spans_without_a_type():
    """A value of a store that keeps types is what it is."""

    def record(**attributes: Any) -> SpanRecord:
        return SpanRecord("n", "", "", None, 0, 1, attributes)

    assert record(a=7).label("a") == 7
    assert record(a="7").label("a") == "7"
    assert record(**label("a", 7)).label("a") == 7
    assert record(a=7.5).label("a") is None
    assert record().label("a") is None
    assert label("a", None) == {}
    assert transportable("\ud800") == "\\ud800"


# --- one entry for all


def as_gzip(spans: Any) -> bytes:
    return gzip.compress("".join(to_json_line([span]) for span in spans).encode())


def as_framed(spans: Any) -> bytes:
    """The collector's `format: proto`."""
    messages = [encode_spans([span]).SerializeToString() for span in spans]
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def as_answer(spans: Any) -> bytes:
    return json.dumps({"result": json.loads(to_json_line(spans))}).encode()


def compact(spans: Any) -> tuple[list[str], list[list[Any]]]:
    found = list(rows(spans))
    return list(found[0]), [list(row.values()) for row in found]


def as_compact(spans: Any) -> bytes:
    names, values = compact(spans)
    return json.dumps(
        {"meta": [{"name": n, "type": "String"} for n in names], "data": values}
    ).encode()


def as_compact_rows(spans: Any) -> bytes:
    names, values = compact(spans)
    return "".join(json.dumps(row) + "\n" for row in (names, *values)).encode()


def as_compact_rows_with_types(spans: Any) -> bytes:
    names, values = compact(spans)
    lines = (names, ["String"] * len(names), *values)
    return "".join(json.dumps(row) + "\n" for row in lines).encode()


FILES: dict[str, Callable[[Any], bytes]] = {
    "OTLP/JSON lines": lambda spans: "".join(to_json_line([s]) for s in spans).encode(),
    "lines without the last end": lambda spans: to_json_line(spans).rstrip().encode(),
    "lines of Windows": lambda spans: "".join(
        to_json_line([s]).replace("\n", "\r\n") for s in spans
    ).encode(),
    "blank lines between": lambda spans: ("\n" + to_json_line(spans) + "\n\n").encode(),
    "a byte order mark": lambda spans: b"\xef\xbb\xbf" + to_json_line(spans).encode(),
    "one object over lines": lambda spans: json.dumps(
        json.loads(to_json_line(spans)), indent=2
    ).encode(),
    "a list of objects": lambda spans: json.dumps(
        [json.loads(to_json_line([s])) for s in spans]
    ).encode(),
    "an answer of Jaeger": as_answer,
    "one printed by it": lambda spans: json.dumps(json.loads(as_answer(spans)), indent=4).encode(),
    "gzip": as_gzip,
    "two gzip members": lambda spans: as_gzip(spans[:1]) + as_gzip(spans[1:]),
    "protobuf": lambda spans: encode_spans(spans).SerializeToString(),
    "the collector's proto": as_framed,
    "gzip of protobuf": lambda spans: gzip.compress(encode_spans(spans).SerializeToString()),
    "JSONEachRow": lambda spans: "".join(json.dumps(r) + "\n" for r in rows(spans)).encode(),
    "JSON": lambda spans: json.dumps(
        {"meta": [], "data": list(rows(spans)), "rows": 5}, indent=1
    ).encode(),
    "JSONCompact": as_compact,
    "JSONCompactEachRowWithNames": as_compact_rows,
    "JSONCompactEachRowWithNamesAndTypes": as_compact_rows_with_types,
    "with lines of other signals": lambda spans: (
        '{"resourceLogs":[]}\n{}\n' + to_json_line(spans) + '{"resourceMetrics":[{}]}\n'
    ).encode(),
}


@pytest.mark.parametrize("form", FILES)
def test_a_file_is_known_by_its_content(
    form: str, recorded: Any, recording: Recording, tmp_path: Path
):
    """Whatever it is called, a file's spans give the trajectories that were recorded."""
    path = written(tmp_path / "spans.txt", FILES[form](recorded))
    expected = list(recording.trajectories)
    assert reconstruct(read(path)) == expected
    assert reconstruct(read(str(path))) == expected
    with open(path, "rb") as file:
        assert reconstruct(read(file)) == expected
    with open(path, "rb", buffering=0) as raw:
        assert reconstruct(read(raw)) == expected
    assert reconstruct(read(io.BytesIO(path.read_bytes()))) == expected


@pytest.mark.parametrize("form", FILES)
def test_a_pipe_can_be_read(form: str, recorded: Any, recording: Recording):
    """What comes in small parts and cannot be read twice is read as a file is."""
    content = FILES[form](recorded)
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb", buffering=0) as file:
            for start in range(0, len(content), 1000):
                file.write(content[start : start + 1000])

    thread = threading.Thread(target=write)
    thread.start()
    with open(reading, "rb") as file:
        assert reconstruct(read(file)) == list(recording.trajectories)
    thread.join()


def test_protobuf_of_any_length_is_no_json(spans: Any):
    """A message whose length is that of a bracket is not taken for JSON."""
    for padding in range(200):
        provider = TracerProvider()
        exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        provider.get_tracer("s").start_span("n" * padding).end()
        content = encode_spans(exporter.get_finished_spans()).SerializeToString()
        (record,) = read(io.BytesIO(content))
        assert record.name == "n" * padding
    data = TracesData()
    attribute = data.resource_spans.add().resource.attributes.add(key="k")
    attribute.value.string_value = "v" * 25
    span = data.resource_spans[0].scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8)
    span.name = "n" * (123 - 2 - data.resource_spans[0].ByteSize())
    assert data.SerializeToString().startswith(b'\n{\n"\n')
    assert [record.name for record in read(io.BytesIO(data.SerializeToString()))] == [span.name]


def test_rows_of_any_client(recorded: Any, recording: Recording):
    """Rows as dicts, with times as numbers, and nested columns as lists of rows."""
    found = list(rows(recorded))
    expected = list(recording.trajectories)
    assert reconstruct(read(iter(found))) == expected
    for row, span in zip(found, sorted_like(found, recorded), strict=True):
        row["Timestamp"] = span.start_time
        row["Duration"] = int(row["Duration"])
        row["SpanAttributes"] = list(row["SpanAttributes"].items())
        columns = [row.pop(f"Events.{name}") for name in ("Timestamp", "Name", "Attributes")]
        names = ("Timestamp", "Name", "Attributes")
        row["Events"] = [
            dict(zip(names, event, strict=True)) for event in zip(*columns, strict=True)
        ]
    assert reconstruct(read(found)) == expected
    assert reconstruct(read_clickhouse(found[::-1])) == expected


def sorted_like(found: list[dict[str, Any]], spans: Any) -> Iterator[ReadableSpan]:
    by_id = {f"{span.context.span_id:016x}": span for span in spans}
    return (by_id[row["SpanId"]] for row in found)


def test_attributes_whose_names_were_split(recorded: Any, recording: Recording):
    """With the exporter's `json: true` the attributes are objects in objects."""
    nested = list(rows(recorded))
    for row in nested:
        tree: dict[str, Any] = {}
        for key, value in row["SpanAttributes"].items():
            *path, last = key.split(".")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        row["SpanAttributes"] = tree
    assert reconstruct(read(nested)) == list(recording.trajectories)


@pytest.mark.parametrize(
    "time",
    [
        1_700_000_000_123_456_000,
        "1700000000123456000",
        "2023-11-14 22:13:20.123456000",
        "2023-11-14T22:13:20.123456Z",
        datetime(2023, 11, 14, 22, 13, 20, 123456),
        datetime(2023, 11, 14, 23, 13, 20, 123456, timezone(timedelta(hours=1))),
    ],
    ids=str,
)
def test_times_of_rows(spans: Any, time: Any):
    """A time is the same in every form that a client gives it in."""
    (row, *_) = rows(spans)
    (record,) = read_clickhouse([{**row, "Timestamp": time, "Duration": 1}])
    assert record.start_time_ns == 1_700_000_000_123_456_000
    assert record.end_time_ns == 1_700_000_000_123_456_001


def test_ids_in_base64(spans: Any):
    """Some backends answer protobuf's own JSON, whose ids are base64."""
    found = list(read_json(MessageToDict(encode_spans(spans))))
    assert found == list(read_protobuf(encode_spans(spans).SerializeToString()))


# --- what cannot be read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hello\n", "no format of spans begins with b'hello"),
        (b"\x28\xb5\x2f\xfd\x00\x00", "zstd -d"),
        (b"\x00\x00\x00\x08\x28\xb5\x2f\xfd\x00\x00\x00\x00", "zstd -d"),
        (b"\x0a\xff\xff", "not an OTLP/protobuf message"),
        (b"\x00\x00\x00\x03\x0a\xff\xff", "message 1: not an OTLP/protobuf message"),
        ('{"resourceSpans": 5}\n', "line 1: expected an OTLP/JSON object"),
        ('{"resourceSpans":[]}\n{"spans":[]}\n', "line 2: expected an OTLP/JSON object"),
        ('{"resourceSpans":[]}\n{"res\n{"resourceSpans":[]}\n', "line 2: not JSON"),
        ('{"resourceSpans":[]}\n\n[1]\n', "line 3: expected spans, got the list"),
        ('{\n"resourceSpans": [\n', "line 1: not JSON"),
        ('{"data":[{"traceID":"1","spans":[]}]}', "rawTraces=true"),
        ('{"schema_version":1,"exchanges":[]}\n', "this is a trajectory, not spans"),
        ('{"TraceId":"aa","SpanId":"bb"}\n', "no column 'Timestamp'"),
        ('{"name":"x","context":{"trace_id":"0x1"}}\n', "expected an OTLP/JSON object"),
        ('{"resourceSpans":[{"scopeSpans":[{"spans":[{}]}]}]}\n', "line 1: not an OTLP/JSON span"),
        (
            '{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"zz","spanId":"1"}]}]}]}\n',
            "expected an id of 16 bytes in hex, got 'zz'",
        ),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_input_is_refused(content: str | bytes, message: str, tmp_path: Path):
    """The error names the file, the line, and what was expected; with `on_error` it goes on."""
    path = written(tmp_path / "spans.jsonl", content)
    with pytest.raises(SpanFormatError) as raised:
        list(read(path))
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(path))
    errors: list[SpanFormatError] = []
    assert list(read(path, on_error=errors.append)) == []
    assert str(raised.value) in map(str, errors)


def test_an_error_costs_only_its_line(recorded: Any, recording: Recording, tmp_path: Path):
    """With `on_error`, what is around a damaged line is read."""
    lines = [to_json_line([span]) for span in recorded]
    path = written(tmp_path / "spans.jsonl", "".join([*lines[:2], '{"resou\n', *lines[2:]]))
    errors: list[SpanFormatError] = []
    assert reconstruct(read(path, on_error=errors.append)) == list(recording.trajectories)
    assert [", line 3: not JSON" in str(error) for error in errors] == [True]
    with pytest.raises(SpanFormatError, match="line 3"):
        list(read_json_lines(path))


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_cut_end_is_passed_over(spans: Any, tmp_path: Path, cut: int):
    """A crash of the writer costs its last line, or message, only."""
    whole = to_json_line(spans[:1])
    path = written(tmp_path / "a", whole + to_json_line(spans[1:])[: -cut - 1])
    assert [record.name for record in read(path)] == [spans[0].name]
    assert [record.name for record in read_json_lines(path)] == [spans[0].name]
    path = written(tmp_path / "b", as_framed(spans)[:-cut])
    assert [record.name for record in read(path)] == [spans[0].name]


def test_a_cut_gzip_says_so(recorded: Any, tmp_path: Path):
    """What came before the cut is read, and the error names the file."""
    path = written(tmp_path / "spans.gz", as_gzip(recorded)[:-8])
    with pytest.raises(SpanFormatError, match=r"spans\.gz: its compressed content is damaged"):
        list(read(path))
    errors: list[SpanFormatError] = []
    assert 0 < len(list(read(path, on_error=errors.append))) <= len(recorded)
    assert len(errors) == 1


def test_what_is_no_source():
    """A missing file, a file opened for text and other things are refused as what they are."""
    with pytest.raises(FileNotFoundError):
        list(read("nowhere.jsonl"))
    with pytest.raises(SpanFormatError, match="reading bytes"):
        list(read(io.StringIO("{}")))  # type: ignore[arg-type]
    sources: list[Any] = [5, {"resourceSpans": []}, b"{}"]
    for source in sources:
        with pytest.raises(SpanFormatError, match="expected a path"):
            list(read(source))
    with pytest.raises(SpanFormatError, match="row 1: expected a row of otel_traces"):
        list(read([{"a": 1}]))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}\n", b'{"resourceSpans":[]}'])
def test_a_source_without_spans(content: bytes):
    """Nothing is no error."""
    assert list(read(io.BytesIO(content))) == []


def test_lines_are_read_as_they_come(spans: Any):
    """A file is not held: the first spans are there when the rest has not been written yet."""
    reading, writing = os.pipe()
    line = to_json_line(spans).encode()
    with open(reading, "rb") as source, open(writing, "wb", buffering=0) as sink:
        sink.write(line * (8192 // len(line) + 2))
        assert next(read(source)).name == spans[0].name


@pytest.mark.parametrize("cut", [1, 20, 200, -2])
def test_an_object_behind_half_a_line_is_read(spans: Any, tmp_path: Path, cut: int):
    """A writer that went on where another was stopped loses nothing, and the half is said."""
    first, second = to_json_line(spans[:1]), to_json_line(spans[1:])
    path = written(tmp_path / "a", second + first[:cut] + second + second)
    errors: list[SpanFormatError] = []
    names = [span.name for span in spans[1:]] * 3
    assert [record.name for record in read(path, on_error=errors.append)] == names
    assert [f"{path}, line 2: its writer was stopped" in str(error) for error in errors] == [True]
    for reading in (read, read_json_lines):
        with pytest.raises(SpanFormatError, match="line 2: its writer was stopped"):
            list(reading(path))


def test_objects_on_one_line_are_read(spans: Any, tmp_path: Path):
    """Where only the end of a line was not written, nothing is half."""
    first, second = to_json_line(spans[:1]), to_json_line(spans[1:])
    path = written(tmp_path / "a", first[:-1] + second)
    names = [span.name for span in (*spans[:1], *spans[1:])]
    assert [record.name for record in read(path)] == names
    assert [record.name for record in read_json_lines(path)] == names


def test_half_a_line_that_ends_like_an_object_over_lines(spans: Any, tmp_path: Path):
    """Half a line may end in a comma or a bracket; the lines after it are read."""
    line = to_json_line(spans)
    for end in (line.index(",") + 1, line.index("[") + 1, 1):
        path = written(tmp_path / "a", line[:end] + "\n" + line + line[:end] + "\n" + line)
        errors: list[SpanFormatError] = []
        found = [record.name for record in read(path, on_error=errors.append)]
        assert found == [span.name for span in spans] * 2
        assert [str(error).split(": ")[0] for error in errors] == [
            f"{path}, line 1",
            f"{path}, line 3",
        ]


@pytest.mark.parametrize("meta", [{}, {"meta": {"page": 1}}, {"meta": None}])
def test_an_answer_of_jaegers_older_api_is_recognised(meta: dict[str, Any]):
    """Whatever is beside its data: only ClickHouse's rows have a list of columns there."""
    answer = json.dumps({"data": [{"traceID": "1", "spans": []}], **meta}).encode()
    with pytest.raises(SpanFormatError, match="Jaeger's older API"):
        list(read(io.BytesIO(answer)))
