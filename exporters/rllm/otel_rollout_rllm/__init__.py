"""Episodes for rLLM: a step for each call, with the ids that were sampled.

rLLM puts steps together whose prompt begins with all that was before, one running row at a time;
so the steps of a trajectory come conversation by conversation, and its rows are our token
sequences. A step says everything twice, for itself and as the `model_output` that the verl backend
reads.

to_rllm_episode     the live `rllm.types.Episode` of an episode or trajectory
to_rllm_row         the same as JSON, without rLLM: what `rllm.types.Episode.from_dict` reads
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from otel_rollout import Episode, Trajectory, TrajectoryGroup
from otel_rollout.export import Dropped, Json, JsonRows, dropped_completions
from otel_rollout_rllm.row import Unscored, to_rllm_row

__all__ = ["RllmRows", "to_rllm_episode", "to_rllm_row"]


def to_rllm_episode(
    source: Episode | Trajectory, *, index: int = 0, unscored: Unscored = "error"
) -> Any:
    """The `rllm.types.Episode`, of which `to_rllm_row` has the arguments and the errors."""
    import rllm.types

    row = to_rllm_row(source, index=index, unscored=unscored)
    episode = rllm.types.Episode.from_dict(row)
    episode.session_id = row["session_id"]
    for trajectory, fields in zip(episode.trajectories, row["trajectories"], strict=True):
        trajectory.signals = fields["signals"]
        trajectory.output = fields["output"]
    return episode


@dataclass(frozen=True)
class RllmRows(JsonRows):
    """The exporter `rllm`: an episode for each trajectory that has something, and each failure.

    unscored: "error" refuses a trajectory without a reward, "drop" leaves it out.
    correct_from: lowest reward of a correct episode; not set: no episode is correct, which is
    rLLM's own default.
    """

    unscored: Unscored = "error"
    correct_from: float | None = None

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """The episodes, in order of the samples."""
        members = [*group.trajectories, *group.failures]
        members.sort(key=lambda t: (t.sample_index is None, t.sample_index or 0))
        for index, trajectory in enumerate(members):
            row = to_rllm_row(trajectory, index=index, unscored=self.unscored)
            if trajectory.reward is not None and self.correct_from is not None:
                row["is_correct"] = trajectory.reward >= self.correct_from
            if row["trajectories"] or row["termination_reason"] in ("error", "timeout"):
                yield row

    def dropped(self, group: TrajectoryGroup) -> Iterator[Dropped]:
        """The completions that no step trains."""
        members = [*group.trajectories, *group.failures]
        return dropped_completions(member for member in members if member.trainable)
