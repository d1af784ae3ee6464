"""What Agent Lightning's own daemon makes of our triplets is our token sequences."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import agentlightning
import pytest
import torch
from agentlightning import RolloutLegacy, Triplet
from otel_rollout_agentlightning import AgentlightningRows, to_triplet_rows, to_triplets

from exporters.kit.agents import (
    AGENTS,
    Agent,
    ask,
    chain,
    interleaved,
    play,
    play_group,
    run_readme,
    tool_loop,
    user,
)
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ExportError,
    Reward,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    rollout,
)
from otel_rollout.export import row_exporter

pytestmark = pytest.mark.trainer


def batch(row: dict[str, Any], level: str) -> list[tuple[list[int], list[int], float]]:
    """Ids, mask and reward of each sample that the daemon makes of one rollout."""
    # Its package imports more of verl than the daemon needs, and its constructor starts servers.
    path = Path(agentlightning.__file__).parent / "verl" / "daemon.py"
    spec = importlib.util.spec_from_file_location("agentlightning_daemon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    daemon = object.__new__(module.AgentModeDaemon)
    made = RolloutLegacy.model_validate(row)
    daemon.__dict__ |= {
        "is_train": True,
        "_completed_rollouts_v0": {made.rollout_id: made},
        "_total_tasks_queued": 1,
        "_task_id_to_original_sample": {made.rollout_id: {"data_id": "d"}},
        "trace_aggregator": {"level": level},
        "pad_token_id": 0,
        "reward_fillna_value": -1.0,
        "tokenizer": None,
        "_use_mrope": False,
    }
    data, _ = daemon.get_train_data_batch(400, 400, torch.device("cpu"), 0)
    tensors = data.batch
    found = []
    for index in range(len(tensors["input_ids"])):
        kept = tensors["attention_mask"][index].bool()
        mask = torch.zeros_like(kept, dtype=torch.long)
        mask[400:] = tensors["response_mask"][index] if level == "trajectory" else kept[400:]
        reward = tensors["token_level_scores"][index].sum().item()
        found.append((tensors["input_ids"][index][kept].tolist(), mask[kept].tolist(), reward))
    return found


def row_of(trajectory: Trajectory) -> dict[str, Any]:
    (row,) = AgentlightningRows().rows(TrajectoryGroup.of([trajectory]))
    result: dict[str, Any] = json.loads(json.dumps(row, allow_nan=False))
    return result


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_its_samples_are_our_rows(recording: Recording, clients: Clients, agent: Agent):
    """Put together by the daemon, triplets are the token sequences, with the reward on each."""
    trajectory = await play(clients, agent, 0.5)
    rows = trajectory.token_sequences()
    assert batch(row_of(trajectory), "trajectory") == [
        (row.token_ids, row.loss_mask, 0.5) for row in rows
    ]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_a_triplet_is_a_call(recording: Recording, clients: Clients, agent: Agent):
    """Prompt and response are the ids of the completion; each completion is there once."""
    trajectory = await play(clients, agent)
    expected = [
        (c.id, c.choice_index, c.prompt_token_ids, c.token_ids, c.logprobs)
        for c in trajectory.completions
        if c.trainable
    ]
    triplets = to_triplets(trajectory)
    assert all(isinstance(triplet, Triplet) for triplet in triplets)
    found = [
        (
            t.metadata["response_id"],
            t.metadata["choice_index"],
            t.prompt["token_ids"],
            t.response["token_ids"],
            [entry["logprob"] for entry in t.response["logprobs"]],
        )
        for t in triplets
    ]
    assert sorted(found) == sorted(expected)
    samples = batch(row_of(trajectory), "transition")
    assert [ids for ids, _, _ in samples] == [
        t.prompt["token_ids"] + t.response["token_ids"] for t in triplets
    ]


async def test_conversations_are_not_torn(recording: Recording, clients: Clients):
    """Agents that take turns come one after the other, which is not the order of their calls."""
    trajectory = await play(clients, interleaved)
    order = [t.metadata["response_id"] for t in to_triplets(trajectory)]
    by_time = [c.id for c in trajectory.completions]
    assert order == [by_time[0], by_time[2], by_time[1], by_time[3]]


async def test_rewards_stay_where_they_belong(recording: Recording, clients: Clients):
    """Steps have theirs, the last has the trajectory's; what is not known stays None."""
    trajectory = await play(clients, chain, reward=None)
    assert [t.reward for t in to_triplets(trajectory)] == [None, None]
    assert row_of(trajectory)["final_reward"] is None
    first, last = trajectory.completions
    trajectory.add_reward(Reward(0.25, completion_id=first.id))
    trajectory.add_reward(Reward(0.5, completion_id=last.id))
    assert [t.reward for t in to_triplets(trajectory)] == [0.25, 0.5]
    trajectory.reward = 0.0
    assert [t.reward for t in to_triplets(trajectory)] == [0.25, 0.0]
    assert [t.metadata["step_reward"] for t in to_triplets(trajectory)] == [0.25, 0.5]


