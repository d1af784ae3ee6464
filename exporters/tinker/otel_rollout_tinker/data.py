"""Token sequences as datums: what each position of the model's input has to predict, and how much.

A datum is a token sequence, shifted by one: T tokens are T - 1 inputs and T - 1 targets. What is
not learned has mask, advantage and log-probability 0.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from otel_rollout import (
    Completion,
    ExportError,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
)
from otel_rollout.export import (
    Dropped,
    JsonRows,
    Positive,
    check_choice,
    dropped_completions,
)

if TYPE_CHECKING:
    import tinker

Unscored = Literal["error", "drop"]
UnknownLogprobs = Literal["error", "mask"]


@dataclass(frozen=True)
class Action:
    """A reply that trains in a row: `start` to `end` of its tokens."""

    completion: Completion
    start: int
    end: int


def to_tinker_data(
    group: TrajectoryGroup,
    *,
    advantages: Sequence[float | None] | None = None,
    scale_advantages: bool = False,
    unscored: Unscored = "error",
    unknown_logprobs: UnknownLogprobs = "error",
    mask_truncated: bool = False,
    max_length: int | None = None,
) -> list[tinker.Datum]:
    """A Datum for each token sequence of each trajectory of a group, in order.

    Of a sequence of T tokens: model_input (T - 1) ids; loss_fn_inputs target_tokens int64,
    logprobs, advantages and mask float32, each (T - 1). A trajectory's advantage is on each token
    that it trains. Tinker's losses do not take `mask`: leave it out as the cookbook does, what is
    masked has the advantage 0.

    advantages: one for each trajectory, None for one to leave out; without them the group's own
    (`TrajectoryGroup.advantages`, with `scale_advantages` divided by the standard deviation).
    unscored: "drop" leaves out trajectories without a reward; "error" refuses.
    unknown_logprobs: "mask" keeps replies as context whose log-probabilities are not all known.
    mask_truncated, max_length: as in `Trajectory.token_sequences`.

    ExportError names the trajectory or reply that cannot be carried, and says what to do.
    """
    rows = _rows(
        group,
        advantages=advantages,
        scale_advantages=scale_advantages,
        unscored=unscored,
        unknown_logprobs=unknown_logprobs,
        mask_truncated=mask_truncated,
        max_length=max_length,
    )
    return [to_datum(row) for row in rows]


def to_datum(row: Mapping[str, Any]) -> tinker.Datum:
    """The Datum of a row of the exporter `tinker`."""
    import numpy as np
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(row["model_input"])),
        loss_fn_inputs={
            name: tinker.TensorData.from_numpy(
                np.asarray(values, dtype=np.int64 if name == "target_tokens" else np.float32)
            )
            for name, values in row["loss_fn_inputs"].items()
        },
    )


@dataclass(frozen=True)
class TinkerRows(JsonRows):
    """The exporter `tinker`: JSON lines of datums, which `to_datum` reads.

    A row has model_input and loss_fn_inputs (those of `to_tinker_data`, as lists), and where they
    are from: trajectory_id, group_id, task_id, completion_ids, reward, policy_versions. A
    trajectory without another of its group is compared with none: its advantage is 0.

    unscored: "error" refuses a trajectory without a reward, "drop" leaves it out.
    unknown_logprobs: "error" refuses a reply whose log-probabilities are not all known, "mask"
    keeps it as context.
    scale_advantages: divide advantages by the standard deviation of the rewards of the group.
    mask_truncated: replies that a length limit truncated stay as context and are not trained.
    max_length: longer rows are truncated to so many tokens; not set: no limit.
    """

    unscored: Unscored = "error"
    unknown_logprobs: UnknownLogprobs = "error"
    scale_advantages: bool = False
    mask_truncated: bool = False
    max_length: Positive | None = None

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Any]]:
        """A row for each token sequence of each scored trajectory."""
        for row in _rows(
            group,
            scale_advantages=self.scale_advantages,
            unscored=self.unscored,
            unknown_logprobs=self.unknown_logprobs,
            mask_truncated=self.mask_truncated,
            max_length=self.max_length,
        ):
            inputs = {name: values.tolist() for name, values in row["loss_fn_inputs"].items()}
            yield row | {"model_input": row["model_input"].tolist(), "loss_fn_inputs": inputs}

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions of scored trajectories that no datum trains."""
        return dropped_completions(
            scored(group, self.unscored),
            mask_truncated=self.mask_truncated,
            max_length=self.max_length,
        )


