"""Outputs on verl's own class: each sampled token trains once, as it was sampled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from otel_rollout_verl import to_verl_outputs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker

from exporters.kit.agents import AGENTS, Agent, ask, chain, fork, play, run_readme, tool_loop, user
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    Reward,
    gather_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.testing import Reply

pytestmark = pytest.mark.trainer


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_output_is_a_token_sequence(recording: Recording, clients: Clients, agent: Agent):
    """Cut in two at its first sampled token; every admitted token trains in exactly one."""
    trajectory = await play(clients, agent)
    outputs, rows = to_verl_outputs(trajectory), trajectory.token_sequences()
    assert len(outputs) == len(rows) > 0
    for output, row in zip(outputs, rows, strict=True):
        tensors = output.as_dict()
        start = row.prompt_length
        assert tensors["prompts"].tolist() + tensors["responses"].tolist() == row.token_ids
        assert len(tensors["prompts"]) == start > 0
        assert tensors["response_mask"].tolist() == row.loss_mask[start:]
        trained = zip(row.logprobs[start:], row.loss_mask[start:], strict=True)
        assert tensors["rollout_log_probs"].tolist() == [value * mask for value, mask in trained]
        assert output.extra_fields["completion_ids"] == row.completion_ids
    dropped = {id(drop.completion) for drop in rows.dropped}
    admitted = [c for c in trajectory.completions if id(c) not in dropped]
    sampled = sum(len(c.token_ids or ()) for c in admitted)
    assert sum(sum(output.response_mask) for output in outputs) == sampled


async def test_what_verl_does_with_several(recording: Recording, clients: Clients):
    """The reward is on the last; verl gives it to the others, and finds the same fields in all."""
    outputs = to_verl_outputs(await play(clients, fork, reward=0.5))
    assert [output.reward_score for output in outputs] == [None, 0.5]
    final = outputs[-1]
    for output in outputs[:-1]:  # as verl's `_agent_loop_postprocess` of trainer v1
        output.reward_score = final.reward_score
        output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
    fields = [output.as_dict() for output in outputs]
    assert fields[0].keys() == fields[1].keys()
    for output, field in zip(outputs, fields, strict=True):
        assert field["rm_scores"].tolist() == [0.0] * (len(output.response_ids) - 1) + [0.5]
        assert field["extra_fields"]["reward_extra_info"] == {}


async def test_verls_batch(recording: Recording, clients: Clients):
    """Its padding, scores and batch of single outputs: each mask and value is where ours is."""
    worker: Any = object.__new__(AgentLoopWorker)  # without the servers that its constructor wants
    padding: Any = PreTrainedTokenizerFast
    worker.tokenizer = padding(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>"
    )
    worker.rollout_config = SimpleNamespace(prompt_length=64, response_length=128)
    worker.processor = worker.reward_loop_worker_handles = worker.mm_processor_kwargs = None
    worker.distillation_enabled = False
    agents, rewards = (chain, tool_loop), (0.5, -1.0)
    outputs = [
        output
        for agent, reward in zip(agents, rewards, strict=True)
        for output in to_verl_outputs(await play(clients, agent, reward=reward, policy_version=7))
    ]
    padded = [
        await worker._agent_loop_postprocess(output, validate=False, raw_prompt=[])
        for output in outputs
    ]
    made = worker._postprocess(padded)
    assert made.batch["input_ids"].shape == (2, 192)
    for row, (output, reward) in enumerate(zip(outputs, rewards, strict=True)):
        end = len(output.response_ids)
        start = 64 - len(output.prompt_ids)
        ids = made.batch["input_ids"][row].tolist()
        assert ids == [0] * start + output.prompt_ids + output.response_ids + [0] * (128 - end)
        assert made.batch["response_mask"][row, :end].tolist() == output.response_mask
        assert made.batch["response_mask"][row, end:].sum() == 0
        assert made.batch["rollout_log_probs"][row, :end].tolist() == output.response_logprobs
        assert made.batch["rm_scores"][row].nonzero().tolist() == [[end - 1]]
        assert made.batch["rm_scores"][row, end - 1] == reward
    assert made.non_tensor_batch["max_global_steps"].tolist() == [7, 7]
    assert made.non_tensor_batch["__num_turns__"].tolist() == [4, 4]


async def test_turns_steps_and_scores(recording: Recording, clients: Clients):
    """Turns are counted as verl's tool agent does; policy versions are steps, the oldest first."""
    client = clients.asynchronous(clients.serve())
    versions = iter((4, 4, "5", 5))

    @rollout
    async def agent() -> None:
        messages: list[Any] = [{"role": "system", "content": "s"}, user("one")]
        await ask(client, messages)
        messages += [{"role": "tool", "tool_call_id": str(n), "content": "x"} for n in range(2)]
        await ask(client, messages)
        record_reward(1.0)

    trajectory = await gather_trajectory(agent(), policy_version=lambda: next(versions))
    first, second = trajectory.completions
    trajectory.add_reward(Reward(0.25, completion_id=second.id))
    (output,) = to_verl_outputs(trajectory)
    assert output.num_turns == 4  # user, assistant, the tools, assistant
    fields = output.extra_fields
    steps = [int(first.policy_version or 0), int(second.policy_version or 0)]
    assert [fields["min_global_steps"], fields["max_global_steps"]] == steps
    assert steps[0] < steps[1]
    assert fields["turn_scores"] == [0.25]
    assert fields["tool_rewards"] == []
    assert fields["reward_extra_info"] == {}
    assert fields["trajectory_id"] == trajectory.id
    seconds = sum((c.end_time_ns or 0) - c.start_time_ns for c in (first, second)) / 1e9
    assert output.metrics.generate_sequences == pytest.approx(seconds)
    (tools,) = to_verl_outputs(await play(clients, tool_loop))
    assert tools.num_turns == 4


