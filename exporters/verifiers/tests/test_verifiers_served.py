"""What vLLM sampled, as branches of verifiers' traces."""

from __future__ import annotations

import pytest
from otel_rollout_verifiers import to_trace

from exporters.kit.recomputed import Row
from exporters.kit.served import check, groups, needs_servers

pytestmark = [pytest.mark.trainer, needs_servers]


def test_branches() -> None:
    """A node that two branches share is sampled in both, and counts in the first."""
    trajectories = [t for group in groups() for t in group]
    rows: list[Row] = []
    for trajectory in trajectories:
        seen: set[int] = set()
        for branch in to_trace(trajectory).branches:
            mask: list[int] = []
            for node in branch.nodes:
                mask += [int(m and id(node) not in seen) for m in node.mask]
                seen.add(id(node))
            rows.append((branch.token_ids, mask, branch.logprobs))
    check(rows, trajectories)
