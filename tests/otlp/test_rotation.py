"""Files that grow, or that a collector rotates, while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from otel_rollout import SpanFormatError
from otel_rollout.command.cli import main
from otel_rollout.otlp import read, read_json_lines
from tests.kit.transports import to_json_line

READERS = pytest.mark.parametrize("reading", [read, read_json_lines])
Reading = Callable[..., Any]


def line(name: str) -> str:
    """A line with one span, larger than what a reader reads at once."""
    span: Any = TracerProvider().get_tracer("x").start_span(name, attributes={"x": "x" * 20_000})
    span.end()
    return to_json_line([span._readable_span()])


def append(path: Path, *names: str) -> None:
    with path.open("a") as file:
        file.write("".join(map(line, names)))


def rotate(path: Path, minute: int) -> Path:
    """As collectors do: the file is renamed, and the next line begins a new one."""
    reason = "-size" if minute else ""  # newer ones say why
    return path.rename(path.with_name(f"traces-2026-11-22T18-{minute:02}-00.123{reason}.jsonl"))


def names(spans: Any) -> list[str]:
    return [span.name for span in spans]


@READERS
def test_rotated_files_are_read_with_the_current_one(reading: Reading, tmp_path: Path):
    """Oldest first, each once; files of other names are not touched."""
    path = tmp_path / "traces.jsonl"
    for minute, name in enumerate("abc"):
        append(path, name)
        rotate(path, minute)
    append(path, "d")
    (tmp_path / "traces-old.jsonl").write_text("not spans\n")
    (tmp_path / "other-2026-11-22T18-00-00.123.jsonl").write_text("not spans\n")
    assert names(reading(path)) == ["a", "b", "c", "d"]
    assert names(reading(tmp_path / "traces-2026-11-22T18-01-00.123-size.jsonl")) == ["b"]


@READERS
@pytest.mark.parametrize("after", range(6))
def test_a_rotation_while_reading_loses_and_doubles_nothing(
    reading: Reading, tmp_path: Path, after: int
):
    """Whenever it happens; what is in the new file by then is read too."""
    path = tmp_path / "traces.jsonl"
    append(path, "a", "b")
    rotate(path, 0)
    append(path, "c", "d")
    found = []
    spans = reading(path)
    for _ in range(min(after, 4)):
        found.append(next(spans))
    append(path, "e")
    rotate(path, 1)
    append(path, "f")
    if after == 5:
        rotate(path, 2)
        append(path, "g")
    found += spans
    assert sorted(names(found)) == list("abcdefg" if after == 5 else "abcdef")


@READERS
def test_a_line_that_is_being_written_is_read_when_it_is_whole(reading: Reading, tmp_path: Path):
    """Half of it at the end of a file that grows is neither an error nor lost."""
    path = tmp_path / "traces.jsonl"
    append(path, "a", "b")
    last, further = line("c"), line("d")
    with path.open("a", buffering=1 << 20) as file:
        file.write(last[:9000])
        file.flush()
        spans = reading(path)
        found = [next(spans)]
        file.write(last[9000:] + further)
        file.flush()
        found += spans
    assert names(found) == ["a", "b", "c", "d"]


class Growing:
    """A file to which something is written each time that its end was seen."""

    def __init__(self, path: Path, pieces: list[str]) -> None:
        self._file = path.open("rb")
        self._path = path
        self._pieces = pieces
        self.name = str(path)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if not data and self._pieces:
            with self._path.open("a") as file:
                file.write(self._pieces.pop(0))
        return data

    def close(self) -> None:
        self._file.close()


def test_a_line_is_written_in_pieces_while_it_is_read(tmp_path: Path):
    """Also where its reader was at the end of the file already."""
    path = tmp_path / "traces.jsonl"
    last = line("b")
    path.write_text(line("a") + last[:10])
    growing: Any = Growing(path, [last[10:200], last[200:]])
    assert names(read(growing)) == ["a", "b"]
    growing.close()


def test_a_folder_is_read(tmp_path: Path):
    """Its files, each once, with those that were rotated in their order; an empty one is said."""
    path = tmp_path / "traces.jsonl"
    append(path, "b")
    rotate(path, 0)
    append(path, "c")
    append(tmp_path / "another.jsonl", "a")
    append(tmp_path / ".hidden", "z")
    (tmp_path / "empty").mkdir()
    assert names(read(tmp_path)) == ["a", "b", "c"]
    with pytest.raises(SpanFormatError, match="no file in this folder"):
        list(read(tmp_path / "empty"))


def test_a_file_that_the_collector_deletes_meanwhile(tmp_path: Path):
    """A file that is gone when its turn comes was deleted by the collector: the others are read."""
    path = tmp_path / "traces.jsonl"
    append(path, "a")
    rotate(path, 0)
    append(path, "b")
    last = rotate(path, 1)
    append(path, "c")
    spans = read(path)
    found = [next(spans)]
    last.unlink()
    found += spans
    assert names(found) == ["a", "c"]


@pytest.mark.parametrize("how", ["file", "folder", "all"])
def test_the_command_reads_them_too(how: str, tmp_path: Path, capsys: Any):
    """By the name of the current file, of the folder, or of each file: every span once."""
    folder = tmp_path / "traces"
    folder.mkdir()
    path = folder / "traces.jsonl"
    for minute in range(3):
        append(path, f"{minute}")
        rotate(path, minute)
    append(path, "last")
    files = sorted(map(str, folder.iterdir()))
    sources = {"file": [str(path)], "folder": [str(folder)], "all": files}[how]
    main(["rebuild", *sources, "-o", os.fspath(tmp_path / "out.jsonl")])
    assert "4 spans" in capsys.readouterr().err