async def test_the_servers_versions_are_steps(recording: Recording, clients: Clients):
    """Weights that changed while a reply was sampled: the oldest and the newest of its tokens."""
    served = Reply("hello", weight_versions=[("7", 2), ("9", 1), ("8", 3)])
    client = clients.asynchronous(clients.serve(served))
    async with rollout("agent") as trajectory:
        await ask(client, [user("hi")])
        trajectory.reward = 1.0
    (output,) = to_verl_outputs(recording.trajectory)
    assert output.extra_fields["min_global_steps"] == 7
    assert output.extra_fields["max_global_steps"] == 9


@pytest.mark.parametrize("version", [None, "step-7", "7.5", "²"])
async def test_versions_that_are_no_steps(recording: Recording, clients: Clients, version: Any):
    """A step that nobody said is not invented."""
    (output,) = to_verl_outputs(await play(clients, chain, policy_version=version))
    assert "min_global_steps" not in output.extra_fields
    assert "max_global_steps" not in output.extra_fields


async def test_what_is_not_scored_is_not_zero(recording: Recording, clients: Clients):
    """It has no score, and no scores by token: verl makes them then."""
    (output,) = to_verl_outputs(await play(clients, chain, reward=None))
    assert output.reward_score is None
    assert "rm_scores" not in output.as_dict()
    (zero,) = to_verl_outputs(await play(clients, chain, reward=0.0))
    assert zero.reward_score == 0.0
    assert "rm_scores" in zero.as_dict()


async def test_failed_rollouts_have_no_output(recording: Recording, clients: Clients):
    """Unless they are scored, or it is asked for."""
    client = clients.asynchronous(clients.serve())

    @rollout
    async def agent() -> None:
        await chain(client)
        raise ValueError("no")

    trajectory = await gather_trajectory(agent(), raise_errors=False)
    assert to_verl_outputs(trajectory) == []
    (kept,) = to_verl_outputs(trajectory, on_failure="keep")
    assert kept.reward_score is None
    trajectory.reward = -1.0
    (scored,) = to_verl_outputs(trajectory)
    assert scored.reward_score == -1.0


