"""What vLLM sampled, as Agent Lightning's triplets."""

from __future__ import annotations

import pytest
from otel_rollout_agentlightning import to_triplets

from exporters.kit.recomputed import Row
from exporters.kit.served import check, groups, needs_servers

pytestmark = [pytest.mark.trainer, needs_servers]


def test_triplets() -> None:
    """Of all trajectories."""
    trajectories = [t for group in groups() for t in group]
    rows: list[Row] = []
    for triplet in (made for t in trajectories for made in to_triplets(t)):
        prompt, ids = triplet.prompt["token_ids"], triplet.response["token_ids"]
        logprobs = [entry["logprob"] for entry in triplet.response["logprobs"]]
        mask = [0] * len(prompt) + [1] * len(ids)
        rows.append((prompt + ids, mask, [0.0] * len(prompt) + logprobs))
    check(rows, trajectories)
