"""Spans in, trajectories out, whatever the source and the order of the spans. Pure."""

from otel_rollout.rebuild.assembly import Assembly
from otel_rollout.rebuild.episodes import reconstruct_episodes
from otel_rollout.rebuild.reconstruction import reconstruct
from otel_rollout.rebuild.warnings import after_sentence

__all__ = [
    "Assembly",
    "after_sentence",
    "reconstruct",
    "reconstruct_episodes",
]
