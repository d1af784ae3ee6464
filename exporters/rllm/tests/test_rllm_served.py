"""What vLLM sampled, as steps of rLLM's episodes, each a prompt and a response."""

from __future__ import annotations

import pytest
from otel_rollout_rllm import to_rllm_row

from exporters.kit.recomputed import Row
from exporters.kit.served import check, groups, needs_servers

pytestmark = [pytest.mark.trainer, needs_servers]


def test_steps() -> None:
    """Of all trajectories."""
    trajectories = [t for group in groups() for t in group]
    steps = [
        s for t in trajectories for made in to_rllm_row(t)["trajectories"] for s in made["steps"]
    ]
    rows: list[Row] = []
    for step in steps:
        prompt, ids = step["prompt_ids"], step["response_ids"]
        mask = [0] * len(prompt) + [1] * len(ids)
        rows.append((prompt + ids, mask, [0.0] * len(prompt) + step["logprobs"]))
    check(rows, trajectories)
