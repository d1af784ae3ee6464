"""Weights from a trainer to a vLLM on the same machine, through a folder: it needs no GPU.

TRL sends weights between GPUs. On a CPU they are written into a folder, and vLLM, started with
`VLLM_SERVER_DEV_MODE=1`, reads them from there.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import save_file

Weights = Iterable[tuple[str, torch.Tensor]]


class FolderTransfer:
    """What TRL's `WeightTransferProtocol` asks for; `transfer` is all of it at once.

    vLLM 0.32 on a CPU keeps a packed copy of the output layer, and packs no new one where that
    layer is tied to the embeddings: such a model is refused, since it would sample with a mixture.
    """

    def __init__(self, server: str, folder: str | Path) -> None:
        """server: its address, without /v1. folder: made here; the server can read it."""
        self._server, self._folder = server.rstrip("/"), Path(folder).resolve()

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        """Hold calls until `resume`; they are computed anew from then on, with the new weights."""
        self._post("pause", params={"mode": "keep"})

    def send_weights(self, iterator: Weights) -> None:
        """Write them, and have the server read them; ValueError if the output layer is tied."""
        self._folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().contiguous().clone() for name, tensor in iterator}
        if "lm_head.weight" not in weights:
            raise ValueError(
                "the weights have no 'lm_head.weight': vLLM on a CPU does not renew an output "
                "layer that is tied to the embeddings; train a model with "
                "tie_word_embeddings=False, or on a GPU"
            )
        save_file(weights, self._folder / "model.safetensors", metadata={"format": "pt"})
        options = {"weights_path": str(self._folder)}
        self._post("collective_rpc", json={"method": "reload_weights", "kwargs": options})

    def resume(self) -> None:
        self._post("resume")

    def destroy(self) -> None: ...

    def transfer(self, weights: Weights) -> None:
        """Bring the weights to the server between two calls."""
        self.pause()
        self.send_weights(weights)
        self.resume()

    def _post(self, path: str, **options: Any) -> None:
        requests.post(f"{self._server}/{path}", timeout=300, **options).raise_for_status()
