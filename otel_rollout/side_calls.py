"""Rules for side calls: calls beside the task, such as titles, which are kept and do not train.

`configure(side_calls=[...])` and `Trajectory.with_side_calls` take rules. Users import this module,
the package itself does not.
"""

from otel_rollout.trajectory import Rule as Rule
from otel_rollout.trajectory import SideCalls as SideCalls
from otel_rollout.trajectory import known_side_call as known_side_call
from otel_rollout.trajectory import without_tools as without_tools
