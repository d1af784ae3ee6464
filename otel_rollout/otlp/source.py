"""One reader for every source of spans; it recognises the format by the content."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, BinaryIO, cast

from otel_rollout import lines
from otel_rollout.compressed import (
    GZIP,
    UNPACKING_ERRORS,
    UTF_16,
    Unpacked,
    head_of,
    is_utf_16,
    joined,
)
from otel_rollout.errors import SpanFormatError
from otel_rollout.lines import HALF_A_LINE, bounded_lines, whole_objects
from otel_rollout.otlp.clickhouse import read_clickhouse
from otel_rollout.otlp.json import SPANS_PREFIX, UNREADABLE, read_json
from otel_rollout.otlp.rotation import files_of, parts_of
from otel_rollout.rebuild import dialects
from otel_rollout.spans import SpanRecord
from otel_rollout.wire import read_strict

OnError = Callable[[SpanFormatError], None]
SpanSource = str | os.PathLike[str] | BinaryIO | Iterable[Mapping[str, Any]]

_HEAD = 4096
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZEROS = bytes(5)
"""More than the length of a message has."""
_FIELD = 0x0A
"""The first byte of a protobuf message with spans; the same byte as a newline."""
_has_json_below = re.compile(
    rb"[^\x01-\x08\x0b\x0c\x0e-\x1f]*\n[{\[][\"{]|[^\x01-\x1f]{%d}" % _HEAD
).match
"""True of a text in which a line begins as JSON, or of a line that is longer: it is damaged."""
# In JSON no newline can follow a quote; in protobuf one does.
_is_json = re.compile(
    rb"(\xef\xbb\xbf)?\s*([\[{]\s*([\"\[{}\]][^\n]|$|[}\]]\s)|\[\s*\{\s*(\"|$)|$)"
).match


def read(source: SpanSource, *, on_error: OnError | None = None) -> Iterator[SpanRecord]:
    """The spans of a source, one at a time.

    `source` is one of
    * a path, or a file that is open for reading bytes. The content decides: OTLP/JSON or rows of
      ClickHouse's `otel_traces` (`FORMAT JSONEachRow`, `JSON`, `JSONCompact`,
      `JSONCompactEachRowWithNames`), as lines or as one object; answers of Jaeger's API v3, of
      Phoenix's `spans` and `spans/otlpv1` and of MLflow's `get-trace-artifact`; records that
      LangSmith, Langfuse, Weave and LiteLLM export, which `infer_rollouts` makes trajectories of;
      OTLP/protobuf, one message or the collector's file of `format: proto`; each also gzipped.
      A line or message may have 256 MiB, the content of a gzipped file 64 GiB. Of a file that a
      collector rotates the older ones beside it (`traces-2026-11-22T18-30-00.000-size.jsonl`) are
      read first, and those that it begins meanwhile last.
    * the path of a folder: each file in it, in the order of their names.
    * the http address of a trace in Jaeger, Phoenix or MLflow, or of a project in Phoenix, as
      copied from the browser or of its API.
    * rows of `otel_traces` as dicts.

    A last line or message that is incomplete after a crash is skipped, and a whole object that was
    appended to an incomplete line is read. SpanFormatError, with the
    file and the line number, for anything else that cannot be read; with `on_error`, it is called
    with each such error instead, and reading continues. OSError if the source does not exist;
    LookupError if the backend has no such trace or project.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return _read_address(source)
    if isinstance(source, str | os.PathLike):
        return _read_path(source, on_error)
    if hasattr(source, "read"):
        file = cast("BinaryIO", source)
        return _Reader(str(getattr(file, "name", file)), on_error).spans(file)
    if isinstance(source, Iterable) and not isinstance(source, bytes | Mapping):
        return read_clickhouse(source)
    raise SpanFormatError(
        f"read: expected a path, an open file, the address of a trace in a backend, or rows of "
        f"otel_traces, got {source!r:.80}"
    )


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[SpanRecord]:
    """`read` of a file of OTLP/JSON lines, such as the collector's file exporter writes."""
    return read(path)


def _module(name: str) -> Any:
    """A module of this room that is imported where it is needed: it has an HTTP client, or more."""
    return import_module(f"otel_rollout.otlp.{name}")


