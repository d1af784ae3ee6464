"""The toy that learns: what the trainer reads is exact, and it is what the learning rests on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest

from examples import train_toy
from otel_rollout import TrajectoryGroup, request_token_ids, to_token_rows
from tests.kit.calling import Configure
from tests.kit.recording import Clients, Recording

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]
PATIENT = openai.Timeout(600, connect=60)
"""The client's own 5 s to connect fail rollouts where the machine is busy."""


async def train(
    clients: Clients,
    steps: int,
    damage: Callable[[train_toy.Policy, Rows], None] | None = None,
    samples: int = 8,
) -> list[float]:
    """Mean reward of each step, where `damage` may change the rows before they are learned."""
    policy = train_toy.Policy()
    client = clients.asynchronous(clients.serve(policy.answer), timeout=PATIENT)
    curve: list[float] = []
    for _ in range(steps):
        with request_token_ids():
            groups = await train_toy.collect(client, policy, samples)
        rows = [row for group in groups for row in to_token_rows(group)]
        if damage is not None:
            damage(policy, rows)
        policy.learn(rows)
        curve.append(train_toy.means(groups)["reward"])
    return curve


def recomputed(policy: train_toy.Policy, ids: Sequence[int]) -> list[float]:
    """How probable each of these ids is to the policy, behind those before it."""
    rows = policy.logprobs(policy.states(ids)[:-1])
    return [float(row[token_id]) for row, token_id in zip(rows, ids, strict=True)]


async def test_rows_are_what_the_policy_said(recording: Recording, clients: Clients):
    """Ids, log-probabilities and versions are the policy's own, and each sampled id trains once."""
    policy = train_toy.Policy()
    client = clients.asynchronous(clients.serve(policy.answer), timeout=PATIENT)
    collected: list[tuple[train_toy.Policy, list[TrajectoryGroup]]] = []
    for _ in range(3):
        with request_token_ids():
            groups = await train_toy.collect(client, policy, 4)
        collected.append((copy.deepcopy(policy), groups))
        policy.learn([row for group in groups for row in to_token_rows(group)])
    differ = 0
    for then, groups in collected:
        assert len(groups) == len(train_toy.DOORS)
        for trajectory in (trajectory for group in groups for trajectory in group):
            assert trajectory.warnings == []
            sequences = trajectory.token_sequences()
            assert sequences.dropped == []
            trained: list[str] = []
            for row in to_token_rows([trajectory]):
                assert set(row["policy_versions"]) == {then.version}
                assert row["loss_mask"] == row["sampled"]
                exact = recomputed(then, row["input_ids"])
                later = recomputed(policy, row["input_ids"])
                for at, mask in enumerate(row["loss_mask"]):
                    if mask:
                        assert row["logprobs"][at] == pytest.approx(exact[at], abs=1e-12)
                        differ += abs(row["logprobs"][at] - later[at]) > 1e-3
                    else:
                        assert row["logprobs"][at] == 0.0
                trained += row["completion_ids"]
            assert sorted(trained) == sorted(c.id for c in trajectory.completions)
            sampled = sum(len(completion.token_ids or ()) for completion in trajectory.completions)
            assert sum(sum(sequence.loss_mask) for sequence in sequences) == sampled > 0
    assert differ > 100


def imitate_tools(policy: train_toy.Policy, rows: Rows) -> None:
    """Train on every id, also on what users and tools said."""
    for row in rows:
        row["logprobs"] = recomputed(policy, row["input_ids"])
        row["loss_mask"] = [1] * len(row["input_ids"])


def one_late(policy: train_toy.Policy, rows: Rows) -> None:
    """The mask is off by one."""
    for row in rows:
        row["logprobs"] = recomputed(policy, row["input_ids"])
        row["loss_mask"] = [0, *row["loss_mask"][:-1]]


def shuffle(policy: train_toy.Policy, rows: Rows) -> None:
    """Every run has the advantage of another one."""
    advantages = [row["advantage"] for row in rows]
    random.Random(policy.version).shuffle(advantages)
    for row, advantage in zip(rows, advantages, strict=True):
        row["advantage"] = advantage


async def test_it_learns(capture_only: Configure, clients: Clients):
    """The reward rises from chance to most of what there is."""
    capture_only()
    curve = await train(clients, 14)
    assert curve[0] < 0.15
    assert sum(curve[-3:]) / 3 > 0.7


@pytest.mark.parametrize("damage", [imitate_tools, one_late, shuffle])
async def test_it_does_not_learn_from_damaged_rows(
    capture_only: Configure,
    clients: Clients,
    damage: Callable[[train_toy.Policy, Rows], None],
):
    """What the rows say is needed: with a wrong mask or another's rewards it fails."""
    capture_only()
    curve = await train(clients, 14, damage)
    assert sum(curve[-3:]) / 3 < 0.6


async def test_the_same_seed_gives_the_same_numbers(capture_only: Configure, clients: Clients):
    """However the threads of the server take turns."""
    capture_only()
    assert await train(clients, 3, samples=4) == await train(clients, 3, samples=4)
