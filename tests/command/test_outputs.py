"""No verb destroys what it reads, or mixes two kinds in one file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_rollout.command.cli import main
from otel_rollout.export import JsonlTrajectoryExporter
from otel_rollout.record import rollout
from tests.kit.recording import Recording
from tests.kit.transports import to_json_line

SERVER = "http://127.0.0.1:9"


@pytest.fixture
def files(recording: Recording, tmp_path: Path) -> Path:
    """A folder with `spans`, `trajectories` and `text`."""
    with rollout("agent"):
        pass
    (tmp_path / "spans").write_text("".join(to_json_line([s]) for s in recording.spans))
    exporter = JsonlTrajectoryExporter(tmp_path / "trajectories")
    exporter.export(recording.trajectories)
    exporter.shutdown()
    (tmp_path / "text").write_text("mine\n")
    return tmp_path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong command line is answered with; nothing is written."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err


ROTATED = "spans-2026-11-01T00-00-00.000"
EXPORT = ["export", "trajectories", "--to", "tokens", "-o"]
EATING: dict[str, list[str]] = {
    "rebuild": ["rebuild", "spans", "-o", "spans"],
    "rebuild, by force": ["rebuild", "spans", "-o", "spans", "--force"],
    "a link": ["rebuild", "spans", "-o", "link", "--force"],
    "into a folder that is read": ["rebuild", ".", "-o", "./spans", "--force"],
    "anew into a folder that is read": ["rebuild", ".", "-o", "new"],
    "export": ["export", "trajectories", "--to", "tokens", "-o", "trajectories", "--force"],
    "what export keeps": ["export", "rows.part", "--to", "tokens", "-o", "rows"],
    "view": ["view", "trajectories", "--html", "trajectories", "--force"],
    "one of several": ["view", "text", "trajectories", "--html", "./trajectories", "--force"],
    "replaced without force": ["rebuild", "spans", "-o", "text"],
    "rows without force": ["export", "trajectories", "--to", "tokens", "-o", "text"],
    "a page without force": ["view", "trajectories", "--html", "text"],
    "one file for two kinds": ["run", "--upstream", SERVER, "--out", "n", "--spans", "n", "true"],
    "trajectories onto spans": ["run", "--upstream", SERVER, "--out", "spans", "true"],
    "spans onto trajectories": ["run", "--upstream", SERVER, "--spans", "trajectories", "true"],
    "trajectories onto a text": ["run", "--upstream", SERVER, "--out", "text", "true"],
    "a gateway's": ["gateway", "--upstream", SERVER, "--out", "spans"],
    "a reward's": ["reward", "ab", "1", "--spans", "trajectories"],
    "a receiver's": ["receive", "--journal", "journal", "--out", "spans"],
    "a receiver's rows": ["receive", "--journal", "j", "--to", "tokens", "--out", "trajectories"],
    "rows onto spans": ["receive", "--journal", "j", "--to", "tokens", "--out", "spans"],
    "rows onto a text": ["receive", "--journal", "j", "--to", "tokens", "--out", "text"],
    "a rotated part": ["rebuild", "spans", "-o", ROTATED, "--force"],
    "what a link in a folder leads to": ["rebuild", "folder", "-o", "spans", "--force"],
    "the record of starts": [*EXPORT, "trajectories.started", "--force"],
    "a page onto it": ["view", "trajectories", "--html", "trajectories.started", "--force"],
    "starts and spans": ["run", "--upstream", SERVER, "--out", "n", "--spans", "n.started", "true"],
    "somebody's part": [*EXPORT, "rows"],
    "trajectories onto settings": ["run", "--upstream", SERVER, "--out", "settings", "true"],
    "trajectories onto ATIF": ["run", "--upstream", SERVER, "--out", "atif", "true"],
    "a page to stdout": ["view", "trajectories", "--html", "-"],
}


@pytest.mark.parametrize("name", EATING)
def test_a_verb_that_would_destroy_something_does_nothing(
    files: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Exit status 2 before anything is opened, and all files are as they were."""
    monkeypatch.chdir(files)
    (files / "link").symlink_to(files / "spans")
    (files / "rows.part").write_bytes((files / "trajectories").read_bytes())
    (files / ROTATED).write_bytes((files / "spans").read_bytes())
    (files / "settings").write_text('{"schema_version": 3, "name": "x"}\n')
    (files / "atif").write_text('{"schema_version":"ATIF-v1.8","trace_id":"x"}\n')
    (files / "text.groups").mkdir()  # that of no export
    (files / "folder").mkdir()
    (files / "folder" / "link").symlink_to(files / "spans")
    before = {path: path.is_dir() or path.read_bytes() for path in files.iterdir()}
    assert "name another file" in refused(EATING[name], capsys)
    assert {path: path.is_dir() or path.read_bytes() for path in files.iterdir()} == before


@pytest.fixture
def stdin() -> Iterator[Callable[[Path], None]]:
    """Makes a file the standard input of this process."""
    before = os.dup(0)

    def give(path: Path) -> None:
        with open(path, "rb") as file:
            os.dup2(file.fileno(), 0)

    yield give
    os.dup2(before, 0)
    os.close(before)


def test_the_file_on_stdin_is_a_source(
    files: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, stdin: Callable[[Path], None]
) -> None:
    """It is not replaced, by force either; a device is written to."""
    stdin(files / "spans")
    before = (files / "spans").read_bytes()
    arguments = ["rebuild", "-", "--force", "-o"]
    assert "name another file" in refused([*arguments, str(files / "spans")], capsys)
    assert (files / "spans").read_bytes() == before
    stdin(Path(os.devnull))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main([*arguments, os.devnull]) == 1
    assert "there is no span" in capsys.readouterr().err


def test_export_asks_for_a_name_instead_of_a_pipe(files: Path, capsys: Any) -> None:
    """It keeps files beside its output."""
    read, write = os.pipe()
    arguments = ["export", str(files / "trajectories"), "--to", "tokens", "-o", f"/dev/fd/{write}"]
    assert "expected a file, or a new name" in refused(arguments, capsys)
    os.close(read)
    os.close(write)


def test_what_is_there_is_replaced_by_force(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file needs none: nothing is lost with it."""
    monkeypatch.chdir(files)
    (files / "empty").touch()
    assert main(["rebuild", "spans", "-o", "text", "--force"]) == 0
    assert main(["rebuild", "spans", "-o", "empty"]) == 0
    assert (files / "text").read_bytes() == (files / "empty").read_bytes()
    assert os.path.getsize("text") > 0


def test_a_verb_appends_to_its_own_kind(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to the file that a rollout is looked up in."""
    monkeypatch.chdir(files)
    (trajectory,) = JsonlTrajectoryExporter.read("trajectories")
    before = os.path.getsize("spans")
    assert main(["reward", trajectory.id, "1", "--spans", "spans"]) == 0
    assert os.path.getsize("spans") > before


def test_a_receiver_appends_to_rows(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a trainer's rows is no reason to refuse: it goes on after a restart."""
    monkeypatch.chdir(files)
    Path("rows").write_text('{"prompt_token_ids":[1],"loss_mask":[0]}\n')
    arguments = ["receive", "--journal", "spans", "--to", "tokens", "--out", "rows"]
    assert main(arguments) == 1  # the journal is no folder
