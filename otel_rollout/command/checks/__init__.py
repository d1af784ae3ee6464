"""The check of a set-up, one module for each thing that is looked at."""

from otel_rollout.command.checks.check import check as check
from otel_rollout.command.checks.process import Finding as Finding
