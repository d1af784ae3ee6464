"""GRPOTrainer on rollouts of a real agent: what it learns on is what the model saw and said."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from otel_rollout_trl import to_trl_rollout

from examples import train_trl
from examples.tiny_model import SPECIAL, Policy
from exporters.kit.recording import Recording
from otel_rollout import ExportError, TooManyExceptionsError, Trajectory, TrajectoryGroup
from otel_rollout.testing import ModelServer

pytestmark = pytest.mark.trainer
ROOT = Path(__file__).parents[3]
END = len(SPECIAL) - 1


Key = tuple[Any, tuple[int, ...]]
"""The step, and the ids of a row."""


@dataclass
class Learned:
    """A row of a batch as the trainer's loss takes it, its padding removed."""

    step: int
    prompt: list[int]
    completion: list[int]
    mask: list[int]
    """Of the completion: what the loss is multiplied by."""
    sampled_with: list[float]
    """Of the completion: the log-probabilities that came with the rollout."""
    advantage: float
    current: list[float]
    """Of the completion: its log-probabilities under the weights that are about to learn."""

    @property
    def key(self) -> Key:
        return self.step, tuple(self.prompt + self.completion)


@dataclass
class Training:
    """A trainer on the example's agent, and what its loss was given."""

    trainer: Any
    server: ModelServer
    policy: Policy
    curve: list[float]
    rows: list[Learned] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def watch(self) -> None:
        """Look at what the loss is given, and at what it is."""
        compute_loss = self.trainer.compute_loss

        def watched(model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
            self.rows += self._rows(inputs)
            loss = compute_loss(model, inputs, *args, **options)
            self.losses.append(float(loss))
            return loss

        self.trainer.compute_loss = watched

    def _rows(self, inputs: dict[str, Any]) -> Iterator[Learned]:
        # The trainer multiplies the loss by these two.
        masks = inputs["completion_mask"] * inputs["tool_mask"]
        for number, advantage in enumerate(inputs["advantages"].tolist()):
            asked = inputs["prompt_mask"][number].bool()
            said = inputs["completion_mask"][number].bool()
            assert not masks[number][~said].any(), "it learns from padding"
            prompt = inputs["prompt_ids"][number][asked].tolist()
            completion = inputs["completion_ids"][number][said].tolist()
            with torch.no_grad():
                ids = torch.tensor([prompt + completion])
                logprobs = self.policy.model(input_ids=ids).logits[0].log_softmax(-1)
            behind = logprobs[len(prompt) - 1 : -1]
            yield Learned(
                step=self.trainer.state.global_step,
                prompt=prompt,
                completion=completion,
                mask=masks[number][said].tolist(),
                sampled_with=inputs["sampling_per_token_logps"][number][said].tolist(),
                advantage=advantage,
                current=behind[range(len(completion)), completion].tolist(),
            )


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """The example's trainer, watched, for three steps."""
    torch.set_num_threads(1)
    policy, curve = Policy(), list[float]()
    with ModelServer(policy.answer, token_ids=True, logprobs=True) as server:
        roll_out = train_trl.rollouts_of(server.base_url, "tiny", curve)
        trainer = train_trl.make_trainer(
            policy.model, policy.tokenizer, roll_out, 3, str(tmp_path), **train_trl.TINY
        )
        made = Training(trainer, server, policy, curve)
        made.watch()
        yield made


def float32(values: list[float]) -> list[float]:
    """What the trainer's precision leaves of them."""
    return [float(value) for value in torch.tensor(values, dtype=torch.float32)]


def key(trajectory: Trajectory) -> Key:
    """The policy version, and the ids of the trajectory's only row."""
    (row,) = trajectory.token_sequences()
    return trajectory.policy_version, tuple(row.token_ids)


def test_the_loss_is_given_what_was_sampled(recording: Recording, training: Training):
    """Ids, mask and log-probabilities in TRL's loss are those of our rows, on each rollout."""
    training.trainer.train()
    trajectories = list(recording.trajectories)
    assert len(training.rows) == len(trajectories) == 3 * 8 * len(train_trl.SOUNDS)
    waiting: dict[Key, list[Trajectory]] = {}
    for trajectory in trajectories:
        waiting.setdefault(key(trajectory), []).append(trajectory)
    truncated = 0
    for learned in training.rows:
        trajectory = waiting[learned.key].pop()
        assert trajectory.warnings == []
        assert [c.policy_version for c in trajectory.completions] == [learned.step] * 2
        (row,) = trajectory.token_sequences()
        assert len(row.spans) == 2
        assert learned.prompt == row.token_ids[: row.prompt_length]
        assert learned.mask == row.loss_mask[row.prompt_length :]
        assert learned.sampled_with == float32(row.logprobs[row.prompt_length :])
        # What the agent said between the replies: context in the middle of the completion.
        assert re.fullmatch("1+0+1+", "".join(map(str, learned.mask)))
        assert sum(learned.mask) == sum(len(c.token_ids or ()) for c in trajectory.completions)
        # A reply that was cut has no end: none is added.
        assert (learned.completion[-1] == END) is not trajectory.completions[-1].truncated
        truncated += row.truncated
    assert truncated
    assert not any(waiting.values())


def test_the_server_samples_from_the_weights_that_learn(recording: Recording, training: Training):
    """What was sampled is as probable to the trainer as it was to the server, at every step."""
    before = {k: v.clone() for k, v in training.policy.model.state_dict().items()}
    training.trainer.train()
    for learned in training.rows:
        sampled = [i for i, mask in enumerate(learned.mask) if mask]
        recorded = [learned.sampled_with[i] for i in sampled]
        assert [learned.current[i] for i in sampled] == pytest.approx(recorded, abs=1e-4)
    after = training.policy.model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert [name for name in before if not torch.equal(before[name], after[name])] == list(before)
    assert len(training.losses) == 3
    assert all(map(math.isfinite, training.losses))


def test_each_row_has_the_reward_of_its_rollout(recording: Recording, training: Training):
    """The advantages are those of the rewards that were recorded, within the groups of rollouts."""
    training.trainer.train()
    groups: dict[str | None, list[float]] = {}
    for trajectory in recording.trajectories:
        groups.setdefault(trajectory.group_id, []).append(float(trajectory.reward or 0.0))
    assert [len(rewards) for rewards in groups.values()] == [8] * 6
    expected: dict[Key, list[float]] = {}
    for trajectory in recording.trajectories:
        rewards = groups[trajectory.group_id]
        advantage = (float(trajectory.reward or 0.0) - fmean(rewards)) / (stdev(rewards) + 1e-4)
        expected.setdefault(key(trajectory), []).append(advantage)
    for learned in training.rows:
        values = expected[learned.key]
        assert any(learned.advantage == pytest.approx(value, abs=1e-4) for value in values)
    assert any(learned.advantage > 0 for learned in training.rows)
    rewards = [float(trajectory.reward or 0.0) for trajectory in recording.trajectories]
    assert fmean(rewards) == pytest.approx(fmean(training.curve))


def test_rows_stay_in_the_order_of_the_prompts(recording: Recording, training: Training):
    """The samples of several tasks are not sorted among each other."""
    prompts = [prompt for prompt in train_trl.questions()["prompt"] for _ in "ab"]
    url = training.server.base_url
    trajectories = asyncio.run(train_trl.collect(url, "tiny", prompts, 2, 0))
    assert [t.sample_index for t in trajectories] == [0, 1, 0, 1]
    ids = [trajectory.id for trajectory in trajectories]
    assert to_trl_rollout(trajectories, prompts)["rollout_id"] == ids
    assert to_trl_rollout(TrajectoryGroup(trajectories), prompts)["rollout_id"] == ids
    one = TrajectoryGroup([trajectories[0]], [trajectories[1]])
    assert to_trl_rollout(one)["rollout_id"] == ids[:2]
    turned = TrajectoryGroup([trajectories[1]], [trajectories[0]])
    assert to_trl_rollout(turned)["rollout_id"] == ids[:2]
    with pytest.raises(ExportError, match="sample indices do not say"):
        to_trl_rollout(TrajectoryGroup(trajectories[:3], trajectories[3:]), prompts)


def test_a_rollout_that_fails_ends_the_training(recording: Recording, training: Training):
    """A failed rollout has no row: the error is the agent's, and no batch is shifted."""

    def sample(prompt: list[int], seed: int, most: int) -> Any:
        if seed == 501:  # the first question of the sixth rollout
            raise RuntimeError("no memory left")
        return Policy.sample(training.policy, prompt, seed, most)

    training.policy.sample = sample  # type: ignore[method-assign]
    with pytest.raises(TooManyExceptionsError, match="no memory left"):
        training.trainer.train()
    assert training.rows == []


def test_the_example_learns():
    """The example as a user runs it: the mean reward rises from chance to most there is."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OPENAI_"))}
    done = subprocess.run(
        [sys.executable, "-m", "examples.train_trl", "--steps", "12"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rewards = [
        float(reward) for reward in re.findall(r"^step .* reward ([\d.]+)", done.stdout, re.M)
    ]
    assert len(rewards) == 12
    assert rewards[0] < 0.2
    assert fmean(rewards[-3:]) > 0.35
    # What trains is said before the first step.
    said = done.stdout.partition("step ")[0]
    assert re.search(r"^16 rollouts: 16 rows, \d+ of \d+ tokens train$", said, re.MULTILINE)
