"""Rows as the tensors that TransferQueue holds, and the calls that put them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tensordict import TensorDict

_TYPES = {
    **dict.fromkeys(("prompts", "responses", "response_mask", "loss_mask"), "int64"),
    **dict.fromkeys(("input_ids", "position_ids", "token_mask", "prompt_ids_for_adv"), "int64"),
    **dict.fromkeys(("rollout_log_probs", "rm_scores", "generation_logprobs"), "float32"),
    **dict.fromkeys(("sample_mask", "total_reward"), "float32"),
    "input_lengths": "int32",
}
"""The types of the fields that are tensors."""


class QueueBatch(NamedTuple):
    """Rows that are put with one call, and seen together."""

    keys: list[str]
    """(N) the key of each row."""
    tags: list[dict[str, Any]]
    """(N) what the queue's controller knows of each row."""
    fields: TensorDict | None
    """(N) columns; those of tokens are jagged, unless all have one length. None: tags alone."""


def to_batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[QueueBatch]:
    """The rows, which may be read from JSON, in batches: of verl a trajectory, of NeMo RL a group.

    It needs torch and tensordict.
    """
    for _, found in groupby(rows, _batch):
        batch = list(found)
        fields = [row["fields"] for row in batch]
        columns = None if fields[0] is None else _columns(fields)
        yield QueueBatch([row["key"] for row in batch], [row["tag"] for row in batch], columns)


def _batch(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    return row["key"].rpartition("_")[0], list(row["fields"] or ())


def _columns(rows: list[dict[str, Any]]) -> TensorDict:
    from tensordict import TensorDict

    columns = {name: _column(name, [row[name] for row in rows]) for name in rows[0]}
    return TensorDict(columns, batch_size=[len(rows)])


def _column(name: str, values: list[Any]) -> Any:
    """The values of a field: one tensor, a jagged one, or no tensor."""
    import numpy as np
    import torch
    from tensordict import NonTensorStack

    if name not in _TYPES:
        return NonTensorStack(*values)
    tensors = [torch.from_numpy(np.array(value, dtype=_TYPES[name])) for value in values]
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors)
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def put(rows: Iterable[Mapping[str, Any]], *, partition_id: str = "train") -> None:
    """Put rows in order, so that a reader who sees verl's prompt finds the rows of it.

    partition_id: "train" or "val" for verl and NeMo RL.
    `transfer_queue.init()` was called in this process, or in another one of the Ray cluster.
    """
    import transfer_queue

    for keys, tags, fields in to_batches(rows):
        transfer_queue.kv_batch_put(keys=keys, partition_id=partition_id, fields=fields, tags=tags)


async def put_later(rows: Iterable[Mapping[str, Any]], *, partition_id: str = "train") -> None:
    """`put` for an event loop, which goes on meanwhile."""
    import transfer_queue

    for keys, tags, fields in to_batches(rows):
        await transfer_queue.async_kv_batch_put(
            keys=keys, partition_id=partition_id, fields=fields, tags=tags
        )
