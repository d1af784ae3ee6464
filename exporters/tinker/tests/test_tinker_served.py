"""What vLLM sampled, as datums: ours, and those that the cookbook makes of our transitions."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import tinker
from otel_rollout_tinker import to_tinker_data, to_tinker_trajectory
from tinker_cookbook.rl.data_processing import trajectory_to_data

from exporters.kit.recomputed import Row
from exporters.kit.served import check, groups, needs_servers

pytestmark = [pytest.mark.trainer, needs_servers]


def rows(data: Iterable[tinker.Datum]) -> list[Row]:
    """Each datum in one row again: its targets are the inputs, one further on."""
    found: list[Row] = []
    for datum in data:
        inputs = {name: values.data for name, values in datum.loss_fn_inputs.items()}
        first = datum.model_input.to_ints()[0]
        ids = [first, *map(int, inputs["target_tokens"])]
        mask = [0, *map(int, inputs["mask"])]
        found.append((ids, mask, [0.0, *map(float, inputs["logprobs"])]))
    return found


def test_datums() -> None:
    """Of all trajectories."""
    played = groups()
    data = [datum for group in played for datum in to_tinker_data(group, advantages=[1.0])]
    check(rows(data), [t for group in played for t in group])


def test_the_cookbooks_datums() -> None:
    """Merged by the cookbook itself."""
    trajectories = [t for group in groups() for t in group]
    data = [datum for t in trajectories for datum in trajectory_to_data(to_tinker_trajectory(t), 1)]
    check(rows(data), trajectories)
