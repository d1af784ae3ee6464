"""The examples that train, on the real vLLM: after each step it has the trainer's weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import openai
import pytest
import torch

from examples import train_trl, train_trl_vllm
from examples.folder_transfer import FolderTransfer, Weights
from examples.tiny_model import Policy
from exporters.kit.recomputed import Model, Row
from exporters.kit.served import TOLERANCE, needs_servers
from otel_rollout import JsonlTrajectoryExporter
from tests.servers.programs import start_vllm

pytestmark = [pytest.mark.trainer, pytest.mark.server, needs_servers]
PYTHON = Path(__file__).parents[3] / ".venv-servers" / "bin" / "python"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights that were brought to the server, in their order."""
    kept: list[dict[str, torch.Tensor]] = []
    send = FolderTransfer.send_weights

    def keeping(transfer: FolderTransfer, iterator: Weights) -> None:
        kept.append({name: tensor.detach().clone() for name, tensor in iterator})
        send(transfer, iter(kept[-1].items()))

    monkeypatch.setattr(FolderTransfer, "send_weights", keeping)
    return kept


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Policy:
    """The tiny model, thinking or not; it holds the weights of the first step."""
    torch.set_num_threads(1)
    return Policy(thinking=request.param)


@pytest.fixture
def served(policy: Policy, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a vLLM that serves it, and the folder, which is its name there."""
    folder = tmp_path / "tiny"
    policy.save(folder)
    options = ["--reasoning-parser", "qwen3"] if policy.thinking else []
    with start_vllm(folder, tmp_path / "vllm.log", *options, python=str(PYTHON)) as address:
        yield address, str(folder)


def largest_gap(policy: Policy, weights: Weights, folder: Path, rows: list[Row]) -> float:
    """How far the log-probabilities of the rows are from those under these weights, at most."""
    policy.load(weights)
    policy.save(folder)
    return max(Model(folder).gaps(rows))


def asked(server: str, model: str) -> list[Row]:
    """What the server samples now, with its log-probabilities."""
    rows: list[Row] = []
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none-needed") as client:
        for number, question in enumerate([*train_trl.questions()["prompt"]] * 4):
            reply: Any = client.chat.completions.create(
                model=model,
                messages=question,
                max_tokens=8,
                seed=number,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            (choice,) = reply.choices
            before = len(reply.prompt_token_ids)
            logprobs = [0.0] * before + [entry.logprob for entry in choice.logprobs.content]
            mask = [0] * before + [1] * len(choice.token_ids)
            rows.append((reply.prompt_token_ids + choice.token_ids, mask, logprobs))
    return rows


def train(example: Any, served: tuple[str, str], capsys: Any, *options: str) -> list[float]:
    """Run the example as a user does; the mean reward of each step."""
    server, folder = served
    example.main(["--server", server, "--model", folder, *options])
    printed = capsys.readouterr().out
    return [float(reward) for reward in re.findall(r"^\w+ +\d+  reward (\S+)", printed, re.M)]


@pytest.mark.parametrize("policy", [False], indirect=True)
def test_grpo_samples_from_the_weights_that_learn(
    policy: Policy,
    served: tuple[str, str],
    sent: list[dict[str, torch.Tensor]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Each step's rollouts have the log-probabilities of that step's weights, and reward rises."""
    out = tmp_path / "trajectories.jsonl"
    rewards = train(train_trl, served, capsys, "--steps", "12", "--out", str(out))
    assert len(rewards) == len(sent) == 12
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2
    steps: dict[Any, list[Row]] = {}
    for trajectory in JsonlTrajectoryExporter.read(out):
        (row,) = trajectory.token_sequences()
        steps.setdefault(trajectory.policy_version, []).append(
            (row.token_ids, row.loss_mask, row.logprobs)
        )
    assert sorted(steps) == list(range(12))
    for step, rows in steps.items():
        assert largest_gap(policy, sent[step].items(), tmp_path / "then", rows) < TOLERANCE
        others = sent[step - 1].items()
        assert largest_gap(policy, others, tmp_path / "then", rows) > 10 * TOLERANCE


@pytest.mark.parametrize("policy", [True], indirect=True)
def test_async_grpo_leaves_the_server_with_its_weights(
    policy: Policy,
    served: tuple[str, str],
    sent: list[dict[str, torch.Tensor]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """What it samples after the training is as probable to the last weights, and reward rises."""
    first = largest_gap(policy, {}.items(), tmp_path / "then", asked(*served))
    rewards = train(train_trl_vllm, served, capsys, "--steps", "25")
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.05
    assert len(sent) == 26  # at the start, and after each step
    rows = asked(*served)
    assert first < TOLERANCE
    assert largest_gap(policy, sent[-2].items(), tmp_path / "then", rows) > 10 * TOLERANCE
    assert largest_gap(policy, sent[-1].items(), tmp_path / "then", rows) < TOLERANCE
