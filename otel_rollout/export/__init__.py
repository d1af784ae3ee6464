"""Finished trajectories on their way out: exporters in this process, rows of a trainer's file.

Exporters in separate distributions import `otel_rollout` and this module only. For them are
`RowExporter` (the contract), `JsonRows` (base of exporters to JSON lines), `CheckedOptions` and
`Positive` (options), `check_choice`, `dropped_completions`, and these helpers for JSON and
messages: `Json`, `loads`, `dumps`, `copy_json`, `json_of`, `MessagePath`, `path_messages`,
`visible_content`.
"""

from otel_rollout.export.contract import TrajectoryExporter as TrajectoryExporter
from otel_rollout.export.fork import renew_after_fork as renew_after_fork
from otel_rollout.export.group_rows import Tally as Tally
from otel_rollout.export.group_rows import item_of as item_of
from otel_rollout.export.group_rows import item_of_trajectory as item_of_trajectory
from otel_rollout.export.group_rows import rows_of as rows_of
from otel_rollout.export.jsonl import HEAD as HEAD
from otel_rollout.export.jsonl import LINE_PREFIX as LINE_PREFIX
from otel_rollout.export.jsonl import JsonlTrajectoryExporter as JsonlTrajectoryExporter
from otel_rollout.export.jsonl import Layout as Layout
from otel_rollout.export.jsonl import layout_of as layout_of
from otel_rollout.export.jsonl import lines_of as lines_of
from otel_rollout.export.jsonl import parsed_lines as parsed_lines
from otel_rollout.export.jsonl import read_lines as read_lines
from otel_rollout.export.memory import InMemoryTrajectoryExporter as InMemoryTrajectoryExporter
from otel_rollout.export.options import CheckedOptions as CheckedOptions
from otel_rollout.export.options import Positive as Positive
from otel_rollout.export.options import check_choice as check_choice
from otel_rollout.export.row_exporter import JsonRows as JsonRows
from otel_rollout.export.row_exporter import RowExporter as RowExporter
from otel_rollout.export.row_exporter import all_options as all_options
from otel_rollout.export.row_exporter import dropped_completions as dropped_completions
from otel_rollout.export.row_exporter import row_exporter as row_exporter
from otel_rollout.export.row_exporter import row_exporter_from_texts as row_exporter_from_texts
from otel_rollout.export.row_exporter import row_exporters as row_exporters
from otel_rollout.export.rowfile import RowFile as RowFile
from otel_rollout.export.rows import EmptyRowsWarning as EmptyRowsWarning
from otel_rollout.export.rows import Rows as Rows
from otel_rollout.export.rows import TokenRows as TokenRows
from otel_rollout.export.rows import to_token_rows as to_token_rows
from otel_rollout.export.store import Store as Store
from otel_rollout.export.store import reconstruct_by_rollout as reconstruct_by_rollout
from otel_rollout.export.tables import TabularList as TabularList
from otel_rollout.export.tables import columns_of as columns_of
from otel_rollout.export.tables import members as members
from otel_rollout.trajectory import Dropped as Dropped
from otel_rollout.trajectory import json_of as json_of
from otel_rollout.wire import Json as Json
from otel_rollout.wire import MessagePath as MessagePath
from otel_rollout.wire import copy_json as copy_json
from otel_rollout.wire import dumps as dumps
from otel_rollout.wire import loads as loads
from otel_rollout.wire import path_messages as path_messages
from otel_rollout.wire import visible_content as visible_content
