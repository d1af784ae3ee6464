"""Workflows: run tasks with one or more agents and get an episode for each run; rLLM's words.

Reading episodes loads no SDK: names load their module when they are first used.
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
