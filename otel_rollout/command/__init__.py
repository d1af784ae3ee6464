"""The command `otel-rollout`."""

from otel_rollout.command.cli import main as main
