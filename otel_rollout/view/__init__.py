"""Trajectories to look at: filters over their overviews."""

from otel_rollout.view.where import COLUMNS, Where, row_of

__all__ = [
    "COLUMNS",
    "Where",
    "row_of",
]
