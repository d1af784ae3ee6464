"""TRL's AsyncGRPOTrainer without a GPU, for small models: what stands in for CUDA and NCCL.

Everything else is TRL's own: its queue, packing, loss, optimizer and versions. The names of TRL
that are replaced here are those of TRL 1.16.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing

from examples.folder_transfer import FolderTransfer, Weights
from examples.tiny_model import Policy

CPU = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "learning_rate": 8e-3,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "token_budget": -1,
}
"""Settings for a model of some ten thousand weights on a CPU."""


class TinyTransfer(FolderTransfer):
    """Weights for the tiny model that this process serves."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def send_weights(self, iterator: Weights) -> None:
        self._policy.load(iterator)

    def _post(self, path: str, **options: Any) -> None: ...


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Replace, meanwhile, TRL's attention kernel and its question for the name of the GPU."""
    with (
        patch.object(packing, "tree_attention", tree_attention),
        patch.object(async_grpo_trainer, "get_peak_flops_per_device", return_value=None),
    ):
        yield


def tree_attention(
    module: Any,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows: each segment sees the tokens on its own path, causally.

    query, key, value: (1, heads, N, size). tree_kv_index: (K) of the N, the paths end to end; the
    others are the ends of segments in N and of paths in K. Returns (1, N, heads, size).
    """
    seen = []
    segments = itertools.pairwise(tree_cu_seqlens_q.tolist())
    paths = itertools.pairwise(tree_cu_seqlens_k.tolist())
    for (start, end), (first, last) in zip(segments, paths, strict=True):
        index = tree_kv_index[first:last]
        earlier = len(index) - (end - start)
        causal = torch.ones(end - start, len(index), dtype=torch.bool).tril(earlier)
        q, k, v = query[:, :, start:end], key[:, :, index], value[:, :, index]
        seen.append(scaled_dot_product_attention(q, k, v, causal, scale=scaling, enable_gqa=True))
    return torch.cat(seen, dim=2).transpose(1, 2), None
