"""Log-probabilities by the model itself, to compare with those that a server recorded.

A forward pass over a row, in float32, says how likely each token was after those before it. A
recorded value that differs belongs to another token, another prefix, or another distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Row = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Token ids, mask of the trained ones, and log-probabilities, aligned."""


class Model:
    """The weights that a server sampled with."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # a machine that does other things is slower with more
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """(T) log-probability of each token after those before it; 0.0 for the first."""
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            known = self._model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return [0.0, *known.gather(-1, ids[0, 1:, None])[:, 0].tolist()]

    def gaps(self, rows: Iterable[Row]) -> list[float]:
        """Of each trained token, how far its log-probability is from this model's."""
        return [
            abs(recorded - recomputed)
            for ids, mask, logprobs in rows
            for recomputed, trained, recorded in zip(
                self.logprobs(ids), mask, logprobs, strict=True
            )
            if trained
        ]
