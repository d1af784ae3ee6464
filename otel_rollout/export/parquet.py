"""An archive of trajectories in Parquet: one schema, a row for each, and files that are whole.

Columns are views for queries and trainers, as plain Arrow that any reader has; JSON is text there.
The column `trajectory` is the whole record, where it is kept: an equal trajectory is read from it.
An archive of several files is a folder with Hive partitions, to which later exports add files.
"""

from __future__ import annotations

import datetime
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from otel_rollout.errors import ConfigurationError, ExportError, SpanFormatError
from otel_rollout.export.options import CheckedOptions
from otel_rollout.export.row_contract import dropped_completions
from otel_rollout.export.tables import (
    FLOAT,
    INT,
    JSON,
    JSONS,
    TEXT,
    TEXTS,
    ColumnKind,
    TabularList,
    members,
)
from otel_rollout.extras import module_of
from otel_rollout.trajectory import Dropped, Trajectory, TrajectoryGroup
from otel_rollout.wire import Json, loads

_WHOLE = "trajectory"
"""The column of the whole record."""
_BATCH_BYTES = 1 << 26
"""Bytes of JSON that are made into one row group."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_LONGEST_NAME = 255
"""Bytes of the name of a folder, at most, on usual file systems."""


class _Archive(TabularList[dict[str, Any]]):
    """Rows of an archive as a table."""

    _columns: ClassVar = {
        **dict.fromkeys(("id", "name", "trace_id", "parent_id", "task_id", "group_id"), TEXT),
        **dict.fromkeys(("sample_index", "group_size"), INT),
        "policy_version": TEXT,
        **dict.fromkeys(("policy_versions", "models"), TEXTS),
        "day": ColumnKind(lambda pa: pa.date32(), store=datetime.date.fromisoformat),
        "start_time": ColumnKind(lambda pa: pa.timestamp("us", "UTC")),
        "seconds": FLOAT,
        **dict.fromkeys(("status", "termination_reason", "error"), TEXT),
        "reward": FLOAT,
        **dict.fromkeys(("rewards", "metrics", "metadata"), JSON),  # `datasets` reads no maps
        **dict.fromkeys(("messages", "tools"), JSONS),
        "histories": INT,
        "input_ids": ColumnKind(lambda pa: pa.list_(pa.list_(pa.int32()))),
        "loss_mask": ColumnKind(lambda pa: pa.list_(pa.list_(pa.int8()))),
        "logprobs": ColumnKind(lambda pa: pa.list_(pa.list_(pa.float64()))),
        **dict.fromkeys(("missing_calls", "warnings"), TEXTS),
        _WHOLE: ColumnKind(lambda pa: pa.large_string()),
    }


@dataclass(frozen=True)
class ParquetRows(CheckedOptions):
    """An archive: a row for each trajectory, read by Polars, DuckDB, Ray Data and `datasets`.

    It needs the extra `tables`.
    exchanges: keep all that was exchanged, in the column `trajectory`: equal trajectories are read
    back, and the archive is a SOURCE of this command.
    partition_by: make the output a folder with a file for each combination of the values of these
    columns, such as day,policy_version, in Hive's layout: they are in the paths, not in the files.
    Files are added to those that are there.
    """

    exchanges: bool = False
    partition_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = dict.fromkeys(self.partition_by)
        if len(columns) < len(self.partition_by) or not PARTITIONS.issuperset(columns):
            raise ConfigurationError(
                f"ParquetRows(partition_by=...): expected some of {', '.join(sorted(PARTITIONS))}, "
                f"each once, got {','.join(self.partition_by)!r}"
            )
        module_of("tables", "pyarrow.parquet", "the exporter parquet")

    @property
    def writes_folder(self) -> bool:
        """True if the output is a folder, which may be there already."""
        return bool(self.partition_by)

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """A row for each trajectory, those that failed included."""
        for trajectory in members(group, "ParquetRows"):
            kept = trajectory.to_json() if self.exchanges else None
            row = {**trajectory_row(trajectory), _WHOLE: kept}
            # Raises now what is no text or number of its column, as these two always are.
            _Archive([{**row, "loss_mask": None, "logprobs": None}]).to_arrow()
            yield row

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no token sequence trains."""
        return dropped_completions(members(group, "ParquetRows"))

    def finish(self, rows: Path, output: Path) -> None:
        """Write the file, or those of the folder; each appears whole, or not at all.

        ConfigurationError if a trajectory is in the folder already, in another file.
        """
        part = output.with_name(output.name + ".unfinished")
        if self.writes_folder:
            output.mkdir(exist_ok=True)
            part = output / ".unfinished"
        with rows.open("rb") as lines:
            for folder, places in self._partitions(lines, output).items():
                try:
                    digest, ids = self._write(_lines_at(lines, places), part)
                    target = output
                    if self.writes_folder:
                        folder.mkdir(parents=True, exist_ok=True)
                        target = folder / f"{digest}.parquet"
                        _check_new(folder, target, ids)
                    os.replace(part, target)
                finally:
                    part.unlink(missing_ok=True)

    def _partitions(self, lines: Iterable[bytes], output: Path) -> dict[Path, array[int]]:
        """Where the rows of each folder begin, in order."""
        found: dict[Path, array[int]] = {}
        start = 0
        for line in lines:
            row = loads(line) if self.partition_by else {}
            folder = output.joinpath(
                *(partition_folder(name, row[name]) for name in self.partition_by)
            )
            found.setdefault(folder, array("q")).append(start)
            start += len(line)
        return found

    def _write(self, lines: Iterable[bytes], part: Path) -> tuple[str, set[str]]:
        """Write rows to a file; a digest of them, and the ids of their trajectories."""
        parquet = module_of("tables", "pyarrow.parquet", "the exporter parquet")
        schema = _Archive().to_arrow().drop_columns(list(self.partition_by)).schema
        digest, ids = blake2b(digest_size=16), set[str]()
        with part.open("wb") as file:
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                for batch in _batches(lines):
                    table = _Archive(map(loads, batch)).to_arrow()
                    ids.update(table["id"].to_pylist())
                    digest.update(b"".join(batch))
                    writer.write_table(table.select(schema.names))
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest(), ids


