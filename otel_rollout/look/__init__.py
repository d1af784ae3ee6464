"""The look lane: LLM spans for people to look at, and the queue of spans on their way out.

An instrumentor loads hundreds of modules: it is imported where it is asked for.
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
