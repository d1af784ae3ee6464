"""Rows for GRPO: what the real trainers make of them is what was sampled."""

from __future__ import annotations

import itertools
import json
import math
import queue
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from otel_rollout_trl import (
    TrlRows,
    rollout_reward,
    to_trl_async_samples,
    to_trl_rollout,
    to_trl_sft_tokens,
)
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TreeRow

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.export import row_exporter

pytestmark = pytest.mark.trainer


async def silent(client: Any) -> None:
    """It asks nothing of a model."""


async def broken(client: Any) -> None:
    """It fails behind its first call."""
    await agents.ask(client, [agents.user("one")])
    raise ValueError("no tool of this name")


async def failed(clients: Clients, agent: Any = broken) -> Trajectory:
    return await agents.play(clients, agent, None, raise_errors=False)


async def without_ids(clients: Clients, logprobs: bool) -> Trajectory:
    """A rollout whose server sends token ids, and log-probabilities only if they are asked for."""
    client = clients.asynchronous(clients.serve("hello", logprobs=False))

    @rollout
    async def agent() -> None:
        await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            logprobs=logprobs,
            extra_body={"return_token_ids": True},
        )
        record_reward(1.0)

    return await gather_trajectory(agent())


class Spied(GRPOTrainer):
    """The trainer, and the rows that its loss is computed from."""

    rows: list[dict[str, Any]]

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        logprobs = inputs.get("sampling_per_token_logps")
        self.rows = []
        for number, there in enumerate(inputs["completion_mask"].bool()):
            prompt = inputs["prompt_ids"][number][inputs["prompt_mask"][number].bool()].tolist()
            mask = inputs["completion_mask"][number] * inputs["tool_mask"][number]
            assert not mask[~there].any()
            self.rows.append(
                {
                    "prompt": prompt,
                    "completion": inputs["completion_ids"][number][there].tolist(),
                    "mask": mask[there].tolist(),
                    "logprobs": None if logprobs is None else logprobs[number][there].tolist(),
                    "advantage": round(inputs["advantages"][number].item(), 3),
                }
            )
        return super()._compute_loss(model, inputs)


def train(
    played: list[Trajectory], tokenizer: Any, model: Any, tmp_path: Path, **options: Any
) -> list[dict[str, Any]]:
    """One step of the trainer, two rollouts to a prompt; the rows of its loss, in their order."""

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return to_trl_rollout(played, prompts, **options)

    trainer = Spied(
        model=model,
        reward_funcs=[rollout_reward],
        rollout_func=rollout_func,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            max_steps=1,
            per_device_train_batch_size=len(played),
            num_generations=2,
            learning_rate=0.1,
            max_completion_length=512,
        ),
    )
    trainer.train()

    def place(row: dict[str, Any]) -> int:  # the trainer shuffles them
        ids = row["prompt"] + row["completion"]
        (number,) = (n for n, p in enumerate(played) if ids in _token_ids(p))
        return number

    return sorted(trainer.rows, key=place)


def _token_ids(trajectory: Trajectory) -> list[list[int]]:
    return [row.token_ids for row in trajectory.token_sequences(on_failure="keep")]


