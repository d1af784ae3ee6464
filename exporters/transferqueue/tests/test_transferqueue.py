"""Rows as verl's own code puts them, field by field, and a real queue that verl's code reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue
from otel_rollout_transferqueue import (
    QueueBatch,
    put,
    put_later,
    to_batches,
    to_nemo_rl_rows,
    to_verl_rows,
)
from otel_rollout_verl import to_verl_outputs
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from exporters.kit.agents import AGENTS, Agent, chain, fork, play, play_group, run_readme
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    ConfigurationError,
    ExportError,
    JsonlTrajectoryExporter,
    TrajectoryGroup,
)
from otel_rollout.command import main

pytestmark = pytest.mark.trainer
WORKER: Any = getattr(AgentLoopWorkerTQ, "__ray_metadata__").modified_class  # noqa: B009
"""verl's worker, as it is inside its process."""


async def puts_of_verl(
    monkeypatch: pytest.MonkeyPatch, outputs: list[Any], **kwargs: Any
) -> dict[str, Any]:
    """What verl's worker puts into the queue for the outputs of one agent loop."""
    found: dict[str, Any] = {}

    async def record(**arguments: Any) -> None:
        found.update(arguments)

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", record)
    worker: Any = object.__new__(WORKER)  # without the servers that its constructor wants
    worker.processor = worker.reward_loop_worker_handles = worker.mm_processor_kwargs = None
    worker.distillation_enabled = False
    await worker._agent_loop_postprocess(outputs, validate=False, **kwargs)
    return found


def as_plain(fields: Any) -> dict[str, list[Any]]:
    """The fields of each row: type and values of a tensor, or what is no tensor."""
    plain: dict[str, list[Any]] = {}
    for name in fields.keys():  # noqa: SIM118 - a TensorDict
        column = fields.get(name)
        if isinstance(column, torch.Tensor):
            plain[name] = [(row.dtype, row.tolist()) for row in column.unbind()]
        else:
            plain[name] = column.tolist()
    return plain


def through_json(rows: list[Any]) -> list[QueueBatch]:
    """The batches of rows that were in a file."""
    return list(to_batches(json.loads(json.dumps(rows))))


@pytest.mark.parametrize("reward", [0.5, None])
@pytest.mark.parametrize("agent", AGENTS)
async def test_rows_are_those_of_verl(
    recording: Recording,
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    agent: Agent,
    reward: float | None,
):
    """Keys, tags, fields and types are those that its worker puts for the same outputs."""
    options = {"group_id": "u1", "sample_index": 3, "policy_version": 7}
    trajectory = await play(clients, agent, reward, **options)
    columns = {"data_source": "d", "reward_model": {"style": "rule"}, "index": 4}
    ours, prompt = through_json(to_verl_rows(TrajectoryGroup.of([trajectory]), columns=columns))
    outputs = to_verl_outputs(trajectory)
    if reward is None:  # else verl's worker asks its reward loop
        monkeypatch.setattr(WORKER, "_compute_score", nothing)
    theirs = await puts_of_verl(
        monkeypatch, outputs, uid="u1", session_id=3, global_steps=7, **columns
    )
    assert ours.keys == theirs["keys"]
    assert ours.tags == theirs["tags"]
    assert ours.fields is not None
    assert ours.fields.batch_size == theirs["fields"].batch_size
    assert as_plain(ours.fields) == as_plain(theirs["fields"])
    assert ("rm_scores" in ours.fields) == (reward is not None)
    assert prompt == QueueBatch(
        ["u1"], [{"is_prompt": True, "status": "finished", "global_steps": 7}], None
    )


async def nothing(*arguments: Any, **options: Any) -> None:
    """A reward loop that is not there."""


async def test_a_group_that_is_not_whole_is_a_failure(recording: Recording, clients: Clients):
    """One sample failed, or did not come: the prompt says so, and the others are there."""
    group = await play_group(clients, [1.0, None, 0.0])
    *rows, prompt = to_verl_rows(group)
    assert [row["key"] for row in rows] == [f"{group.key}_0_0", f"{group.key}_2_0"]
    assert prompt["tag"]["status"] == "failure"
    whole = await play_group(clients, [1.0, 0.0])
    assert to_verl_rows(whole)[-1]["tag"]["status"] == "finished"
    (first, _) = whole
    assert to_verl_rows(TrajectoryGroup.of([first]))[-1]["tag"]["status"] == "failure"


