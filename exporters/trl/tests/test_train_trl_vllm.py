"""AsyncGRPOTrainer on rollouts of a thinking model: two rows of each, exactly as sampled."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from examples import train_trl_vllm
from examples.async_on_cpu import CPU, TinyTransfer, without_a_gpu
from examples.tiny_model import Policy
from examples.train_trl import SAMPLES
from exporters.kit.recording import Recording
from otel_rollout import TrajectoryGroup
from otel_rollout.testing import ModelServer

pytestmark = pytest.mark.trainer


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Policy, str]]:
    """A thinking model in a folder, and its server, in a process that takes itself for a GPU's."""
    torch.set_num_threads(1)
    policy = Policy(thinking=True)
    policy.save(tmp_path / "tiny")
    with without_a_gpu(), ModelServer(policy.answer, token_ids=True, logprobs=True) as server:
        yield policy, server.base_url.removesuffix("/v1")


def test_the_trainer_computes_what_was_sampled(
    recording: Recording, parts: tuple[Policy, str], tmp_path: Path
):
    """While nothing is learned, each trained token is as probable to the trainer as it was then."""
    policy, server = parts
    worker = train_trl_vllm.Worker(server, "tiny", 8, [])
    transfer = TinyTransfer(policy)
    settings: dict[str, Any] = {**CPU, "learning_rate": 0.0}
    trainer = train_trl_vllm.make_trainer(
        str(tmp_path / "tiny"), worker, transfer, 3, str(tmp_path), **settings
    )
    trainer.train()
    measured = trainer.state.log_history[-1]
    assert measured["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert measured["kl"] == pytest.approx(0.0, abs=1e-6)  # of terms that are never negative
    assert measured["batch/samples_per_step"] == 4 * SAMPLES
    rows = [trajectory.token_sequences() for trajectory in recording.trajectories]
    assert {len(sequences) for sequences in rows} == {2}


def test_no_rollouts_end_the_training(parts: tuple[Policy, str], tmp_path: Path):
    """A server that refuses every call is the trainer's error, not an endless wait."""
    policy, _ = parts

    def refuse(request: dict[str, Any]) -> Any:
        raise ValueError("no memory left")

    with ModelServer(refuse) as server:
        worker = train_trl_vllm.Worker(server.base_url.removesuffix("/v1"), "tiny", 8, [])
        trainer = train_trl_vllm.make_trainer(
            str(tmp_path / "tiny"), worker, TinyTransfer(policy), 3, str(tmp_path), **CPU
        )
        with pytest.raises(RuntimeError, match="the rollouts have ended"):
            trainer.train()


class InStep(train_trl_vllm.Worker):
    """Samples a round with the weights of the last step, so that each run learns alike."""

    def _print(self, number: int, groups: Sequence[TrajectoryGroup]) -> None:
        super()._print(number, groups)
        while self._version <= number and not self._stopped.is_set():
            time.sleep(0.01)


def test_the_example_learns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The example as a user runs it: the mean reward rises, and what trains is said first.

    It samples while it trains, so what a round has learnt would depend on how fast the machine is:
    here a round waits for the step before it.
    """
    monkeypatch.setattr(train_trl_vllm, "Worker", InStep)
    train_trl_vllm.main(["--steps", "30"])
    printed = capsys.readouterr().out
    said = printed.partition("round ")[0]
    assert re.search(r"^16 rollouts: 32 rows, \d+ of \d+ tokens train$", said, re.MULTILINE)
    rounds = re.findall(r"^round .* reward (\S+)", printed, re.MULTILINE)
    rewards = [float(reward) for reward in rounds]
    assert fmean(rewards[-4:]) - fmean(rewards[:4]) > 0.1