async def test_the_trainer_learns_from_what_was_sampled(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """One step of GRPOTrainer: ids, mask, log-probabilities and rewards of its loss are ours."""
    played = [
        await agents.play(clients, agents.chain, 1.0),
        await agents.play(clients, agents.tool_loop, 0.0),
        await agents.play(clients, agents.truncated, None),
        await agents.play(clients, agents.failing_calls, 3.0),
    ]
    before = [weight.detach().clone() for weight in model.parameters()]
    rows = train(played, tokenizer, model, tmp_path)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for row, trajectory in zip(rows, played, strict=True):
        (ours,) = trajectory.token_sequences()
        start = ours.prompt_length
        assert (row["prompt"], row["completion"]) == (
            ours.token_ids[:start],
            ours.token_ids[start:],
        )
        assert row["mask"] == ours.loss_mask[start:]
        assert 0 in row["mask"]  # what the environment said between
        assert row["logprobs"] == ours.logprobs[start:]
    assert [row["advantage"] for row in rows] == [0.707, -0.707, 0.0, 0.0]


async def test_a_failed_rollout_has_to_be_run_again_or_asked_for(
    recording: Recording, clients: Clients, tokenizer: Any, model: Any, tmp_path: Path
):
    """It has no row of its own accord; with on_failure=keep its words have no advantage."""
    played = [await agents.play(clients, agents.chain, 1.0), await failed(clients)]
    with pytest.raises(ExportError, match=rf"{played[1].id}.*failed.*Run it again"):
        to_trl_rollout(played)
    rows = train(played, tokenizer, model, tmp_path, on_failure="keep")
    assert [row["advantage"] for row in rows] == [0.0, 0.0]
    assert all(rows[1]["mask"])


async def test_a_failed_rollout_that_was_scored_is_a_row(recording: Recording, clients: Clients):
    """Who scores a failure wants it trained."""
    trajectory = await failed(clients)
    trajectory.reward = -1.0
    assert to_trl_rollout([trajectory])["rollout_reward"] == [-1.0]


async def test_a_rollout_without_a_model_call_has_no_row(recording: Recording, clients: Clients):
    """Nothing is made up for it, not even if it is scored."""
    trajectory = await agents.play(clients, silent, 1.0)
    with pytest.raises(ExportError, match=r"nothing to train.*made no model call.*Run it again"):
        to_trl_rollout([trajectory], on_failure="keep")


async def test_a_group_has_its_failures_in_their_places(recording: Recording, clients: Clients):
    """A row would otherwise be another prompt's."""
    group = await agents.play_group(clients, [0.5, None, 1.5])
    assert len(group) == 2
    with pytest.raises(ExportError, match=group.failures[0].id):
        to_trl_rollout(group)
    rows = to_trl_rollout(group, ["p"] * 3, on_failure="keep")
    assert rows["rollout_reward"] == [0.5, None, 1.5]
    assert rows["rollout_id"][1] == group.failures[0].id
    with pytest.raises(ExportError, match=r"one row for each of its 4 prompts.*got 3 trajectories"):
        to_trl_rollout(group, ["p"] * 4, on_failure="keep")


@pytest.mark.parametrize("agent", [agents.fork, agents.interleaved, agents.forgetful])
async def test_several_token_sequences_need_a_choice(
    recording: Recording, clients: Clients, agent: Any
):
    """By default it is refused, and said which completions are in which of them."""
    trajectory = await agents.play(clients, agent)
    sequences = trajectory.token_sequences()
    with pytest.raises(ExportError, match=f"{len(sequences)} token sequences") as refused:
        to_trl_rollout([trajectory])
    for sequence in sequences:
        assert f"{len(sequence)} tokens with {', '.join(sequence.completion_ids)}" in str(
            refused.value
        )
    for choose, row in (
        ("longest", max(sequences, key=len)),
        ("last", sequences[-1]),
        ("main", _main(trajectory)),
    ):
        made = to_trl_rollout([trajectory], choose=choose)  # type: ignore[arg-type]
        assert made["prompt_ids"] == [row.token_ids[: row.prompt_length]]
        assert made["completion_ids"] == [row.token_ids[row.prompt_length :]]
        # A reply that two of them share trains in this one, since it is the only one left.
        assert made["env_mask"] == [row.sampled[row.prompt_length :]]


def _main(trajectory: Trajectory) -> Any:
    end = trajectory.histories[0].completions[-1]
    return next(s for s in trajectory.token_sequences() if end.id in s.completion_ids)


async def test_the_main_row_is_that_of_the_main_history(recording: Recording, clients: Clients):
    """Also where the first row is another agent's."""
    trajectory = await agents.play(clients, agents.interleaved)
    made = to_trl_rollout([trajectory], choose="main")
    text = bytes(i for i in made["prompt_ids"][0] if i < 256).decode()
    assert text == trajectory.messages()[0]["content"] == "second"
    assert len(trajectory.token_sequences()) == 2


async def test_completions_are_cut_at_their_end_only(recording: Recording, clients: Clients):
    """All lists of a row are as long as the completion, and no end token is invented."""
    trajectory = await agents.play(clients, agents.chain)
    whole, cut = (to_trl_rollout([trajectory], max_completion_length=n) for n in (None, 7))
    assert cut["prompt_ids"] == whole["prompt_ids"]
    for name in ("completion_ids", "env_mask", "logprobs"):
        assert cut[name] == [whole[name][0][:7]]
    assert (whole["rollout_truncated"], cut["rollout_truncated"]) == ([False], [True])


async def test_unknown_log_probabilities_are_none(recording: Recording, clients: Clients):
    """None where another row has them, and no list at all where no row does; never 0."""
    known = await without_ids(clients, logprobs=True)
    unknown = await without_ids(clients, logprobs=False)
    assert to_trl_rollout([unknown])["logprobs"] is None
    first, second = to_trl_rollout([known, unknown])["logprobs"]
    assert all(value < 0 for value in first)
    assert second == [None] * len(first)


@pytest.mark.parametrize("cut", [None, "in the first reply", "before the second"])
async def test_lists_are_those_of_the_token_sequence(
    recording: Recording, clients: Clients, cut: str | None
):
    """Plain numbers; of replies with log-probabilities and others in one row, the latter's None."""
    client = clients.asynchronous(clients.serve(logprobs=False))
    async with rollout("mixed"):
        messages = [agents.user("one")]
        await agents.ask(client, messages)
        await agents.ask(client, [*messages, agents.user("two")], logprobs=True)
    mixed, fork = recording.trajectory, await agents.play(clients, agents.fork)
    (row,) = mixed.token_sequences()
    unknown, known = row.spans
    start, end = row.prompt_length, known[1] if cut else len(row)
    end = start + 3 if cut == "in the first reply" else end
    logprobs: list[float | None] = [*row.logprobs]
    logprobs[unknown[1] : unknown[2]] = [None] * (unknown[2] - unknown[1])
    assert all(map(math.isnan, row.logprobs[unknown[1] : unknown[2]]))
    assert all(value < 0 for value in row.logprobs[known[1] : known[2]])
    made = to_trl_rollout([mixed], max_completion_length=end - start)
    assert made["prompt_ids"] == [row.token_ids[:start]]
    assert made["completion_ids"] == [row.token_ids[start:end]]
    assert made["env_mask"] == [row.sampled[start:end]]
    assert made["logprobs"] == (None if cut else [logprobs[start:end]])
    rows = [row for trajectory in (mixed, fork) for row in trajectory.token_sequences()]
    labelled = to_trl_sft_tokens([mixed, fork])
    for row, sft in zip(rows, labelled, strict=True):
        pairs = zip(row.token_ids, row.loss_mask, strict=True)
        assert sft["input_ids"] == row.token_ids
        assert sft["labels"] == [token if mask else -100 for token, mask in pairs]
    lists = [made[name][0] for name in ("prompt_ids", "completion_ids", "env_mask")]
    lists += [each[name] for each in labelled for name in each]
    assert {type(value) for each in lists for value in each} == {int}


@pytest.mark.parametrize(
    "options",
    [{"choose": "best"}, {"on_failure": "drop"}, {"max_completion_length": 0}],
)
def test_a_wrong_option_is_named(options: dict[str, Any]):
    """With what was expected."""
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}.*expected"):
        to_trl_rollout([], **options)


