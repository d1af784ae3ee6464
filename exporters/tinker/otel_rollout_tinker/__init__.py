"""Trajectories for Tinker: pure functions from rollouts to what it trains on.

to_tinker_data              `tinker.Datum`s of a group, with advantages: one per token sequence
to_tinker_trajectory        a Trajectory of the cookbook: one transition per sampled reply
to_tinker_group             a TrajectoryGroup of the cookbook: scored ones, and what failed
TinkerRows, to_datum        the exporter `tinker`: datums as JSON rows, and back

Ids are those that were sampled; what is not known (a reward, a log-probability) is an ExportError
or left out, never a zero.
"""

from otel_rollout_tinker.cookbook import to_tinker_group, to_tinker_trajectory
from otel_rollout_tinker.data import TinkerRows, to_datum, to_tinker_data

__all__ = [
    "TinkerRows",
    "to_datum",
    "to_tinker_data",
    "to_tinker_group",
    "to_tinker_trajectory",
]
