"""Documents of other programs are sources of every verb that takes trajectories."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_rollout.command.cli import main
from otel_rollout.view.answers import Answers
from otel_rollout.view.index import Index
from tests.kit.documents import ATIF, ENTRY, HISTORY, MINI

Output = pytest.CaptureFixture[str]
LAYOUTS: dict[str, Callable[[list[Any]], bytes]] = {
    "lines": lambda all_: "".join(json.dumps(one) + "\n\n" for one in all_).encode(),
    "a list": lambda all_: json.dumps(all_).encode(),
    "an indented list": lambda all_: json.dumps(all_, indent=2).encode(),
    "sorted": lambda all_: json.dumps(all_, sort_keys=True, indent=4).encode(),
    "gzipped": lambda all_: gzip.compress(json.dumps(all_, indent=1).encode()),
}


def listed(capsys: Output, *sources: Path) -> list[Any]:
    """Names and turns of what `list` gives, in order."""
    assert main(["list", "--json", "--sort", "name", *map(str, sources)]) == 0
    *lines, _ = map(json.loads, capsys.readouterr().out.splitlines())
    return [(line["name"], line["turns"]) for line in lines]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout: str, tmp_path: Path, capsys: Output):
    """One document on each line, a list of them, indented or not, sorted, packed."""
    path = tmp_path / "documents"
    path.write_bytes(LAYOUTS[layout]([ATIF, MINI, ATIF]))
    assert listed(capsys, path) == [("mini-swe-agent", 3), ("terminus-2", 2)]
    path.write_bytes(LAYOUTS[layout]([HISTORY] if layout == "lines" else HISTORY))
    assert listed(capsys, path) == [("pydantic-ai", 2)]


def test_a_folder_of_documents(tmp_path: Path, capsys: Output):
    """Each trajectory once, whichever file has it first."""
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(ATIF, indent=4))
    (folder / "b.traj.json").write_text(json.dumps(MINI, indent=2))
    (folder / "c.json").write_text(json.dumps(ATIF))
    assert listed(capsys, folder) == [("mini-swe-agent", 3), ("terminus-2", 2)]


def test_the_other_verbs(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """`show`, `check` and the page read it; `rebuild` says which verbs do."""
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(ATIF, indent=2))
    assert main(["show", str(path)]) == 0
    assert "are you sure" in (shown := capsys.readouterr().out)
    assert "read from a document" in shown
    assert main(["check", "--require", "complete", str(path)]) == 0
    assert main(["rebuild", str(path)]) == 1
    assert "a file of trajectories, not spans" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Index([str(path)], follow=False) as index:
        index.wait()
        (row,) = Answers(index).named()["trajectories"]({})["rows"]
    assert row["name"] == "terminus-2"


def test_what_cannot_be_read_is_reported(tmp_path: Path, capsys: Output):
    """With its place; the rest is read."""
    path = tmp_path / "documents.jsonl"
    lines = [json.dumps(ATIF), json.dumps({**ATIF, "agent": None}), "{", json.dumps(MINI)]
    path.write_text("\n".join(lines))
    assert main(["list", "--json", str(path)]) == 1
    output, error = capsys.readouterr()
    assert len(output.splitlines()) == 3
    assert "line 2: not as atif has it" in error
    assert "line 3: it is not JSON" in error
    path.write_text(json.dumps([ATIF, 1], indent=2))
    assert main(["list", str(path)]) == 1
    assert "element 2: expected a trajectory of ATIF" in capsys.readouterr().err
    path.write_text(json.dumps(ATIF, indent=2)[:-10])
    assert main(["list", str(path)]) == 1
    assert "neither JSON nor lines of JSON" in capsys.readouterr().err
    path.write_bytes(gzip.compress(json.dumps(ATIF, indent=2).encode())[:-10])
    assert main(["list", str(path)]) == 1
    assert "damaged or cut" in capsys.readouterr().err


def test_a_store_of_nemo_gym(tmp_path: Path, capsys: Output):
    """What is marked as incomplete says so, with entries and without; its other files are none."""
    for name, incomplete in (("whole", False), ("lacking", True), ("empty", True)):
        stem, state = str(tmp_path / name), {"entry_digests": {}, "incomplete": incomplete}
        Path(f"{stem}.tokens.state.json").write_text(json.dumps(state))
        Path(f"{stem}.tokens.lock").touch()
        if name != "empty":
            line = json.dumps({**ENTRY, "rollout_id": name}, sort_keys=True)
            Path(f"{stem}.tokens.jsonl").write_text(line + "\n")
    assert main(["list", "--json", "--sort", "id", str(tmp_path)]) == 0
    *lines, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(line["id"], line["turns"]) for line in lines] == [
        ("empty", 0),
        ("lacking", 1),
        ("whole", 1),
    ]
    assert ["incomplete" in line["findings"] for line in lines] == [True, True, False]
    (tmp_path / "whole.tokens.intents").write_text("call-1\ncall-2\n")  # one has no entry
    assert main(["list", "--json", "--where", "id == 'whole'", str(tmp_path)]) == 0
    (line, _) = map(json.loads, capsys.readouterr().out.splitlines())
    assert "incomplete" in line["findings"]
