"""A trace as JSON: the message graph, the calls that made it, and how it went."""

from __future__ import annotations

from typing import Any

from otel_rollout import Completion, ExportError, Trajectory
from otel_rollout.export import Json, copy_json
from otel_rollout_verifiers.graph import Graph, build, key
from otel_rollout_verifiers.messages import tools_of

OWN = "reward"
"""Name of the reward that is the trajectory's own, among its named ones."""


def to_trace_record(trajectory: Trajectory) -> dict[str, Json]:
    """The trace as JSON, which `verifiers.v1.trace.WireTrace` reads.

    Each branch that trains is a token sequence: its ids, where the model sampled, and the
    log-probabilities of that. A reply that several branches share is one node. Replies that cannot
    train (no ids, a rollout that failed) are nodes without tokens, failed calls and side calls have
    no node.

    rewards: `trace.reward` is the trajectory's; where it is not known `rewards["reward"]` is None.
    A named reward that does not count towards it has the weight 0. info: the metadata, and under
    `otel_rollout` what verifiers has no place for.

    ExportError names the completion that verifiers cannot carry, and what to do.
    """
    own = [completion for completion in trajectory.completions if completion.side_call is None]
    graph = build(own, list(trajectory.token_sequences()))
    tools = {
        (tool["type"], tool["name"]): tool for completion in own for tool in tools_of(completion)
    }
    models = [c.request_model for c in own if c.request_model]
    complete, timeout = trajectory.status == "complete", trajectory.termination_reason == "timeout"
    reason = trajectory.termination_reason or trajectory.status
    span = {"start": trajectory.start_time_ns / 1e9, "end": (trajectory.end_time_ns or 0) / 1e9}
    return {
        "version": 1,
        "id": trajectory.id,
        "task": {
            "type": trajectory.name,
            "data": {"id": trajectory.task_id},
            "key": trajectory.task_id or trajectory.group_id,
        },
        "agent": {
            "config": {"model": models[0]} if models else {},
            "name": trajectory.name,
            "trainable": trajectory.trainable,
        },
        "tools": list(tools.values()),
        "nodes": graph.nodes,
        "calls": _calls(trajectory.completions, graph),
        "rewards": _rewards(trajectory),
        "metrics": {name: float(value) for name, value in trajectory.metrics.items()},
        "info": {**copy_json(dict(trajectory.metadata)), "otel_rollout": _rest(trajectory)},
        "is_completed": trajectory.status != "running",
        "ok": complete,
        "stop_condition": "agent_completed"
        if complete
        else "agent_timeout"
        if timeout
        else None
        if trajectory.status == "running"
        else reason,
        "is_timeout": timeout,
        "errors": [_error(trajectory.error)] if trajectory.error else [],
        "timing": {"start": span["start"], "agent": span},
    }


def _rewards(trajectory: Trajectory) -> dict[str, Json]:
    own = trajectory.all_rewards.get((None, None, 0))
    rewards: dict[str, Json] = {
        name: {
            "score": float(reward),
            "weight": 0.0 if own is not None or reward.weight is None else reward.weight,
        }
        for name, reward in trajectory.rewards.items()
    }
    if own is None and trajectory.reward is not None:
        return rewards
    if OWN in rewards:
        raise ExportError(
            f"trajectory {trajectory.id} ({trajectory.name!r}) has a reward named {OWN!r} beside "
            f"its own, which is called so in a trace: give the named one another name"
        )
    return {OWN: None if own is None else {"score": float(own), "weight": 1.0}, **rewards}


def _calls(completions: list[Completion], graph: Graph) -> list[dict[str, Json]]:
    calls: list[dict[str, Json]] = []
    counted: set[str] = set()
    for completion in completions:
        usage = None if completion.span_id in counted else _usage(completion.usage)
        counted.add(completion.span_id)
        reason = completion.finish_reason
        calls.append(
            {
                "node": graph.node_of.get(key(completion)),
                "model": completion.request_model,
                "sampling": copy_json(completion.sampling),
                "endpoint": completion.exchange.path,
                "finish_reason": reason if reason in ("stop", "length", "tool_calls") else None,
                "usage": usage,
                "time": {
                    "start": completion.start_time_ns / 1e9,
                    "end": (completion.end_time_ns or 0) / 1e9,
                },
                "error": _error(completion.error, completion.exchange.status_code)
                if completion.error
                else None
                if completion.status == "complete"
                else _error({"type": completion.status, "message": "the call was not completed"}),
            }
        )
    return calls


def _usage(usage: dict[str, Any] | None) -> dict[str, Json] | None:
    if usage is None:
        return None
    prompt, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(sampled, int):
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {
        "prompt_tokens": prompt - (cached or 0),
        "completion_tokens": sampled,
        "cached_input_tokens": cached,
        "reasoning_tokens": (usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
    }


def _error(error: dict[str, str], status_code: int | None = None) -> dict[str, Json]:
    return {
        "type": error.get("type") or "Exception",
        "message": error.get("message") or "",
        "status_code": status_code,
        "traceback": error.get("traceback"),
    }


def _rest(trajectory: Trajectory) -> dict[str, Json]:
    """The fields that a trace has no place for, those that are set."""
    fields = {
        "group_id": trajectory.group_key,
        "sample_index": trajectory.sample_index,
        "parent_id": trajectory.parent_id,
        "trace_id": trajectory.trace_id,
        "policy_versions": trajectory.policy_versions,
        "logs": trajectory.logs,
        "warnings": list(trajectory.warnings),
        "rewards": [reward.to_dict() for reward in list(trajectory.all_rewards.values())],
    }
    return {name: value for name, value in fields.items() if value not in (None, [], "")}
