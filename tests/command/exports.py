"""Files to export, and the rows that come out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from otel_rollout import JsonlTrajectoryExporter, TrajectoryGroup, to_token_rows
from otel_rollout.command.cli import main
from tests.kit.recording import Recording
from tests.kit.transports import to_json_line

ROOT = Path(__file__).parents[2]
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from otel_rollout.command import main; sys.exit(main())",
]


def spans_of(recorded: Recording, path: Path) -> str:
    path.write_text("".join(to_json_line([span]) for span in recorded.spans))
    return str(path)


def trajectories_of(trajectories: Any, path: Path) -> str:
    exporter = JsonlTrajectoryExporter(path)
    exporter.export(trajectories)
    exporter.shutdown()
    return str(path)


def expected(trajectories: Any) -> list[Any]:
    """What `to_token_rows` gives for the groups, in JSON."""
    rows = [row for group in TrajectoryGroup.by_id(trajectories) for row in to_token_rows(group)]
    return list(json.loads(json.dumps(rows)))


def rows_in(path: Path) -> list[Any]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text().splitlines()
    return [json.loads(line, parse_constant=no_constants) for line in text]


def export(*arguments: str) -> int:
    return main(["export", "--to", "tokens", *arguments])


def by_place(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (row["trajectory_id"], row["row"]))


def plugin(folder: Path, source: str) -> Path:
    """A folder with an installed distribution: an exporter `other` that this source defines."""
    information = folder / "other-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entry = "[otel_rollout_exporter]\nother = other_rows:OtherRows\n"
    (information / "entry_points.txt").write_text(entry)
    (folder / "other_rows.py").write_text(source)
    return folder
