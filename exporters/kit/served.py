"""Trajectories that real servers gave, which `make test-servers` leaves in a folder.

`tests/servers` records them with vLLM and a tiny model; what an exporter makes of them is compared
with the weights, through the structures that the trainer computes its loss from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from exporters.kit.recomputed import Model, Row
from otel_rollout import JsonlTrajectoryExporter, Trajectory, TrajectoryGroup

FOLDER = Path(os.environ.get("OTEL_ROLLOUT_SERVED", ""))
TOLERANCE = 1e-3

needs_servers = pytest.mark.skipif(
    "OTEL_ROLLOUT_SERVED" not in os.environ, reason="its trajectories come of make test-servers"
)


def groups() -> list[TrajectoryGroup]:
    """A group of each trajectory."""
    read = JsonlTrajectoryExporter.read(FOLDER / "trajectories.jsonl")
    return [TrajectoryGroup.of([trajectory]) for trajectory in read]


def sampled(trajectories: Iterable[Trajectory]) -> int:
    """How many tokens the server counted in the calls that were not left early."""
    usage = {c.span_id: c.usage or {} for t in trajectories for c in t.completions if c.trainable}
    return sum(counted["completion_tokens"] for counted in usage.values())


def check(rows: Iterable[Row], trajectories: Iterable[Trajectory]) -> None:
    """The rows train each sampled token once, with the log-probability that the weights give it."""
    gaps = Model(FOLDER / "model").gaps(rows)
    print(f"{len(gaps)} tokens, gap {max(gaps):.1e}")
    assert len(gaps) == sampled(trajectories) > 0
    assert [gap for gap in gaps if not gap <= TOLERANCE] == []
