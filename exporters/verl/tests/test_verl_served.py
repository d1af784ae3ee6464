"""What vLLM sampled, as outputs of verl's agent loop."""

from __future__ import annotations

import pytest
from otel_rollout_verl import to_verl_outputs

from exporters.kit.recomputed import Row
from exporters.kit.served import check, groups, needs_servers

pytestmark = [pytest.mark.trainer, needs_servers]


def test_outputs() -> None:
    """The tensors of each output, prompt and response in one row."""
    trajectories = [t for group in groups() for t in group]
    rows: list[Row] = []
    for trajectory in trajectories:
        for output in to_verl_outputs(trajectory):
            tensors = output.as_dict()
            prompt, ids = tensors["prompts"].tolist(), tensors["responses"].tolist()
            mask = [0] * len(prompt) + tensors["response_mask"].tolist()
            logprobs = [0.0] * len(prompt) + tensors["rollout_log_probs"].tolist()
            rows.append((prompt + ids, mask, logprobs))
    check(rows, trajectories)
