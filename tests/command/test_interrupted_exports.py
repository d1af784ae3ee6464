"""Exports that are killed or run twice: every group is written once, whole."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import TrajectoryGroup
from otel_rollout.export.rows import TokenRows
from otel_rollout.export.store import Store
from tests.command.exports import (
    COMMAND,
    ROOT,
    by_place,
    expected,
    export,
    plugin,
    rows_in,
    spans_of,
    trajectories_of,
)
from tests.kit.disks import full_disk
from tests.kit.recording import Recording

pytestmark = pytest.mark.slow


class Stopped:
    """An exporter that is interrupted before its `at`th group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.groups: list[str | None] = []
        rows = TokenRows.rows

        def stopping(exporter: TokenRows, group: TrajectoryGroup) -> Any:
            if len(self.groups) == at:
                raise KeyboardInterrupt
            self.groups.append(group.id)
            return rows(exporter, group)

        monkeypatch.setattr(TokenRows, "rows", stopping)


def half_a_row(rows: Path) -> None:
    with open(rows.with_name("rows.part"), "ab") as file:
        file.write(b'{"input_ids":[1,2')


def lost_rows(rows: Path) -> None:
    part = rows.with_name("rows.part")
    os.truncate(part, part.stat().st_size - 10)


def no_rows(rows: Path) -> None:
    rows.with_name("rows.part").unlink(missing_ok=True)


def nothing(rows: Path) -> None:
    pass


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("damage", [nothing, half_a_row, lost_rows, no_rows])
def test_an_interrupted_export_goes_on(
    recorded: Recording,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    at: int,
    damage: Callable[[Path], None],
):
    """The file is that of an export that was not interrupted; what is whole is not done again."""
    if at == 0 and damage is lost_rows:
        pytest.skip("there are no rows yet")
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    with monkeypatch.context() as context:
        Stopped(context, at)
        assert export(source, "-o", str(rows)) == 130
    assert not rows.exists()
    assert "the same command goes on from here" in capsys.readouterr().err
    damage(rows)
    with monkeypatch.context() as context:
        second = Stopped(context, 99)
        assert export(source, "-o", str(rows)) == 0
    assert rows_in(rows) == expected(recorded.trajectories)
    done = 0 if damage is no_rows else at - (damage is lost_rows)
    assert len(second.groups) == 4 - done
    assert "4 groups, 8 trajectories -> 7 rows" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


