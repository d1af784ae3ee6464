"""The archive of `export --to parquet`, read by Polars, DuckDB, Ray Data and datasets alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest
from datasets import load_dataset

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import JsonlTrajectoryExporter, Trajectory, gather_group, rollout
from otel_rollout.command import main

pytestmark = pytest.mark.trainer

PARTITIONS = ("day", "policy_version", "name")
Archive = tuple[Path, dict[str, Trajectory]]


@pytest.fixture
async def archive(recording: Recording, clients: Clients, tmp_path: Path) -> Archive:
    """Trajectories of several versions, names and endings, in partitions, by their ids."""
    played = [await agents.play(clients, agent, 0.5) for agent in agents.AGENTS]
    played.append(await agents.play(clients, agents.tool_loop, None, policy_version="v/4 é"))
    group = await agents.play_group(clients, [1.0, 0.0, None])
    played += [*group, *group.failures]
    exporter = JsonlTrajectoryExporter(tmp_path / "t.jsonl")
    exporter.export(played)
    arguments = ["export", "--to", "parquet", "--partition-by", ",".join(PARTITIONS)]
    folder = tmp_path / "archive"
    assert main([*arguments, "--exchanges", str(tmp_path / "t.jsonl"), "-o", str(folder)]) == 0
    return folder, {trajectory.id: trajectory for trajectory in played}


def with_polars(folder: Path) -> list[dict[str, Any]]:
    """Its scan knows Hive's layout."""
    return (
        polars.scan_parquet(f"{folder}/**/*.parquet", hive_partitioning=True).collect().to_dicts()
    )


def with_duckdb(folder: Path) -> list[dict[str, Any]]:
    """So does its table function."""
    found: Any = duckdb.sql(f"FROM read_parquet('{folder}/**/*.parquet', hive_partitioning = true)")
    rows: list[dict[str, Any]] = found.to_arrow_table().to_pylist()
    return rows


def with_datasets(folder: Path) -> list[dict[str, Any]]:
    """It does not: the columns of the paths are not there."""
    cache = str(folder.with_name("cache"))
    return list(load_dataset("parquet", data_dir=str(folder), cache_dir=cache, split="train"))


def check(rows: list[dict[str, Any]], played: dict[str, Trajectory], *names: str) -> None:
    """The rows have what the trajectories have, and the whole record is in them."""
    assert len(rows) == len(played) == len({row["id"] for row in rows})
    for row in rows:
        trajectory = played[row["id"]]
        sequences = trajectory.token_sequences()
        assert Trajectory.from_json(row["trajectory"]) == trajectory
        assert row["reward"] == trajectory.reward
        assert row["status"] == trajectory.status
        assert list(map(json.loads, row["messages"])) == trajectory.messages()
        assert row["input_ids"] == [sequence.token_ids for sequence in sequences]
        assert row["loss_mask"] == [sequence.loss_mask for sequence in sequences]
        assert row["logprobs"] == [sequence.logprobs for sequence in sequences]
        for name in names:
            assert row[name] == getattr(trajectory, name)


@pytest.mark.parametrize("read", [with_polars, with_duckdb, with_datasets])
def test_others_read_it(archive: Archive, read: Callable[[Path], list[dict[str, Any]]]):
    """Each as its own documentation has it; versions are texts, not set is null."""
    folder, played = archive
    rows = read(folder)
    named = () if read is with_datasets else ("name",)
    check(rows, played, *named)
    if named:
        versions = {row["id"]: row["policy_version"] for row in rows}
        assert versions == {
            id_: None if each.policy_version is None else str(each.policy_version)
            for id_, each in played.items()
        }


@pytest.mark.ray
def test_ray_data_reads_it(archive: Archive, cluster: Any):
    """In its own processes; what is not set in a path has Hive's name for it."""
    folder, played = archive
    rows = cluster.data.read_parquet(str(folder)).to_pandas().to_dict("records")
    for row in rows:
        for name in ("input_ids", "loss_mask", "logprobs"):
            row[name] = [list(sequence) for sequence in row[name]]
        row["reward"] = None if row["reward"] != row["reward"] else row["reward"]
    check(rows, played, "name")


async def test_unset_is_unset(recording: Recording, clients: Clients, tmp_path: Path):
    """In a file without partitions, too."""

    @rollout
    async def silent() -> None:
        """It asks nothing of a model."""

    group = await gather_group([silent()])
    exporter = JsonlTrajectoryExporter(tmp_path / "t.jsonl")
    exporter.export(group.trajectories)
    path = tmp_path / "a.parquet"
    assert main(["export", "--to", "parquet", str(tmp_path / "t.jsonl"), "-o", str(path)]) == 0
    (row,) = polars.read_parquet(path).to_dicts()
    assert (row["reward"], row["policy_version"], row["input_ids"]) == (None, None, [])
