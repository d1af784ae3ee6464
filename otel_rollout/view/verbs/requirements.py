"""What can be required of trajectories before they are trained on: a closed set of words."""

from __future__ import annotations

WHOLE = "whole"
REQUIREMENTS: dict[str, tuple[str | None, str]] = {
    "complete": ("incomplete", "every model call of its rollout is in it"),
    "undamaged": ("damaged", "all that was recorded can be read, and is the rollout's"),
    "exact": ("inexact", "token ids and log-probabilities are there, as they were sampled"),
    "tokens": (None, "at least one token of it trains"),
    "reward": ("unscored", "it has a reward"),
    "unique": ("duplicate", "its id, and those of its responses, are there once"),
    WHOLE: (None, "no sample of its group is missing, or there too often"),
    "no-drift": ("drift", "calls that continue a conversation continue its token ids"),
    "no-failures": ("failed", "neither the rollout nor a call failed or was cancelled"),
    "no-truncation": ("truncated", "the model ended every reply itself"),
    "no-side-calls": ("side_call", "no call was made beside the agent"),
    "one-policy": ("mixed_policy", "one policy version sampled all that trains, as far as known"),
    "certain": ("uncertain", "each call's place in its conversation is unambiguous"),
}
"""The kind of finding that fails each, and what it asks for; `tokens` is no kind of its own, and
`whole` is asked of groups."""
DEFAULT = ("complete", "undamaged", "exact", "tokens", "reward", "unique", WHOLE)
"""What is required where nothing else is said: what a trainer needs."""
TO_TRAIN_ON = ("exact", "tokens", "reward")
"""Required only of trajectories that are to be trained on (`trainable`)."""
