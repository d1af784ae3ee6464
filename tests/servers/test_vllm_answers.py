"""Answers of the real vLLM that are easily read wrong: echoed prompts, aborts, guided decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from exporters.kit.recomputed import Model, Row
from otel_rollout import (
    gather_trajectory,
    no_capture,
    request_token_ids,
    rollout,
)
from tests.kit.calling import STREAMED
from tests.kit.recording import Recording
from tests.servers.agents import serving
from tests.servers.checks import rows_of, sampled
from tests.servers.model import user

pytestmark = pytest.mark.server
TOLERANCE = 1e-3


@pytest.fixture
async def client(vllm: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(vllm) as made:
        yield made


@STREAMED
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 8])
async def test_an_echoed_prompt_does_not_train(
    recording: Recording,
    client: openai.AsyncOpenAI,
    model: Model,
    stream: bool,
    as_ids: bool,
    max_tokens: int,
) -> None:
    """Log-probabilities of prompt and reply, texts of the reply: it trains exactly, or not."""

    @rollout
    async def agent() -> None:
        options: dict[str, Any] = {"echo": True, "max_tokens": max_tokens, "seed": 1}
        options["extra_body"] = {"return_tokens_as_token_ids": as_ids}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        made: Any = await client.completions.create(model="tiny", prompt="One fish,", **options)
        if stream:
            async for _ in made:
                pass

    with request_token_ids():
        trajectory = await gather_trajectory(agent())
    gaps = model.gaps(rows_of(trajectory.token_sequences()))
    assert len(gaps) in (0, sampled(trajectory.completions))
    assert [gap for gap in gaps if not gap <= TOLERANCE] == []


async def test_an_aborted_reply_says_so(
    recording: Recording, client: openai.AsyncOpenAI, vllm: str, model: Model
) -> None:
    """`/pause`, as around an update of the weights, ends a reply with what had come by then."""

    @rollout
    async def agent() -> None:
        messages: list[Any] = [user("Say something.")]
        stream = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "max_tokens": 4000},
        )
        async for number in _numbered(stream):
            if number == 3:
                with no_capture():
                    await client.post(f"{vllm}/pause?mode=abort", cast_to=object)

    try:
        with request_token_ids():
            trajectory = await gather_trajectory(agent())
    finally:
        await client.post(f"{vllm}/resume", cast_to=object)
    (completion,) = trajectory.completions
    assert completion.finish_reason == "abort"
    ids, prompt = completion.token_ids or [], completion.prompt_token_ids or []
    assert 3 < len(ids) == sampled([completion]) < 4000
    logprobs = [value or 0.0 for value in completion.logprobs or ()]
    assert max(model.gaps([_row(prompt, ids, logprobs)])) < TOLERANCE


async def test_guided_decoding_is_another_distribution(
    client: openai.AsyncOpenAI, model: Model
) -> None:
    """What a grammar forbids is left out before vLLM takes its "raw" log-probabilities."""
    beginning = {"role": "assistant", "content": "<think>Hmm</think>"}  # it guides what follows
    messages: list[Any] = [user("Say something."), beginning]
    gaps: dict[bool, float] = {}
    for guided in (True, False):
        options: dict[str, Any] = {"response_format": {"type": "json_object"}} if guided else {}
        made: Any = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            logprobs=True,
            max_tokens=30,
            seed=1,
            extra_body={
                "return_token_ids": True,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            **options,
        )
        (choice,) = made.choices
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        gaps[guided] = max(model.gaps([_row(made.prompt_token_ids, choice.token_ids, logprobs)]))
    assert gaps[False] < TOLERANCE
    assert gaps[True] > 1.0


def _row(prompt: list[int], ids: list[int], logprobs: list[float]) -> Row:
    before = len(prompt)
    return prompt + ids, [0] * before + [1] * len(ids), [0.0] * before + logprobs


async def _numbered(stream: Any) -> AsyncIterator[int]:
    number = 0
    async for _ in stream:
        number += 1
        yield number
