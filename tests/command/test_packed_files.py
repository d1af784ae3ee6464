"""Files of trajectories that somebody packed, or wrote anew with other spaces, in other order."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter
from otel_rollout.command.cli import main
from otel_rollout.errors import SpanFormatError
from otel_rollout.view.answers import Answers
from otel_rollout.view.index import Index
from tests.kit.recording import Recording
from tests.kit.transports import to_json_line

Output = pytest.CaptureFixture[str]


@pytest.fixture
def plain(recorded: Recording, tmp_path: Path) -> Path:
    """Eight trajectories."""
    spans, path = tmp_path / "spans.jsonl", tmp_path / "plain.jsonl"
    spans.write_text("".join(to_json_line([span]) for span in recorded.spans))
    assert main(["rebuild", str(spans), "-o", str(path)]) == 0
    return path


def _each_line(change: Callable[[Any], str]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        return "".join(change(json.loads(line)) + "\n" for line in content.splitlines()).encode()

    return changed


def _in_parts(content: bytes) -> bytes:
    """What `cat a.gz b.gz` makes."""
    return b"".join(gzip.compress(line) for line in content.splitlines(keepends=True))


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "gzipped": gzip.compress,
    "gzipped in parts": _in_parts,
    "with spaces": _each_line(json.dumps),
    "sorted": _each_line(lambda data: json.dumps(data, sort_keys=True)),
    "sorted and gzipped": lambda content: gzip.compress(
        _each_line(lambda data: json.dumps(data, sort_keys=True, separators=(",", ":")))(content)
    ),
    "with a byte order mark": lambda content: codecs.BOM_UTF8 + content,
    "after an empty line": lambda content: b"\n" + content,
}


@pytest.fixture(params=WAYS)
def other(request: pytest.FixtureRequest, plain: Path, tmp_path: Path) -> Path:
    """The same eight, written otherwise."""
    path = tmp_path / "other"
    path.write_bytes(WAYS[request.param](plain.read_bytes()))
    return path


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["list", "--json"], ["show"], ["drift", "--json"], ["check", "--json"]],
    ids=" ".join,
)
def test_every_verb_reads_them(
    arguments: list[str], plain: Path, other: Path, capsys: Output
) -> None:
    """As it reads the file that the exporter wrote."""
    statuses = []
    outputs = []
    for path in (plain, other):
        statuses.append(main([*arguments, str(path)]))
        outputs.append(capsys.readouterr())
    assert statuses[0] == statuses[1]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].out) > 100


def test_they_are_exported_and_read_in_python(plain: Path, other: Path, tmp_path: Path) -> None:
    """The same rows, and equal trajectories."""
    rows = []
    for number, path in enumerate((plain, other)):
        out = tmp_path / f"rows{number}"
        assert main(["export", "--to", "tokens", str(path), "-o", str(out)]) == 0
        rows.append(out.read_bytes())
    assert rows[0] == rows[1]
    assert rows[0]
    assert list(JsonlTrajectoryExporter.read(other)) == list(JsonlTrajectoryExporter.read(plain))


def test_they_are_read_from_a_pipe(
    plain: Path, other: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which cannot go back to its start."""
    assert main(["list", str(plain)]) == 0
    expected = capsys.readouterr().out
    stdin = io.TextIOWrapper(io.BytesIO(other.read_bytes()))
    monkeypatch.setattr(stdin.buffer, "seekable", lambda: False, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["list", "-"]) == 0
    assert capsys.readouterr().out == expected


def test_the_page_shows_them(
    plain: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is opened as it was; beside spans, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = {each.id: each for each in JsonlTrajectoryExporter.read(plain)}
    spans = tmp_path / "spans.jsonl"
    for sources in ([str(other)], [str(spans), str(other)]):
        with Index(sources, follow=False) as index:
            index.wait()
            rows = Answers(index).named()["trajectories"]({})["rows"]
            assert {row["id"] for row in rows} == expected.keys()
            for id_, trajectory in expected.items():
                assert index.load(id_).trajectory == trajectory
            said = [error.partition(": ")[2] for error in index.errors]
            assert all("was there before" in each for each in said)
            assert all(error.startswith("what was rebuilt, line") for error in index.errors)


def test_a_packed_file_that_was_cut_is_said(plain: Path, tmp_path: Path, capsys: Output) -> None:
    """What stands before the cut is there."""
    path = tmp_path / "cut.gz"
    packed = gzip.compress(plain.read_bytes())
    path.write_bytes(packed[: len(packed) * 3 // 4])
    assert main(["list", "--json", str(path)]) == 1
    output = capsys.readouterr()
    assert 1 < len(output.out.splitlines()) < 9
    assert f"{path}: its compressed content is damaged or cut" in output.err
    with pytest.raises(SpanFormatError, match="damaged or cut"):
        list(JsonlTrajectoryExporter.read(path))


def _indented(content: bytes) -> bytes:
    """What `jq .` makes."""
    objects = map(json.loads, content.splitlines())
    return "".join(json.dumps(each, indent=2) + "\n" for each in objects).encode()


def _as_list(content: bytes) -> Any:
    return [json.loads(line) for line in content.splitlines()]


LAYOUTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "indented": (_indented, "jq -c . FILE"),
    "indented and gzipped": (lambda content: gzip.compress(_indented(content)), "jq -c . FILE"),
    "a list": (lambda content: json.dumps(_as_list(content)).encode(), "jq -c '.[]' FILE"),
    "an indented list": (
        lambda content: json.dumps(_as_list(content), indent=4, sort_keys=True).encode(),
        "jq -c '.[]' FILE",
    ),
}


def test_spans_before_trajectories(plain: Path, tmp_path: Path, capsys: Output) -> None:
    """The trajectories are reported with what to do: they belong into a file of their own."""
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "spans.jsonl").read_bytes() + plain.read_bytes())
    assert main(["list", str(both)]) == 1
    assert "from a file that has trajectories alone" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_does_not_stand_on_lines_is_said_once(
    layout: str, plain: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that puts it on lines; files beside it are read."""
    change, way = LAYOUTS[layout]
    folder = tmp_path / "folder"
    folder.mkdir()
    other = folder / "a"
    other.write_bytes(change(plain.read_bytes()))
    said = f"{other}: its trajectories must be on one line each, as `{way}` writes them"
    for verb in ("list", "show", "check", "drift"):
        assert main([verb, str(other)]) != 0
        output = capsys.readouterr().err.splitlines()
        assert output[0] == said
        assert "1 place could not be read and was left out" in output
    assert main(["export", "--to", "tokens", str(other), "-o", str(tmp_path / "rows")]) == 1
    assert said in capsys.readouterr().err
    with pytest.raises(SpanFormatError) as raised:
        list(JsonlTrajectoryExporter.read(other))
    assert str(raised.value) == said
    (folder / "b").write_bytes(plain.read_bytes())
    assert main(["list", "--json", str(folder)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 9
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Index([str(folder)], follow=False) as index:
        index.wait()
        assert index.errors == [said]
        assert Answers(index).named()["trajectories"]({})["total"] == 8
