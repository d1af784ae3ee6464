"""Where finished trajectories go: exporters, and the rows of a trainer's file."""

from otel_rollout.export.contract import TrajectoryExporter
from otel_rollout.export.jsonl import BEGINNING, JsonlTrajectoryExporter, read_lines
from otel_rollout.export.memory import InMemoryTrajectoryExporter, OnFull
from otel_rollout.export.partitions import parts_for, reconstruct_apart
from otel_rollout.export.rowfile import RowFile, Tally, item_of, item_of_trajectory, rows_of
from otel_rollout.export.rows import (
    Credit,
    JsonRows,
    RowExporter,
    Rows,
    TokenRows,
    row_exporter,
    row_exporters,
    to_token_rows,
)

__all__ = [
    "BEGINNING",
    "Credit",
    "InMemoryTrajectoryExporter",
    "JsonRows",
    "JsonlTrajectoryExporter",
    "OnFull",
    "RowExporter",
    "RowFile",
    "Rows",
    "Tally",
    "TokenRows",
    "TrajectoryExporter",
    "item_of",
    "item_of_trajectory",
    "parts_for",
    "read_lines",
    "reconstruct_apart",
    "row_exporter",
    "row_exporters",
    "rows_of",
    "to_token_rows",
]
