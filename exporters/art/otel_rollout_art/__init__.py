"""Trajectories for ART: its live objects, whose tokens are those that were sampled.

ART trains the `Choice` instances of a conversation. From 0.5.20 on it takes their ids and those of
their prompts from the choice; before, the ids from the log-probabilities (`token_id:<id>`), and it
renders everything else with the chat template. So every completion that trains becomes a `Choice`
with its exact ids, once; what stands before it is dicts and never trains.

to_art_group        art.TrajectoryGroup of a group; failures are its exceptions
to_art_trajectory   art.Trajectory of a trajectory
to_art_row          the same as JSON, without ART
from_art_row        the live group of a line that the exporter `art` wrote
"""

from otel_rollout_art.live import from_art_row, to_art_group, to_art_trajectory
from otel_rollout_art.rows import ArtRows, Mode, to_art_row

__all__ = [
    "ArtRows",
    "Mode",
    "from_art_row",
    "to_art_group",
    "to_art_row",
    "to_art_trajectory",
]
