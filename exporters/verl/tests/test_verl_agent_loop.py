"""The example's agent loop in verl's own worker, and what verl's loss makes of its outputs."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hydra import compose, initialize_config_module
from transformers import GraniteConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

from examples import verl_agent_loop
from examples.tiny_model import Policy
from exporters.kit.recording import Recording
from otel_rollout.testing import ModelServer

pytestmark = pytest.mark.trainer
ROOT = Path(__file__).parents[3]
SAMPLES = 8


class Worker(AgentLoopWorker):  # type: ignore[misc, unused-ignore]
    """verl's worker, up to the outputs: before they are padded or sent to its queue."""

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        return output


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, on this machine alone."""
    ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """A model in a folder, where verl reads its tokenizer."""
    torch.set_num_threads(1)
    made = Policy()
    made.save(tmp_path / "tiny")
    # Of the tokenizer of a Qwen2 verl wants an id for a newline.
    GraniteConfig(architectures=["GraniteForCausalLM"]).save_pretrained(tmp_path / "tiny")
    return made


def configured(folder: Path) -> Any:
    """The configuration of verl's trainer, as the command line of docs/verl.md changes it."""
    page = (ROOT / "docs" / "verl.md").read_text()
    command = page.partition("main_ppo \\\n")[2].partition("```")[0]
    changes = shlex.split(command.replace("\\\n", " ").replace("$PWD", str(ROOT)))
    model = f"actor_rollout_ref.model.path={folder / 'tiny'}"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*changes, model])
    validate_config(config, use_reference_policy=False, use_critic=False)
    return config


def play(config: Any, address: str, tasks: list[Any], step: int) -> list[list[AgentLoopOutput]]:
    """The outputs of the samples of each task, run by verl's worker."""
    client = LLMServerClient(
        config,
        load_balancer_handle=get_router_handle(
            {address: None}, load_balancer_cls=GlobalRequestLoadBalancer
        ),
    )
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}

    async def run() -> Any:
        worker = Worker(config, client)
        trajectory = {"step": step, "sample_index": 0, "rollout_n": 0, "validate": False}
        return await asyncio.gather(
            *(
                worker._run_agent_loop(
                    sampling,
                    trajectory,
                    trace=False,
                    agent_name="listen",
                    uid=f"uid-{number}",
                    session_id=sample,
                    global_steps=step,
                    raw_prompt=task["raw_prompt"],
                )
                for number, task in enumerate(tasks)
                for sample in range(SAMPLES)
            )
        )

    outputs: list[list[AgentLoopOutput]] = asyncio.run(run())
    return outputs


def test_verl_runs_the_agent_and_learns(
    cluster: None, recording: Recording, policy: Policy, tmp_path: Path
):
    """Its worker finds the loop by name; its loss makes what was good more probable."""
    config = configured(tmp_path)
    verl_agent_loop.write_tasks(str(tmp_path / "tasks.parquet"))
    dataset = RLHFDataset(
        str(tmp_path / "tasks.parquet"), tokenizer=policy.tokenizer, config=config.data
    )
    tasks = [dataset[0], dataset[1]]
    assert {task["agent_name"] for task in tasks} == {"listen"}
    with ModelServer(policy.answer, token_ids=True, logprobs=True) as server:
        address = server.base_url.removeprefix("http://").removesuffix("/v1")
        sampled = play(config, address, tasks, step=3)
    assert [len(outputs) for outputs in sampled] == [1] * 2 * SAMPLES
    outputs = [output for (output,) in sampled]
    assert {output.extra_fields["max_global_steps"] for output in outputs} == {3}
    learn(config, policy, outputs)


def learn(config: Any, policy: Policy, outputs: list[AgentLoopOutput]) -> None:
    """One step with the advantages and the loss of verl makes the better rollouts more probable."""
    width = max(len(output.response_ids) for output in outputs)

    def padded(values: list[Any]) -> torch.Tensor:
        return torch.tensor([row + [0] * (width - len(row)) for row in values])

    def logprobs() -> torch.Tensor:
        rows = []
        for output in outputs:
            ids = torch.tensor([output.prompt_ids + output.response_ids])
            logits = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            known = logits.gather(-1, ids[0, 1:, None])[:, 0][len(output.prompt_ids) - 1 :]
            rows.append(torch.nn.functional.pad(known, (0, width - len(known))))
        return torch.stack(rows)

    mask = padded([output.response_mask for output in outputs]).float()
    recorded = padded([output.response_logprobs for output in outputs])
    before = logprobs()
    assert ((before - recorded) * mask).abs().max() < 1e-4
    rewards = torch.zeros_like(mask)
    for row, output in enumerate(outputs):
        rewards[row, len(output.response_ids) - 1] = output.reward_score
    groups = np.array([number // SAMPLES for number in range(len(outputs))])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, groups)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    policy_loss: Any = compute_policy_loss_vanilla
    loss, _ = policy_loss(recorded, before, advantages, mask, config=actor)
    loss.backward()
    torch.optim.SGD(policy.model.parameters(), lr=1e-2).step()
    assert ((logprobs() - before) * advantages * mask).sum() > 0


def test_a_rollout_that_fails_has_no_output(
    cluster: None, recording: Recording, policy: Policy, tmp_path: Path
):
    """The trainer leaves it out; the other samples go on."""

    def refuse(request: dict[str, Any]) -> Any:
        raise ValueError("no memory left")

    task = {"raw_prompt": [{"role": "user", "content": "What does a cow say?"}]}
    with ModelServer(refuse) as server:
        address = server.base_url.removeprefix("http://").removesuffix("/v1")
        assert play(configured(tmp_path), address, [task], step=1) == [[]] * SAMPLES
