"""Rows for trainers: nothing but other names for what token sequences hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import (
    ConfigurationError,
    RowExporter,
    TrajectoryGroup,
    gather_group,
    gather_trajectory,
    record_reward,
    rollout,
    to_token_rows,
)
from otel_rollout.rows import row_exporter
from tests.conftest import Clients, Recording


async def play(clients: Clients, rewards: list[float | None]) -> TrajectoryGroup:
    """A group of agents that each have two conversations."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent(reward: float | None) -> None:
        for text in ("one", "two"):
            message: Any = {"role": "user", "content": text}
            await client.chat.completions.create(model="m", messages=[message])
        if reward is not None:
            record_reward(reward)

    return await gather_group([agent(r) for r in rewards], group_id="g", policy_version=3)


async def test_a_row_is_a_token_sequence(recording: Recording, clients: Clients):
    """Its lists are those of the sequence, and it says which trajectory it is of."""
    group = await play(clients, [1.0])
    (trajectory,) = group.trajectories
    rows = to_token_rows([trajectory])
    sequences = trajectory.token_sequences()
    assert len(rows) == len(sequences) == 2
    for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        assert row["input_ids"] == sequence.token_ids
        assert row["loss_mask"] == sequence.loss_mask
        assert row["logprobs"] == sequence.logprobs
        assert row["sampled"] == sequence.sampled
        assert row["prompt_length"] == sequence.prompt_length
        assert row["completion_ids"] == sequence.completion_ids
        assert row["policy_versions"] == [3]
        assert (row["row"], row["rows"]) == (number, 2)
        assert (row["trajectory_id"], row["group_id"]) == (trajectory.id, "g")
        assert row["advantage"] is None


@pytest.mark.parametrize(
    ("credit", "rewards", "advantages"),
    [
        ("broadcast", [1.0, 1.0, 0.0, 0.0], [0.5, 0.5, -0.5, -0.5]),
        ("split", [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, -0.25, -0.25]),
        ("last", [0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, -0.5]),
    ],
)
async def test_what_each_row_of_a_trajectory_gets(
    recording: Recording, clients: Clients, credit: Any, rewards: Any, advantages: Any
):
    """Advantages are relative to trajectories, never to rows."""
    rows = to_token_rows(await play(clients, [1.0, 0.0]), credit=credit)
    assert [row["reward"] for row in rows] == rewards
    assert [row["advantage"] for row in rows] == advantages


async def test_unknown_rewards_stay_unknown(recording: Recording, clients: Clients):
    """A trajectory that nobody scored has neither reward nor advantage."""
    rows = to_token_rows(await play(clients, [None, 2.0]))
    assert [row["reward"] for row in rows] == [None, None, 2.0, 2.0]
    assert [row["advantage"] for row in rows] == [None, None, 0.0, 0.0]


def test_a_wrong_credit_is_named():
    """What was expected is said."""
    wrong: Any = "all"
    with pytest.raises(ConfigurationError, match="expected 'broadcast', 'split' or 'last'"):
        to_token_rows([], credit=wrong)


async def test_the_exporter_that_is_always_there(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """`tokens` is found by its name, and writes the same rows."""
    exporter = row_exporter("tokens", credit="split", max_length="4")
    assert isinstance(exporter, RowExporter)
    group = await play(clients, [1.0])
    rows = list(exporter.rows(group))
    assert rows == to_token_rows(group, credit="split", max_length=4)
    lines = tmp_path / "rows.part"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exporter.finish(lines, tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert not lines.exists()


async def test_failed_rollouts_only_if_asked_for(recording: Recording, clients: Clients):
    """`on_failure=keep` gives the rows of rollouts that failed without a reward."""
    client = clients.asynchronous(clients.serve("hello"))

    @rollout
    async def agent() -> None:
        message: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="m", messages=[message])
        raise ValueError("no")

    failed = TrajectoryGroup.of([await gather_trajectory(agent(), raise_errors=False)])
    assert list(row_exporter("tokens").rows(failed)) == []
    (row,) = row_exporter("tokens", on_failure="keep").rows(failed)
    assert row["reward"] is None
    assert not any(math.isnan(value) for value in row["logprobs"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "there is no exporter 'nothing': installed are .*tokens"),
        ("tokens", {"colour": "red"}, "exporter 'tokens': .*colour"),
    ],
)
def test_what_is_not_there_is_named(name: str, options: dict[str, Any], message: str):
    """An unknown exporter lists those that are installed; an unknown option is said."""
    with pytest.raises(ConfigurationError, match=message):
        row_exporter(name, **options)
