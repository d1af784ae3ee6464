"""Finished trajectories on their way out: exporters in this process, rows of a trainer's file.

Exporters in separate distributions import `otel_rollout` and this module only. For them are
`RowExporter` (the contract), `JsonRows` (base of exporters to JSON lines), `CheckedOptions` and
`Positive` (options), `check_choice`, `dropped_completions`, and these helpers for JSON and
messages: `Json`, `loads`, `dumps`, `copy_json`, `json_of`, `MessagePath`, `path_messages`,
`visible_content`.
"""

from otel_rollout.export.apart import reconstruct_apart
from otel_rollout.export.contract import TrajectoryExporter
from otel_rollout.export.fork import renew_after_fork
from otel_rollout.export.group_rows import Tally, item_of, item_of_trajectory, rows_of
from otel_rollout.export.jsonl import (
    HEAD,
    LINE_PREFIX,
    JsonlTrajectoryExporter,
    Layout,
    layout_of,
    lines_of,
    parsed_lines,
    read_lines,
)
from otel_rollout.export.memory import InMemoryTrajectoryExporter
from otel_rollout.export.options import CheckedOptions, Positive, check_choice
from otel_rollout.export.partitions import parts_for
from otel_rollout.export.row_exporter import (
    JsonRows,
    RowExporter,
    all_options,
    dropped_completions,
    row_exporter,
    row_exporter_from_texts,
    row_exporters,
)
from otel_rollout.export.rowfile import RowFile
from otel_rollout.export.rows import EmptyRowsWarning, Rows, TokenRows, to_token_rows
from otel_rollout.export.tables import Overviews, overviews
from otel_rollout.trajectory import Dropped, json_of
from otel_rollout.wire import (
    Json,
    MessagePath,
    copy_json,
    dumps,
    loads,
    path_messages,
    visible_content,
)

__all__ = [
    "HEAD",
    "LINE_PREFIX",
    "CheckedOptions",
    "Dropped",
    "EmptyRowsWarning",
    "InMemoryTrajectoryExporter",
    "Json",
    "JsonRows",
    "JsonlTrajectoryExporter",
    "Layout",
    "MessagePath",
    "Overviews",
    "Positive",
    "RowExporter",
    "RowFile",
    "Rows",
    "Tally",
    "TokenRows",
    "TrajectoryExporter",
    "all_options",
    "check_choice",
    "copy_json",
    "dropped_completions",
    "dumps",
    "item_of",
    "item_of_trajectory",
    "json_of",
    "layout_of",
    "lines_of",
    "loads",
    "overviews",
    "parsed_lines",
    "parts_for",
    "path_messages",
    "read_lines",
    "reconstruct_apart",
    "renew_after_fork",
    "row_exporter",
    "row_exporter_from_texts",
    "row_exporters",
    "rows_of",
    "to_token_rows",
    "visible_content",
]
