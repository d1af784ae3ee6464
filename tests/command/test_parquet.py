"""`export --to parquet`: files that are whole, one schema, and equal trajectories back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import (
    ConfigurationError,
    JsonlTrajectoryExporter,
    SpanFormatError,
    Trajectory,
    rollout,
)
from otel_rollout.command.cli import main
from otel_rollout.export import ParquetRows, row_exporter
from otel_rollout.export.parquet import partition_folder
from tests.command.exports import by_place, expected, export, rows_in, trajectories_of
from tests.kit.recording import Clients, Recording

SCHEMA = pyarrow.schema([])


def archive(source: str, output: Path, *more: str) -> int:
    return main(["export", "--to", "parquet", source, "-o", str(output), *more])


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def by_id(trajectories: Any) -> dict[str, Trajectory]:
    return {trajectory.id: trajectory for trajectory in trajectories}


def read(folder: Path) -> dict[str, Trajectory]:
    paths = [folder] if folder.is_file() else folder.rglob("*.parquet")
    return by_id(each for path in paths for each in JsonlTrajectoryExporter.read(path))


def test_equal_trajectories_are_read_back(recorded: Recording, tmp_path: Path):
    """From a file and from partitions; an archive is a source of the command."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert archive(source, tmp_path / "a.parquet", "--exchanges") == 0
    assert archive(source, tmp_path / "b", "--exchanges", "--partition-by", "day,status") == 0
    assert read(tmp_path / "a.parquet") == read(tmp_path / "b") == by_id(recorded.trajectories)
    assert len(files_in(tmp_path / "b")) == 2
    for made in ("a.parquet", "b"):
        assert export(str(tmp_path / made), "-o", str(tmp_path / "rows"), "--force") == 0
        assert by_place(rows_in(tmp_path / "rows")) == by_place(expected(recorded.trajectories))


def test_columns_are_plain_views(recorded: Recording, tmp_path: Path):
    """Numbers are numbers, JSON is text, and what is not known is null."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert archive(source, tmp_path / "a.parquet") == 0
    found = {
        row["id"]: row for row in pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    }
    for trajectory in recorded.trajectories:
        row = found.pop(trajectory.id)
        sequences = trajectory.token_sequences()
        assert row["reward"] == trajectory.reward
        assert [json.loads(message) for message in row["messages"]] == trajectory.messages()
        assert row["input_ids"] == [sequence.token_ids for sequence in sequences]
        assert row["loss_mask"] == [sequence.loss_mask for sequence in sequences]
        assert row["logprobs"] == [sequence.logprobs for sequence in sequences]
        assert row["start_time"].timestamp() == pytest.approx(trajectory.start_time_ns / 1e9)
        assert row["day"] == row["start_time"].date()
        assert row["trajectory"] is None
    assert found == {}


def test_unknown_log_probabilities_are_null(recording: Recording, clients: Clients, tmp_path: Path):
    """Neither 0 nor NaN."""
    client = clients.sync(clients.serve(logprobs=False))
    with rollout("x") as trajectory:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert archive(trajectories_of([trajectory], tmp_path / "t"), tmp_path / "a") == 0
    (row,) = pyarrow.parquet.read_table(tmp_path / "a").to_pylist()
    (sequence,) = trajectory.token_sequences()
    unknown = [None if sampled else 0.0 for sampled in sequence.sampled]
    assert row["logprobs"] == [unknown]
    assert (row["reward"], row["policy_version"]) == (None, None)


def test_one_schema(recorded: Recording, tmp_path: Path):
    """All files have it, whatever is in them, but for the columns in their paths."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert archive(source, tmp_path / "a") == 0
    assert archive(source, tmp_path / "b", "--exchanges", "--partition-by", "group_id,name") == 0
    whole = pyarrow.parquet.read_schema(tmp_path / "a")
    schemas = [pyarrow.parquet.read_schema(path) for path in (tmp_path / "b").rglob("*.parquet")]
    assert len(schemas) > 2
    for schema in schemas:
        assert list(schema) == [each for each in whole if each.name not in ("group_id", "name")]
    table = pyarrow.dataset.dataset(tmp_path / "b", partitioning="hive").to_table()
    groups = {trajectory.group_id for trajectory in recorded.trajectories}
    assert set(table["group_id"].to_pylist()) == groups
    assert table.num_rows == len(recorded.trajectories)


