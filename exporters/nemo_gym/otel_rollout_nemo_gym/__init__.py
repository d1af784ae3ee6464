"""Trajectories for NeMo Gym and NeMo RL: the token ids of each model call, as Gym captures them.

Gym marks rollouts and not calls: a rollout that lacks the ids of a reply is `incomplete`, and the
calls of it that have them are there all the same.

to_token_entries  the entries of a trajectory, and whether it is incomplete
TrajectoryTokens  a TokenSource over trajectories, of this process or of files
"""

from otel_rollout_nemo_gym.entries import Capture, NemoGymRows, to_token_entries
from otel_rollout_nemo_gym.source import TrajectoryTokens

__all__ = ["Capture", "NemoGymRows", "TrajectoryTokens", "to_token_entries"]
