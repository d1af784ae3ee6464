"""Token sequences as agent loop outputs: a prompt, and a response with a mask.

An agent loop of verl may return several outputs for one prompt; each is a token sequence, split at
its first sampled token. All that tools and users said later is part of the response, masked.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from otel_rollout import Completion, ConfigurationError, ExportError, TokenSequence, Trajectory
from otel_rollout.export import Json, path_messages

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


def to_verl_outputs(
    trajectory: Trajectory,
    *,
    logprobs: bool = True,
    response_length: int | None = None,
    **options: Any,
) -> list[AgentLoopOutput]:
    """The return value of `AgentLoopBase.run`: an AgentLoopOutput for each token sequence.

    prompt_ids: up to the first sampled token. response_ids, response_mask, response_logprobs: all
    that follows; the mask is 1 on what trains in this row, the others have log-probability 0.0.
    reward_score: the trajectory's, on the last output (verl copies it to the others), None if it
    is not scored: then verl scores it. num_turns: turns of the conversation, users' and tools'
    included. metrics.generate_sequences: seconds in the calls that train in the row.
    extra_fields: reward_extra_info ({}), turn_scores (step rewards), tool_rewards ([]),
    trajectory_id, completion_ids; min_global_steps and max_global_steps where the policy versions
    of what trains are whole numbers, which verl's trainer v1 needs (`policy_version=`).

    A rollout that failed and is not scored has none: verl leaves an empty list out.
    logprobs: False leaves them out of all outputs, and verl computes them itself.
    response_length: longer responses are truncated (`rollout.response_length` of verl).
    options: those of `Trajectory.token_sequences`.

    ExportError for a log-probability that is not known.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    made = output_fields(trajectory, logprobs=logprobs, response_length=response_length, **options)
    return [
        AgentLoopOutput(**{**fields, "metrics": AgentLoopMetrics(**fields["metrics"])})
        for fields in made
    ]


def output_fields(
    trajectory: Trajectory,
    *,
    logprobs: bool = True,
    response_length: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """The fields of the outputs of `to_verl_outputs`, which needs verl; this does not.

    reward_score is there where it is set.
    """
    if response_length is not None and response_length < 1:
        raise ConfigurationError(
            f"to_verl_outputs(response_length=...): expected a number from 1 on, got "
            f"{response_length!r}"
        )
    outputs: list[dict[str, Any]] = []
    for row in trajectory.token_sequences(**options):
        ids, start = row.token_id_array, row.prompt_length
        end = len(row) if response_length is None else min(len(row), start + response_length)
        mask = row.loss_mask_array[start:end]
        if not any(mask):
            continue
        spans = zip(row.completions, row.spans, row.trains, strict=True)
        kept = [(completion, trains) for completion, (_, first, _), trains in spans if first < end]
        trained = [completion for completion, trains in kept if trains]
        outputs.append(
            {
                "prompt_ids": ids[:start].tolist(),
                "response_ids": ids[start:end].tolist(),
                "response_mask": mask.tolist(),
                "response_logprobs": _logprobs(trajectory, row, end) if logprobs else None,
                "num_turns": _turns(path_messages(kept[-1][0].path)),
                "metrics": {"generate_sequences": _seconds(trained)},
                "extra_fields": {
                    "reward_extra_info": {},
                    "turn_scores": [float(c.reward) for c, _ in kept if c.reward is not None],
                    "tool_rewards": [],
                    "trajectory_id": trajectory.id,
                    "completion_ids": [completion.id for completion, _ in kept],
                    **_global_steps(trained),
                },
            }
        )
    if outputs and trajectory.reward is not None:
        outputs[-1]["reward_score"] = float(trajectory.reward)
    return outputs


def _logprobs(trajectory: Trajectory, row: TokenSequence, end: int) -> list[float]:
    values = row.logprob_array
    for (completion_id, first, last), trains in zip(row.spans, row.trains, strict=True):
        if not trains:
            values[first:last] = array("d", bytes(8 * (last - first)))
        elif not math.isfinite(math.hypot(*values[first : min(last, end)])):
            raise ExportError(
                f"completion {completion_id!r} of trajectory {trajectory.id!r}: the server did "
                f"not send the log-probability of each token; ask for them "
                f"(`with otel_rollout.request_token_ids():`), or logprobs=False lets "
                f"verl compute them"
            )
    return values[row.prompt_length : end].tolist()


def _turns(messages: Sequence[Json]) -> int:
    """Turns of a conversation: what users and tools said between two replies is one."""
    sides = [
        message.get("role") == "assistant"
        or (message.get("role") is None and not str(message.get("type")).endswith("_output"))
        for message in messages
        if isinstance(message, dict) and message.get("role") not in ("system", "developer")
    ]
    return sum(1 for _ in groupby(sides))


def _seconds(completions: Sequence[Completion]) -> float:
    """In their calls, each call once."""
    spans = {c.span_id: (c.start_time_ns, c.end_time_ns or c.start_time_ns) for c in completions}
    return sum(end - start for start, end in spans.values()) / 1e9


def _global_steps(completions: Sequence[Completion]) -> dict[str, int]:
    """The training steps whose policies sampled these, where all of them say so."""
    steps = [_whole_number(v) for each in completions for v in each.policy_versions]
    known = [step for step in steps if step is not None]
    if not known or len(known) < len(steps):
        return {}
    return {"min_global_steps": min(known), "max_global_steps": max(known)}


def _whole_number(version: str | int | None) -> int | None:
    text = str(version)
    return int(text) if text.isascii() and text.isdecimal() else None