def _read_address(address: str) -> Iterator[SpanRecord]:
    for name in ("jaeger", "phoenix", "mlflow"):
        spans: Iterator[SpanRecord] | None = _module(name).read_address(address)
        if spans is not None:
            return spans
    raise SpanFormatError(
        f"expected the address of a trace in Jaeger, such as "
        f"http://127.0.0.1:16686/trace/<trace id>, in Phoenix or MLflow, or of a project in "
        f"Phoenix, got {address!r}"
    )


def _read_protobuf(message: bytes) -> Iterator[SpanRecord]:
    return _module("protobuf").read_protobuf(message)  # type: ignore[no-any-return]


def _read_path(path: str | os.PathLike[str], on_error: OnError | None) -> Iterator[SpanRecord]:
    for file in files_of(path):
        for name, content in parts_of(file):
            yield from _Reader(name, on_error).spans(content)


class _Reader:
    """Reads one file; error messages contain `name`."""

    def __init__(self, name: str, on_error: OnError | None) -> None:
        self._name = name
        self._on_error = on_error

    def _fail(self, where: str, problem: object) -> None:
        error = SpanFormatError(f"{self._name}{where}: {problem}")
        if self._on_error is None:
            raise error from None
        self._on_error(error)

    def spans(self, file: BinaryIO, *, unpacked: bool = False) -> Iterator[SpanRecord]:
        """The spans of a file. unpacked: it is the content of a compressed one."""
        head, whole = head_of(file, self._name, _HEAD)
        if isinstance(head, str):
            raise SpanFormatError(f"{self._name}: open it for reading bytes: open(path, 'rb')")
        if is_utf_16(head):
            self._fail("", UTF_16)
            return
        if head.startswith(b"\0"):
            head = self._after_zeros(whole.read(_HEAD), whole)
            whole = joined(head, whole, self._name)
        if head.startswith(GZIP):
            if unpacked:
                self._fail("", "it is compressed twice, which no sender does: unpack it")
                return
            inside = io.BufferedReader(Unpacked(whole, self._name))
            try:
                yield from self.spans(inside, unpacked=True)
            except UNPACKING_ERRORS as error:
                self._fail("", f"its compressed content is damaged or cut ({error})")
        elif head.startswith(_ZSTD) or head[4:8] == _ZSTD:
            self._fail("", _COMPRESSED)
        elif _is_json(head) or _has_json_below(head):
            yield from self._lines(_numbered(whole))
        elif len(head) > 4 and head[4] == _FIELD and head[0] < _FIELD:
            yield from self._messages(whole)
        elif head[0] == _FIELD:
            message = whole.read(lines.LONGEST + 1)
            if len(message) > lines.LONGEST:
                self._fail("", _too_long("its message"))
            else:
                yield from self._all_of("", _read_protobuf, message)
        else:
            self._fail("", f"no format of spans begins with {head[:20]!r}; {_EXPECTED}")

    def _after_zeros(self, head: bytes, file: BinaryIO) -> bytes:
        """The head of a file after the zeros that a loss of power left before its lines."""
        zeros, rest = head, head.lstrip(b"\0")
        while head and not rest:
            head = file.read(_HEAD)
            rest = head.lstrip(b"\0")
        if not _is_json(rest) or not zeros.startswith(_ZEROS):
            return head
        self._fail(", line 1", "it begins with zeros, as a loss of power leaves them")
        return rest

    def _all_of(
        self, where: str, parse: Callable[[Any], Iterator[SpanRecord]], content: Any
    ) -> Iterator[SpanRecord]:
        """The spans of one line or message, up to the first that cannot be read."""
        try:
            yield from parse(content)
        except SpanFormatError as error:
            self._fail(where, error)
        except UNREADABLE as error:
            self._fail(where, f"not spans ({error!r:.200}); {_EXPECTED}")

    def _messages(self, file: BinaryIO) -> Iterator[SpanRecord]:
        """The collector's `format: proto`: before each message its length, 4 bytes big-endian."""
        number = 0
        while len(size := file.read(4)) == 4:
            number += 1
            if int.from_bytes(size, "big") > lines.LONGEST:
                self._fail(f", message {number}", _too_long("it"))
                return
            message = file.read(int.from_bytes(size, "big"))
            if len(message) < int.from_bytes(size, "big"):
                return  # incomplete: the writer crashed
            if message.startswith(_ZSTD):
                self._fail(f", message {number}", _COMPRESSED)
                return
            yield from self._all_of(f", message {number}", _read_protobuf, message)

    def _lines(
        self, numbered: Iterator[tuple[int, bytes | None]], *, may_be_long: bool = True
    ) -> Iterator[SpanRecord]:
        """The spans of numbered lines. `may_be_long`: the rest of the file may be one object."""
        cut: int | None = None
        where = ""

        def report(error: SpanFormatError) -> None:
            self._fail(where, error)

        documents = _Documents(report if self._on_error else None)
        for number, line in numbered:
            where = f", line {number}"
            if line is None:
                self._fail(where, _too_long("it"))
                continue
            if line.isspace():
                continue
            if cut is not None:
                self._fail(f", line {cut}", f"not JSON; {_EXPECTED}")
                cut = None
            where = f", line {number}"
            try:
                data = _loads(line)
            except (ValueError, RecursionError):
                objects, is_all = whole_objects(line, SPANS_PREFIX)
                for each in objects:
                    yield from self._all_of(where, documents.spans, _loads(each))
                if objects and not is_all:
                    self._fail(where, HALF_A_LINE)
                elif not objects and may_be_long and line.rstrip().endswith((b"{", b"[", b",")):
                    yield from self._over_lines(where, line, numbered, documents)
                elif not objects:
                    cut = number
                continue
            yield from self._all_of(where, documents.spans, data)

    def _over_lines(
        self,
        where: str,
        line: bytes,
        numbered: Iterator[tuple[int, bytes | None]],
        documents: _Documents,
    ) -> Iterator[SpanRecord]:
        """The spans of an object over several lines; if it is none, those of the lines after it."""
        rest: list[tuple[int, bytes | None]] = []
        length = len(line)
        while length <= lines.LONGEST and (more := next(numbered, None)) is not None:
            rest.append(more)
            length += lines.LONGEST if more[1] is None else len(more[1])
        try:
            if length > lines.LONGEST:
                raise ValueError(_too_long("its object"))
            data = _values(line + b"".join(each or b"" for _, each in rest))
        except (ValueError, RecursionError) as error:
            self._fail(where, f"not JSON ({error}); {_EXPECTED}")
            yield from self._lines(chain(rest, numbered), may_be_long=False)
        else:
            rest.clear()
            yield from self._all_of(where, documents.spans, data)


