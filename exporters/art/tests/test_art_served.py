"""What vLLM sampled, as ART's own tokeniser makes rows of it.

The weights are not asked here: ART changes transformers for its process. What a row trains, and
what stands before it, is compared with what the server sent, which `tests/servers` compares.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from art.preprocessing.tokenize import TokenizedResult, tokenize_trajectory_groups
from otel_rollout_art import to_art_group
from transformers import AutoTokenizer

from exporters.kit.served import FOLDER, groups, needs_servers
from otel_rollout import Completion, TrajectoryGroup

pytestmark = [pytest.mark.trainer, needs_servers]
Run = tuple[list[int], list[int], list[float]]
"""Ids before a run of trained tokens, its ids, and its log-probabilities."""


def tokenised(group: TrajectoryGroup, tokenizer: Any) -> list[TokenizedResult]:
    """The rows that ART trains on."""
    return list(
        tokenize_trajectory_groups(
            tokenizer,
            [to_art_group(group)],
            allow_training_without_logprobs=False,
            scale_rewards=False,
            shuffle_group_trajectories=False,
            drop_zero_advantage_trajectories=False,
        )
    )


def runs(row: TokenizedResult) -> list[Run]:
    """What the row trains, each run of tokens with what stands before it."""
    found: list[Run] = []
    for trained, positions in groupby(range(len(row.token_ids)), row.assistant_mask.__getitem__):
        if trained:
            start, *others = positions
            run = slice(start, start + 1 + len(others))
            found.append((row.token_ids[:start], row.token_ids[run], row.logprobs[run]))
    return found


def is_rendered_alike(completion: Completion) -> bool:
    """ART gives the template the tools in another order of keys, and has no prefill."""
    return not completion.tools and completion.request_messages[-1]["role"] != "assistant"


def test_tokenised() -> None:
    """Each reply trains once with its ids and log-probabilities, after the ids of its prompt."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    alike = 0
    for group in groups():
        made = [run for row in tokenised(group, tokenizer) for run in runs(row)]
        replies = [c for trajectory in group for c in trajectory.completions if c.trainable]
        assert sorted(run[1:] for run in made) == sorted((c.token_ids, c.logprobs) for c in replies)
        for reply in filter(is_rendered_alike, replies):
            assert (reply.prompt_token_ids, reply.token_ids, reply.logprobs) in made
            alike += 1
    assert alike > 0