async def test_the_file_has_the_same_rows(recording: Recording, clients: Clients):
    """The exporter `trl` gives them one by one, as JSON."""
    group = await agents.play_group(clients, [1.0, 0.0])
    exporter = row_exporter("trl", format="grpo", max_completion_length=9)
    assert isinstance(exporter, TrlRows)
    rows = json.loads(json.dumps(list(exporter.rows(group)), allow_nan=False))
    columns = to_trl_rollout(group, max_completion_length=9)
    assert [row["completion_ids"] for row in rows] == columns["completion_ids"]
    assert [row["rollout_reward"] for row in rows] == [1.0, 0.0]
    assert {len(row["env_mask"]) for row in rows} == {9}


async def test_the_file_has_failures_only_if_asked_for(recording: Recording, clients: Clients):
    """No row of it stands for a prompt, so one that is missing is no error."""
    group = await agents.play_group(clients, [1.0, None])
    for options, rewards in (({}, [1.0]), ({"on_failure": "keep"}, [1.0, None])):
        rows = row_exporter("trl", format="grpo", **options).rows(group)
        assert [row["rollout_reward"] for row in rows] == rewards


# --- AsyncGRPO


async def test_async_samples_are_token_sequences(recording: Recording, clients: Clients):
    """What the real queue of AsyncGRPOTrainer yields of them has our ids, masks and advantages."""
    group = await agents.play_group(clients, [1.0, 0.0])
    group.trajectories.append(await agents.play(clients, agents.fork, 2.0))
    samples = to_trl_async_samples(group, group_id=7, model_version=3)
    rows = [row for trajectory in group for row in trajectory.token_sequences()]
    assert len(samples) == len(rows) == 4
    advantages = group.advantages(scale=True)
    assert [s.advantage for s in samples] == [*advantages[:2], advantages[2], advantages[2]]
    for sample, row in zip(samples, rows, strict=True):
        assert isinstance(sample, RolloutSample)
        assert sample.input_ids.tolist() == row.token_ids
        assert sample.completion_mask.tolist() == row.loss_mask
        assert sample.old_log_probs.tolist() == row.logprobs
        dtypes = (sample.input_ids.dtype, sample.completion_mask.dtype, sample.old_log_probs.dtype)
        assert dtypes == (np.int64, np.int64, np.float32)
        assert [m["role"] for m in sample.completion][-1] == "assistant"
        assert (sample.group_id, sample.model_version) == (7, 3)

    waiting: queue.Queue[RolloutSample] = queue.Queue()
    for sample in samples:
        waiting.put(sample)
    dataset = RolloutQueueDataset(waiting, lambda: 4, lambda _: None, 600, defaultdict(list))
    packed = TreeRow()
    for sample in itertools.islice(dataset, len(samples)):
        packed.add(sample)
    loss = packed.pack()
    trained = [
        (token, logprob, advantage)
        for row, sample in zip(rows, samples, strict=True)
        for token, logprob, advantage in zip(
            row.token_ids, row.logprobs, itertools.repeat(sample.advantage)
        )
    ]
    masks = [mask for row in rows for mask in row.loss_mask]
    expected = list(itertools.compress(trained, masks))
    assert loss["shift_labels"][loss["token_index"]].tolist() == [token for token, _, _ in expected]
    assert loss["old_log_probs"].tolist() == [logprob for _, logprob, _ in expected]
    assert loss["advantages"].tolist() == pytest.approx([value for _, _, value in expected])


