"""Trajectories of the cookbook: what the policy saw, what it did, and what it was worth.

The cookbook makes datums of transitions by one rule: a transition whose observation goes on from
the one before is in the same datum, any other starts a new one. So transitions come row by row,
not in order of time: the datums are then our token sequences, also where sub-agents took turns.
A reply that another row trains is part of the observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_rollout import ExportError, Trajectory, TrajectoryGroup
from otel_rollout_tinker.data import UnknownLogprobs, Unscored, scored, trained_rows

if TYPE_CHECKING:
    from tinker_cookbook.rl import types as rl

_STOP_REASONS = {
    "timeout": "rollout_timeout",
    "max_turns_exceeded": "max_turns",
    "max_response_length_exceeded": "max_tokens",
    "max_prompt_length_exceeded": "context_overflow",
}


def to_tinker_trajectory(
    trajectory: Trajectory, *, unknown_logprobs: UnknownLogprobs = "error", **options: Any
) -> rl.Trajectory:
    """The cookbook's Trajectory: a Transition for each reply that trains, row by row.

    The reward is on the last transition, with the metrics; the others have 0.0, and a step reward
    is the metric `step_reward`. A scored trajectory of which nothing can train is one empty
    transition, as the cookbook has it where a prompt was too long: it counts in its group and
    makes no datum. `options` are those of `Trajectory.token_sequences`.

    ExportError for a trajectory without a reward, and as in `to_tinker_data`.
    """
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory as CookbookTrajectory
    from tinker_cookbook.rl.types import Transition

    scored(TrajectoryGroup([trajectory]), "error")
    transitions: list[rl.Transition] = []
    for row, actions in trained_rows(trajectory, unknown_logprobs, **options):
        for action in actions:
            completion, start, end = action.completion, action.start, action.end
            truncated = completion.truncated or end - start < len(completion.token_ids or ())
            step = completion.reward
            transitions.append(
                Transition(
                    ob=tinker.ModelInput.from_ints(row.token_ids[:start]),
                    ac=TokensWithLogprobs(
                        tokens=row.token_ids[start:end],
                        maybe_logprobs=row.logprobs[start:end],
                        stop_reason="length" if truncated else "stop",
                    ),
                    reward=0.0,
                    episode_done=False,
                    metrics={} if step is None else {"step_reward": float(step)},
                    logs={"completion_id": completion.id},
                )
            )
    if not transitions:
        nothing = TokensWithLogprobs(tokens=[], maybe_logprobs=[])
        transitions.append(Transition(tinker.ModelInput.empty(), nothing, 0.0, True))
    last = transitions[-1]
    last.episode_done, last.reward = True, float(trajectory.reward or 0.0)
    last.metrics |= dict(trajectory.metrics)
    last.logs["trajectory_id"] = trajectory.id
    reason = _STOP_REASONS.get(trajectory.termination_reason or "")
    if reason is None and trajectory.status == "complete":
        reason = "max_tokens" if last.ac.stop_reason == "length" else "completed"
    if reason is not None:
        last.metrics[f"stop/{reason}"] = 1.0
    return CookbookTrajectory(transitions, tinker.ModelInput.empty(), reason)


def to_tinker_group(
    group: TrajectoryGroup,
    *,
    unscored: Unscored = "error",
    unknown_logprobs: UnknownLogprobs = "error",
    **options: Any,
) -> rl.TrajectoryGroup:
    """The cookbook's TrajectoryGroup: its scored trajectories; failures are `rollout_errors`.

    Rewards are on the transitions, so the final rewards are 0.0. ExportError if nothing is scored,
    and as in `to_tinker_trajectory`.
    """
    from tinker_cookbook.rl.types import RolloutError
    from tinker_cookbook.rl.types import TrajectoryGroup as CookbookGroup

    members = scored(group, unscored)
    if not members:
        raise ExportError(
            f"group {group.id!r} has no trajectory with a reward ({len(group.failures)} failed): "
            f"there is nothing to compare, leave it out"
        )
    return CookbookGroup(
        [
            to_tinker_trajectory(member, unknown_logprobs=unknown_logprobs, **options)
            for member in members
        ],
        [0.0] * len(members),
        [{} for _ in members],
        [
            RolloutError(
                (failed.error or {}).get("type", failed.status),
                (failed.error or {}).get("message", ""),
            )
            for failed in group.failures
        ],
    )
