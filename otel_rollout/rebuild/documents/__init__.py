"""Trajectories from documents of other programs: one module for each format.

As of other instrumentations' spans (`rebuild/dialects`), no format keeps a whole call: what is read
names its format (`source`) and what that loses (`lost`). A document that an exporter of ours wrote
has our own record in `extra.otel_rollout.trajectory`, and comes back equal.

To add a format: a module with a `FORMAT`, and an entry point `otel_rollout_source` (`formats/`,
`exporters/atif`).
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