def _values(text: bytes) -> Any:
    """The JSON value of a text; a list of several that follow each other, as of `jq .`."""
    values, place, whole = list[Any](), 0, text.decode("utf-8-sig").strip()
    while place < len(whole):
        while whole[place].isspace():
            place += 1
        value, place = json.JSONDecoder().raw_decode(whole, place)
        values.append(value)
    return values[0] if len(values) == 1 else values


def _loads(text: bytes) -> Any:
    """What `json.loads` makes of it; strict JSON, which costs less, is read first as such."""
    found = read_strict.part(text)
    return json.loads(text) if found is None else found


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """`(number, line)` of each line; None for one that is too long."""
    return ((number, line) for number, (line, _) in enumerate(bounded_lines(file), 1))


def _too_long(what: str) -> str:
    """The sentence about a line or message that is too long to be read."""
    return f"{what} is {lines.too_long()}: no sender of spans writes it so"


class _Documents:
    """The JSON values of one file, in order: some of ClickHouse's formats start with the names.

    One span that cannot be read costs no other: it is reported, and reading goes on. Without a
    `report` it is a SpanFormatError.
    """

    def __init__(self, report: OnError | None) -> None:
        self._report = report
        self._columns: list[str] | None = None
        self._types_may_follow = False

    def spans(self, data: Any) -> Iterator[SpanRecord]:
        members = data.keys() if isinstance(data, dict) else frozenset[str]()
        if isinstance(data, list):
            yield from self._list(data)
        elif "TraceId" in members:
            yield from read_clickhouse([data])
        elif "data" in members and isinstance(data.get("meta"), list):
            names = [column["name"] for column in data["meta"]]
            for row in data["data"]:
                yield from self._row(names, row)
        elif not members.isdisjoint(("result", "resourceSpans")):
            yield from read_json(data.get("result", data), on_error=self._report)
        elif data == {}:
            return
        elif (rows := _records_in(data)) is not None:
            for row in rows:
                yield from self._each(dialects.spans_of_record(row) or _unknown(row))
        elif (backend := _backend_of(data)) is not None:
            yield from _module(backend).read_answer(data, on_error=self._report)
        else:
            _check_known(members)
            yield from read_json(data, on_error=self._report)

    def _row(self, names: list[str], row: Any) -> Iterator[SpanRecord]:
        yield from self._each(read_clickhouse([_named(names, row)]))

    def _each(self, spans: Iterable[SpanRecord]) -> Iterator[SpanRecord]:
        try:
            yield from spans
        except UNREADABLE as error:
            problem = error if isinstance(error, SpanFormatError) else SpanFormatError(repr(error))
            if self._report is None:
                raise problem from None
            self._report(problem)

    def _list(self, data: list[Any]) -> Iterator[SpanRecord]:
        if all(isinstance(item, dict) for item in data):
            for item in data:
                yield from self.spans(item)
        elif "TraceId" in data:
            self._columns, self._types_may_follow = data, True
        elif self._columns is None or len(data) != len(self._columns):
            raise SpanFormatError(f"expected spans, got the list {str(data)[:80]!r}")
        else:
            types = self._types_may_follow and "String" in data
            self._types_may_follow = False
            if not types:
                yield from read_clickhouse([_named(self._columns, data)])


