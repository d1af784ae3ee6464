"""The look lane: LLM spans for people to look at, drawn by an instrumentor behind a guard."""

from otel_rollout.look import instrumentors

__all__ = ["instrumentors"]
