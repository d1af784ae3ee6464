"""Spans in, trajectories out, whatever the source and the order of the spans. Pure."""

from otel_rollout.rebuild.assembly import Assembly as Assembly
from otel_rollout.rebuild.late_rewards import apply_rewards as apply_rewards
from otel_rollout.rebuild.reconstruction import reconstruct as reconstruct
from otel_rollout.rebuild.reconstruction import reconstruct_episodes as reconstruct_episodes