async def test_unknown_log_probabilities(recording: Recording, clients: Clients):
    """They are refused where they train, and left to verl if that is asked for."""
    replies = [Reply("a", finish_reason="length"), "b"]
    client = clients.asynchronous(clients.serve(replies, logprobs=False))

    @rollout
    async def agent() -> None:
        messages = [user("one")]
        await ask(client, messages, max_tokens=2)
        await ask(client, [*messages, user("two")], logprobs=True)
        record_reward(1.0)

    trajectory = await gather_trajectory(agent())
    unknown, known = trajectory.completions
    assert unknown.truncated
    with pytest.raises(ExportError, match=f"{unknown.id}.*log-probability.*logprobs=False"):
        to_verl_outputs(trajectory)
    (output,) = to_verl_outputs(trajectory, logprobs=False)
    assert output.response_logprobs is None
    assert "rollout_log_probs" not in output.as_dict()
    (output,) = to_verl_outputs(trajectory, mask_truncated=True)
    assert output.response_logprobs is not None
    assert output.response_logprobs[-len(known.logprobs or ()) :] == known.logprobs
    assert sum(map(bool, output.response_logprobs)) == len(known.logprobs or ())


async def test_long_responses_are_cut_at_their_end(recording: Recording, clients: Clients):
    """On all lists alike; what has nothing to learn any more is no output."""
    trajectory = await play(clients, chain)
    (whole,) = to_verl_outputs(trajectory)
    first = len(trajectory.completions[0].token_ids or ())
    (cut,) = to_verl_outputs(trajectory, response_length=first + 2)
    assert cut.response_ids == whole.response_ids[: first + 2]
    assert cut.response_mask == whole.response_mask[: first + 2] == [1] * first + [0, 0]
    assert cut.response_logprobs == (whole.response_logprobs or [])[: first + 2]
    assert cut.extra_fields["completion_ids"] == [trajectory.completions[0].id]
    assert cut.num_turns == 2
    assert cut.reward_score == 1.0
    forked = await play(clients, fork)
    assert len(to_verl_outputs(forked)) == 2
    shared = len(forked.completions[0].token_ids or ())
    (only,) = to_verl_outputs(forked, response_length=shared)
    assert only.response_mask == [1] * shared
    assert only.reward_score == 1.0
    with pytest.raises(ConfigurationError, match=r"response_length.*got 0"):
        to_verl_outputs(trajectory, response_length=0)


async def test_pictures_do_not_train(recording: Recording, clients: Clients):
    """Token ids hold placeholders where they stand; they are kept where that is asked for."""

    async def look(client: openai.AsyncOpenAI) -> None:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        await ask(client, [{"role": "user", "content": [picture]}, user("what is it?")])

    trajectory = await play(clients, look)
    assert to_verl_outputs(trajectory) == []
    assert len(to_verl_outputs(trajectory, on_media="keep")) == 1


async def test_nothing_sampled_with_ids(recording: Recording, clients: Clients):
    """A server without token ids gives no output, and no made-up ones."""
    client = clients.asynchronous(clients.serve(Reply("hi"), token_ids=False))

    @rollout
    async def agent() -> None:
        await chain(client)
        record_reward(1.0)

    assert to_verl_outputs(await gather_trajectory(agent())) == []


def test_verl_is_imported_only_when_it_is_needed():
    """Files are made without it: a machine that only exports does not need the trainer."""
    code = (
        "import sys, otel_rollout_verl\n"
        "assert not {'verl', 'torch', 'transformers', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_readme_runs(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its code, as it stands."""
    names = run_readme(Path(__file__).parents[1], clients, monkeypatch)
    (output,) = names["outputs"]
    assert isinstance(output, AgentLoopOutput)
    assert output.reward_score == 1.0
    assert output.extra_fields["max_global_steps"] == 7
