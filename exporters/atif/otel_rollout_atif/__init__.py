"""Trajectories as ATIF 1.8, the format of Harbor and Terminal-Bench, without loss.

A document is what any reader of ATIF shows and trains; our own record of the trajectory is in its
`extra.otel_rollout.trajectory`, so that it comes back equal.

to_atif             the document of a trajectory, with those of its forks and sub-agents in it
from_atif           the trajectories of a document, whoever wrote it
to_rollout_details  token ids and log-probabilities as Harbor's agents hand them to trainers
"""

from otel_rollout_atif.document import from_atif, to_atif, to_rollout_details
from otel_rollout_atif.files import AtifRows

__all__ = ["AtifRows", "from_atif", "to_atif", "to_rollout_details"]
