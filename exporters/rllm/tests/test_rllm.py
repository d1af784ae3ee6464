"""Rows for rLLM: the fields that it documents, and its merge of them gives our token sequences."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from otel_rollout_rllm import RllmRows, to_rllm_episode, to_rllm_row

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
    ConfigurationError,
    Episode,
    ExportError,
    Reward,
    TerminationReason,
    TrajectoryGroup,
    gather_trajectory,
    rollout,
)
from otel_rollout.export import row_exporter, row_exporter_from_texts

pytestmark = pytest.mark.trainer

EPISODE = {
    *("id", "task", "termination_reason", "is_correct", "session_id", "trajectories", "metrics"),
    "info",
}
TRAJECTORY = {"uid", "name", "task", "steps", "reward", "info", "signals", "output"}
STEP = {
    *("prompt_ids", "response_ids", "logprobs", "routing_matrices", "chat_completions"),
    *("observation", "thought", "action", "model_response", "model_output", "info", "reward"),
    *("done", "mc_return", "advantage", "weight_version"),
}
OUTPUT = {
    *("text", "content", "reasoning", "tool_calls", "prompt_ids", "completion_ids"),
    *("multi_modal_inputs", "logprobs", "prompt_logprobs", "routing_matrices", "prompt_length"),
    *("completion_length", "finish_reason", "weight_version", "metrics"),
}


def merged(steps: list[dict[str, Any]]) -> list[tuple[list[int], list[int], list[float]]]:
    """What rLLM makes of steps: one running row, which ends where a prompt does not go on."""
    rows: list[tuple[list[int], list[int], list[float]]] = []
    for step in steps:
        output = step["model_output"]
        prompt, ids, logprobs = output["prompt_ids"], output["completion_ids"], output["logprobs"]
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], [], []))
        tokens, mask, known = rows[-1]
        new = prompt[len(tokens) :]
        tokens += [*new, *ids]
        mask += [0] * len(new) + [1] * len(ids)
        known += [0.0] * len(new) + logprobs
    return rows


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_its_rows_are_ours(recording: Recording, clients: Clients, agent: Agent):
    """Ids and masks are those of our token sequences, each reply trains once."""
    trajectory = await play(clients, agent)
    (row,) = to_rllm_row(trajectory)["trajectories"]
    ours = trajectory.token_sequences()
    assert [(ids, mask) for ids, mask, _ in merged(row["steps"])] == [
        (sequence.token_ids, sequence.loss_mask) for sequence in ours
    ]
    for (_, mask, logprobs), sequence in zip(merged(row["steps"]), ours, strict=True):
        trained = [p for p, m in zip(logprobs, mask, strict=True) if m]
        assert trained == [
            p for p, m in zip(sequence.logprobs, sequence.loss_mask, strict=True) if m
        ]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_the_documented_fields(recording: Recording, clients: Clients, agent: Agent):
    """All of them, none else; a step and its model output say the same."""
    trajectory = await play(clients, agent)
    row = json.loads(json.dumps(to_rllm_row(trajectory), allow_nan=False))
    assert set(row) == EPISODE
    (inner,) = row["trajectories"]
    assert set(inner) == TRAJECTORY
    for step in inner["steps"]:
        assert set(step) == STEP
        output = step["model_output"]
        assert set(output) == OUTPUT
        assert step["prompt_ids"] == output["prompt_ids"]
        assert step["response_ids"] == output["completion_ids"]
        assert step["logprobs"] == output["logprobs"]
        assert len(step["logprobs"]) == len(step["response_ids"]) == output["completion_length"]
        assert step["chat_completions"][-1]["role"] == "assistant"
    assert [step["done"] for step in inner["steps"]] == [False] * (len(inner["steps"]) - 1) + [True]


async def test_conversations_are_not_torn(recording: Recording, clients: Clients):
    """Agents that take turns come one after the other: rLLM has one running row."""
    (row,) = to_rllm_row(await play(clients, interleaved))["trajectories"]
    assert [len(step["chat_completions"]) for step in row["steps"]] == [2, 4, 2, 4]


async def test_what_a_step_says(recording: Recording, clients: Clients):
    """The conversation as it was on the wire, its reward, the version, what was done."""
    trajectory = await play(clients, tool_loop, policy_version=7)
    first = trajectory.completions[0]
    trajectory.add_reward(Reward(0.25, completion_id=first.id))
    trajectory.steps[0].action = {"tool": "add"}
    (row,) = to_rllm_row(trajectory)["trajectories"]
    step, last = row["steps"]
    call = step["chat_completions"][-1]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"a":  1, "b": "Zürich"}'
    assert (step["reward"], step["action"]) == (0.25, {"tool": "add"})
    assert (step["weight_version"], step["model_output"]["weight_version"]) == (7, 7)
    assert step["model_output"]["finish_reason"] == "tool_calls"
    assert last["chat_completions"][0] == step["chat_completions"][0]
    assert last["chat_completions"][2]["role"] == "tool"
    assert last["model_response"] == last["model_output"]["content"]


async def test_ids_that_rllm_takes_apart(recording: Recording, clients: Clients):
    """`task:index`: of the task, the group or the trajectory; colons would be mistaken."""
    plain = await play(clients, chain)
    assert to_rllm_row(plain)["id"] == f"{plain.id}:0"
    assert to_rllm_row(await play(clients, chain, group_id="g"), index=3)["id"] == "g:3"
    named = await play(clients, chain, task_id="t", group_id="g", sample_index=2)
    assert to_rllm_row(named)["id"] == "t:2"
    assert to_rllm_row(Episode(id="t:5", trajectories=[named]))["id"] == "t:5"
    wrong = await play(clients, chain, task_id="gsm8k:12")
    with pytest.raises(ExportError, match=r"'gsm8k:12:0'.*without a colon"):
        to_rllm_row(wrong)
    named = copy.copy(named)
    named.name = "solver:a"
    with pytest.raises(ExportError, match=r"'solver:a'.*have no colon"):
        to_rllm_row(named)


async def test_an_episode_with_its_trajectories(recording: Recording, clients: Clients):
    """What the workflow judged is there; a judge that is not to be trained on is not."""
    solver = await play(clients, chain)
    judge = await play(clients, tool_loop, reward=None, trainable=False)
    episode = Episode(
        id="t:0",
        task={"question": "?"},
        trajectories=[solver, judge],
        is_correct=True,
        metrics={"turns": 2},
        termination_reason=TerminationReason.MAX_TURNS_EXCEEDED,
    )
    row = to_rllm_row(episode)
    assert [t["uid"] for t in row["trajectories"]] == [solver.id]
    assert (row["is_correct"], row["task"]) == (True, {"question": "?"})
    assert (row["termination_reason"], row["metrics"]) == ("max_turns_exceeded", {"turns": 2})


async def test_a_group_with_failures(recording: Recording, clients: Clients, tmp_path: Path):
    """One that failed is an episode without trajectories, in its place."""
    group = await play_group(clients, [1.0, None, 0.0])
    exporter = row_exporter("rllm", correct_from=0.5)
    (tmp_path / "part").write_text("".join(json.dumps(r) + "\n" for r in exporter.rows(group)))
    exporter.finish(tmp_path / "part", tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"{group.key}:{number}" for number in range(3)]
    assert [row["is_correct"] for row in rows] == [True, False, False]
    assert [row["termination_reason"] for row in rows] == ["env_done", "error", "env_done"]
    assert [[t["reward"] for t in row["trajectories"]] for row in rows] == [[1.0], [], [0.0]]
    assert rows[1]["info"]["error"]["message"] == "no"


async def test_a_reward_that_is_not_known_is_not_zero(recording: Recording, clients: Clients):
    """Refused or left out; the reward of the last step counts, as it does for rLLM."""
    trajectory = await play(clients, chain, reward=None)
    with pytest.raises(ExportError, match=f"{trajectory.id}.*has no reward.*unscored='drop'"):
        to_rllm_row(trajectory)
    assert list(RllmRows(unscored="drop").rows(TrajectoryGroup.of([trajectory]))) == []
    trajectory.add_reward(Reward(0.5, completion_id=trajectory.completions[-1].id))
    (row,) = to_rllm_row(trajectory)["trajectories"]
    assert (row["reward"], row["steps"][-1]["reward"]) == (None, 0.5)


async def test_what_cannot_train_is_said(recording: Recording, clients: Clients):
    """No ids, or no log-probabilities: refused, with what to do."""
    for options, reason in (
        ({"token_ids": False}, "sends token ids to those who ask|sent no token ids"),
        ({"logprobs": False}, "needs the log-probability.*request_token_ids"),
    ):
        client = clients.asynchronous(clients.serve("hello", **options))

        @rollout
        async def agent(client: Any = client) -> None:
            await ask(client, [user("hi")])

        trajectory = await gather_trajectory(agent())
        trajectory.reward = 1.0
        with pytest.raises(ExportError, match=reason):
            to_rllm_row(trajectory)


async def test_images_are_refused(recording: Recording, clients: Clients):
    """Token ids say nothing of them."""
    client = clients.asynchronous(clients.serve("a cat"))

    @rollout
    async def agent() -> None:
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        await ask(client, [{"role": "user", "content": [image]}])

    trajectory = await gather_trajectory(agent())
    trajectory.reward = 1.0
    with pytest.raises(ExportError, match="has image_url, for which its token ids"):
        to_rllm_row(trajectory)


def test_wrong_options_are_named():
    """At start-up, with what was expected."""
    with pytest.raises(ConfigurationError, match="unscored: expected"):
        row_exporter_from_texts("rllm", {"unscored": "zero"})
    with pytest.raises(ConfigurationError, match="correct_from: expected"):
        row_exporter_from_texts("rllm", {"correct_from": "high"})


async def test_live_episodes(recording: Recording, clients: Clients):
    """Where rLLM is installed, its own class reads a row."""
    pytest.importorskip("rllm.types", reason="rLLM is on no package index")
    trajectory = await play(clients, tool_loop, task_id="t", sample_index=1)
    trajectory.rewards["style"] = 0.5
    episode = to_rllm_episode(trajectory)
    assert (episode.task_id, episode.rollout_idx) == ("t", "1")
    (inner,) = episode.trajectories
    assert inner.signals == {"style": 0.5}
    assert [step.model_output.completion_ids for step in inner.steps] == [
        c.token_ids for c in trajectory.completions
    ]


def test_the_readme_runs(recording: Recording, clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its example gives an episode with a step that trains."""
    row = run_readme(Path(__file__).parents[1], clients, monkeypatch)["row"]
    assert row["id"] == "sum:0"
    assert len(row["trajectories"][0]["steps"]) == 1
