"""Parquet files that verl reads: one schema for all rows of a file, and nothing that it damages.

Arrow has one type for a column: where one object of a list has a key, all others get it too, as
null, and chat templates render that. So a column holds only what comes back as it was; what does
not fits into `columns=json`, texts that `otel_rollout_verl.dataset` reads.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from otel_rollout import ExportError, TrajectoryGroup
from otel_rollout.export import CheckedOptions, Json, dumps
from otel_rollout_verl.messages import Untrained, to_verl_prompts, to_verl_sft, with_objects

_BATCH = 16 * 2**20
"""Bytes of JSON that are made into one row group."""
_CALL = {"id": pa.string(), "type": pa.string()}
_FUNCTION = {"name": pa.string(), "arguments": pa.string()}
_MESSAGE = {
    "role": pa.string(),
    "content": pa.string(),
    "tool_calls": pa.list_(pa.struct({**_CALL, "function": pa.struct(_FUNCTION)})),
    "tool_call_id": pa.string(),
    "name": pa.string(),
    "reasoning_content": pa.string(),
}
_RL = {
    "data_source": pa.string(),
    "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    "ability": pa.string(),
    "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
    "extra_info": pa.struct({"index": pa.int64(), "split": pa.string(), "task_id": pa.string()}),
}


@dataclass(frozen=True)
class VerlRows(CheckedOptions):
    """The exporter `verl`: a parquet file for one of verl's datasets.

    format: "rl" is the prompts of tasks, for RLHFDataset (`to_verl_prompts`); "sft" is
    conversations, for MultiTurnSFTDataset (`to_verl_sft`).
    data_source: of rl, the column of that name; not set: the name of the rollout.
    ability: of rl, the column of that name.
    split: of rl, `extra_info.split`.
    ground_truth: of rl, the name of the metadata that holds `reward_model.ground_truth`.
    style: of rl, `reward_model.style`.
    agent_name: of rl, the agent loop that runs the prompts; not set: no such column.
    min_reward: of sft, leave out what is scored lower, or not at all; not set: nothing.
    untrained: of sft, what to do with a conversation that has replies which must not be trained,
    "error", "skip" or "train".
    columns: of sft, "arrow", or "json" for `otel_rollout_verl.dataset.TrajectorySFTDataset`.
    """

    format: Literal["rl", "sft"] = "rl"
    data_source: str | None = None
    ability: str = ""
    split: str = "train"
    ground_truth: str = "ground_truth"
    style: str = "rule"
    agent_name: str | None = None
    min_reward: float | None = None
    untrained: Untrained = "error"
    columns: Literal["arrow", "json"] = "arrow"

    @property
    def _is_rl(self) -> bool:
        return self.format == "rl"

    @property
    def _is_json(self) -> bool:
        return self.columns == "json"

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """A row for each prompt of the task, or for each conversation."""
        if self._is_rl:
            agent = {} if self.agent_name is None else {"agent_name": self.agent_name}
            prompts = to_verl_prompts(
                group,
                data_source=self.data_source,
                ability=self.ability,
                split=self.split,
                ground_truth=self.ground_truth,
                style=self.style,
            )
            yield from ({**row, **agent} for row in prompts)
            return
        for row in to_verl_sft(group, min_reward=self.min_reward, untrained=self.untrained):
            if self._is_json:
                where = f"trajectory {row['trajectory_id']!r}"
                row["messages"] = [with_objects(message, where) for message in row["messages"]]
            yield row

    def finish(self, rows: Path, output: Path) -> None:
        """Write the parquet file; ExportError if the rows do not go together in one."""
        schema = pa.schema(self._rl_schema() if self._is_rl else self._sft_schema(rows))
        part = output.with_name(output.name + ".unfinished")
        try:
            with pq.ParquetWriter(part, schema) as writer:
                for batch in self._batches(rows):
                    writer.write_table(_table(batch, schema))
            os.replace(part, output)
        finally:
            part.unlink(missing_ok=True)

    def _rl_schema(self) -> dict[str, pa.DataType]:
        agent = {} if self.agent_name is None else {"agent_name": pa.string()}
        return {**_RL, **agent}

    def _sft_schema(self, rows: Path) -> dict[str, pa.DataType]:
        keys, tools = {"role", "content"}, _Same("tools", "columns='json' keeps each row's own")
        thinking = _Same("enable_thinking", "export them into files of their own")
        for row in _lines(rows):
            keys.update(*row["messages"])
            thinking.see(row["enable_thinking"] is None, row)
            if not self._is_json:
                tools.see(row["tools"], row)
        schema: dict[str, pa.DataType] = {}
        if self._is_json:
            schema |= {"messages": pa.string(), "tools": pa.string()}
        else:
            message = {name: kind for name, kind in _MESSAGE.items() if name in keys}
            schema["messages"] = pa.list_(pa.struct(message))
            if tools.value:
                schema["tools"] = _tools_type(tools.value)
        if thinking.value is False:
            schema["enable_thinking"] = pa.bool_()
        return {**schema, "trajectory_id": pa.string(), "reward": pa.float64()}

    def _batches(self, rows: Path) -> Iterator[list[dict[str, Json]]]:
        batch: list[dict[str, Json]] = []
        size = 0
        for number, row in enumerate(_lines(rows)):
            if self._is_rl:
                row["extra_info"]["index"] = number
            elif self._is_json:
                row |= {name: dumps(row[name]) for name in ("messages", "tools")}
            batch.append(row)
            size += len(str(row))
            if size > _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


class _Same:
    """A value that has to be equal in all rows of a file."""

    def __init__(self, name: str, advice: str) -> None:
        self._name, self._advice = name, advice
        self._seen: str | None = None
        self.value: Json = None

    def see(self, value: Json, row: dict[str, Json]) -> None:
        text = dumps(value)
        if self._seen is None:
            self._seen, self.value = text, value
        elif text != self._seen:
            raise ExportError(
                f"trajectory {row['trajectory_id']!r} has other {self._name} than those before "
                f"it: verl reads one column for all; {self._advice}"
            )


def _lines(path: Path) -> Iterator[dict[str, Json]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _table(rows: list[dict[str, Json]], schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError as error:
        raise ExportError(
            f"a text has a lone surrogate, {error.object[error.start : error.end]!r}, which a "
            f"parquet file cannot hold; columns='json' can"
        ) from None


def _tools_type(tools: list[Json]) -> pa.DataType:
    """The type that gives the tools back as they are."""
    try:
        table = pa.table({"tools": [tools]})
        file = io.BytesIO()
        pq.write_table(table, file)
        kept = pq.read_table(file).to_pylist()[0]["tools"]
    except (pa.ArrowException, UnicodeEncodeError) as error:
        kept = str(error)
    if dumps(_sorted(kept)) != dumps(_sorted(tools)):
        raise ExportError(
            f"these tools do not survive in a column of verl, where all get the keys of all: "
            f"got {dumps(kept)[:200]} of {dumps(tools)[:200]}; use columns='json'"
        )
    return table.schema.field("tools").type


def _sorted(value: Json) -> Json:
    return json.loads(json.dumps(value, sort_keys=True))
