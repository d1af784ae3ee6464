"""Workflows: a task run with every ending handled, one or many."""

from otel_rollout.workflows.rllm import RllmTrajectory, rollout_idx
from otel_rollout.workflows.runs import run_workflows
from otel_rollout.workflows.workflow import Workflow

__all__ = ["RllmTrajectory", "Workflow", "rollout_idx", "run_workflows"]
