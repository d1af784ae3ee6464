"""Datasets: what is read back is equal, from memory, Parquet and JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import otel_rollout_datasets
import pyarrow.parquet
import pytest
from datasets import Dataset, load_dataset
from otel_rollout_datasets import FEATURES, DatasetRows, from_dataset, to_dataset

from exporters.kit import agents
from exporters.kit.recording import Clients, Recording
from otel_rollout import (
    SpanFormatError,
    Trajectory,
    TrajectoryGroup,
    gather_trajectory,
    get_current_trajectory,
    record_reward,
    rollout,
)
from otel_rollout.export import row_exporter
from otel_rollout.testing import Reply, ToolCall

pytestmark = pytest.mark.trainer


async def broken(client: Any) -> None:
    """It fails behind its first call."""
    await agents.ask(client, [agents.user("one")])
    raise ValueError("no tool of this name")


async def silent(client: Any) -> None:
    """It asks nothing of a model."""


async def hard(clients: Clients) -> Trajectory:
    """Whatever Arrow does not like: other keys and types, text or parts, odd texts and numbers."""
    replies = [
        Reply(tool_calls=[ToolCall("add", '{"a": 1, "b": [1, "x", null]}'), ToolCall("f", "{}")]),
        Reply(tool_calls=[ToolCall("find", '{"a": "text", "deep": {"k": {}}}')]),
        Reply("\ud83d and NaN: é", extra={"score": math.nan, "big": 2**70}),
    ]
    client = clients.asynchronous(clients.serve(replies))

    @rollout(task_id="t")
    async def agent() -> dict[str, Any]:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "tools"}]}]
        for _ in range(3):
            message = await agents.ask(client, messages, tools=agents.TOOLS)
            for call in message.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        trajectory = get_current_trajectory()
        trajectory.metadata["mixed"] = [1, "a", {"b": None}]
        trajectory.metrics["steps"] = 3
        trajectory.rewards["style"] = 0.1
        record_reward(1 / 3)
        return {"answer": None}

    return await gather_trajectory(agent())


async def test_side_calls_are_no_conversations(recording: Recording, clients: Clients):
    """`histories` counts what the agent said; what was asked beside it is in the whole."""
    titled = await agents.play(clients, agents.titled)
    (row,) = to_dataset([titled])
    assert (row["histories"], len(row["input_ids"])) == (1, 1)
    assert row["messages"][0]["content"] == "one"
    assert from_dataset(to_dataset([titled])) == [titled]


async def everything(clients: Clients) -> list[Trajectory]:
    played = [await agents.play(clients, agent, 0.5) for agent in agents.AGENTS]
    played.append(await agents.play(clients, broken, None, raise_errors=False))
    played.append(await agents.play(clients, silent, None))
    played.append(await hard(clients))
    return played


def readable(trajectory: Trajectory) -> list[Any]:
    """Its messages, without that which has half a character in it."""
    return [None if "\ud83d" in str(m.get("content")) else m for m in trajectory.messages()]


def written(group: TrajectoryGroup, path: Path) -> Path:
    """The file that the command makes of a group."""
    exporter = row_exporter("datasets")
    assert isinstance(exporter, DatasetRows)
    lines = path.with_suffix(".part")
    with lines.open("w") as file:
        for row in exporter.rows(group):
            file.write(json.dumps(row, allow_nan=False) + "\n")
    exporter.finish(lines, path)
    assert not lines.exists()
    return path


async def test_a_dataset_is_lossless(recording: Recording, clients: Clients):
    """The trajectories are equal, whatever was in them; so are their views."""
    played = await everything(clients)
    dataset = to_dataset(played)
    assert dataset.features == FEATURES
    assert from_dataset(dataset) == played
    for row, trajectory in zip(dataset, played, strict=True):
        assert row["messages"] == readable(trajectory)
        assert row["reward"] == trajectory.reward
        assert row["metadata"] == dict(trajectory.metadata)
        assert row["trajectory"] == trajectory.to_json()
        sequences = trajectory.token_sequences()
        assert row["input_ids"] == [sequence.token_ids for sequence in sequences]
        assert row["loss_mask"] == [sequence.loss_mask for sequence in sequences]
        assert row["logprobs"] == [sequence.logprobs for sequence in sequences]


@pytest.mark.parametrize("batch_bytes", [1, 1 << 26])
async def test_parquet_is_lossless(
    recording: Recording,
    clients: Clients,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_bytes: int,
):
    """However few rows are written at a time; tool arguments keep their own keys."""
    monkeypatch.setattr(otel_rollout_datasets, "_BATCH_BYTES", batch_bytes)
    group = TrajectoryGroup.of(await everything(clients), id="g")
    path = written(group, tmp_path / "group.parquet")
    dataset = load_dataset("parquet", data_files=str(path), cache_dir=tmp_path, split="train")
    assert dataset.features == FEATURES
    assert from_dataset(dataset) == [*group, *group.failures]
    found = [
        call["function"]["arguments"]
        for row in dataset
        for message in row["messages"]
        if message is not None
        for call in message.get("tool_calls") or ()
    ]
    assert '{"a": 1, "b": [1, "x", null]}' in found
    assert '{"a": "text", "deep": {"k": {}}}' in found


async def test_json_lines_are_lossless(recording: Recording, clients: Clients, tmp_path: Path):
    """By line, and by the library with our features."""
    group = TrajectoryGroup.of(await everything(clients), id="g")
    path = written(group, tmp_path / "group.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert from_dataset(lines) == [*group, *group.failures]
    assert [row["messages"] for row in lines] == list(map(readable, [*group, *group.failures]))
    dataset = load_dataset(
        "json", data_files=str(path), features=FEATURES, cache_dir=tmp_path, split="train"
    )
    assert from_dataset(dataset) == [*group, *group.failures]
    assert dataset["messages"] == [row["messages"] for row in lines]


async def test_a_dataset_can_be_saved_and_pushed_on(
    recording: Recording, clients: Clients, tmp_path: Path
):
    """What the library writes itself is lossless too, and so is what it filters."""
    played = await everything(clients)
    dataset = to_dataset(played)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "disk"))
    assert (
        from_dataset(Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path)))
        == played
    )
    assert from_dataset(Dataset.load_from_disk(str(tmp_path / "disk"))) == played
    scored = dataset.filter(lambda row: row["reward"] is not None)
    assert from_dataset(scored) == [t for t in played if t.reward is not None]


async def test_others_read_it_without_us(recording: Recording, clients: Clients, tmp_path: Path):
    """Plain Arrow: numbers as numbers, messages as JSON texts, unknown as null."""
    unscored = await agents.play(clients, agents.tool_loop, None)
    path = written(TrajectoryGroup.of([unscored]), tmp_path / "a.parquet")
    (row,) = pyarrow.parquet.read_table(path).to_pylist()
    assert row["reward"] is None
    (sequence,) = unscored.token_sequences()
    assert row["input_ids"] == [sequence.token_ids]
    assert [json.loads(message) for message in row["messages"]] == unscored.messages()


async def test_unknown_log_probabilities_are_null(recording: Recording, clients: Clients):
    """Neither 0 nor NaN, which many readers take for a number."""
    client = clients.asynchronous(clients.serve("hello", logprobs=False))

    @rollout
    async def agent() -> None:
        await agents.ask(client, [agents.user("hi")])

    (row,) = to_dataset([await gather_trajectory(agent())])
    assert None in row["logprobs"][0]
    assert {value for value in row["logprobs"][0] if value is not None} == {0.0}


def test_nothing_is_a_dataset_too(tmp_path: Path):
    """With the same columns."""
    assert to_dataset([]).features == FEATURES
    assert from_dataset(to_dataset([])) == []
    path = written(TrajectoryGroup([]), tmp_path / "none.parquet")
    assert pyarrow.parquet.read_table(path).schema.names == list(FEATURES)


def test_other_rows_are_refused():
    """With the columns that they have."""
    with pytest.raises(SpanFormatError, match=r"column 'trajectory'.*got the columns prompt, a"):
        from_dataset(Dataset.from_list([{"prompt": "x", "a": 1}]))
    with pytest.raises(SpanFormatError, match="it is no JSON"):
        from_dataset([{"trajectory": "{"}])


def test_the_readme_runs(clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its example, as it stands."""
    monkeypatch.chdir(tmp_path)
    names = agents.run_readme(Path(__file__).parents[1], clients, monkeypatch)
    assert len(names["trajectories"]) == 2
    assert (tmp_path / "runs.parquet").exists()
