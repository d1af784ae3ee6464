"""All that looks at trajectories: overviews, findings, drift, verbs, text and page.

Each name is loaded when it is first used; the page's server needs the extra `view`.
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
