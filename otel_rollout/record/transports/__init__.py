"""What model calls are sent with: hooks on HTTP libraries, and what is seen of their bodies.

A POST to a model's path is recorded where the API at that path is known, else it is counted on
its rollout. What a captured client sends belongs to its call. All else passes: outside of
rollouts, and under other paths, nothing is read.
"""

from otel_rollout.record.transports.hooks import Hook as Hook
from otel_rollout.record.transports.hooks import Hooks as Hooks