async def test_what_was_said_is_there_to_read(recording: Recording, clients: Clients):
    """Messages as they were on the wire, tools, versions, the name of the agent."""
    trajectory = await play(clients, tool_loop, policy_version=7)
    first, last = to_triplets(trajectory)
    arguments = first.response["raw_content"][0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"a":  1, "b": "Zürich"}'
    assert last.prompt["raw_content"][-1]["role"] == "tool"
    assert first.metadata["agent_name"] == "tool_loop"
    assert first.metadata["policy_version"] == 7
    assert first.metadata["request"]["tools"][0]["function"]["name"] == "add"
    assert first.metadata["response"]["finish_reason"] == "tool_calls"


async def test_images_are_named(recording: Recording, clients: Clients):
    """Both spellings of an image's URL are found."""
    client = clients.asynchronous(clients.serve("a cat"))
    url = "data:image/png;base64,AAAA"

    @rollout
    async def agent() -> None:
        parts: list[Any] = [
            {"type": "text", "text": "what?"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        await ask(client, [{"role": "user", "content": parts}])

    (triplet,) = to_triplets(await gather_trajectory(agent()))
    assert triplet.prompt["image_urls"] == [url]


async def test_a_group_and_its_failures(recording: Recording, clients: Clients, tmp_path: Path):
    """A line for each rollout that trains; one that failed without a reward has none."""
    group = await play_group(clients, [1.0, None, 0.0])
    exporter = row_exporter("agentlightning")
    (tmp_path / "part").write_text("".join(json.dumps(r) + "\n" for r in exporter.rows(group)))
    exporter.finish(tmp_path / "part", tmp_path / "rows.jsonl")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    read = [RolloutLegacy.model_validate_json(line) for line in lines]
    assert [r.final_reward for r in read] == [1.0, 0.0]
    assert [r.rollout_id for r in read] == [t.id for t in group]
    assert to_triplet_rows(group.failures[0]) == []


async def test_what_cannot_train_is_said(recording: Recording, clients: Clients):
    """A server without token ids: refused, and the reason given."""
    client = clients.asynchronous(clients.serve("hello", token_ids=False))

    @rollout
    async def agent() -> None:
        await ask(client, [user("hi")])

    trajectory = await gather_trajectory(agent())
    with pytest.raises(ExportError, match=f"{trajectory.id}.*sends token ids to those who ask"):
        to_triplets(trajectory)
    judge = await gather_trajectory(agent(), trainable=False)
    assert to_triplets(judge) == []


async def test_sound_is_refused(recording: Recording, clients: Clients):
    """Neither token ids nor messages give it to the trainer."""
    client = clients.asynchronous(clients.serve("a bell"))

    @rollout
    async def agent() -> None:
        audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
        await ask(client, [{"role": "user", "content": [audio]}])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    with pytest.raises(ExportError, match="holds input_audio"):
        to_triplets(trajectory)


def test_the_readme_runs(recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its example gives a triplet."""
    (triplet,) = run_readme(Path(__file__).parents[1], clients, monkeypatch)["triplets"]
    assert isinstance(triplet, Triplet)
    assert triplet.reward == 1.0
