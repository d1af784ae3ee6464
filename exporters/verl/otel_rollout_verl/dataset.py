"""The dataset that reads what Arrow cannot hold: each row's own tools, arguments as objects.

For verl's SFT trainer:

    data.custom_cls.path=pkg://otel_rollout_verl.dataset
    data.custom_cls.name=TrajectorySFTDataset
"""

from __future__ import annotations

import json
from typing import Any

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


class TrajectorySFTDataset(MultiTurnSFTDataset):  # type: ignore[misc, unused-ignore]
    """verl's MultiTurnSFTDataset, of a file with `columns=json`."""

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()  # type: ignore[no-untyped-call]
        self.messages = [json.loads(text) for text in self.messages]
        if self.tools is not None:
            self.tools = [json.loads(text) for text in self.tools]

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        messages = json.loads(example[self.messages_key])
        built: list[dict[str, Any]] = super()._build_messages(
            {**example, self.messages_key: messages}
        )
        return built
