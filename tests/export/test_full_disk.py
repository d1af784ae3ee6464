"""Full disks and stopped writers: what is in a file is whole, and what is missing is said."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    JsonlTrajectoryExporter,
    SpanFormatError,
    Trajectory,
    rollout,
)
from tests.kit.disks import full_disk


def some(count: int, start: int = 0) -> list[Trajectory]:
    return [Trajectory(id=f"t{number}", name="x") for number in range(start, start + count)]


def written(path: Path, *trajectories: Trajectory) -> Path:
    JsonlTrajectoryExporter(path).export(trajectories)
    return path


def ids(path: Path, **options: Any) -> list[str]:
    return [trajectory.id for trajectory in JsonlTrajectoryExporter.read(path, **options)]


def test_every_trajectory_is_in_the_file_or_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Ten rollouts on a disk that fills up: what is there is whole, the rest is counted."""
    path = tmp_path / "t.jsonl"
    otel_rollout.configure("x", [JsonlTrajectoryExporter(path)])
    with full_disk(2_500):
        for number in range(10):
            with rollout(f"{number}"):
                pass
        assert not otel_rollout.shutdown()
    there = list(JsonlTrajectoryExporter.read(path))
    assert 0 < len(there) < 10
    assert path.read_bytes().endswith(b"\n")
    assert caplog.text.count("did not export trajectory") == 10 - len(there)
    assert f"{10 - len(there)} trajectories did not reach their exporters" in caplog.text


@pytest.mark.parametrize("fsync", [False, True])
def test_export_raises_and_takes_back(tmp_path: Path, fsync: bool):
    """A trajectory that does not fit raises, and the next one that does is on its own line."""
    path = tmp_path / "t.jsonl"
    exporter = JsonlTrajectoryExporter(path, fsync=fsync)
    exporter.export(some(1))
    with full_disk(path.stat().st_size + 100), pytest.raises(OSError, match="large"):
        exporter.export([Trajectory(id="long", logs=["x" * 10_000])])
    exporter.export(some(1, 1))
    assert ids(path) == ["t0", "t1"]
    assert path.read_bytes().count(b"\n") == 2


def test_a_full_device_raises():
    """A device that takes nothing is said with each trajectory."""
    with pytest.raises(OSError, match="No space"):
        JsonlTrajectoryExporter("/dev/full").export(some(1))


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path):
    """A folder, and a file that cannot be created, are refused when the exporter is made."""
    with pytest.raises(ConfigurationError, match="this is a folder"):
        JsonlTrajectoryExporter(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        JsonlTrajectoryExporter(tmp_path / ("x" * 300))
    (tmp_path / "link").symlink_to(tmp_path / "no" / "t.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        JsonlTrajectoryExporter(tmp_path / "link")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    JsonlTrajectoryExporter(pipe)  # does not wait for a reader


def test_the_file_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A relative path is that of the process when the exporter was made; a file moved away is
    followed by a new one.
    """
    monkeypatch.chdir(tmp_path)
    exporter = JsonlTrajectoryExporter("t.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    exporter.export(some(1))
    (tmp_path / "t.jsonl").rename(tmp_path / "t.1.jsonl")
    exporter.export(some(1, 1))
    assert ids(tmp_path / "t.1.jsonl") + ids(tmp_path / "t.jsonl") == ["t0", "t1"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_half_a_line_inside_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """With its number, and reading goes on; the last line alone is passed over without a word."""
    path = written(tmp_path / "t.jsonl", *some(3))
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[2] + lines[1][:50])
    assert ids(path) == ["t0", "t2"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{path}, line 2: its writer was stopped" in record.getMessage()
    errors: list[SpanFormatError] = []
    assert ids(path, on_error=errors.append) == ["t0", "t2"]
    assert [", line 2: " in str(error) for error in errors] == [True]


@pytest.mark.parametrize("kept", [1, 10, 40, -2, -1])
def test_a_trajectory_behind_half_a_line_is_read(tmp_path: Path, kept: int):
    """Two writers on one line: the whole trajectory is read; the half, if it is one, is said."""
    path = written(tmp_path / "t.jsonl", *some(3))
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(lines[0] + lines[1][:kept] + lines[2])
    errors: list[SpanFormatError] = []
    whole = kept == -1
    assert ids(path, on_error=errors.append) == ["t0", *(["t1"] if whole else []), "t2"]
    assert len(errors) == (0 if whole else 1)
    assert all(", line 2: " in str(error) for error in errors)


def test_other_errors_go_to_on_error_too(tmp_path: Path):
    """What is no trajectory is an error with its place, and reading continues."""
    path = written(tmp_path / "t.jsonl", *some(1))
    line = path.read_bytes()
    path.write_bytes(b'hello\n{"a": 1}\n' + line)
    errors: list[SpanFormatError] = []
    assert ids(path, on_error=errors.append) == ["t0"]
    assert [str(error).split(": ")[0] for error in errors] == [f"{path}, line {n}" for n in (1, 2)]
    with pytest.raises(SpanFormatError, match="line 1: not a Trajectory"):
        ids(path)


def test_a_trajectory_inside_half_a_line_is_not_one(tmp_path: Path):
    """What a half trajectory holds in its metadata is not read as one of the file."""
    inner = some(1)[0].to_dict()
    path = written(tmp_path / "t.jsonl", Trajectory(id="outer", metadata={"inner": inner, "z": 1}))
    line = path.read_bytes()
    end = line.index(b'"z":1')
    path.write_bytes(line[:end] + line)
    assert ids(path) == ["outer"]
    assert json.loads(line)["id"] == "outer"


@pytest.mark.parametrize("is_held", [False, True])
def test_only_what_is_ones_own_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
):
    """Where somebody else holds the lock, and appends, a failure does not cut off their line."""
    path = written(tmp_path / "t.jsonl", *some(1))
    theirs = path.read_bytes().replace(b"t0", b"t9")

    def fail(_: int) -> None:
        if is_held:
            with open(path, "ab") as file:
                file.write(theirs)
        raise OSError("no fsync")

    monkeypatch.setattr("otel_rollout.lines._LOCK_SECONDS", 0.05)
    monkeypatch.setattr(os, "fsync", fail)
    with open(path, "ab") as holder:
        if is_held:
            fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="no fsync"):
            JsonlTrajectoryExporter(path, fsync=True).export(some(1, 1))
    assert ids(path) == (["t0", "t1", "t9"] if is_held else ["t0"])
