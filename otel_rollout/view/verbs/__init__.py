"""The verbs that look at trajectories, each a module that is imported when it is used."""

from otel_rollout.view.verbs.requirements import DEFAULT as DEFAULT
from otel_rollout.view.verbs.requirements import REQUIREMENTS as REQUIREMENTS
