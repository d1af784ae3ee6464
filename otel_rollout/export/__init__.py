"""Finished trajectories on their way out: exporters in this process, rows of a trainer's file.

Exporters in separate distributions import `otel_rollout` and this module only. For them are
`RowExporter` (the contract), `JsonRows` (base of exporters to JSON lines), `CheckedOptions` and
`Positive` (options), `check_choice`, `dropped_completions`, `trajectory_row` (a trajectory in
columns), `Documents` (reads what some of them write), and these helpers for JSON and messages:
`Json`, `loads`, `dumps`, `copy_json`, `json_of`, `portable`, `none_for_nan`, `MessagePath`,
`path_messages`, `normalised_content`, `message_parts` with the classes of parts, `is_of_model`, and
`counts_of` a completion's usage.
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
