"""Hooks for HTTP libraries, for the model calls that no hook of a client library sees.

A POST to a model's path is recorded where the API at that path is known, else it is counted on
its rollout. What a captured client sends belongs to its call. All else passes: outside of
rollouts, and under other paths, nothing is read.
"""

from otel_rollout.record.transports.libraries import TRANSPORTS as TRANSPORTS