def test_an_export_that_was_killed_while_it_read_begins_anew(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Half of the trajectories, brought together, are no beginning."""
    source = spans_of(recorded, tmp_path / "spans")
    rows = tmp_path / "rows"
    add = Store.add

    def stopping(store: Store, key: str, item: bytes) -> None:
        add(store, key, item)
        if key.startswith("group"):
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Store, "add", stopping)
        assert export(source, "-o", str(rows)) == 130
    assert (tmp_path / "rows.groups").exists()
    assert export(source, "-o", str(rows)) == 0
    assert by_place(rows_in(rows)) == by_place(expected(recorded.trajectories))
    assert "going on" not in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "spans"]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.02)


HANGING = """
import os, time
from otel_rollout.export import TokenRows
from otel_rollout.testing import Raw

class OtherRows(TokenRows):
    def rows(self, group):
        with open(os.environ["GROUPS"], "a") as file:
            file.write(f"{group.id}\\n")
        yield from super().rows(group)
        if group.id == os.environ.get("HANG", ""):
            while True:
                time.sleep(1)
"""


def test_an_export_that_was_killed_goes_on(recorded: Recording, tmp_path: Path):
    """Kill -9 in the middle of a group: no half row, no row twice, no group done again."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    path = os.pathsep.join([str(plugin(tmp_path / "site", HANGING)), str(ROOT)])
    groups, rows = tmp_path / "groups", tmp_path / "rows"
    environment = {**os.environ, "PYTHONPATH": path, "GROUPS": str(groups)}
    command = [*COMMAND, "export", "--to", "other", source, "-o", str(rows)]
    process = subprocess.Popen(command, env={**environment, "HANG": "g2"})
    wait_for(lambda: groups.exists() and groups.read_text().endswith("g2\n"))
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert not rows.exists()
    again = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    assert b"going on with rows: 2 groups are done" in again.stderr
    assert groups.read_text().split() == ["g0", "g1", "g2", "g2", "None"]
    assert rows_in(rows) == expected(recorded.trajectories)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_export_that_was_killed_at_its_end(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
):
    """Before or after its rows became the file: both end with the file, and nothing beside it."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    finish = TokenRows.finish

    def stopped(exporter: TokenRows, part: Path, output: Path) -> None:
        if is_renamed:
            finish(exporter, part, output)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(TokenRows, "finish", stopped)
        assert export(source, "-o", str(rows)) == 130
    with monkeypatch.context() as context:
        second = Stopped(context, 99)
        assert export(source, "-o", str(rows)) == 0
    assert second.groups == []
    assert rows_in(rows) == expected(recorded.trajectories)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


def test_another_export_is_refused(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """What was begun with other options or sources is not mixed with this; it may begin anew."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    with monkeypatch.context() as context:
        Stopped(context, 2)
        assert export(source, "-o", str(rows)) == 130
    capsys.readouterr()
    assert export(source, "-o", str(rows), "--option", "credit=last") == 1
    said = capsys.readouterr().err
    assert "options was {} and is {'credit': 'last'}" in said
    assert "--restart" in said
    trajectories_of(recorded.trajectories[:1], tmp_path / "t")
    assert export(source, "-o", str(rows)) == 1
    assert "sources was" in capsys.readouterr().err
    with monkeypatch.context() as context:
        again = Stopped(context, 99)
        assert export(source, "-o", str(rows), "--option", "credit=last", "--restart") == 0
    assert len(again.groups) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


def test_two_exports_of_one_file(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """While one writes another is refused, with `--restart` too, and does not harm the first."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    statuses: list[int] = []
    inner = TokenRows.rows

    def meanwhile(exporter: TokenRows, group: TrajectoryGroup) -> Any:
        if not statuses:
            statuses.append(export(source, "-o", str(rows)))
            statuses.append(export(source, "-o", str(rows), "--restart"))
        return inner(exporter, group)

    monkeypatch.setattr(TokenRows, "rows", meanwhile)
    assert export(source, "-o", str(rows)) == 0
    assert statuses == [1, 1]
    assert "another process is writing rows" in capsys.readouterr().err
    assert rows_in(rows) == expected(recorded.trajectories)


def test_a_bar_on_a_terminal_only(recorded: Recording, tmp_path: Path):
    """How far it is, where somebody looks; nothing of it elsewhere."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    command = [*COMMAND, "export", "--to", "tokens", source, "-o"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    subprocess.run([*command, str(tmp_path / "1")], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # all has been read
        pass
    os.close(ours)
    assert b"| 0/8 [" in shown
    assert b"4 groups, 8 trajectories" in shown
    quiet = subprocess.run(
        [*command, str(tmp_path / "2")], env=environment, capture_output=True, check=True
    )
    assert len(quiet.stderr.splitlines()) == 2


def test_an_export_on_a_full_disk_goes_on(recorded: Recording, tmp_path: Path, capsys: Any):
    """It says that the disk is full, and ends with every row once when there is room again."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    rows = tmp_path / "rows"
    sizes = iter(range(0, 1 << 20, 7000))
    while True:
        with full_disk(next(sizes)):
            status = export(source, "-o", str(rows))
        said = capsys.readouterr().err
        if status == 0:
            break
        assert "rows.groups/trajectories: disk I/O error" in said or "File too large" in said
        assert not rows.exists()
    assert by_place(rows_in(rows)) == by_place(expected(recorded.trajectories))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "t"]


@pytest.mark.parametrize("kind", ["a file", "a folder", "a link", "a damaged store"])
def test_what_no_export_wrote_is_left_alone(
    recorded: Recording, tmp_path: Path, capsys: Any, kind: str
):
    """Something with the name of the folder beside the output is not overwritten."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    folder, diary = tmp_path / "rows.groups", tmp_path / "diary"
    if kind == "a file":
        diary = folder
    elif kind == "a link":
        tmp_path.joinpath("elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        diary = folder / ("trajectories" if kind == "a damaged store" else "diary")
    diary.write_text("my diary\n" * 1000)
    assert export(source, "-o", str(tmp_path / "rows")) == 1
    assert str(folder) in capsys.readouterr().err
    assert diary.read_text() == "my diary\n" * 1000
    assert not (tmp_path / "rows").exists()