PARTITIONS = frozenset(
    ("day", "policy_version", "name", "task_id", "group_id", "status", "termination_reason")
)
"""Columns that an archive can be partitioned by: those with one text for each trajectory."""


def trajectory_row(trajectory: Trajectory) -> dict[str, Json]:
    """A trajectory in columns for queries and trainers: names, times, numbers and JSON.

    policy_version: that of its start; where it is not set, of its first completion. group_id: its
    `group_key`.
    input_ids, loss_mask, logprobs: (sequences, T), as in `Trajectory.token_sequences`.
    messages, tools: of the main history. day, start_time: UTC; microseconds.
    """
    started, ended = trajectory.start_time_ns, trajectory.end_time_ns
    versions, version = trajectory.policy_versions, trajectory.policy_version
    version = next(iter(versions), None) if version is None else version
    error, reward = trajectory.error, trajectory.reward
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "group_id": trajectory.group_key,
        "policy_version": None if version is None else str(version),
        "policy_versions": list(map(str, versions)),
        "day": _day(started) if started else None,
        "start_time": started // 1000 if started else None,
        "seconds": (ended - started) / 1e9 if ended is not None and started else None,
        "error": error and f"{error.get('type')}: {error.get('message')}",
        "reward": None if reward is None else float(reward),
        "rewards": {name: float(value) for name, value in trajectory.rewards.items()},
        "metrics": dict(trajectory.metrics),
        "metadata": dict(trajectory.metadata),
        "missing_calls": list(trajectory.missing_calls),
        "warnings": list(trajectory.warnings),
        **_exchanged(trajectory),
    }


def _exchanged(trajectory: Trajectory) -> dict[str, Json]:
    """The columns of what the model saw and sampled."""
    histories, sequences = trajectory.histories, trajectory.token_sequences()
    models = (completion.model for completion in trajectory.completions)
    return {
        "models": list(dict.fromkeys(model for model in models if model is not None)),
        "messages": histories[0].messages() if histories else [],
        "tools": list(histories[0].tools or ()) if histories else None,
        "histories": sum(history.side_call is None for history in histories),
        "input_ids": [sequence.token_ids for sequence in sequences],
        "loss_mask": [sequence.loss_mask for sequence in sequences],
        "logprobs": [sequence.logprobs for sequence in sequences],
    }


_PLAIN = (
    *("id", "name", "trace_id", "parent_id", "task_id", "sample_index"),
    *("group_size", "status", "termination_reason"),
)


def _day(nanoseconds: int) -> str:
    """The day of a time, in UTC."""
    time = datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.timezone.utc)
    return time.date().isoformat()


def partition_folder(name: str, value: str | None) -> str:
    """The name of a folder in Hive's layout. ExportError for one that is too long."""
    text = _NULL if value is None else quote(value, safe=" ", errors="replace")
    if len(folder := f"{name}={text}") > _LONGEST_NAME:
        raise ExportError(
            f"exporter parquet: the {name} {value!r:.100} is too long for the name of a folder: "
            f"partition by other columns"
        )
    return folder


def _lines_at(file: Any, places: Iterable[int]) -> Iterator[bytes]:
    for place in places:
        file.seek(place)
        yield file.readline()


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_new(folder: Path, target: Path, ids: set[str]) -> None:
    """ConfigurationError if one of the trajectories is in another file of the folder."""
    parquet = module_of("tables", "pyarrow.parquet", "the exporter parquet")
    for path in sorted(folder.glob("*.parquet")):
        try:
            there = parquet.read_table(path, columns=["id"], partitioning=None)["id"].to_pylist()
        except (OSError, ValueError, LookupError) as error:
            raise ConfigurationError(
                f"{path}: expected a file of an earlier export ({error}): move it away, and give "
                f"the same command again"
            ) from None
        if path != target and (again := ids.intersection(there)):
            raise ConfigurationError(
                f"{folder}: {len(again)} of {len(ids)} trajectories are in {path.name} already, "
                f"such as {min(again)!r}, and would be there twice: remove that file and give the "
                f"same command again, or leave them out (--where)"
            )


# --- read


def lines_of_parquet(path: str) -> Iterator[bytes]:
    """The trajectories of a file as lines of a file of trajectories.

    SpanFormatError for a file without them, and where its content is damaged.
    """
    if not os.path.isfile(path):
        raise SpanFormatError("Parquet is read from its end: give the path of the file")
    parquet = module_of("tables", "pyarrow.parquet", f"reading {path}")
    without = 0
    try:
        file = parquet.ParquetFile(path)
        if _WHOLE not in file.schema_arrow.names:
            raise SpanFormatError(_NO_EXCHANGES.format(file.metadata.num_rows))
        for batch in file.iter_batches(_READ_ROWS, columns=[_WHOLE]):
            for text in batch.column(0):
                whole = text.as_py()
                without += whole is None
                if whole is not None:
                    yield whole.encode() + b"\n"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, SpanFormatError):
            raise
        raise SpanFormatError(f"its Parquet is damaged, or of another kind ({error})") from None
    if without:
        raise SpanFormatError(_NO_EXCHANGES.format(without))


_READ_ROWS = 16
_NO_EXCHANGES = (
    "{} of its rows have no exchanges, so no trajectory can be read from them: export with "
    "--exchanges keeps these"
)