@pytest.mark.parametrize("to_rows", [to_verl_rows, to_nemo_rl_rows])
async def test_what_a_key_cannot_be(recording: Recording, clients: Clients, to_rows: Any):
    """A uid with an underscore, an unknown version; the group's id is replaced by another."""
    trajectory = await play(clients, chain)
    group = TrajectoryGroup.of([trajectory], id="a_b")
    for uid in ("a_b", ""):
        with pytest.raises(ConfigurationError, match=r"without '_'.*got"):
            to_rows(group, uid=uid)
    with pytest.raises(ExportError, match=r"expected a whole number .* got None: pass "):
        to_rows(group)
    named = {"global_steps": 1} if to_rows is to_verl_rows else {"weight_version": 1}
    (key, *_) = [row["key"] for row in to_rows(group, **named)]
    assert key.count("_") == (2 if to_rows is to_verl_rows else 1)
    assert key == to_rows(group, **named)[0]["key"]


async def test_one_sample_index_twice(recording: Recording, clients: Clients):
    """Two rows would be one."""
    group = await play_group(clients, [1.0, 1.0])
    with pytest.raises(ExportError, match=r"got \[0, 0\]: two rows would have one key"):
        to_verl_rows(TrajectoryGroup([group[0], group[0]], id="g"))


async def test_rows_of_nemo_rl(recording: Recording, clients: Clients):
    """Its columns: a value for each token, or for each row."""
    group = await play_group(clients, [1.0, 0.25])
    (batch,) = through_json(to_nemo_rl_rows(group))
    assert batch.keys == [f"{group.key}_g0", f"{group.key}_g1"]
    assert batch.tags == [{"weight_version": 3}] * 2
    assert batch.fields is not None
    found = as_plain(batch.fields)
    rows = [sequence for each in group for sequence in each.token_sequences()]
    assert found["input_ids"] == [(torch.int64, row.token_ids) for row in rows]
    assert found["token_mask"] == [(torch.int64, row.loss_mask) for row in rows]
    assert found["input_lengths"] == [(torch.int32, len(row)) for row in rows]
    assert found["sample_mask"] == [(torch.float32, 1.0)] * 2
    assert found["total_reward"] == [(torch.float32, 1.0), (torch.float32, 0.25)]
    prompts = [(torch.int64, row.token_ids[: row.prompt_length]) for row in rows]
    assert found["prompt_ids_for_adv"] == prompts
    for (dtype, values), row in zip(found["generation_logprobs"], rows, strict=True):
        assert dtype == torch.float32
        assert values == torch.tensor(row.logprobs).tolist()
    assert to_nemo_rl_rows(TrajectoryGroup([], id="g"), weight_version=1) == []


async def test_what_nemo_rl_has_no_row_for(recording: Recording, clients: Clients):
    """No reward is not 0, and several conversations are no row."""
    unscored = await play(clients, chain, None, group_id="g", policy_version=1)
    with pytest.raises(ExportError, match="is not scored"):
        to_nemo_rl_rows(TrajectoryGroup.of([unscored]))
    forked = await play(clients, fork, group_id="g", policy_version=1)
    with pytest.raises(ExportError, match="expected one token sequence, got 2"):
        to_nemo_rl_rows(TrajectoryGroup.of([forked]))


async def test_what_token_ids_cannot_say(recording: Recording, clients: Clients):
    """Images and sound have no row: of NeMo RL refused with the reason, of verl a failed prompt."""
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}

    async def listen(client: Any) -> None:
        messages: Any = [{"role": "user", "content": [sound]}]
        await client.chat.completions.create(model="m", messages=messages)

    group = TrajectoryGroup.of([await play(clients, listen, group_id="g", policy_version=1)])
    with pytest.raises(ExportError, match=r"got 0 .*has input_audio, for which its token ids"):
        to_nemo_rl_rows(group)
    (prompt,) = to_verl_rows(group)
    assert prompt["tag"]["status"] == "failure"