async def test_async_versions_are_those_of_the_completions(recording: Recording, clients: Clients):
    """The rollout's policy version; without one it has to be given."""
    group = await agents.play_group(clients, [1.0, 0.0])
    assert {s.model_version for s in to_trl_async_samples(group, group_id=0)} == {3}
    unversioned = [await agents.play(clients, agents.chain, reward) for reward in (1.0, 0.0)]
    with pytest.raises(ExportError, match=r"policy versions; expected numbers, got .*None"):
        to_trl_async_samples(unversioned, group_id=0)


async def test_async_samples_of_what_was_scored_only(recording: Recording, clients: Clients):
    """A rollout without a reward has no advantage, and so no sample."""
    group = await agents.play_group(clients, [1.0, 0.0, None])
    group.trajectories.append(await agents.play(clients, agents.chain, None))
    samples = to_trl_async_samples(group, group_id=0, model_version=1)
    assert len(samples) == 2
    assert sum(sample.advantage for sample in samples) == pytest.approx(0.0)


async def test_async_samples_need_log_probabilities(recording: Recording, clients: Clients):
    """Their ratio would be one with a made-up policy."""
    unknown = await without_ids(clients, logprobs=False)
    with pytest.raises(ExportError, match=r"log-probability of every trained token.*logprobs=True"):
        to_trl_async_samples(TrajectoryGroup([unknown]), group_id=0, model_version=1)


def test_the_readme_runs(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its example, as it stands."""
    names = agents.run_readme(Path(__file__).parents[1], clients, monkeypatch)
    columns = names["rollout_func"](["one", "two"], None)
    assert columns["rollout_reward"] == [0.0, 0.0]
    assert all(columns["completion_ids"])
