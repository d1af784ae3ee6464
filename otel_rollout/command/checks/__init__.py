"""The check of a set-up, one module for each thing that is looked at."""

from otel_rollout.command.checks.check import check
from otel_rollout.command.checks.finding import Finding

__all__ = [
    "Finding",
    "check",
]