def test_the_readme_runs(clients: Clients, monkeypatch: pytest.MonkeyPatch):
    """Its example, as it stands."""
    names = run_readme(Path(__file__).parents[1], clients, monkeypatch)
    assert len(names["rows"]) == 5


async def test_the_command_writes_them(recording: Recording, clients: Clients, tmp_path: Path):
    """As JSON lines, which are put later."""
    group = await play_group(clients, [1.0, 0.25])
    source, output = str(tmp_path / "t.jsonl"), str(tmp_path / "rows.jsonl")
    JsonlTrajectoryExporter(source).export(group.trajectories)
    for kind, made in (("verl", to_verl_rows(group)), ("nemo_rl", to_nemo_rl_rows(group))):
        arguments = [
            "--to",
            "transferqueue",
            source,
            "-o",
            output,
            "--force",
            f"--option=format={kind}",
        ]
        assert main(["export", *arguments]) == 0
        assert list(map(json.loads, Path(output).read_text().splitlines())) == made


# --- a real queue


@pytest.fixture
def queue(cluster: Any) -> Iterator[Any]:
    """TransferQueue's controller and storage, in processes of their own."""
    transfer_queue.init()
    yield transfer_queue
    transfer_queue.close()


def buffer(kind: Any, **options: Any) -> Any:
    """A replay buffer of verl, as its trainer makes it."""
    config: Any = SimpleNamespace()
    settings = {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop", **options}
    return kind("sync", config, sampler_kwargs=config, poll_interval=0.05, **settings)


@pytest.mark.ray
async def test_verl_samples_them(queue: Any, recording: Recording, clients: Clients):
    """From a real TransferQueue: groups that are finished, with every field as it was put."""
    groups = [await play_group(clients, [1.0, reward]) for reward in (0.0, 0.25)]
    made = [to_verl_rows(group, uid=f"u{n}") for n, group in enumerate(groups)]
    put(made[0])
    await put_later(made[1])
    tag = {"is_prompt": True, "status": "running", "global_steps": 3}
    put([{"key": "u9", "tag": tag, "fields": None}])
    meta, _ = await asyncio.to_thread(buffer(ReplayBuffer).sample, 3, "train", 2)
    rows = [row for rows in made for row in rows[:-1]]
    expected = {row["key"]: row["tag"] for row in rows}
    assert dict(zip(meta.keys, meta.tags, strict=True)) == expected
    check_held(queue, "train", rows)


@pytest.mark.ray
async def test_verl_leaves_stale_and_failed_ones_out(
    queue: Any, recording: Recording, clients: Clients
):
    """By the tags: the step of the prompt, and its status; each of them is asked for again."""
    group, failed = await play_group(clients, [1.0, 0.0]), await play_group(clients, [1.0, None])
    for step in (1, 5):
        put(to_verl_rows(group, uid=f"s{step}", global_steps=step))
    put(to_verl_rows(failed, uid="f", global_steps=5))
    refilled: list[int] = []
    replay = buffer(ReplayBufferAsync, max_off_policy_threshold=3, refill_fn=refilled.append)
    meta, metrics = await asyncio.to_thread(replay.sample, 6, "train", 1)
    assert sorted(meta.keys) == ["s5_0_0", "s5_1_0"]
    assert sum(refilled) == 2
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert metrics["training/rollout_failure/evicted_samples"] == 1


@pytest.mark.ray
async def test_nemo_rl_columns_travel(queue: Any, recording: Recording, clients: Clients):
    """Its columns come back as they were put, and its tags are listed."""
    rows = to_nemo_rl_rows(await play_group(clients, [1.0, 0.25]))
    put(rows, partition_id="nemo")
    assert queue.kv_list("nemo")["nemo"] == {row["key"]: row["tag"] for row in rows}
    check_held(queue, "nemo", rows)


def check_held(queue: Any, partition: str, rows: list[Any]) -> None:
    """The queue has the fields of these rows, of the same types and values."""
    for batch in to_batches(rows):
        assert batch.fields is not None
        names = list(batch.fields.keys())
        got = queue.kv_batch_get(batch.keys, partition_id=partition, select_fields=names)
        assert as_plain(got) == as_plain(batch.fields)
