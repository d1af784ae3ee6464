"""Workflows: a task run with every ending handled, one or many."""

from otel_rollout.workflows.workflow import Workflow, run_workflows

__all__ = [
    "Workflow",
    "run_workflows",
]
