"""What vLLM sampled, as rows of TRL's trainers."""

from __future__ import annotations

import pytest
from otel_rollout_trl import to_trl_async_samples, to_trl_rollout

from exporters.kit.recomputed import Row
from exporters.kit.served import check, groups, needs_servers

pytestmark = [pytest.mark.trainer, needs_servers]


def test_async_samples() -> None:
    """Of each trajectory, all rows."""
    played = groups()
    rows: list[Row] = [
        (s.input_ids.tolist(), s.completion_mask.tolist(), s.old_log_probs.tolist())
        for group in played
        for s in to_trl_async_samples(group, group_id=0, model_version=0)
    ]
    check(rows, [t for group in played for t in group])


def test_rollouts_of_one_row() -> None:
    """GRPOTrainer takes those."""
    trajectories = [t for g in groups() for t in g if len(t.token_sequences()) == 1]
    columns = to_trl_rollout(trajectories)
    rows: list[Row] = []
    for row in range(len(trajectories)):
        prompt, ids = columns["prompt_ids"][row], columns["completion_ids"][row]
        mask = [0] * len(prompt) + columns["env_mask"][row]
        rows.append((prompt + ids, mask, [0.0] * len(prompt) + columns["logprobs"][row]))
    check(rows, trajectories)