_LISTS = ("data", "runs", "calls")
"""Members in which APIs of products list their records."""


def _records_in(data: Any) -> Sequence[Any] | None:
    """The records of a product that an object is or lists; None if there are none."""
    if not isinstance(data, dict):
        return None
    for rows in ([data], *map(data.get, _LISTS)):
        first = rows[0] if isinstance(rows, list) and rows else None
        if isinstance(first, dict) and dialects.spans_of_record(first) is not None:
            return rows
    return None


def _check_known(members: Iterable[str]) -> None:
    """SpanFormatError for an object that is known, and is not to be read as spans."""
    if "data" in members:
        raise SpanFormatError(
            "this looks like Jaeger's older API, which cuts times to microseconds: get "
            "/api/v3/traces/<trace id>?rawTraces=true"
        )
    if {"context", "parent_id", "kind"} <= {*members}:
        raise SpanFormatError(
            "this is what ConsoleSpanExporter prints, which is for people: write spans with "
            "configure(span_exporters=[otel_rollout.otlp.JsonLinesSpanExporter(PATH)])"
        )
    if {"schema_version", "exchanges"} <= {*members}:
        raise SpanFormatError(
            "this is a trajectory, not spans: `otel-rollout list`, `show` and `export` read it "
            "from a file that has trajectories alone, in Python JsonlTrajectoryExporter.read"
        )


def _unknown(row: Any) -> Iterator[SpanRecord]:
    raise SpanFormatError(f"among records of a product there is {str(row)[:80]!r}")
    yield


def _backend_of(data: Any) -> str | None:
    """Phoenix for a page or a span of it, MLflow for the spans of a trace, or a trace with them."""
    if not isinstance(data, dict):
        return None
    if {"data", "next_cursor"} <= data.keys() or "span_kind" in data:
        return "phoenix"
    trace = data.get("trace", data)
    spans = trace.get("spans") if isinstance(trace, dict) else None
    rows = spans if isinstance(spans, list) else ()
    return "mlflow" if any("trace_id" in row for row in rows if isinstance(row, dict)) else None


def _named(columns: list[str], row: Any) -> Mapping[str, Any]:
    return row if isinstance(row, dict) else dict(zip(columns, row, strict=True))


_COMPRESSED = (
    "it is compressed with zstd, which is not read: unpack it with `zstd -d`, or let the "
    "collector's file exporter write without `compression`"
)
_EXPECTED = (
    "expected OTLP/JSON lines, OTLP/protobuf, an answer of Jaeger's API v3, Phoenix or MLflow, "
    "rows of ClickHouse's otel_traces, or records of LangSmith, Langfuse, Weave or LiteLLM"
)
