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
from typing import Any, Literal

from otel_rollout import ConfigurationError, Episode, Trajectory, TrajectoryGroup
from otel_rollout.export.rows import JsonRows
from otel_rollout.wire.json import Json
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


class RllmRows(JsonRows):
    """The exporter `rllm`: an episode for each trajectory that has something, and each failure."""

    def __init__(
        self,
        unscored: Literal["error", "drop"] = "error",
        correct_from: float | str | None = None,
    ) -> None:
        if unscored not in ("error", "drop"):
            raise ConfigurationError(f"unscored: expected 'error' or 'drop', got {unscored!r}")
        try:
            self._correct_from = None if correct_from is None else float(correct_from)
        except ValueError:
            raise ConfigurationError(
                f"correct_from: expected the lowest reward of a correct episode, got "
                f"{correct_from!r}"
            ) from None
        self._unscored: Unscored = unscored

    def rows(self, group: TrajectoryGroup) -> Iterator[dict[str, Json]]:
        """In order of the samples; an episode is correct whose reward is at least `correct_from`.

        Without that none is: rLLM's own default.
        """
        members = [*group.trajectories, *group.failures]
        members.sort(key=lambda t: (t.sample_index is None, t.sample_index or 0))
        for index, trajectory in enumerate(members):
            row = to_rllm_row(trajectory, index=index, unscored=self._unscored)
            if trajectory.reward is not None and self._correct_from is not None:
                row["is_correct"] = trajectory.reward >= self._correct_from
            if row["trajectories"] or row["termination_reason"] in ("error", "timeout"):
                yield row
