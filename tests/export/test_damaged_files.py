"""Files whose first lines are damaged, and lines that are too long: what follows them is read."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter, SpanFormatError, Trajectory, lines, reconstruct
from otel_rollout.command.cli import main
from otel_rollout.otlp import read
from otel_rollout.view.index import Index
from otel_rollout.view.table import Filter
from tests.kit.recording import Recording
from tests.kit.scenarios import play
from tests.kit.transports import to_json_line

pytestmark = pytest.mark.not_replayed("files are damaged on purpose")
MIB = 1 << 20
COUNT = 5
FIRST = {
    "zeros before it": b"\0" * 5000,
    "a line of zeros": b"\0" * 70_000 + b"\n",
    "few zeros": b"\0\n",
    "brackets": b"{]\n",
    "the end of a line": b'x": 1}], "a": "\xc3\xa9' + b"y" * (5 * MIB) + b'"}\n',
    "half a line": b'{"schema_version":1,"id":"x"\n',
    "blank lines": b"\n \n\r\n",
}


@pytest.fixture
def recorded(recording: Recording) -> tuple[bytes, bytes]:
    """Six rollouts, as lines of trajectories and of spans."""
    play("plain", "annotated")
    made = [each.to_json().encode() + b"\n" for each in reconstruct(recording.spans)]
    assert len(made) == COUNT
    spans = [to_json_line([span]).encode() + b"\n" for span in recording.spans]
    return b"".join(made), b"".join(spans)


def listed(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, int, str]:
    """Status of `list --json`, how many it lists, and what it says of the rest."""
    status = main(["list", str(path), "--json"])
    out, err = capsys.readouterr()
    return status, out.count("\n") - 1, err


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("first", FIRST)
def test_the_first_line_that_is_something_decides(
    recorded: tuple[bytes, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: str,
    packed: bool,
):
    """Of trajectories and of spans; what is damaged before it is said."""
    path = tmp_path / "file"
    is_damaged = first != "blank lines"
    for content in recorded[:1] if first == "half a line" else recorded:
        whole = FIRST[first] + content
        path.write_bytes(gzip.compress(whole) if packed else whole)
        status, count, said = listed(path, capsys)
        assert (status, count) == (int(is_damaged), COUNT)
        assert ("line 1" in said) == is_damaged
        with Index([str(path)], cached=False, follow=False) as index:
            assert index.wait()
            assert index.table().count() == COUNT
            assert any("line 1" in error for error in index.errors) == is_damaged


def test_spans_that_look_like_lines_of_trajectories(
    recorded: tuple[bytes, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """An object over several lines is one of spans, whatever its texts say."""
    objects = [json.loads(line) for line in recorded[1].split(b"\n") if line]
    path = tmp_path / "pretty.json"
    every = [each for one in objects for each in one["resourceSpans"]]
    path.write_text(json.dumps({"resourceSpans": every}, indent=1))
    assert listed(path, capsys)[:2] == (0, COUNT)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines have at most 2 MiB."""
    monkeypatch.setattr(lines, "LONGEST", 2 * MIB)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_a_line_has_a_length(
    recorded: tuple[bytes, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    packed: bool,
):
    """A longer one is reported, and the others are read, from a file and in the index."""
    first, second, *_ = recorded[0].split(b"\n")
    long = b'{"schema_version":1,"name":"' + b"n" * (40 * MIB) + b'"}'
    whole = b"\n".join([first, long, second]) + b"\n"
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(whole, 1) if packed else whole)
    del whole, long
    errors: list[SpanFormatError] = []
    expected = f"{path}, line 2: longer than 2 MiB"

    def read_all() -> list[Trajectory]:
        return list(JsonlTrajectoryExporter.read(path, on_error=errors.append))

    assert len(within(16, read_all)) == 2
    assert [str(error) for error in errors] == [expected]
    status, count, said = within(16, lambda: listed(path, capsys))
    assert (status, count) == (1, 2)
    assert expected in said

    def index() -> list[str]:
        with Index([str(path)], cached=False, follow=False) as index:
            assert index.wait()
            assert index.table().count() == 2
            return index.errors

    (said,) = within(16, index)
    assert "line 2: longer than 2 MiB" in said


@pytest.mark.usefixtures("short")
def test_a_long_line_that_does_not_end(recorded: tuple[bytes, bytes], tmp_path: Path):
    """It is not waited for, and what is appended after it is found where it is."""
    path = tmp_path / "file"
    two = b"".join(recorded[0].splitlines(keepends=True)[:2])
    path.write_bytes(two + b'{"schema_version":1,' + b" " * (5 * MIB))
    with Index([str(path)], path=tmp_path / "index", follow=False) as index:
        assert index.wait()
        assert [each.partition("line ")[2] for each in index.errors] == ["3: longer than 2 MiB"]
    with path.open("ab") as file:
        file.write(b"\n" + two.replace(b'"id":"', b'"id":"again-'))
    with Index([str(path)], path=tmp_path / "index", follow=False) as index:
        assert index.wait()
        ids = [row["id"] for row in index.table().rows(Filter())]
        assert len(ids) == 4
        assert [index.load(id_).trajectory.id for id_ in ids] == ids


def within(most: int, step: Any) -> Any:
    """What the step returns, which has so many MiB at most at any time."""
    tracemalloc.start()
    try:
        found = step()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * MIB
    return found


def test_a_message_of_zero_bytes_is_no_loss(recorded: tuple[bytes, bytes], tmp_path: Path):
    """Zeros alone are no spans, and are said."""
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 10_000)
    errors: list[SpanFormatError] = []
    assert list(read(path, on_error=errors.append)) == []
    assert ["begins with zeros" in str(error) for error in errors] == [True]
