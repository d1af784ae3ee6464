"""Token rows for GRPO: exactly what was sampled, with a mask for what the environment said.

`GRPOTrainer` takes one row for each prompt that it asked for, in order, so a rollout that has no
row, or several, is an error here rather than a shifted batch. `AsyncGRPOTrainer` takes any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from otel_rollout import (
    Completion,
    ConfigurationError,
    ExportError,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.export import check_choice, none_for_nan
from otel_rollout_trl.names import named

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

Choose = Literal["error", "longest", "last", "main"]
OnFailure = Literal["error", "keep"]


def to_trl_rollout(
    trajectories: Iterable[Trajectory] | TrajectoryGroup,
    prompts: Sequence[Any] | None = None,
    *,
    choose: Choose = "error",
    on_failure: OnFailure = "error",
    max_completion_length: int | None = None,
) -> dict[str, Any]:
    """The return value of a `rollout_func` of GRPOTrainer: lists of N, one item per trajectory.

    prompt_ids: up to the first sampled token. completion_ids: all that follows, also what tools
    and users said. env_mask: 1 on what the model sampled, else 0. logprobs: of the sampled tokens,
    None where unknown, 0.0 on the others; None as a whole where no row has any.
    rollout_reward, rollout_rewards, rollout_metrics, rollout_truncated, rollout_id, rollout_name:
    columns that TRL hands to reward functions; `rollout_reward` is one that gives the reward.

    prompts: those that `rollout_func` was called with; then there has to be a row for each.
    choose: the row of a trajectory with several token sequences (sub-agents, edited contexts):
    "error" refuses; "longest", "last" (of its last call) or "main" (of the main history) keeps
    one, and what is in the others is not trained.
    on_failure: "keep" takes what a failed, unscored rollout said, without a reward.
    max_completion_length: longer completions are truncated; TRL does not do it.

    ExportError names a trajectory that has no row, or several, and says why.
    """
    check_choice("choose", choose, Choose)
    check_choice("on_failure", on_failure, OnFailure)
    if max_completion_length is not None and max_completion_length < 1:
        raise ConfigurationError(
            f"to_trl_rollout(max_completion_length=...): expected a number from 1 on, got "
            f"{max_completion_length!r}"
        )
    members = _members(trajectories)
    if prompts is not None and len(prompts) != len(members):
        raise ExportError(
            f"to_trl_rollout: GRPOTrainer needs one row for each of its {len(prompts)} prompts "
            f"(they come repeated num_generations times), got {len(members)} trajectories; run "
            f"one rollout per prompt, in order"
        )
    failed: Literal["keep", "drop"] = "keep" if on_failure == "keep" else "drop"
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for trajectory in members:
        row = _only_row(trajectory, choose, failed)
        end = None if max_completion_length is None else row.prompt_length + max_completion_length
        start, truncated = row.prompt_length, end is not None and len(row) > end
        ids = row.token_id_array
        columns["prompt_ids"].append(ids[:start].tolist())
        columns["completion_ids"].append(ids[start:end].tolist())
        # Not the loss mask: a token that trains in a row that is left out has to train in this.
        columns["env_mask"].append(row.sampled_array[start:end].tolist())
        columns["logprobs"].append(none_for_nan(row.logprob_array[start:end]))
        columns["rollout_reward"].append(_float(trajectory.reward))
        columns["rollout_rewards"].append(
            {name: float(reward) for name, reward in trajectory.rewards.items()}
        )
        columns["rollout_metrics"].append(dict(trajectory.metrics))
        columns["rollout_truncated"].append(row.truncated or truncated)
        columns["rollout_id"].append(trajectory.id)
        columns["rollout_name"].append(trajectory.name)
    known = any(
        values.count(None) < mask.count(1)
        for mask, values in zip(columns["env_mask"], columns["logprobs"], strict=True)
    )
    return {**columns, "logprobs": columns["logprobs"] if known else None}


_COLUMNS = (
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "env_mask",
    "rollout_reward",
    "rollout_rewards",
    "rollout_metrics",
    "rollout_truncated",
    "rollout_id",
    "rollout_name",
)


def rollout_reward(rollout_reward: list[float | None], **_: Any) -> list[float | None]:
    """A reward function for GRPOTrainer: what the rollouts recorded; None where one did not."""
    return rollout_reward


def to_trl_async_samples(
    group: TrajectoryGroup | Iterable[Trajectory],
    *,
    group_id: int,
    model_version: int | None = None,
    scale_advantages: bool = True,
) -> list[RolloutSample]:
    """A `RolloutSample` for each token sequence of each scored trajectory of a group.

    The advantage is the trajectory's, relative to the group, on each of its rows; 0 where no
    other of the group is scored. Arrays are as long as the row, prompt included, and masked 0 on
    all that does not train in it.
    group_id: TRL counts groups. model_version: TRL drops samples of old ones; without it that
    which the completions say is taken, of several the oldest.

    ExportError where the log-probability of a trained token, or the version, is not known.
    """
    # In here, so that everything else works where TRL is not installed.
    import numpy as np
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    if not isinstance(group, TrajectoryGroup):
        group = TrajectoryGroup.of(group)
    samples: list[RolloutSample] = []
    for trajectory, advantage in zip(group, group.advantages(scale=scale_advantages), strict=True):
        if trajectory.reward is None:
            continue
        for row in trajectory.token_sequences():
            logprobs = np.asarray(row.logprob_array, dtype=np.float32)
            # Each sampled token trains in the first row that has it.
            if np.isnan(logprobs).any():
                raise ExportError(
                    f"{named(trajectory)}: AsyncGRPOTrainer needs the log-probability of every "
                    f"trained token, and the server did not send those of "
                    f"{', '.join(row.completion_ids)}; ask for them (logprobs=True)"
                )
            first, last = row.completions[0], row.completions[-1]
            said = [*last.request_messages, last.message]
            asked = first.request_messages
            samples.append(
                RolloutSample(
                    prompt=asked,
                    completion=said[len(asked) :],
                    input_ids=np.asarray(row.token_id_array, dtype=np.int64),
                    completion_mask=np.asarray(row.loss_mask_array, dtype=np.int64),
                    old_log_probs=logprobs,
                    advantage=advantage or 0.0,
                    model_version=_version(trajectory, row, model_version),
                    group_id=group_id,
                    metrics={name: float(value) for name, value in trajectory.metrics.items()},
                    enqueued_at=None,
                )
            )
    return samples


def _members(trajectories: Iterable[Trajectory] | TrajectoryGroup) -> list[Trajectory]:
    """The trajectories in order; of a group also its failures, each in its place."""
    if not isinstance(trajectories, TrajectoryGroup):
        return list(trajectories)
    if not trajectories.failures:
        return list(trajectories)
    places = {t.sample_index: t for t in (*trajectories, *trajectories.failures)}
    if None in places or len(places) < len(trajectories) + len(trajectories.failures):
        raise ExportError(
            f"to_trl_rollout: group {trajectories.id!r} has failures, and its sample indices do "
            f"not say where their rows belong; give a list of trajectories, in order of the prompts"
        )
    return [places[index] for index in sorted(places, key=lambda index: index or 0)]


def _only_row(
    trajectory: Trajectory, choose: Choose, on_failure: Literal["drop", "keep"]
) -> TokenSequence:
    rows = trajectory.token_sequences(on_failure=on_failure)
    if not rows:
        reasons = dict.fromkeys(map(str, rows.dropped))
        raise ExportError(
            f"{named(trajectory)} has nothing to train, and GRPOTrainer needs a row of it: "
            f"{'; '.join(reasons) or 'it made no model call'}. Run it again, for its row"
            + (
                ", record a reward for it, or take what it said with on_failure='keep'"
                if trajectory.status == "error" and on_failure == "drop"
                else ""
            )
        )
    if len(rows) == 1:
        return rows[0]
    if choose == "longest":
        return max(rows, key=len)
    if choose == "last":
        return rows[-1]
    if choose == "main":
        for call in reversed(trajectory.main.completions if trajectory.main else ()):
            found = [row for row in rows if any(_same(call, c) for c in row.completions)]
            if found:
                return found[0]
    raise ExportError(
        f"{named(trajectory)} has {len(rows)} token sequences, and GRPOTrainer takes one row for "
        f"each rollout: {'; '.join(_why(rows))}. Choose one (choose='main', 'longest' or 'last'), "
        f"or train on all of them with AsyncGRPOTrainer (to_trl_async_samples)"
    )


def _why(rows: Sequence[TokenSequence]) -> list[str]:
    """For each row what is in it, and how far it goes along with an earlier one."""
    sentences = []
    for number, row in enumerate(rows):
        shared = max((_shared(row, earlier) for earlier in rows[:number]), default=0)
        calls = ", ".join(row.completion_ids)
        sentences.append(
            f"{len(row)} tokens with {calls}"
            + (f" (only the first {shared} are those of an earlier one)" if number else "")
        )
    return sentences


def _shared(row: TokenSequence, other: TokenSequence) -> int:
    for number, (mine, theirs) in enumerate(zip(row.token_ids, other.token_ids, strict=False)):
        if mine != theirs:
            return number
    return min(len(row), len(other))


def _same(one: Completion, other: Completion) -> bool:
    return (one.span_id, one.choice_index) == (other.span_id, other.choice_index)


def _version(trajectory: Trajectory, row: TokenSequence, given: int | None) -> int:
    if given is not None:
        return given
    versions = [completion.policy_version for completion in row.completions]
    known = [version for version in versions if isinstance(version, int)]
    if len(known) < len(versions):
        raise ExportError(
            f"{named(trajectory)}: AsyncGRPOTrainer counts policy versions; expected numbers, got "
            f"{versions!r}; give the rollout a policy_version, or model_version= here"
        )
    return min(known)


def _float(reward: float | None) -> float | None:
    return None if reward is None else float(reward)
