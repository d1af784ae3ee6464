"""Trajectories as Hugging Face datasets and Parquet: lossless, and readable by anything.

Each row is a trajectory. Its column `trajectory` is the record, as JSON text, from which an equal
trajectory is made; the other columns are views of it for people, queries and trainers. They hold
JSON as such: as Arrow structs, tool calls would gain each other's arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Json, List, Value

from otel_rollout import SpanFormatError, Trajectory, TrajectoryGroup
from otel_rollout.export import (
    Dropped,
    dropped_completions,
    dumps,
    loads,
    none_for_nan,
    trajectory_row,
)
from otel_rollout.export import Json as AnyJson

__all__ = ["FEATURES", "DatasetRows", "from_dataset", "to_dataset"]

FEATURES = Features(
    {
        "id": Value("string"),
        "name": Value("string"),
        "trace_id": Value("string"),
        "parent_id": Value("string"),
        "task_id": Value("string"),
        "group_id": Value("string"),
        "sample_index": Value("int64"),
        "status": Value("string"),
        "termination_reason": Value("string"),
        "reward": Value("float64"),
        "rewards": Json(),
        "metrics": Json(),
        "metadata": Json(),
        "messages": List(Json()),
        "tools": List(Json()),
        "histories": Value("int32"),
        "input_ids": List(List(Value("int32"))),
        "loss_mask": List(List(Value("int8"))),
        "logprobs": List(List(Value("float32"))),
        "warnings": List(Value("string")),
        "trajectory": Value("large_string"),
    }
)
"""The columns. `messages` and `tools` are those of the main history, of `histories` many.

input_ids, loss_mask, logprobs: (sequences, T) as in `Trajectory.token_sequences`; null: unknown.
reward: null where it is not scored.

What readers of JSON in Arrow cannot have is null there (a lone surrogate, an integer of more than
64 bits), and their floats have 15 digits; `trajectory` has all of it.
"""

_BATCH_BYTES = 1 << 26


def to_dataset(trajectories: Iterable[Trajectory] | TrajectoryGroup) -> Dataset:
    """A dataset with a row for each trajectory, those that failed included."""
    return Dataset(_table(list(map(_row, _members(trajectories)))))


def from_dataset(dataset: Iterable[Mapping[str, Any]]) -> list[Trajectory]:
    """The trajectories of a dataset that `to_dataset` made, or of the rows of its files.

    What was changed in other columns than `trajectory` is not in them. SpanFormatError for a row
    that has no such column.
    """
    if isinstance(dataset, Dataset) and "trajectory" in dataset.column_names:
        dataset = dataset.select_columns(["trajectory"])
    return [_trajectory(row) for row in dataset]


class DatasetRows:
    """The exporter `datasets`: Parquet where the output's name ends so, JSON lines elsewhere.

    Both load with `datasets.load_dataset`; JSON lines need `features=FEATURES`. It has no options.
    """

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Any]]:
        """A row for each trajectory, those that failed included."""
        return map(_row, _members(group))

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no token sequence trains."""
        return dropped_completions(_members(group))

    def finish(self, rows: Path, output: Path) -> None:
        """Write the Parquet file, some rows at a time, or rename the JSON lines."""
        if output.suffix != ".parquet":
            os.replace(rows, output)
            return
        part = output.with_name(output.name + ".unfinished")
        try:
            with pq.ParquetWriter(part, FEATURES.arrow_schema) as writer:
                for batch in _batches(rows):
                    writer.write_table(_table(batch))
            os.replace(part, output)
        finally:
            part.unlink(missing_ok=True)
        rows.unlink()


def _members(trajectories: Iterable[Trajectory] | TrajectoryGroup) -> list[Trajectory]:
    if isinstance(trajectories, TrajectoryGroup):
        return [*trajectories, *trajectories.failures]
    return list(trajectories)


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row: dict[str, Any] = trajectory_row(trajectory) | {"trajectory": trajectory.to_json()}
    for name in ("messages", "tools"):
        row[name] = None if row[name] is None else list(map(_view, row[name]))
    row["metadata"] = _view(row["metadata"])
    row["logprobs"] = list(map(none_for_nan, row["logprobs"]))
    return {name: row[name] for name in FEATURES}


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows as Arrow. What `datasets` would write as JSON itself, it would round."""
    schema = FEATURES.arrow_schema
    columns = []
    for name, feature in FEATURES.items():
        values = [row[name] for row in rows]
        kind = schema.field(name).type
        if feature == Json():
            texts = pa.array([_text(value) for value in values], pa.string())
            columns.append(pa.ExtensionArray.from_storage(pa.json_(), texts))
        elif feature == List(Json()):
            texts = [None if items is None else [_text(item) for item in items] for items in values]
            columns.append(pa.array(texts, pa.list_(pa.string())).cast(kind))
        else:
            columns.append(pa.array(values, kind))
    return pa.Table.from_arrays(columns, schema=schema)


def _text(value: AnyJson) -> str | None:
    return None if value is None else dumps(value)


def _view(value: AnyJson) -> AnyJson:
    """The value, or None where readers cannot have it: half a character, 65 bits of an integer."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        Json().decode_example(text)
    except ValueError:
        return None
    return value


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    text = row.get("trajectory")
    if not isinstance(text, str):
        raise SpanFormatError(
            f"from_dataset: expected rows with the column 'trajectory' that to_dataset writes, got "
            f"the columns {', '.join(row)}"
        )
    return Trajectory.from_json(text)


def _batches(rows: Path) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    with rows.open(encoding="utf-8") as lines:
        for line in lines:
            batch.append(loads(line))
            size += len(line)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
