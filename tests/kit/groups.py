"""A recording with groups, for verbs that list and export them."""

from __future__ import annotations

from typing import Any

import pytest

from otel_rollout import record_reward, rollout
from tests.kit.recording import Clients, Recording


@pytest.fixture
def recorded(recording: Recording, clients: Clients) -> Recording:
    """Three groups of two, a rollout of no group, and one that failed in the second group."""
    client = clients.sync(clients.serve())
    for turn in range(2):
        for group in ("g0", "g1", "g2"):
            with rollout("agent", group_id=group, sample_index=turn):
                message: Any = {"role": "user", "content": f"{group} {turn}"}
                client.chat.completions.create(model="m", messages=[message])
                record_reward(turn)
    with rollout("alone"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(ValueError), rollout("agent", group_id="g1", sample_index=2):
        raise ValueError("no")
    return recording
