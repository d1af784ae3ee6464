"""Agents on llama.cpp's real server: what its replies hold trains exactly, the rest is dropped.

Its chats have no ids of the prompt, so the agent renders its conversation itself and asks for text
completions of token ids. Where a character is split over tokens the server leaves out entries of
log-probabilities (of `/v1/completions` with them the ids); such a completion does not train.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import Qwen2Tokenizer

from exporters.kit.recomputed import Model
from otel_rollout import Completion, Trajectory, gather_trajectory, request_token_ids, rollout
from tests.kit.calling import STREAMED
from tests.kit.recording import Recording
from tests.servers.agents import Chat, serving
from tests.servers.checks import check
from tests.servers.model import user

pytestmark = pytest.mark.server
TOLERANCE = 1e-2  # its cache has 16 bits


@pytest.fixture
async def client(llama: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(llama) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return Qwen2Tokenizer.from_pretrained(model_folder)


def prompt(tokenizer: Any, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [user(text)], add_generation_prompt=True, return_dict=False
    )
    return list(rendered)


async def complete(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> list[int]:
    """The ids of a text completion, as its log-probabilities name them."""
    defaults: dict[str, Any] = {"logprobs": 1, "max_tokens": 60, "temperature": 1.0}
    options = defaults | options
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    made: Any = await client.completions.create(model="tiny", **options)
    pieces = [piece async for piece in made] if stream else [made]
    return [
        entry["id"]
        for piece in pieces
        for choice in piece.choices
        for entry in (choice.logprobs.content if choice.logprobs else ())
    ]


def split(trajectory: Trajectory) -> list[Completion]:
    """The completions for which the server sent fewer tokens than it counted."""
    return [
        completion
        for completion in trajectory.completions
        if len(completion.token_ids or ()) != (completion.usage or {})["completion_tokens"]
        or len(completion.logprobs or ()) != len(completion.token_ids or ())
    ]


@STREAMED
async def test_conversations_of_ids(
    recording: Recording,
    client: openai.AsyncOpenAI,
    tokenizer: Any,
    model: Model,
    stream: bool,
) -> None:
    """Turns that go on from the sampled ids are one row; so do stop strings and length limits."""

    @rollout(name="llama.cpp /v1/completions")
    async def agent() -> None:
        endings: list[dict[str, Any]] = [{}, {}, {}, {"stop": ["dog", "3"]}, {"max_tokens": 4}]
        for seed, options in enumerate(endings * 2):
            ids = prompt(tokenizer, "Say something.")
            for turn in range(3):
                ids += await complete(client, stream, prompt=ids, seed=10 * seed + turn, **options)
                ids += prompt(tokenizer, "Go on.")

    trajectory = await gather_trajectory(agent())
    rows, lost = trajectory.token_sequences(), split(trajectory)
    assert 0 < len(lost) < 20
    assert all("token ids" in dropped.reason for dropped in rows.dropped)
    assert max(len(row.spans) for row in rows) == 3
    check(trajectory, model, TOLERANCE, lost)


async def test_its_own_endpoint(
    recording: Recording, client: openai.AsyncOpenAI, llama: str, tokenizer: Any, model: Model
) -> None:
    """`/completion` has all ids, and fewer log-probabilities where a character is split."""

    @rollout(name="llama.cpp /completion")
    async def agent() -> None:
        for seed in range(12):
            body = {"prompt": prompt(tokenizer, "Why?"), "n_probs": 1, "return_tokens": True}
            sampling = {"temperature": 1.0, "n_predict": 60, "seed": seed}
            await client.post(f"{llama}/completion", body=body | sampling, cast_to=object)

    trajectory = await gather_trajectory(agent())
    assert len(trajectory.completions) == 12
    assert all("log-probabilities" in d.reason for d in trajectory.token_sequences().dropped)
    check(trajectory, model, TOLERANCE, split(trajectory))


@STREAMED
async def test_chats_have_no_rows(
    recording: Recording, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """It sends no ids of the prompt: messages are there, nothing trains, and that is said."""

    @rollout
    async def agent() -> None:
        await Chat(client, stream).ask([user("Say something.")])

    with request_token_ids():
        trajectory = await gather_trajectory(agent())
    (dropped,) = trajectory.token_sequences().dropped
    assert trajectory.messages()[-1]["role"] == "assistant"
    assert dropped.reason.startswith("the server sent no token ids")
    assert trajectory.token_sequences() == []
