"""What an agent's own code may use inside a rollout: its trajectory, rewards, tools."""

from otel_rollout.record.inside.tools import tool as tool
