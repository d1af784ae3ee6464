"""The measurement of a server's log-probabilities: raw, processed, or wrong.

A reply is sampled with a temperature, and its tokens are then given to the server as a prompt,
whose log-probabilities are raw: from before the temperature. At temperature T a processed one is
raw / T - log Z, where Z is from 1 to V ** (1 - 1 / T) for a vocabulary of V tokens and T above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from otel_rollout.command.checks.process import Finding
from otel_rollout.record import process_state, request_token_ids
from otel_rollout.trajectory import Trajectory

LOGPROBS = "log-probabilities"
_TEMPERATURE = 1.5
_LONGEST_Z = (1 - 1 / _TEMPERATURE) * math.log(1 << 18)
_NOISE = 0.3
"""Nats by which one token may differ between two passes of one model in 16 bits."""


def measured(client: openai.OpenAI, model: str, trajectory: Trajectory) -> Finding:
    """Which log-probabilities the server sends. trajectory: of the rollout that is running."""
    with request_token_ids():
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me something that nobody expects."}],
            max_tokens=48,
            logprobs=True,
            temperature=_TEMPERATURE,
            top_p=1,
            extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1},
        )
    completion = trajectory.completions[-1]
    prompt, ids, sent = completion.prompt_token_ids, completion.token_ids, completion.logprobs
    if not prompt or not ids or not sent or len(ids) != len(sent):
        return Finding("ok", LOGPROBS, "not measurable: the server sends none, or no token ids")
    raw = _raw(client, model, [*prompt, *ids])[-len(ids) :]
    pairs = [(a, b) for a, b in zip(sent, raw, strict=False) if a is not None and b is not None]
    if len(raw) != len(ids) or not pairs:
        return Finding("ok", LOGPROBS, "not measurable: the server has none of prompts")
    if min(b for _, b in pairs) > -_NOISE:
        return Finding("ok", LOGPROBS, "not measurable: the model was certain of each token")
    return _judged(pairs)


def _raw(client: openai.OpenAI, model: str, ids: list[int]) -> list[float | None]:
    """The log-probability of each of these tokens after those before it."""
    reply = client.completions.create(
        model=model, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    listed = (reply.choices[0].model_extra or {}).get("prompt_logprobs")
    listed = listed if isinstance(listed, list) and len(listed) == len(ids) else []
    return [_of(entries, token) for entries, token in zip(listed, ids, strict=False)]


def _of(entries: Any, token: int) -> float | None:
    entry = entries.get(str(token)) if isinstance(entries, Mapping) else None
    return entry.get("logprob") if isinstance(entry, Mapping) else None


def _judged(pairs: Sequence[tuple[float, float]]) -> Finding:
    """The finding about (sent, raw) log-probabilities."""
    from_raw = max(abs(sent - raw) for sent, raw in pairs)
    bounds = [(sent, raw / _TEMPERATURE) for sent, raw in pairs]
    beyond = max(max(sent - high, high - _LONGEST_Z - sent) for sent, high in bounds)
    mode = "raw" if from_raw <= _NOISE else "processed" if beyond <= _NOISE else "wrong"
    if mode == "wrong":
        return Finding(
            "problem",
            LOGPROBS,
            f"wrong: off by up to {from_raw:.2g} nats from raw ones, and {beyond:.2g} beyond what "
            f"processed ones can be: do not train on them (token by token they are of another "
            f"distribution, as with some kinds of speculative decoding)",
        )
    told = process_state.settings.logprobs_mode
    if told not in (None, mode):
        text = f"{mode}, and this process is configured with logprobs_mode={told!r}"
        return Finding("problem", LOGPROBS, f"{text}: say what is so")
    what = {
        "raw": "from before temperature and the like, not of what was sampled from",
        "processed": f"of what was sampled from ({from_raw:.2g} nats from raw ones)",
    }
    return Finding(
        "ok", LOGPROBS, f"{mode}: {what[mode]}. configure(logprobs_mode={mode!r}) says so"
    )
