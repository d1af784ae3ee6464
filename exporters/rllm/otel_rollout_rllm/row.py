"""An episode as JSON, in the shape that `rllm.types.Episode.to_dict` gives.

Invariant: every completion that trains is the `model_output` of exactly one step, whose prompt and
response ids are those that the server sent, and whose log-probabilities are as many as its ids.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from otel_rollout import Completion, Episode, ExportError, Step, TokenSequence, Trajectory
from otel_rollout.export import Json, copy_json, json_of

Unscored = Literal["error", "drop"]
_REASONS = {"error": "error", "timeout": "timeout", None: "env_done"}


def to_rllm_row(
    source: Episode | Trajectory, *, index: int = 0, unscored: Unscored = "error"
) -> dict[str, Json]:
    """The episode as JSON; of a trajectory, an episode with it alone.

    id: `task:index`, which rLLM takes apart: the task is the task id, else the group id, else the
    trajectory's own; the index is the sample index, else `index`. Episodes with one task are
    compared with each other, and in them trajectories with one name.
    trajectories: those that train; a trajectory that failed or was cancelled has none of its steps.
    unscored: rLLM reads a reward that is not known as 0, so a trajectory that was not scored, nor
    its last step, is an ExportError, or is left out ("drop").

    ExportError names the trajectory or completion that rLLM cannot carry, and what to do.
    """
    if isinstance(source, Episode):
        episode, id_ = source, source.id if ":" in source.id else f"{source.id}:{index}"
        reason = None if episode.termination_reason is None else episode.termination_reason.value
    else:
        sample = index if source.sample_index is None else source.sample_index
        run = f"@{source.group_run}" if source.group_run else ""
        id_ = f"{source.task_id or source.group_id or source.id}{run}:{sample}"
        episode = Episode(id=id_, task=source.task_id, trajectories=[source])
        episode.metrics = {name: float(value) for name, value in source.metrics.items()}
        episode.info = {"error": source.error} if source.error else {}
        reason = _REASONS.get(source.termination_reason, "unknown")
    if id_.count(":") != 1:
        raise ExportError(
            f"episode {id_!r}: rLLM takes the task of an episode to end at the first colon of its "
            f"id, and would compare it with episodes of other tasks; use task ids without a colon"
        )
    trajectories = (_trajectory(t, unscored) for t in episode.trajectories if t.trainable)
    return {
        "id": id_,
        "task": json_of(episode.task),
        "termination_reason": reason or "unknown",
        "is_correct": bool(episode.is_correct),
        "session_id": source.id,
        "trajectories": [row for row in trajectories if row is not None],
        "metrics": json_of(episode.metrics),
        "info": json_of(episode.info),
    }


def _trajectory(trajectory: Trajectory, unscored: Unscored) -> dict[str, Json] | None:
    """The trajectory; None for one that has nothing to train, or is to be left out."""
    if ":" in trajectory.name:
        raise ExportError(
            f"{_named(trajectory)}: rLLM takes the names of agents to have no colon, and would cut "
            f"it there; give the rollout another name"
        )
    rows = trajectory.token_sequences()
    steps = _steps(trajectory, rows)
    if not steps:
        if any(c.trainable for c in trajectory.completions) and trajectory.status == "complete":
            reasons = dict.fromkeys(map(str, rows.dropped))
            if reasons:
                raise ExportError(
                    f"{_named(trajectory)} has nothing that trains: {'; '.join(reasons)}"
                )
        return None
    last, scored = steps[-1]
    if trajectory.reward is None and not scored:
        if unscored == "drop":
            return None
        raise ExportError(
            f"{_named(trajectory)} has no reward, and rLLM would read that as 0: set "
            f"trajectory.reward, or leave it out with unscored='drop'"
        )
    if not any(step["done"] for step, _ in steps):
        last["done"] = True
    return {
        "uid": trajectory.id,
        "name": trajectory.name,
        "task": trajectory.task_id,
        "steps": [step for step, _ in steps],
        "reward": None if trajectory.reward is None else float(trajectory.reward),
        "signals": {name: float(reward) for name, reward in trajectory.rewards.items()},
        "output": copy_json(trajectory.output),
        "info": {
            **copy_json(dict(trajectory.metadata)),
            "group_id": trajectory.group_key,
            "sample_index": trajectory.sample_index,
            "metrics": dict(trajectory.metrics),
            "logs": trajectory.logs,
        },
    }


def _steps(trajectory: Trajectory, rows: list[TokenSequence]) -> list[tuple[dict[str, Json], bool]]:
    """The steps that train, conversation by conversation, and whether each has a reward."""
    known = {_key(step.completion): step for step in trajectory.steps if step.completion}
    steps: list[tuple[dict[str, Json], bool]] = []
    for row in rows:
        spans = zip(row.completions, row.spans, row.trains, strict=True)
        for completion, (_, start, end), trains in spans:
            # Of calls that another trajectory of the episode claims, this one has no step.
            step = known.get(_key(completion))
            if step is not None and trains:
                prompt, ids = row.token_ids[:start], row.token_ids[start:end]
                made = _step(step, completion, prompt, ids, row.logprobs[start:end])
                reward = step.reward if step.scored else completion.reward  # may have come since
                made["reward"] = 0.0 if reward is None else float(reward)
                steps.append((made, reward is not None))
    return steps


def _step(
    step: Step, completion: Completion, prompt: list[int], ids: list[int], logprobs: list[float]
) -> dict[str, Json]:
    unknown = sum(map(math.isnan, logprobs))
    if unknown:
        raise ExportError(
            f"completion {completion.id!r}: rLLM needs the log-probability of every sampled token, "
            f"got {unknown} of {len(ids)} unknown; ask the server for them "
            f"(`with otel_rollout.request_token_ids():`)"
        )
    message: dict[str, Any] = completion.message or {}
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    version = completion.policy_version
    if isinstance(version, str):
        version = int(version) if version.isdecimal() else None
    output = {
        "text": None,
        "content": content if isinstance(content, str) else None,
        "reasoning": reasoning if isinstance(reasoning, str) else None,
        "tool_calls": [],  # rLLM's are parsed; as they were sampled they are in chat_completions
        "prompt_ids": prompt,
        "completion_ids": ids,
        "multi_modal_inputs": None,
        "logprobs": logprobs,
        "prompt_logprobs": None,
        "routing_matrices": None,
        "prompt_length": len(prompt),
        "completion_length": len(ids),
        "finish_reason": completion.finish_reason,
        "weight_version": version,
        "metrics": None,
    }
    return {
        "prompt_ids": prompt,
        "response_ids": ids,
        "logprobs": logprobs,
        "routing_matrices": None,
        "chat_completions": [*completion.request_messages, copy_json(message)],
        "observation": json_of(step.observation),
        "thought": step.thought or output["reasoning"] or "",
        "action": json_of(step.action),
        "model_response": step.model_response or text,
        "model_output": output,
        "info": {
            **json_of(step.info),
            "completion_id": completion.id,
            "choice_index": completion.choice_index,
            "truncated": completion.truncated,
        },
        "done": step.done,
        "mc_return": float(step.mc_return),
        "advantage": None,
        "weight_version": version,
    }


def _key(completion: Completion) -> tuple[str, int]:
    return completion.span_id, completion.choice_index


def _named(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.id} ({trajectory.name!r})"