def test_files_are_whole_or_not_there(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A full disk at the second file leaves the first one; the same command then goes on."""
    source, output = trajectories_of(recorded.trajectories, tmp_path / "t"), tmp_path / "a"
    arguments = (source, output, "--exchanges", "--partition-by", "group_id")
    written, writer = list[Any](), pyarrow.parquet.ParquetWriter

    class Full(writer):  # type: ignore[misc, valid-type]
        def write_table(self, table: Any) -> None:
            super().write_table(table)
            written.append(table)
            if len(written) == 2:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "ParquetWriter", Full)
    assert archive(*arguments) == 1
    assert len(files_in(output)) == 1
    assert len(read(output)) == written[0].num_rows
    assert archive(*arguments) == 0
    assert read(output) == by_id(recorded.trajectories)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "t"]


def test_an_archive_grows(recorded: Recording, tmp_path: Path, capsys: Any):
    """Later exports add files; the same one again changes nothing, and none is there twice."""
    first = trajectories_of(recorded.trajectories[:3], tmp_path / "one")
    rest = trajectories_of(recorded.trajectories[3:], tmp_path / "two")
    every = trajectories_of(recorded.trajectories, tmp_path / "all")
    more = ("--exchanges", "--partition-by", "day")
    for source, count in ((first, 1), (rest, 2), (first, 2)):
        assert archive(source, tmp_path / "a", *more) == 0
        assert len(files_in(tmp_path / "a")) == count
    assert read(tmp_path / "a") == by_id(recorded.trajectories)
    capsys.readouterr()
    assert archive(every, tmp_path / "a", *more) == 1
    assert "trajectories are in" in (said := capsys.readouterr().err)
    assert "would be there twice" in said
    shutil.rmtree(tmp_path / "a")
    assert archive(every, tmp_path / "a", *more) == 0


@given(st.text(st.characters(codec="utf-8"), max_size=20) | st.none())
def test_any_text_is_a_partition(value: str | None):
    """A reader of Hive's layout has it again; nothing leads out of the folder."""
    folder = partition_folder("name", value)
    assert "/" not in folder
    assert folder not in (".", "..")
    found = pyarrow.dataset.HivePartitioning(
        pyarrow.schema([("name", pyarrow.string())]), segment_encoding="uri"
    ).parse(f"{folder}/x")
    (got,) = pyarrow.dataset.get_partition_keys(found).values() or (None,)
    assert got == value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PAR1", "damaged"),
        (b"PAR1" + b"x" * 100 + b"PAR1", "damaged"),
        (None, "have no exchanges"),
    ],
)
def test_what_cannot_be_read_is_reported(
    recorded: Recording, tmp_path: Path, capsys: Any, content: bytes | None, said: str
):
    """With the file's name: one that is cut, or was written without exchanges."""
    path = tmp_path / "a.parquet"
    archive(trajectories_of(recorded.trajectories, tmp_path / "t"), path)
    if content is not None:
        path.write_bytes(content)
    capsys.readouterr()
    assert main(["list", str(path)]) == 1
    assert said in (errors := capsys.readouterr().err)
    assert str(path) in errors


def test_a_text_that_is_no_trajectory(tmp_path: Path):
    """Its row is named as a line."""
    table = pyarrow.table({"trajectory": ["{}"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SpanFormatError, match=r"a.parquet, line 1: .*schema_version"):
        list(JsonlTrajectoryExporter.read(tmp_path / "a.parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"trajectory": [1]}), tmp_path / "a.parquet")
    with pytest.raises(SpanFormatError, match="damaged, or of another kind"):
        list(JsonlTrajectoryExporter.read(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("partition_by", ["id"], "expected some of day, .*, got 'id'"),
        ("partition_by", ["day", "day"], "each once"),
        ("exchanges", 1, "expected 'true' or 'false'"),
    ],
)
def test_options_are_checked(option: str, value: Any, said: str):
    """When the exporter is made."""
    with pytest.raises(ConfigurationError, match=said):
        ParquetRows(**{option: value})


def test_other_exporters_have_no_partitions(recorded: Recording, tmp_path: Path, capsys: Any):
    """A file is not a folder, and the other way around."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    assert export(source, "-o", str(tmp_path / "a"), "--partition-by", "day") == 1
    assert "there is no option 'partition_by'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        archive(source, tmp_path)
    with pytest.raises(SystemExit):
        archive(source, Path(source), "--partition-by", "day")
    assert getattr(row_exporter("parquet", require_all_calls=True), "writes_folder", None) is False


def test_a_foreign_file_in_the_archive(recorded: Recording, tmp_path: Path, capsys: Any):
    """It is named, and nothing is written beside it; without it the same command goes on."""
    source = trajectories_of(recorded.trajectories, tmp_path / "t")
    arguments = (source, tmp_path / "a", "--partition-by", "name")
    (tmp_path / "a" / "name=agent").mkdir(parents=True)
    foreign = tmp_path / "a" / "name=agent" / "x.parquet"
    foreign.write_text("this is none")
    assert archive(*arguments) == 1
    assert f"{foreign}: expected a file of an earlier export" in capsys.readouterr().err
    foreign.unlink()
    assert archive(*arguments) == 0
    assert len(files_in(tmp_path / "a")) == 2
