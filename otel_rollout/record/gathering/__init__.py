"""Many rollouts at once, their trajectories in order, and how far they are."""

from otel_rollout.record.gathering.gather import gather_trajectories as gather_trajectories
