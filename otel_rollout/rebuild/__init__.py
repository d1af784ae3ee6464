"""Spans in, trajectories out, whatever the source and the order of the spans. Pure."""

from otel_rollout.rebuild.assembly import Assembly
from otel_rollout.rebuild.episodes import reconstruct_episodes
from otel_rollout.rebuild.reconstruction import reconstruct

__all__ = [
    "Assembly",
    "reconstruct",
    "reconstruct_episodes",
]