def _rows(
    group: TrajectoryGroup,
    *,
    advantages: Sequence[float | None] | None = None,
    scale_advantages: bool = False,
    unscored: Unscored = "error",
    unknown_logprobs: UnknownLogprobs = "error",
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Rows whose tokens are arrays."""
    check_choice("unscored", unscored, Unscored)
    if advantages is None:
        own = group.advantages(scale=scale_advantages)
        pairs_of = zip(own, group.rewards, strict=True)
        known = [each or 0.0 for each, reward in pairs_of if reward is not None]
        pairs = list(zip(scored(group, unscored), known, strict=True))
    elif len(advantages) == len(group):
        given = zip(group, advantages, strict=True)
        pairs = [(member, value) for member, value in given if value is not None]
    else:
        raise ExportError(
            f"to_tinker_data(advantages=...): expected one for each of the {len(group)} "
            f"trajectories of group {group.id!r}, got {len(advantages)}"
        )
    for trajectory, advantage in pairs:
        for row, actions in trained_rows(trajectory, unknown_logprobs, **options):
            ids, values = row.token_id_array, row.logprob_array
            mask, weights, logprobs = (array("d", bytes(8 * len(row))) for _ in range(3))
            for action in actions:
                here = slice(action.start, action.end)
                count = action.end - action.start
                mask[here] = array("d", [1.0]) * count
                weights[here] = array("d", [advantage]) * count
                logprobs[here] = values[here]
            yield {
                "model_input": ids[:-1],
                "loss_fn_inputs": {
                    "target_tokens": ids[1:],
                    "logprobs": logprobs[1:],
                    "advantages": weights[1:],
                    "mask": mask[1:],
                },
                "trajectory_id": trajectory.id,
                "group_id": trajectory.group_key,
                "task_id": trajectory.task_id,
                "completion_ids": row.completion_ids,
                "reward": None if trajectory.reward is None else float(trajectory.reward),
                "policy_versions": row.policy_versions,
            }


def scored(group: TrajectoryGroup, unscored: Unscored) -> list[Trajectory]:
    """The scored trajectories of a group; ExportError for another, unless it may be dropped."""
    for trajectory in group:
        if trajectory.reward is None and unscored == "error":
            raise ExportError(
                f"trajectory {trajectory.id!r} ({trajectory.name!r}) has no reward, and Tinker "
                f"cannot say so: record_reward(...) for it, or unscored='drop' leaves it out"
            )
    return [trajectory for trajectory in group if trajectory.reward is not None]


def trained_rows(
    trajectory: Trajectory, unknown_logprobs: UnknownLogprobs, **options: Any
) -> list[tuple[TokenSequence, list[Action]]]:
    """The rows of a trajectory, and of each the replies that train in it, first to last.

    ExportError for a reply without its log-probabilities, unless it may be masked.
    """
    check_choice("unknown_logprobs", unknown_logprobs, UnknownLogprobs)
    rows: list[tuple[TokenSequence, list[Action]]] = []
    for row in trajectory.token_sequences(**options):
        actions: list[Action] = []
        logprobs = row.logprob_array
        spans = zip(row.completions, row.spans, row.trains, strict=True)
        for completion, (_, start, end), trains in spans:
            if not trains:
                continue
            if math.isfinite(math.hypot(*logprobs[start:end])):
                actions.append(Action(completion, start, end))
            elif unknown_logprobs == "error":
                raise ExportError(
                    f"completion {completion.id!r} of trajectory {trajectory.id!r}: the server "
                    f"did not send the log-probability of each token; ask for them "
                    f"(`with otel_rollout.request_token_ids():`), or "
                    f"unknown_logprobs='mask' does not train it"
                )
        if actions:
            rows.append((row, actions))
    return rows
