"""The document of a trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from otel_rollout import Completion, ExportError, History, Trajectory
from otel_rollout.export import Documents, Json, portable
from otel_rollout_atif.steps import call_of, present, steps_of

VERSION = "ATIF-v1.8"
_UNKNOWN = "unknown"
"""Name and version of an agent, where it has none: ATIF requires both."""
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def to_atif(
    trajectory: Trajectory,
    *,
    children: Iterable[Trajectory] = (),
    prompt_token_ids: bool = False,
    rollout_details: bool = False,
) -> dict[str, Json]:
    """The ATIF document of a trajectory: its main conversation, the others embedded.

    children: trajectories of rollouts inside it, at any depth; those are embedded, too.
    prompt_token_ids: give each step those of its whole prompt; the document then grows with the
    square of the number of steps.
    rollout_details: add what `to_rollout_details` gives, to `extra.otel_rollout`.

    Images and sound that are in messages stay there as `data:` addresses; the exporter `atif`
    writes files of them. ExportError for a trajectory without a step, which ATIF does not allow.
    """
    histories = trajectory.histories
    if not histories:
        why = trajectory.why_empty or "no model replied in it"
        raise ExportError(
            f"trajectory {trajectory.id!r} ({trajectory.name!r}) has no step, and a document of "
            f"ATIF has one at least: {why}; leave it out"
        )
    seen, counted = set[tuple[str, int]](), set[str]()
    made = [
        _document(
            trajectory, history, steps_of(history, seen, counted, prompt_token_ids=prompt_token_ids)
        )
        for history in histories
    ]
    document = made[0]
    for number, fork in enumerate(made[1:], 1):
        own = {"history": number, "side_call": histories[number].side_call}
        fork |= {
            "trajectory_id": f"{trajectory.id}/{number}",
            "extra": {"otel_rollout": present(own)},
        }
    inside = list(made[1:])
    children = list(children)
    for child in children:
        if child.parent_id == trajectory.id and child is not trajectory:
            rest = [other for other in children if other is not child]
            options: Any = {
                "prompt_token_ids": prompt_token_ids,
                "rollout_details": rollout_details,
            }
            inside.append(to_atif(child, children=rest, **options))
    facts = _facts(trajectory)
    if rollout_details:
        facts["rollout_details"] = to_rollout_details(trajectory)
    document["extra"] = {"otel_rollout": facts}
    document = dict(portable(document))
    document["extra"]["otel_rollout"]["trajectory"] = trajectory.to_json()
    if inside:
        document["subagent_trajectories"] = [portable(each) for each in inside]
    return document


def from_atif(document: Mapping[str, Any]) -> list[Trajectory]:
    """The trajectories of a document: its own, then those embedded in it.

    Of one that `to_atif` made they are equal to what it was made of; what was changed beside
    `extra.otel_rollout.trajectory` is not in them. Another's say what they lack. SpanFormatError
    for what is no ATIF.
    """
    return list(Documents().read(dict(document)))


def to_rollout_details(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Harbor's `RolloutDetail`s: one for each conversation that trains, the main one first.

        context.rollout_details = to_rollout_details(trajectory)   # in the run() of a Harbor agent

    prompt_token_ids, completion_token_ids, logprobs: (turns) lists, only of turns that train in
    this conversation, so that none is trained twice. logprobs is left out where some are unknown.
    extra: the completion id of each turn.

    ExportError if a turn that trains has no token ids.
    """
    return [made for history in trajectory.histories if (made := _detail(trajectory, history))]


def _detail(trajectory: Trajectory, history: History) -> dict[str, Any]:
    trained = {call_of(i.completion) for i in history.items if i.completion and i.trainable}
    turns = [completion for completion in history.completions if call_of(completion) in trained]
    prompts, ids, logprobs = list[list[int]](), list[list[int]](), list[list[float]]()
    for completion in turns:
        asked, sampled = completion.prompt_token_ids, completion.token_ids
        if asked is None or sampled is None:
            raise ExportError(
                f"completion {completion.id!r} of trajectory {trajectory.id!r} has no token ids of "
                f"its {'prompt' if asked is None else 'reply'}, which RolloutDetail needs; ask the "
                f"server for them (`with otel_rollout.request_token_ids():`), or leave "
                f"rollout_details out"
            )
        prompts.append(asked)
        ids.append(sampled)
        known = [value for value in completion.logprobs or () if value is not None]
        logprobs += [known] if len(known) == len(sampled) else []
    detail: dict[str, Any] = {"prompt_token_ids": prompts, "completion_token_ids": ids}
    if len(logprobs) == len(turns):
        detail["logprobs"] = logprobs
    return {**detail, "extra": {"completion_id": [each.id for each in turns]}} if turns else {}


def _document(
    trajectory: Trajectory, history: History, steps: list[dict[str, Json]]
) -> dict[str, Json]:
    models = [step["model_name"] for step in steps if "model_name" in step]
    tools = [tool for tool in history.tools or () if isinstance(tool, Mapping)]
    agent = {
        "name": trajectory.name or _UNKNOWN,
        "version": str(trajectory.metadata.get("agent_version") or _UNKNOWN),
        "model_name": models[0] if models else None,
        "tool_definitions": tools or None,
    }
    for step in steps:
        if models and step.get("model_name") == models[0]:
            del step["model_name"]  # the agent's
    return {
        "schema_version": VERSION,
        "session_id": trajectory.id,
        "trajectory_id": trajectory.id,
        "agent": present(agent),
        "steps": list(steps),
        "final_metrics": _totals(steps),
    }


def _totals(steps: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    totals: dict[str, Json] = {"total_steps": len(steps)}
    for name in _COUNTS:
        counts = [step["metrics"][name] for step in steps if name in step.get("metrics", {})]
        if counts:
            totals[f"total_{name}"] = sum(counts)
    return totals


def _facts(trajectory: Trajectory) -> dict[str, Json]:
    """What a document has no place for, of those facts that are set."""
    without = [each for each in trajectory.completions if not each.items]
    facts = {
        "parent_id": trajectory.parent_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "status": trajectory.status,
        "termination_reason": trajectory.termination_reason,
        "error": trajectory.error,
        "reward": trajectory.reward,
        "rewards": {name: float(value) for name, value in trajectory.rewards.items()} or None,
        "policy_versions": trajectory.policy_versions or None,
        "warnings": trajectory.warnings or None,
        "calls_without_reply": [_lost(each) for each in without] or None,
    }
    return present(facts)


def _lost(completion: Completion) -> dict[str, Json]:
    return {"completion_id": completion.id, "status": completion.status, "error": completion.error}
