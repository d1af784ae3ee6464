"""The name of a trajectory in error messages."""

from __future__ import annotations

from otel_rollout import Trajectory


def named(trajectory: Trajectory) -> str:
    """The trajectory in an error message."""
    return f"trajectory {trajectory.id!r} ({trajectory.name})"
